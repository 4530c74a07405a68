"""Files that jobs hold on disk or in a store, and which of them may be removed. The decision is pure (`plan_removal`).

    captured states       needed until the job's drafters are trained and measured; the largest files of a job
    training states       the state a killed run resumes from; needed until the job has ended
    checkpoints           kept: the job's best, every one that an endpoint serves, may serve or may roll back to, and
                          every one that another job continues from or measures as a rival
    everything else       reports, manifests, rows, events: small, and the basis of the leaderboard. Never removed, so
                          that answers which another job takes over stay until their job is deleted

Nothing is removed of a job that has not ended or is unknown. A failed job may be retried and then resumes from its
files: they are removed only on request. Removed files can be produced again by running the stage again.

Files are named by their path below EYRIE_HOME or an artifact store alike: jobs/<id>/stages/<stage>/...
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.status import Endpoint, Job, Phase
from eyrie_api.contract.storage import StoredKind
from eyrie_api.errors import ArtifactMissing

_KINDS: tuple[tuple[StoredKind, re.Pattern[str]], ...] = (
    ("captured-states", re.compile(r"stages/capture/(?:shard-[^/]*|(?:index|sources)\.json)$")),
    ("training-state", re.compile(r"stages/train/[^/]+/\.?state/.")),
    ("checkpoint", re.compile(r"stages/train/(?P<candidate>[^/]+)/checkpoints/(?P<name>[^/]+)/.")),
)
_ENDED: tuple[Phase, ...] = ("Succeeded", "Failed", "Cancelled")
MAY_READ: frozenset[Phase] = frozenset({"Pending", "Running", "Cancelling", "Failed"})
"""Phases of a job that reads its inputs, now or when it is retried. A cancelled one counts as given up, as for its own
files: retried after a removal, it fails with the missing drafter's name."""

_CHECKPOINT = re.compile(r"/jobs/(?P<job>[^/]+)/stages/train/[^/]+/checkpoints/(?P<name>[^/]+)")
_SERVES = ("proposed", "canary", "active", "retired")
"""States of a revision whose drafter may be served: a rollback activates a retired one."""


@dataclass(frozen=True)
class JobFacts:
    phase: Phase
    best: str | None
    """Its best checkpoint."""


class StoredItem(Frozen):
    """Files of one kind that a job holds."""

    job_id: str
    kind: StoredKind
    name: str
    """The checkpoint; the stage's key, or empty, for the rest."""

    size_bytes: int
    files: tuple[str, ...]
    """Paths below the home or keys in the store; empty where a server has measured them."""


class RemovalDecision(Frozen):
    item: StoredItem
    removable: bool
    reason: str


class StorageUsage(Frozen):
    decisions: tuple[RemovalDecision, ...]
    total_bytes: int
    removable_bytes: int


def served_by(endpoints: Iterable[Endpoint]) -> set[tuple[str, str]]:
    """(job, checkpoint) of everything an endpoint serves, may serve, or may roll back to."""
    return {(revision.job_id, revision.checkpoint) for endpoint in endpoints for revision in endpoint.revisions
            if revision.job_id and revision.checkpoint
            and (revision.state in _SERVES or revision.number == endpoint.active_revision)}


def read_by(jobs: Iterable[Job]) -> set[tuple[str, str]]:
    """(job, checkpoint) of all that jobs which may still read their inputs name: `drafter.init_from`, `drafters`,
    `rivals`."""
    return named_by(job.spec for job in jobs if job.status.phase in MAY_READ)


def named_by(specs: Iterable[JobSpec]) -> set[tuple[str, str]]:
    """(job, checkpoint) of every drafter that the specs name by its path."""
    paths: list[str | None] = []
    for spec in specs:
        paths += [spec.drafter.init_from, *(drafter.path for drafter in (*spec.drafters, *spec.rivals))]
        paths += [str(value) for axis in spec.sweep.axes if axis.field == "drafter.init_from" for value in axis.values]
    return {(match["job"], match["name"]) for path in paths if path is not None
            for match in (_CHECKPOINT.search(path),) if match is not None}


def that_have_not(condition: Literal["Regenerated", "Captured"], jobs: Iterable[Job]) -> list[str]:
    """The jobs that may still take over answers (which have not Regenerated) or states (not Captured) of others."""
    return [job.id for job in jobs if job.status.phase in MAY_READ
            and not any(held.type == condition and held.status == "True" for held in job.status.conditions)]


def reused_by(job_ids: Iterable[str], read: Callable[[str], bytes]) -> dict[str, tuple[str, ...]]:
    """Job id -> those of the given jobs that take over what it has (`reuse`).

    read   a file by its path below the home or its key in the store; raises ArtifactMissing
    """
    readers: dict[str, list[str]] = defaultdict(list)
    for job_id in job_ids:
        with suppress(ArtifactMissing, ValueError):  # not started, or a file that its next start writes again
            for earlier in json.loads(read(f"jobs/{job_id}/job.json")).get("reuse", ()):
                readers[earlier].append(job_id)
    return {earlier: tuple(sorted(job_readers)) for earlier, job_readers in sorted(readers.items())}


def states_of(jobs: Iterable[str]) -> set[tuple[str, str]]:
    """Their captured states, as `plan_removal` names what is read."""
    return {(job_id, "") for job_id in jobs}


def group_files(files: Iterable[tuple[str, int]]) -> list[StoredItem]:
    """Files and their sizes grouped into items, in order of job, kind and name. Files outside `jobs/` are ignored."""
    gathered: dict[tuple[str, StoredKind, str], list[tuple[str, int]]] = defaultdict(list)
    for place, size in files:
        parts = place.split("/", 2)
        if len(parts) == 3 and parts[0] == "jobs":
            matches = ((kind, pattern.match(parts[2])) for kind, pattern in _KINDS)
            kind, name = next(((kind, match.groupdict().get("name", "")) for kind, match in matches if match),
                              ("record", ""))
            gathered[parts[1], kind, name].append((place, size))
    return [StoredItem(job_id=job_id, kind=kind, name=name, size_bytes=sum(size for _, size in sized_files),
                    files=tuple(sorted(place for place, _ in sized_files)))
            for (job_id, kind, name), sized_files in sorted(gathered.items())]


def plan_removal(items: Iterable[StoredItem], jobs: Mapping[str, JobFacts], served: set[tuple[str, str]],
                 read: set[tuple[str, str]], *, failed_too: bool = False) -> StorageUsage:
    """Which items may be removed, with the reason of each decision. `served` and `read`: (job, checkpoint), or
    (job, "") for its captured states."""
    decisions = tuple(
        RemovalDecision(item=item, removable=reason is None, reason=reason or _REMOVABLE[item.kind])
        for item in items for reason in (_reason_to_keep(item, jobs.get(item.job_id), served, read, failed_too),))
    return StorageUsage(
        decisions=decisions, total_bytes=sum(decision.item.size_bytes for decision in decisions),
        removable_bytes=sum(decision.item.size_bytes for decision in decisions if decision.removable))


_REMOVABLE: dict[StoredKind, str] = {
    "captured-states": "the job has ended, its drafters are trained",
    "training-state": "the job has ended, nothing resumes from it",
    "checkpoint": "another checkpoint of the job was better, and no endpoint may serve this one",
    "record": "",
}


def _reason_to_keep(item: StoredItem, job: JobFacts | None, served: set[tuple[str, str]],
                    read: set[tuple[str, str]], failed_too: bool) -> str | None:
    if item.kind == "record":
        return "records are small and are kept"
    if job is None:
        return "this server has no such job"
    if job.phase not in _ENDED:
        return f"the job is {job.phase}"
    if item.kind == "checkpoint" and (item.job_id, item.name) in served:
        return "an endpoint serves it, or may roll back to it"
    if item.kind == "checkpoint" and (item.job_id, item.name) in read:
        return "another job continues from it, or measures it as a rival"
    if item.kind == "captured-states" and (item.job_id, "") in read:
        return "another job may copy them"
    if job.phase == "Failed" and not failed_too:
        return "the job failed and may be retried"
    if item.kind == "checkpoint" and item.name == job.best:
        return "the job's best"
    return None


def files_in_home(home: Path, place: str = "jobs") -> Iterator[tuple[str, int]]:
    """Every file below `place` with its size, hidden ones too: training states are. In order of name, job by job.

    What is deleted meanwhile is left out. Raises OSError for a directory that cannot be read.
    """
    try:
        with os.scandir(home / place) as entries:
            by_name = sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in by_name:
        here = f"{place}/{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from files_in_home(home, here)
        elif entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):
                yield here, entry.stat(follow_symlinks=False).st_size


def files_in_store(store: ArtifactStore) -> Iterator[tuple[str, int]]:
    """Every object below `jobs/` with its size."""
    for stored in store.list("jobs"):
        yield stored.key, stored.size_bytes


def read_in_home(home: Path, place: str) -> bytes:
    """A file by its path below the home. Raises ArtifactMissing."""
    try:
        return (home / place).read_bytes()
    except FileNotFoundError:
        raise ArtifactMissing(f"no {home / place}", "run it where the server's files are") from None


def remove_from_home(home: Path, usage: StorageUsage) -> int:
    """Remove the removable files and directories that become empty; return the bytes freed. Idempotent."""
    freed = 0
    for decision in usage.decisions:
        for place in decision.item.files if decision.removable else ():
            path = home / place
            if path.is_file():
                freed += path.stat().st_size
                path.unlink()
            for parent in path.parents:
                if parent == home or not parent.is_dir() or any(parent.iterdir()):
                    break
                parent.rmdir()
    return freed


def remove_from_store(store: ArtifactStore, usage: StorageUsage) -> int:
    """`remove_from_home` for an artifact store."""
    freed = 0
    for decision in usage.decisions:
        for place in decision.item.files if decision.removable else ():
            store.delete(place)
        freed += decision.item.size_bytes if decision.removable else 0
    return freed
