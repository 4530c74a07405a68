"""What jobs left on disk, and what of it nobody needs any more: a pure decision; looking and removing are below it.

    captured states       needed until the job's drafters are trained and measured. The largest thing a job writes.
    training states       what a killed run goes on from; needed until it has ended
    checkpoints           the job's best, and every one that an endpoint serves, may serve or may roll back to, stay;
                          the others have lost
    everything else       reports, manifests, rows, events: small, and what a leaderboard rests on. Never touched

So nothing goes of a job that has not ended, or whose end is unknown. A failed job may be retried, which goes on from
what is there: its files go only when asked for. A succeeded job of which an endpoint still waits for approval keeps its
best like any other. What is removed can be made again: capture, run once more, makes the store anew.

Files are named by their place below EYRIE_HOME or an artifact store alike: jobs/<id>/stages/<stage>/...
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.status import Endpoint, Job, Phase

Kind = Literal["captured-states", "training-state", "checkpoint", "record"]

_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("captured-states", re.compile(r"stages/capture/(?:shard-[^/]*|index\.json)$")),
    ("training-state", re.compile(r"stages/train/[^/]+/\.?state/.")),
    ("checkpoint", re.compile(r"stages/train/(?P<candidate>[^/]+)/checkpoints/(?P<name>[^/]+)/.")),
)
_ENDED: tuple[Phase, ...] = ("Succeeded", "Failed", "Cancelled")
_SERVES = ("proposed", "canary", "active", "retired")
"""States of a revision whose drafter may be asked for: a retired one is what a rollback goes back to."""


@dataclass(frozen=True)
class JobFacts:
    """What the decision needs of a job."""

    phase: Phase
    best: str | None
    """Its best checkpoint."""


class Holding(Frozen):
    """One thing a job holds."""

    job_id: str
    kind: Kind
    name: str
    """The checkpoint; the stage's key, or empty, for the rest."""

    size_bytes: int
    files: tuple[str, ...]
    """Places below the home or the store."""


class Finding(Frozen):
    """A holding, and whether it may go."""

    holding: Holding
    removable: bool
    reason: str


class Storage(Frozen):
    """All of it."""

    findings: tuple[Finding, ...]
    total_bytes: int
    removable_bytes: int


def facts_of(jobs: Iterable[Job]) -> dict[str, JobFacts]:
    """By id."""
    return {job.id: JobFacts(job.status.phase, job.status.best.checkpoint if job.status.best else None) for job in jobs}


def served_by(endpoints: Iterable[Endpoint]) -> set[tuple[str, str]]:
    """(job, checkpoint) of everything an endpoint serves, may serve, or may go back to."""
    return {(revision.job_id, revision.checkpoint) for endpoint in endpoints for revision in endpoint.revisions
            if revision.job_id and revision.checkpoint
            and (revision.state in _SERVES or revision.number == endpoint.active_revision)}


def holdings(files: Iterable[tuple[str, int]]) -> list[Holding]:
    """Files with their sizes, gathered; in order of job, kind and name. What is not below `jobs/` is nobody's."""
    gathered: dict[tuple[str, Kind, str], list[tuple[str, int]]] = defaultdict(list)
    for place, size in files:
        parts = place.split("/", 2)
        if len(parts) == 3 and parts[0] == "jobs":
            gathered[parts[1], *_kind_of(parts[2])].append((place, size))
    return [Holding(job_id=job_id, kind=kind, name=name, size_bytes=sum(size for _, size in found),
                    files=tuple(sorted(place for place, _ in found)))
            for (job_id, kind, name), found in sorted(gathered.items())]


def judge(found: Iterable[Holding], jobs: Mapping[str, JobFacts], served: set[tuple[str, str]], *,
          failed_too: bool = False) -> Storage:
    """What may go, and why or why not."""
    findings = tuple(Finding(holding=one, removable=reason is None, reason=reason or _GONE[one.kind])
                     for one in found for reason in (_kept_because(one, jobs.get(one.job_id), served, failed_too),))
    return Storage(
        findings=findings, total_bytes=sum(one.holding.size_bytes for one in findings),
        removable_bytes=sum(one.holding.size_bytes for one in findings if one.removable))


_GONE: dict[Kind, str] = {
    "captured-states": "the job has ended, its drafters are trained",
    "training-state": "the job has ended, nothing goes on from it",
    "checkpoint": "another checkpoint of the job was better, and no endpoint may serve this one",
    "record": "",
}


def _kept_because(one: Holding, job: JobFacts | None, served: set[tuple[str, str]], failed_too: bool) -> str | None:
    if one.kind == "record":
        return "records are small and stay"
    if job is None:
        return "no such job is known to this server"
    if job.phase not in _ENDED:
        return f"the job is {job.phase}"
    if one.kind == "checkpoint" and (one.job_id, one.name) in served:
        return "an endpoint serves it, or may go back to it"
    if job.phase == "Failed" and not failed_too:
        return "the job failed and may be retried"
    if one.kind == "checkpoint" and one.name == job.best:
        return "the job's best"
    return None


def _kind_of(place: str) -> tuple[Kind, str]:
    for kind, pattern in _KINDS:
        match = pattern.match(place)
        if match is not None:
            return kind, match.groupdict().get("name", "")
    return "record", ""


def files_in_home(home: Path) -> Iterator[tuple[str, int]]:
    """Every file below `jobs/` with its size, hidden ones too: training states are."""
    for path in sorted((home / "jobs").rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(home).as_posix(), path.stat().st_size


def files_in_store(store: ArtifactStore) -> Iterator[tuple[str, int]]:
    """Every object below `jobs/` with its size."""
    for found in store.list("jobs"):
        yield found.key, found.size_bytes


def remove_from_home(home: Path, storage: Storage) -> int:
    """Remove what may go; bytes that went. Directories that become empty go too. Twice is fine."""
    freed = 0
    for finding in storage.findings:
        for place in finding.holding.files if finding.removable else ():
            path = home / place
            if path.is_file():
                freed += path.stat().st_size
                path.unlink()
            for parent in path.parents:
                if parent == home or not parent.is_dir() or any(parent.iterdir()):
                    break
                parent.rmdir()
    return freed


def remove_from_store(store: ArtifactStore, storage: Storage) -> int:
    """The same in an artifact store."""
    freed = 0
    for finding in storage.findings:
        for place in finding.holding.files if finding.removable else ():
            store.delete(place)
        freed += finding.holding.size_bytes if finding.removable else 0
    return freed
