"""The one base of every contract model: frozen, closed, documented field by field."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

API_VERSION = "eyrie.dev/v1alpha1"


class Frozen(BaseModel):
    """A value: immutable, unknown fields refused, attribute docstrings become schema descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )


Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""A DNS label: it becomes part of file names, URLs and Kubernetes object names."""

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class Interval(Frozen):
    """A 95 % bootstrap interval over prompts."""

    low: float
    high: float
