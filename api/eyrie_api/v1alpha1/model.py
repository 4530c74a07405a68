"""The one base of every contract model: frozen, closed, documented field by field.

A contract grows by optional fields (`later`) whose default means what versions without the field do. JSON leaves out
such a field where it has its default. So a version without it reads what this one writes, as long as nobody uses the
field, and the digest of a value does not change when its class gets one: a job that runs while Eyrie is upgraded, or
taken back to the version before, keeps its finished stages.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

API_VERSION = "eyrie.dev/v1alpha1"


class Frozen(BaseModel):
    """A value: immutable, unknown fields refused, attribute docstrings become schema descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )


@dataclass(frozen=True)
class IsDefault:
    """`exclude_if` of a field that was added later."""

    default: object
    since: int

    def __call__(self, value: object) -> bool:
        """Whether the field has its default."""
        return value == self.default


LATEST = 5
"""The number of the latest addition."""


def later(default: Any, since: int, **bounds: Any) -> Any:
    """`Field(default, **bounds)` of a field that earlier versions do not have.

    since   the number of the addition, 1 to LATEST. Versions before this mechanism wrote all fields that they had, so
            the digest that one of them computed is that of the fields up to its own number
            (`artifacts.is_digest_of`).
    """
    return Field(default, exclude_if=IsDefault(default, since), **bounds)


Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""A DNS label: it becomes part of file names, URLs and Kubernetes object names."""

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class Interval(Frozen):
    """A 95 % bootstrap interval over prompts."""

    low: float
    high: float
