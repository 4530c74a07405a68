"""What the pages of one job derive from the API's answers: files by stage, planned beside actual, differences of two
documents. Pure.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import JsonValue

from eyrie_api.v1alpha1.model import Interval
from eyrie_api.v1alpha1.plan import PlannedStages, StagePlan
from eyrie_api.v1alpha1.stages import STAGES
from eyrie_api.v1alpha1.status import StageFile, StageStatus


@dataclass(frozen=True)
class StageFiles:
    """The files of one stage, of all its keys."""

    stage: str
    files: tuple[StageFile, ...]

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(one.size_bytes for one in self.files)


def by_stage(files: Iterable[StageFile]) -> tuple[StageFiles, ...]:
    """In order of stage; stages without files are left out."""
    listed = tuple(files)
    found = (StageFiles(stage, tuple(one for one in listed if one.stage == stage)) for stage in STAGES)
    return tuple(one for one in found if one.files)


@dataclass(frozen=True)
class StageComparison:
    """What was planned for a stage and what it took."""

    stage: str
    planned: StagePlan | None
    seconds: float | None
    """Time in which any part of the stage ran, so far; None before it has started."""

    is_running: bool
    size_bytes: int | None
    """Of its files; None until it has finished: what an unfinished stage has written is not known."""

    @property
    def planned_seconds(self) -> float | None:
        """Of the plan, by its middle."""
        return None if self.planned is None else self.planned.hours * 3600

    @property
    def time_ratio(self) -> float | None:
        """Actual over planned time of a stage that has ended."""
        if self.seconds is None or self.is_running or not self.planned_seconds:
            return None
        return self.seconds / self.planned_seconds


def planned_and_actual(plan: PlannedStages, stages: Sequence[StageStatus], files: Sequence[StageFiles],
                       now: datetime) -> tuple[StageComparison, ...]:
    """A row for every stage of the plan or the job, in order."""
    planned: dict[str, StagePlan] = {}
    for one in plan.stages:  # a row for each hardware profile: together, as their time is
        planned[one.stage] = _added(planned[one.stage], one) if one.stage in planned else one
    sizes = {one.stage: one.size_bytes for one in files}
    found = []
    for stage in STAGES:
        boxes = [one for one in stages if one.stage == stage]
        if stage not in planned and not boxes:
            continue
        spans = [(one.started_at, one.finished_at or now) for one in boxes if one.started_at is not None]
        is_over = bool(boxes) and all(one.state in ("Succeeded", "Skipped") for one in boxes)
        found.append(StageComparison(
            stage, planned.get(stage), _covered_s(spans) if spans else None,
            any(one.state == "Running" for one in boxes), sizes.get(stage) if is_over else None))
    return tuple(found)


@dataclass(frozen=True)
class TimeLeft:
    """Of a running job, in seconds."""

    seconds: float
    low: float | None
    high: float | None
    """The ends of its range; None where the plan has no range, as on CPUs."""


LEAST_LEFT_S = 600.0
"""A plan does not count the start of programs and the loading of models: less is not shown."""


def time_left(planned: PlannedStages | None, stages: Sequence[StageStatus], now: datetime) -> TimeLeft | None:
    """About what a running job will still take: for every stage what was planned less what it has taken, and of a
    running one at least what it expects of the phase that it is in. None without a plan, and for less than
    `LEAST_LEFT_S`."""
    if planned is None:
        return None
    together: dict[str, StagePlan] = {}
    for one in planned.stages:
        together[one.stage] = _added(together[one.stage], one) if one.stage in together else one
    left = [_left_of(part, [one for one in stages if one.stage == name], now) for name, part in together.items()]
    lows, highs = [one.low for one in left if one.low is not None], [one.high for one in left if one.high is not None]
    ranged = len(lows) == len(left)
    found = TimeLeft(sum(one.seconds for one in left), sum(lows) if ranged else None, sum(highs) if ranged else None)
    return found if found.seconds >= LEAST_LEFT_S else None


def _left_of(part: StagePlan, boxes: Sequence[StageStatus], now: datetime) -> TimeLeft:
    if boxes and all(one.state in ("Succeeded", "Skipped") for one in boxes):
        return TimeLeft(0.0, 0.0, 0.0)
    taken = _covered_s([(one.started_at, one.finished_at or now) for one in boxes if one.started_at is not None])
    expected = max((one.progress.eta_s or 0.0 for one in boxes if one.state == "Running" and one.progress is not None),
                   default=0.0)

    def rest(hours: float) -> float:
        return max(expected, hours * 3600 - taken)

    ends = part.hours_range
    return TimeLeft(rest(part.hours), None if ends is None else rest(ends.low),
                    None if ends is None else rest(ends.high))


def _added(first: StagePlan, second: StagePlan) -> StagePlan:
    """Both one after the other; the range where both have one."""
    ranges = (first.hours_range, second.hours_range)
    return first.model_copy(update={
        "hours": first.hours + second.hours, "bytes_on_disk": first.bytes_on_disk + second.bytes_on_disk,
        "hours_range": None if ranges[0] is None or ranges[1] is None else Interval(
            low=ranges[0].low + ranges[1].low, high=ranges[0].high + ranges[1].high)})


def _covered_s(spans: Iterable[tuple[datetime, datetime]]) -> float:
    """Seconds that at least one span covers: parts that run together are not counted twice, pauses not at all."""
    total, end = 0.0, None
    for start, stop in sorted(spans):
        begin = start if end is None else max(start, end)
        total += max(0.0, (stop - begin).total_seconds())
        end = stop if end is None else max(stop, end)
    return total


@dataclass(frozen=True)
class Difference:
    """A field that two documents do not have with the same value."""

    pointer: str
    """JSON pointer (RFC 6901)."""

    mine: str | None
    """JSON text; None where the document has no such field."""

    other: str | None


def differences(mine: JsonValue, other: JsonValue, pointer: str = "") -> tuple[Difference, ...]:
    """Fields in which two JSON documents differ, in order of the first one. Lists are compared by index.

    Objects and lists are descended into where both documents have one, else shown whole. Equal fields are left out.
    """
    if isinstance(mine, dict) and isinstance(other, dict):
        names = (*mine, *(name for name in other if name not in mine))
        pairs = [(name.replace("~", "~0").replace("/", "~1"), name in mine, mine.get(name), name in other,
                  other.get(name)) for name in names]
    elif isinstance(mine, list) and isinstance(other, list):
        pairs = [(str(at), at < len(mine), mine[at] if at < len(mine) else None, at < len(other),
                  other[at] if at < len(other) else None) for at in range(max(len(mine), len(other)))]
    else:
        texts = json.dumps(mine, ensure_ascii=False), json.dumps(other, ensure_ascii=False)
        return () if texts[0] == texts[1] else (Difference(pointer, *texts),)
    found: list[Difference] = []
    for name, in_mine, my_value, in_other, other_value in pairs:
        below = f"{pointer}/{name}"
        if in_mine and in_other:
            found += differences(my_value, other_value, below)
        else:
            found.append(Difference(below, json.dumps(my_value, ensure_ascii=False) if in_mine else None,
                                    json.dumps(other_value, ensure_ascii=False) if in_other else None))
    return tuple(found)
