"""What a job has measured so far, from the manifests of its finished stages, and its plan against what they took. Pure.

The plan is the one that the job was accepted with. It has the parts of a stage one after the other; actual time is that
in which any part ran.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from eyrie_api.artifacts.directories import StageManifest
from eyrie_api.contract.hardware import HardwareMeasurement
from eyrie_api.contract.model import Interval
from eyrie_api.contract.plan import Plan, PlannedStages, StageComparison, StagePlan, TimeLeft
from eyrie_api.contract.prove import ProveReport
from eyrie_api.contract.reports import (
    BenchmarkReport,
    CaptureReport,
    LeaderboardEntry,
    RegenerateReport,
    TrainReport,
    TuneReport,
)
from eyrie_api.contract.stages import STAGES
from eyrie_api.contract.status import Job, JobReport, StageStatus
from eyrie_api.decisions.hardware_choice import hardware_of

_OF_THE_SERVER = ("path", "drafter_dir", "launch", "variants", "model")

LEAST_LEFT_S = 600.0
"""On CPUs a plan does not count the start of programs and the loading of models: less is not shown."""


def report_of(job: Job, manifests: Sequence[StageManifest], leaderboard: tuple[LeaderboardEntry, ...]) -> JobReport:
    seconds: dict[str, float] = {}
    for each in manifests:
        spent = (datetime.fromisoformat(each.manifest.finished_at) - datetime.fromisoformat(each.manifest.started_at))
        seconds[each.stage] = seconds.get(each.stage, 0.0) + spent.total_seconds()
    seconds["total"] = sum(seconds.values())
    reports = [each.manifest.report for each in manifests]
    return JobReport(
        job_id=job.id, name=job.spec.name, target=job.spec.target.model, phase=job.status.phase, seconds=seconds,
        regenerate=next((report for report in reports if isinstance(report, RegenerateReport)), None),
        capture=next((report for report in reports if isinstance(report, CaptureReport)), None),
        train=tuple(report for report in reports if isinstance(report, TrainReport)),
        benchmark=tuple(report for report in reports if isinstance(report, BenchmarkReport)),
        tune=next((report for report in reports if isinstance(report, TuneReport)), None),
        prove=next((report for report in reports if isinstance(report, ProveReport)), None),
        hardware=None if job.spec.prove.hardware is None else hardware_of(
            job.spec.prove.hardware, [report for report in reports if isinstance(report, HardwareMeasurement)]),
        leaderboard=leaderboard, decision=job.status.decision, endpoint=job.status.endpoint,
        devices_per_server=job.spec.engine.tp_size)


def results_for_card(**measured: BaseModel | None) -> dict[str, Any]:
    """What was measured of a checkpoint, for its card (`eyrie_workers.drafters.card --results`), without what concerns
    the server alone."""
    return {part: _public(value.model_dump(mode="json")) for part, value in measured.items() if value is not None}


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items() if key not in _OF_THE_SERVER}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return value


def planned_and_actual(plan: PlannedStages | Plan, stages: Sequence[StageStatus], sizes: Mapping[str, int],
                       now: datetime) -> tuple[StageComparison, ...]:
    """A row for every stage of the plan or the job, in order. `sizes`: bytes of the files of a stage."""
    planned, compared = _by_stage(plan), []
    for stage in STAGES:
        boxes = [box for box in stages if box.stage == stage]
        if stage not in planned and not boxes:
            continue
        spans = [(box.started_at, box.finished_at or now) for box in boxes if box.started_at is not None]
        is_over = bool(boxes) and all(box.state in ("Succeeded", "Skipped") for box in boxes)
        compared.append(StageComparison(
            stage=stage, planned=planned.get(stage), seconds=_covered_s(spans) if spans else None,
            is_running=any(box.state == "Running" for box in boxes),
            size_bytes=sizes.get(stage) if is_over else None))
    return tuple(compared)


def time_left(planned: Plan | None, stages: Sequence[StageStatus], now: datetime) -> TimeLeft | None:
    """About what a running job will still take: for every stage what was planned less what it has taken, and of a
    running one at least what it expects of the phase that it is in. None without a plan, and for less than
    `LEAST_LEFT_S`."""
    if planned is None:
        return None
    left = [_left_of(part, [status for status in stages if status.stage == name], now)
            for name, part in _by_stage(planned).items()]
    lows, highs = [part.low for part in left if part.low is not None], [
        part.high for part in left if part.high is not None]
    ranged = len(lows) == len(left)
    total = TimeLeft(seconds=sum(part.seconds for part in left), low=sum(lows) if ranged else None,
                     high=sum(highs) if ranged else None)
    return total if total.seconds >= LEAST_LEFT_S else None


def _left_of(part: StagePlan, boxes: Sequence[StageStatus], now: datetime) -> TimeLeft:
    if boxes and all(box.state in ("Succeeded", "Skipped") for box in boxes):
        return TimeLeft(seconds=0.0, low=0.0, high=0.0)
    taken = _covered_s([(box.started_at, box.finished_at or now) for box in boxes if box.started_at is not None])
    expected = max((box.progress.eta_s or 0.0 for box in boxes if box.state == "Running" and box.progress is not None),
                   default=0.0)

    def rest(hours: float) -> float:
        return max(expected, hours * 3600 - taken)

    ends = part.hours_range
    return TimeLeft(seconds=rest(part.hours), low=None if ends is None else rest(ends.low),
                    high=None if ends is None else rest(ends.high))


def _by_stage(plan: Plan | PlannedStages) -> dict[str, StagePlan]:
    """The rows of a stage, one for each hardware profile, together, as their time is."""
    merged: dict[str, StagePlan] = {}
    for part in plan.stages:
        first = merged.get(part.stage)
        if first is None:
            merged[part.stage] = part
            continue
        mine, its = first.hours_range, part.hours_range
        merged[part.stage] = first.model_copy(update={
            "hours": first.hours + part.hours, "bytes_on_disk": first.bytes_on_disk + part.bytes_on_disk,
            "hours_range": None if mine is None or its is None else Interval(
                low=mine.low + its.low, high=mine.high + its.high)})
    return merged


def _covered_s(spans: Iterable[tuple[datetime, datetime]]) -> float:
    """Seconds that at least one span covers: parts that run together are not counted twice, pauses not at all."""
    total, end = 0.0, None
    for start, stop in sorted(spans):
        begin = start if end is None else max(start, end)
        total += max(0.0, (stop - begin).total_seconds())
        end = stop if end is None else max(stop, end)
    return total
