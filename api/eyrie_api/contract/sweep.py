"""Which candidates are trained from the same captured states."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from eyrie_api.contract.families import SweptFamily
from eyrie_api.contract.model import Frozen


class SweepAxis(Frozen):
    """One setting, and the values tried for it: a list, or for `sweep.random` also a range."""

    field: str = Field(pattern=r"^((train|drafter)\.[a-z0-9_]+|data\.mix)$")
    """Dotted field of this spec, for example `train.learning_rate`, or `data.mix`: shares of the sources in the rows
    that a candidate trains on (`values: [{chats: 1, tools: 1}, {chats: 3, tools: 1}]`)."""

    values: tuple[JsonValue, ...] = Field((), max_length=64)
    """The values tried, one after the other or as drawn by `sweep.random`."""

    low: float | None = Field(None, ge=-1e18, le=1e18)
    """Lower end of the range; both ends may be drawn. Whole numbers are drawn for fields that take no others."""

    high: float | None = Field(None, ge=-1e18, le=1e18)
    """Upper end of the range."""

    log: bool = False
    """Draw the logarithm evenly, as suits learning rates: from 1e-4 to 1e-2 as many below 1e-3 as above."""

    @property
    def is_range(self) -> bool:
        """Whether values are drawn between two ends."""
        return not self.values

    @model_validator(mode="after")
    def _a_list_or_a_range(self) -> "SweepAxis":
        ends = (self.low, self.high)
        if bool(self.values) == (ends != (None, None)):
            raise ValueError(f"sweep axis {self.field!r} needs values, or low and high, and not both: write "
                             "values: [..], or low: .. and high: ..")
        if self.values:
            if self.log:
                raise ValueError(f"sweep axis {self.field!r} lists values and sets log, which applies to ranges: "
                                 "omit log")
            return self
        if self.low is None or self.high is None or self.low >= self.high:
            raise ValueError(f"sweep axis {self.field!r}: low {self.low} and high {self.high} are not a range: "
                             "give both, low below high")
        if self.log and self.low <= 0:
            raise ValueError(f"sweep axis {self.field!r}: low {self.low:g} has no logarithm: raise it above 0, or "
                             "leave log out")
        return self


MIX_AXIS = "data.mix"
"""The one field outside `train` and `drafter` that an axis may vary."""


class SweepSpec(Frozen):
    """Candidates trained from the same captured states: the grid of all axes, or draws from them; no axis means one
    candidate."""

    axes: tuple[SweepAxis, ...] = Field((), max_length=8)
    """The settings varied; none trains one candidate for each family."""

    families: tuple[SweptFamily, ...] = Field((), max_length=16)
    """Families to train, each at every point of the grid; default: drafter.family alone. `[auto]`: those that the plan
    predicts within a tenth of the fastest, for this target and GPU."""

    max_candidates: int = Field(16, ge=1, le=256)
    """A sweep that would train more is refused."""

    random: int | None = Field(None, ge=1, le=256)
    """Sample this many points from the axes instead of the whole grid; the same ones for every family."""

    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seed of the sampling."""

    shared_passes: Literal["auto", "always", "never"] = "auto"
    """Whether one program trains all candidates: states are read once, the target runs once, and `rungs` stop
    candidates early. auto: together, except on a cluster whose training pods have more than one GPU each or create a
    TrainJob, and with an axis over `data.mix`, whose candidates read different rows. never: each candidate in a pod of
    its own, without early stopping: faster where GPUs are idle."""

    rungs: tuple[Annotated[float, Field(gt=0.0, lt=1.0)], ...] = Field((0.25, 0.5), max_length=8)
    """Successive halving: at these shares of the training, the half of a family's candidates with the lower theoretical
    speed-up stops, with a checkpoint. Empty trains all to the end. Only for candidates trained together."""

    @property
    def varies_mix(self) -> bool:
        """Whether candidates train on different rows of the capture."""
        return any(axis.field == MIX_AXIS for axis in self.axes)

    @model_validator(mode="after")
    def _possible(self) -> "SweepSpec":
        if self.varies_mix and self.shared_passes == "always":
            raise ValueError("sweep.shared_passes is 'always' with an axis over data.mix, whose candidates read "
                             "different rows: set sweep.shared_passes to 'auto', which trains each by itself")
        if list(self.rungs) != sorted(set(self.rungs)):
            raise ValueError(f"sweep.rungs {list(self.rungs)} must ascend: write {sorted(set(self.rungs))}")
        ranges = [axis.field for axis in self.axes if axis.is_range]
        if ranges and self.random is None:
            raise ValueError(f"sweep axis {ranges[0]!r} is a range, which has no grid points: set sweep.random "
                             "(the number of points to sample), or list values")
        if self.random is not None and not self.axes:
            raise ValueError(f"sweep.random is {self.random} and there is no axis to sample from: give sweep.axes, or "
                             "omit sweep.random")
        return self
