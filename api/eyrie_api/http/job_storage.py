"""What the files of jobs occupy, for `GET /v1alpha1/storage` and the console: measured by a thread of its own and kept.

Listing a home or a bucket with many files takes seconds to minutes, so no request does it. A request begins a
measurement when the last one is older than MAX_AGE_S, and waits for it until WAIT_S after its beginning; then it is
answered with the last one, or, if there is none, with StorageNotMeasured. At most one measurement runs at a time, in
each process. It ends early after MAX_FILES or MAX_S, and says so.

A measurement is of all projects, with the decisions of `artifacts.storage_usage` as `eyrie storage` makes them; `page`
shows a caller what is its own.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select

from eyrie_api.access.scope import Scope
from eyrie_api.artifacts import storage_usage
from eyrie_api.clock import utc_now
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.storage import JobStorage, ProjectStorage, StoragePage, StoredFiles
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.rendering import SIZE_CURSOR, decode_cursor, encode_cursor
from eyrie_api.database.tables import JobRow, StageRow
from eyrie_api.errors import Permanent, Transient
from eyrie_api.full_disk import total_and_free_bytes
from eyrie_api.http.job_files import JobFiles
from eyrie_api.settings import Settings

log = logging.getLogger(__name__)

MAX_PAGE = 200
MAX_AGE_S = 30.0
WAIT_S = 5.0
MAX_FILES, MAX_S = 500_000, 120.0
"""Of one measurement. 90,000 files on a disk took 0.8 s and 17 MiB on two cores; a store lists 1000 a request."""


class StorageNotMeasured(Transient):
    """The first measurement has not ended."""


class JobFilesUnavailable(Permanent):
    """This server has no directory with the files of jobs, or cannot read it."""

    http_status = 503
    exit_code = 69  # EX_UNAVAILABLE


@dataclass(frozen=True)
class JobOwner:
    name: str | None
    project: str
    facts: storage_usage.JobFacts


def read_owners(database: Database) -> tuple[dict[str, JobOwner], set[tuple[str, str]], list[str]]:
    """Job id -> owner, of all jobs; (job, checkpoint) of what jobs may still read, as `storage_usage.read_by`; and the
    jobs that may still copy states of others, as `storage_usage.that_have_not`."""
    columns = select(JobRow.id, JobRow.name, JobRow.project, JobRow.phase, JobRow.status)
    with database.reading() as session:
        rows = session.execute(columns).all()
        owners = {row.id: JobOwner(row.name, row.project, storage_usage.JobFacts(
            row.phase, (row.status.get("best") or {}).get("checkpoint"))) for row in rows}
        captured = {row.id for row in rows for condition in row.status.get("conditions", ())
                    if condition["type"] == "Captured" and condition["status"] == "True"}
        capturing = [row.id for row in rows if row.phase in storage_usage.MAY_READ and row.id not in captured]
        specs = session.scalars(select(JobRow.spec).where(JobRow.phase.in_(sorted(storage_usage.MAY_READ))))
        return owners, storage_usage.named_by(JobSpec.model_validate(spec) for spec in specs), capturing


@dataclass(frozen=True)
class Measurement:
    """Every job that holds files, the largest first."""

    jobs: tuple[JobStorage, ...]
    measured_at: datetime
    incomplete: str | None
    disk: tuple[int, int] | None
    """Total and free bytes; None for a store."""


class JobStorageMeter:
    """Measures the files of all jobs. Threads share it."""

    def __init__(self, settings: Settings, files: JobFiles, database: Database, *, max_age_s: float = MAX_AGE_S,
                 wait_s: float = WAIT_S, max_files: int = MAX_FILES, max_s: float = MAX_S) -> None:
        self._settings, self._files, self._database = settings, files, database
        self._max_age_s, self._wait_s, self._max_files, self._max_s = max_age_s, wait_s, max_files, max_s
        self._lock = threading.Lock()
        self._running: Future[Measurement] | None = None
        self._latest: Future[Measurement] | None = None
        self._began, self._ended = 0.0, 0.0

    def page(self, scope: Scope, *, limit: int, cursor: str | None = None) -> StoragePage:
        """One page of what `scope` sees of the latest measurement, after the job of the cursor; the sums are of all
        pages. Raises InvalidInput for an invalid cursor, StorageNotMeasured, JobFilesUnavailable, StoreUnavailable and
        StoreAccessDenied."""
        after = None if cursor is None else decode_cursor(cursor, SIZE_CURSOR)
        measured = self.latest()
        seen = [job for job in measured.jobs if scope.permits("jobs:read", job.project)]
        rest = [job for job in seen if after is None or _rank(job) > (-after[0], after[1])]
        items = tuple(rest[:limit])
        more = encode_cursor(items[-1].size_bytes, items[-1].job_id) if len(rest) > limit else None
        by_project: dict[str | None, list[JobStorage]] = defaultdict(list)
        for job in seen:
            by_project[job.project].append(job)
        projects = (ProjectStorage(project=project, num_jobs=len(held), size_bytes=sum(job.size_bytes for job in held),
                                   removable_bytes=sum(job.removable_bytes for job in held))
                    for project, held in by_project.items())
        disk = measured.disk if measured.disk and scope.permits("jobs:read", None) else (None, None)
        return StoragePage(
            items=items, next_cursor=more,
            projects=tuple(sorted(projects, key=lambda storage: (-storage.size_bytes, storage.project or ""))),
            size_bytes=sum(job.size_bytes for job in seen),
            removable_bytes=sum(job.removable_bytes for job in seen), measured_at=measured.measured_at,
            incomplete=measured.incomplete, place="disk" if self._files.store is None else "store",
            disk_total_bytes=disk[0], disk_free_bytes=disk[1])

    def latest(self) -> Measurement:
        """The latest measurement, or the error that ended it. Raises as `page`."""
        with self._lock:
            now = time.monotonic()
            if self._running is None and (self._latest is None or now - self._ended >= self._max_age_s):
                self._running, self._began = Future(), now
                threading.Thread(target=self._run, args=(self._running,), name="job-storage", daemon=True).start()
            running, latest = self._running, self._latest
            # Counted from the beginning, so that a long measurement holds the threads of few requests.
            patience_s = max(0.0, self._began + self._wait_s - now)
        if running is not None and wait([running], patience_s).done:
            latest = running
        if latest is None:
            raise StorageNotMeasured("the files of jobs are being measured for the first time since the server started",
                                     "try again in a few seconds")
        return latest.result()

    def _run(self, outcome: "Future[Measurement]") -> None:
        try:
            outcome.set_result(self._measure())
        except Exception as error:  # noqa: BLE001 - raised again in the requests that ask for the outcome
            outcome.set_exception(error)
        with self._lock:
            self._latest, self._running, self._ended = outcome, None, time.monotonic()

    def _measure(self) -> Measurement:
        files, measured_at = self._files, utc_now()
        disk = None
        if files.store is None:
            begun = select(StageRow.job_id).where(StageRow.state.notin_(("Pending", "Skipped"))).limit(1)
            with self._database.reading() as session:
                have_run = session.scalars(begun).first() is not None
            if have_run and not (self._settings.home / "jobs").is_dir():
                raise JobFilesUnavailable("jobs have run, and the server has no directory `jobs` in its EYRIE_HOME",
                                          "mount the volume with the files there, or restore it from a backup")
            disk = total_and_free_bytes(self._settings.home)
        listing = _Bounded(files.all_files(), self._max_files, self._max_s)
        try:
            items = storage_usage.group_files(listing)
        except OSError as error:
            log.warning("%s cannot be read: %s", error.filename, error.strerror)
            # Without the path: the caller may not be one who may know the job.
            raise JobFilesUnavailable(f"a directory of a job cannot be read: {error.strerror}",
                                      "the server's log names it; correct its owner and mode") from error
        # After the files: a job that was submitted meanwhile has an owner, and one that was deleted has none.
        jobs, read, capturing = read_owners(self._database)
        read |= storage_usage.states_of(storage_usage.reused_by(capturing, files.record))
        served = storage_usage.served_by(Endpoints(self._database).list().items)
        facts = {job_id: job.facts for job_id, job in jobs.items()}
        decided = storage_usage.plan_removal(items, facts, served, read).decisions
        return Measurement(by_job(decided, jobs), measured_at, listing.incomplete, disk)


class _Bounded:
    """An iterable that ends early, and knows why."""

    def __init__(self, files: Iterator[tuple[str, int]], max_files: int, max_s: float) -> None:
        self._files, self._max_files, self._max_s = files, max_files, max_s
        self.incomplete: str | None = None

    def __iter__(self) -> Iterator[tuple[str, int]]:
        until = time.monotonic() + self._max_s
        for number, file in enumerate(self._files):
            if number == self._max_files:
                self.incomplete = f"stopped after {self._max_files} files"
            elif time.monotonic() > until:
                self.incomplete = f"stopped after {self._max_s:g} s and {number} files"
            if self.incomplete is not None:
                return
            yield file


def by_job(decisions: Iterable[storage_usage.RemovalDecision], owners: dict[str, JobOwner]) -> tuple[JobStorage, ...]:
    """Decisions grouped by job, the largest job first."""
    gathered: dict[str, list[StoredFiles]] = defaultdict(list)
    for decision in decisions:
        item = decision.item
        gathered[item.job_id].append(StoredFiles(kind=item.kind, name=item.name, size_bytes=item.size_bytes,
                                                 removable=decision.removable, reason=decision.reason))
    jobs = []
    for job_id, files in gathered.items():
        owner = owners.get(job_id)
        jobs.append(JobStorage(
            job_id=job_id, name=owner.name if owner else None, project=owner.project if owner else None,
            phase=owner.facts.phase if owner else None, size_bytes=sum(stored.size_bytes for stored in files),
            removable_bytes=sum(stored.size_bytes for stored in files if stored.removable),
            files=tuple(sorted(files, key=lambda stored: (-stored.size_bytes, stored.kind, stored.name)))))
    return tuple(sorted(jobs, key=_rank))


def _rank(job: JobStorage) -> tuple[int, str]:
    return -job.size_bytes, job.job_id
