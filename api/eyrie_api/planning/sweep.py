"""Expands a sweep into candidates: the grid of all axes, or random draws from them, as validated jobs. Pure.

Once the hidden states are captured, training another candidate is cheap, so a job trains several from the same store
(as the blog post "Making an EAGLE fly" suggests). Each candidate is validated by the contract of the whole document,
with the axes' values inserted.

`sweep.random` draws points instead of enumerating the grid (Bergstra and Bengio, JMLR 13, 2012: when few axes matter,
the same number of draws tries more values of those). Draw n of an axis depends on the seed, n and the axis only: a
larger `sweep.random` keeps the earlier points, and adding an axis does not change the draws of the others. A point
that was drawn before is drawn again.

`sweep.families` multiplies the points: every family is trained at every point.

An axis over `data.mix` varies which of the captured rows a candidate trains on (`planning.row_draw`); everything
before training is the same for all candidates and happens once.

Names are deterministic (`c1-lr-0p001`: number, short field, value; `c2-mix-chats-3-tools-1`; with several families
`eagle1-c1-lr-0p001`). They are valid DNS labels, because directories and Kubernetes objects are named after them, and
short enough that a checkpoint's `<candidate>-step-<n>` is a label too.
"""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import exp, log, prod
from random import Random
from typing import get_args

from pydantic import JsonValue, TypeAdapter, ValidationError

from eyrie_api.contract.data import DataSpec, SourceMix
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.resolved import Candidate
from eyrie_api.contract.rules import rule_of
from eyrie_api.contract.sweep import MIX_AXIS, SweepAxis, SweepSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.row_draw import shares

ONLY_CANDIDATE = "base"
"""The name when there is no axis."""

# 63 (a DNS label) - len("-step-") - 15 digits of steps, rounded down.
_MAX_NAME = 40
_SECTIONS: dict[str, type[DrafterSpec] | type[TrainSpec] | type[DataSpec]] = {
    "train": TrainSpec, "drafter": DrafterSpec, "data": DataSpec}
_SHORT = {
    "learning_rate": "lr", "ttt_length": "ttt", "step_decay": "decay", "intermediate_size": "ffn",
    "draft_vocab_size": "vocab", "num_attention_heads": "heads", "max_tokens_per_batch": "batch",
    "aux_layers": "aux",
}
_DRAWN_DIGITS = 3
"""Significant digits of a number drawn from a range; candidate names contain it."""

_MIX = TypeAdapter(SourceMix)
_ATTEMPTS = 1000
"""Draws for one new point before the axes count as exhausted."""

Point = tuple[JsonValue, ...]
"""One value for each axis."""


def expand(spec: JobSpec) -> tuple[Candidate, ...]:
    """The candidates that a job trains, in the order of the grid (the last axis varies fastest) or of the draws. Raises
    InvalidInput naming the axis for a field that does not exist, a field or value given twice, a range of a field that
    takes no numbers, a value the contract refuses, two mixes of equal shares, more points than the axes have, and more
    candidates than `sweep.max_candidates`."""
    if not spec.trains:
        return ()
    sweep = spec.sweep
    _check_axes(sweep.axes)
    if len(set(sweep.families)) < len(sweep.families):
        raise InvalidInput(f"sweep.families {list(sweep.families)} name a family twice", "give each family once")
    if sweep.families and any(axis.field == "drafter.family" for axis in sweep.axes):
        raise InvalidInput("sweep.axes and sweep.families both choose drafter.family", "keep sweep.families alone")
    size = max(1, len(sweep.families)) * (sweep.random or prod(len(axis.values) for axis in sweep.axes))
    if size > sweep.max_candidates:
        of = "sweep.axes make" if sweep.random is None else f"sweep.random {sweep.random} makes"
        raise InvalidInput(
            f"{of} {size} candidates, more than sweep.max_candidates {sweep.max_candidates}",
            "leave out values, or raise sweep.max_candidates (each candidate is trained and benchmarked)")
    points = _draws(sweep.axes, sweep.random, sweep.seed) if sweep.random is not None else list(
        itertools.product(*(axis.values for axis in sweep.axes)))
    candidates = _candidates(spec, points, "") if not sweep.families else tuple(
        candidate for family in sweep.families for candidate in _candidates(spec.model_copy(update={
            "drafter": spec.drafter.model_copy(update={"family": family})}), points, family))
    # Of the grid every value is now that of a valid candidate.
    mixes = [mix for axis in sweep.axes if axis.field == MIX_AXIS and sweep.random is None for mix in axis.values]
    seen: dict[str, JsonValue] = {}
    for mix in mixes:
        key = repr(sorted(shares(_MIX.validate_python(mix)).items()))
        if key in seen:
            raise InvalidInput(f"sweep axis {MIX_AXIS!r} has {seen[key]} and {mix}, which are the same shares",
                               "give each mix once: shares are relative to one another")
        seen[key] = mix
    return candidates


def axes_words(axes: Mapping[str, JsonValue]) -> str:
    """For readers: `mix think 2, instruct 1; intermediate_size 704`."""
    return "; ".join(f"{field.partition('.')[2]} {_words(value)}" for field, value in axes.items())


def _words(value: JsonValue) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return format(value, "g") if isinstance(value, float) else str(value)


def _draws(axes: Sequence[SweepAxis], num: int, seed: int) -> list[Point]:
    points: dict[str, Point] = {}
    number = 0
    for wanted in range(1, num + 1):
        for _ in range(_ATTEMPTS):
            point = tuple(_draw(axis, seed, number) for axis in axes)
            number += 1
            points.setdefault(repr(point), point)
            if len(points) == wanted:
                break
        else:
            raise InvalidInput(f"sweep.random is {num}, and {wanted - 1} different points were found on sweep.axes",
                               f"set sweep.random to {wanted - 1}, or widen the axes")
    return list(points.values())


def _draw(axis: SweepAxis, seed: int, number: int) -> JsonValue:
    # `Random` hashes a string seed with SHA-512: the same draw on every machine and in every Python since 3.2.
    share = Random(f"{seed}/{axis.field}/{number}").random()
    if not axis.is_range:
        return axis.values[int(share * len(axis.values))]
    assert axis.low is not None
    assert axis.high is not None
    if _takes(axis) is int:
        low, high = axis.low, axis.high + 1  # each integer covers an interval of width 1, so `high` is as likely
        drawn = exp(log(low) + share * (log(high) - log(low))) if axis.log else low + share * (high - low)
        return min(int(axis.high), int(drawn))
    low, high = (log(axis.low), log(axis.high)) if axis.log else (axis.low, axis.high)
    drawn = low + share * (high - low)
    readable = float(f"{exp(drawn) if axis.log else drawn:.{_DRAWN_DIGITS}g}")
    return min(max(readable, axis.low), axis.high)


def _takes(axis: SweepAxis) -> type | None:
    """int or float, whichever the axis's field takes; None when it takes no numbers."""
    section, _, field = axis.field.partition(".")
    annotation = _SECTIONS[section].model_fields[field].annotation
    kinds = get_args(annotation) or (annotation,)
    return next((kind for kind in (float, int) if kind in kinds), None)


def _candidates(spec: JobSpec, points: Sequence[Point], prefix: str) -> tuple[Candidate, ...]:
    if not spec.sweep.axes:
        return (Candidate(name=prefix or ONLY_CANDIDATE, drafter=spec.drafter, train=spec.train, mix=spec.data.mix),)
    return tuple(_candidate(spec, point, number, prefix) for number, point in enumerate(points, start=1))


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
        if axis.field == MIX_AXIS and None in axis.values:
            raise InvalidInput(f"sweep.axes[{number}].values of {axis.field!r} contain null, the mix of no candidate",
                               "give shares by source; candidates are compared on the same number of rows")
        if axis.is_range and _takes(axis) is None:
            raise InvalidInput(f"sweep.axes[{number}] is a range of {axis.field!r}, which takes no numbers",
                               "list its values")
        if axis.is_range and _takes(axis) is int and not all(
                end is not None and end.is_integer() for end in (axis.low, axis.high)):
            raise InvalidInput(f"sweep.axes[{number}]: low {axis.low} and high {axis.high} of {axis.field!r}, which "
                               "takes whole numbers", "give whole numbers")
    doubled = [name for name, count in Counter(axis.field for axis in axes).items() if count > 1]
    if doubled:
        raise InvalidInput(f"sweep.axes name {doubled[0]!r} more than once", "put all its values on one axis")


def _candidate(spec: JobSpec, point: Point, number: int, prefix: str) -> Candidate:
    wanted = spec.model_dump(mode="json")
    values = {axis.field: value for axis, value in zip(spec.sweep.axes, point, strict=True)}
    parts = [prefix, f"c{number}"]
    for path, value in values.items():
        section, _, field = path.partition(".")
        wanted[section][field] = value
        parts += [_SHORT.get(field, field.replace("_", "-")), _label(value)]
    try:
        changed = JobSpec.model_validate(wanted)
    except ValidationError as error:
        first = error.errors()[0]
        settings = ", ".join(f"{path} = {value!r}" for path, value in values.items())
        where = ".".join(map(str, first["loc"])) or "spec"
        raise InvalidInput(f"sweep candidate {number} ({settings}) is not a valid job: {where}: "
                           f"{rule_of(first)}",
                           "change the axis value, or the field it collides with") from error
    # The candidate's number makes the name unique, so the rest may be truncated.
    name = "-".join(part for part in parts if part)[:_MAX_NAME].rstrip("-")
    return Candidate(name=name, axes=values, drafter=changed.drafter, train=changed.train, mix=changed.data.mix)


def _label(value: JsonValue) -> str:
    if isinstance(value, dict):
        return "-".join(f"{_label(key)}-{_label(item)}" for key, item in value.items())
    text = format(value, "g") if isinstance(value, float) else str(value)
    text = text.lower().replace(".", "p").replace("+", "")
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def may_train_together(sweep: SweepSpec) -> bool:
    """Whether candidates may share a program, and with it reads and rungs, where the hardware suits."""
    return sweep.shared_passes != "never" and not sweep.varies_mix


def trains_together(spec: JobSpec, num_candidates: int, num_gpus: int, *, on_cluster: bool) -> bool:
    """Whether one program trains all candidates of a job (`sweep.shared_passes`).

    num_gpus    of one training.
    on_cluster  whether other machines could train other candidates.

    One program costs less in total; separate runs finish sooner if there is hardware for all of them at once.
    `auto` assumes that a cluster seldom has that many idle machines of at most one GPU; a job with several GPUs or
    nodes per training trains its candidates separately there. On one machine the program divides the candidates among
    the GPUs, unless there are fewer candidates than GPUs: then each candidate in turn is trained on all of them.
    Candidates of different mixes read different rows, so one program would share nothing among them.
    """
    sweep = spec.sweep
    if not may_train_together(sweep) or num_candidates < 2:
        return False
    if sweep.shared_passes == "always":
        return True
    if on_cluster:
        return num_gpus <= 1 and spec.placement.train_launcher == "pod"
    return num_candidates >= num_gpus
