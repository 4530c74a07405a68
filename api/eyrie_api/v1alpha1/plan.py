"""What a job will cost before it runs: the answer to `POST /v1alpha1/plans`."""

from pydantic import Field

from eyrie_api.v1alpha1.model import Frozen


class Assumption(Frozen):
    """One number the plan rests on, and where it comes from."""

    name: str
    value: float
    unit: str
    source: str
    """Measured here, read from the target's config, given by the spec, or a default."""


class StagePlan(Frozen):
    """One stage's share."""

    stage: str
    tokens: int = Field(ge=0)
    bytes_on_disk: int = Field(ge=0)
    hours: float = Field(ge=0.0)


class Plan(Frozen):
    """Tokens, bytes and hours by stage, with every assumption named."""

    stages: tuple[StagePlan, ...]
    total_tokens: int
    total_bytes_on_disk: int
    total_hours: float
    bytes_per_token: int
    """Captured hidden states, per token."""

    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """On each family of drafters that the job trains: what it suits and what it costs."""

    fits_disk: bool | None = None
    """Whether the free space where the job would write holds it; None when unknown."""
