"""How tokens are sampled from a distribution."""

from pydantic import Field

from eyrie_api.v1alpha1.model import Frozen


class SamplingSpec(Frozen):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0.0, le=4.0)
    """0 is greedy."""

    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Only the most likely tokens that together reach this probability are drawn; 1 keeps all."""

    top_k: int = Field(0, ge=0)
    """0 keeps the whole vocabulary."""
