"""Everything that was measured of a job, from the manifests of its finished stages. Pure."""

from collections.abc import Sequence
from datetime import datetime

from eyrie_api.artifacts.directories import StageManifest
from eyrie_api.decisions.hardware_choice import hardware_of
from eyrie_api.v1alpha1.hardware import HardwareMeasurement
from eyrie_api.v1alpha1.prove import ProveReport
from eyrie_api.v1alpha1.reports import (
    BenchmarkReport,
    CaptureReport,
    LeaderboardEntry,
    RegenerateReport,
    TrainReport,
    TuneReport,
)
from eyrie_api.v1alpha1.status import Job, JobReport


def report_of(job: Job, manifests: Sequence[StageManifest], leaderboard: tuple[LeaderboardEntry, ...]) -> JobReport:
    """All reports of a job."""
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
