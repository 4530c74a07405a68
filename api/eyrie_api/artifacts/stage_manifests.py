"""The finished stages of a job, read from its directory.

A directory without a manifest is unfinished and is skipped; manifests are immutable, so reading them needs no
coordination with the process that runs the job.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, read_manifest
from eyrie_api.errors import ArtifactMissing
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
        # Race: the files of a job that is being deleted vanish between a listing and a read.
        with suppress(FileNotFoundError, ArtifactMissing):
            for path in sorted((*home.glob(MANIFEST), *home.glob(f"*/{MANIFEST}"))):
                key = "" if path.parent == home else path.parent.name
                found.append(StageManifest(stage, key, path.parent, read_manifest(path)))
    return tuple(found)


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
        leaderboard=leaderboard, decision=job.status.decision, endpoint=job.status.endpoint)
