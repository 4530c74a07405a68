"""From a sweep to its candidates: the grid of all axes, as named and validated jobs. Pure.

The second seed's point: once the hidden states are captured, training another candidate is cheap, so a job trains a
grid from the same store. Each candidate is the whole job spec with the axes' values put in, checked by the same
contract as what the user wrote: a value that could not have been written there cannot be swept either.

`sweep.families` multiplies the grid: every family is trained at every point of it.

Names are deterministic (`c1-lr-0p001`: number, short field, value; `eagle1-c1-lr-0p001` beside other families), valid
DNS labels because they become directories and later Kubernetes names, and short enough that a checkpoint's
`<candidate>-step-<n>` is a label too.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue, ValidationError

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.job import DrafterSpec, Family, JobSpec, SweepAxis, TrainSpec

ONLY_CANDIDATE = "base"
"""The name when there is no axis."""

# 63 (a DNS label) - len("-step-") - 15 digits of steps, rounded down.
_MAX_NAME = 40
_SECTIONS: dict[str, type[DrafterSpec] | type[TrainSpec]] = {"train": TrainSpec, "drafter": DrafterSpec}
_SHORT = {
    "learning_rate": "lr", "ttt_length": "ttt", "step_decay": "decay", "intermediate_size": "ffn",
    "draft_vocab_size": "vocab", "num_attention_heads": "heads", "max_tokens_per_batch": "batch",
}


@dataclass(frozen=True)
class Candidate:
    """One point of the grid."""

    name: str
    spec: JobSpec
    """The job with this candidate's values put in."""

    @property
    def drafter(self) -> DrafterSpec:
        """The candidate's drafter section."""
        return self.spec.drafter

    @property
    def train(self) -> TrainSpec:
        """The candidate's training section."""
        return self.spec.train


def expand(spec: JobSpec) -> tuple[Candidate, ...]:
    """The candidates of a job, in the order of the grid: the last axis varies fastest.

    Raises InvalidInput naming the axis for a field that does not exist, a field or value given twice, a value the
    contract refuses, and a grid larger than `sweep.max_candidates`.
    """
    axes, families = spec.sweep.axes, spec.sweep.families
    _check_axes(axes)
    _check_families(spec)
    size = max(1, len(families))
    for axis in axes:
        size *= len(axis.values)
    if size > spec.sweep.max_candidates:
        raise InvalidInput(
            f"sweep.axes make {size} candidates, more than sweep.max_candidates {spec.sweep.max_candidates}",
            "leave out values, or raise sweep.max_candidates (each candidate is trained and benchmarked)")
    if not families:
        return _grid(spec, "")
    return tuple(one for family in families for one in _grid(_of_family(spec, family), family))


def families_of(spec: JobSpec) -> tuple[Family, ...]:
    """The families that a job trains, each once."""
    return tuple(dict.fromkeys(one.drafter.family for one in expand(spec)))


def _of_family(spec: JobSpec, family: Family) -> JobSpec:
    return spec.model_copy(update={"drafter": spec.drafter.model_copy(update={"family": family})})


def _check_families(spec: JobSpec) -> None:
    families = spec.sweep.families
    if len(set(families)) < len(families):
        raise InvalidInput(f"sweep.families {list(families)} name a family twice", "give each family once")
    if families and any(axis.field == "drafter.family" for axis in spec.sweep.axes):
        raise InvalidInput("sweep.axes and sweep.families both choose drafter.family", "keep sweep.families alone")


def _grid(spec: JobSpec, prefix: str) -> tuple[Candidate, ...]:
    axes = spec.sweep.axes
    if not axes:
        return (Candidate(prefix or ONLY_CANDIDATE, spec),)
    grid = itertools.product(*(axis.values for axis in axes))
    return tuple(_candidate(spec, axes, values, number, prefix) for number, values in enumerate(grid, start=1))


def _check_axes(axes: Sequence[SweepAxis]) -> None:
    for number, axis in enumerate(axes):
        section, _, field = axis.field.partition(".")
        fields = _SECTIONS[section].model_fields
        if field not in fields:
            raise InvalidInput(f"sweep.axes[{number}].field {axis.field!r} does not exist",
                               f"fields of {section} are {', '.join(sorted(fields))}")
        if len({repr(value) for value in axis.values}) < len(axis.values):
            raise InvalidInput(f"sweep.axes[{number}].values of {axis.field!r} name a value twice",
                               "give each value once")
    doubled = [name for name, count in Counter(axis.field for axis in axes).items() if count > 1]
    if doubled:
        raise InvalidInput(f"sweep.axes name {doubled[0]!r} more than once", "put all its values on one axis")


def _candidate(spec: JobSpec, axes: Sequence[SweepAxis], values: Sequence[JsonValue], number: int,
               prefix: str) -> Candidate:
    wanted = spec.model_dump(mode="json")
    for axis, value in zip(axes, values, strict=True):
        section, _, field = axis.field.partition(".")
        wanted[section][field] = value
    try:
        changed = JobSpec.model_validate(wanted)
    except ValidationError as error:
        first = error.errors()[0]
        told = ", ".join(f"{axis.field} = {value!r}" for axis, value in zip(axes, values, strict=True))
        raise InvalidInput(f"sweep candidate {number} ({told}) is not a valid job: "
                           f"{'.'.join(map(str, first['loc'])) or 'spec'}: {first['msg']}",
                           "change the axis value, or the field it collides with") from error
    return Candidate(_name(axes, values, number, prefix), changed)


def _name(axes: Sequence[SweepAxis], values: Sequence[JsonValue], number: int, prefix: str) -> str:
    parts = [prefix, f"c{number}"]
    for axis, value in zip(axes, values, strict=True):
        field = axis.field.partition(".")[2]
        parts += [_SHORT.get(field, field.replace("_", "-")), _label(value)]
    # The number alone makes the name unique, so cutting the rest loses nothing but reading comfort.
    return "-".join(part for part in parts if part)[:_MAX_NAME].rstrip("-")


def _label(value: JsonValue) -> str:
    text = format(value, "g") if isinstance(value, float) else str(value)
    text = text.lower().replace(".", "p").replace("+", "")
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")
