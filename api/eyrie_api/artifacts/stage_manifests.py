"""The finished stages of a job, read from its directory: where files and figures come from once a stage is whole.

A directory without a readable manifest is unfinished and is passed over; manifests are immutable, so reading them needs
no coordination with whoever runs the job.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, read_manifest
from eyrie_api.v1alpha1.prove import ProveReport
from eyrie_api.v1alpha1.reports import (
    BenchmarkReport,
    CaptureReport,
    LeaderboardEntry,
    RegenerateReport,
    TrainReport,
    TuneReport,
)
from eyrie_api.v1alpha1.stages import STAGES, Manifest, StageName
from eyrie_api.v1alpha1.status import Job, JobReport


@dataclass(frozen=True)
class StageManifest:
    """One finished stage."""

    stage: StageName
    key: str
    directory: Path
    manifest: Manifest


def read_manifests(job_dir: Path) -> tuple[StageManifest, ...]:
    """Every finished stage of a job, in order of stage and key."""
    found = []
    for stage in STAGES:
        home = job_dir / "stages" / stage
        for path in sorted((*home.glob(MANIFEST), *home.glob(f"*/{MANIFEST}"))):
            key = "" if path.parent == home else path.parent.name
            found.append(StageManifest(stage, key, path.parent, read_manifest(path)))
    return tuple(found)


def report_of(job: Job, found: Sequence[StageManifest], leaderboard: tuple[LeaderboardEntry, ...]) -> JobReport:
    """The reports of a job put together."""
    seconds: dict[str, float] = {}
    for one in found:
        spent = (datetime.fromisoformat(one.manifest.finished_at) - datetime.fromisoformat(one.manifest.started_at))
        seconds[one.stage] = seconds.get(one.stage, 0.0) + spent.total_seconds()
    seconds["total"] = sum(seconds.values())
    reports = [one.manifest.report for one in found]
    return JobReport(
        job_id=job.id, name=job.spec.name, target=job.spec.target.model, phase=job.status.phase, seconds=seconds,
        regenerate=next((one for one in reports if isinstance(one, RegenerateReport)), None),
        capture=next((one for one in reports if isinstance(one, CaptureReport)), None),
        train=tuple(one for one in reports if isinstance(one, TrainReport)),
        benchmark=tuple(one for one in reports if isinstance(one, BenchmarkReport)),
        tune=next((one for one in reports if isinstance(one, TuneReport)), None),
        prove=next((one for one in reports if isinstance(one, ProveReport)), None),
        leaderboard=leaderboard, decision=job.status.decision, endpoint=job.status.endpoint)
