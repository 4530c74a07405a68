"""What is damaged or does not belong together in a home, and its repair: `eyrie doctor`, and a part at every start.

Four things are compared: the database with itself (SQLite's own checks), its rows with the directories of the home, or
with the objects of the artifact store that is the work area of a cluster, every finished stage with its manifest, the
records of endpoints with their format. A database that is older than its files (a restored backup, a disk that lost its
last writes) shows as directories that no row knows, and as jobs that are running for the database and have nothing on
disk.

A repair deletes nothing that cannot be made again: directories that no row knows are moved to `<home>/set-aside`, a
damaged manifest is renamed, so that a retried job runs that stage again, and damaged records of endpoints are removed,
since the control plane writes them again. Nothing is repaired in a store.

`check_start` is what a control plane does before it serves: it does not start on a damaged database, and logs which
directories no row knows.

What SQLite itself does not see, pages and commits that are lost, is counted by `sqlite_pages`. A start with a damaged
log keeps a copy of it, compares indexes with their rows as well, and goes on without the ignored commits.
"""

import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError, OperationalError

from eyrie_api.artifacts import MANIFEST, parse_manifest, read_manifest, read_sealed, verify_files
from eyrie_api.artifacts.store import ArtifactStore, digest_stored
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.rules import first_problem
from eyrie_api.contract.status import Endpoint, Job
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import schema_state
from eyrie_api.database.outbox import Outbox
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, EyrieError, Permanent
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_operator.embedded.processes import ENGINE_FILE, PORT_FILE, EngineRecord, stored_port
from eyrie_operator.embedded.routing import ROUTE_FILE, RouteRecord
from eyrie_operator.sqlite_pages import ignored_commits, lost_pages
from eyrie_pipelines.local import RunHandle, RunResult
from eyrie_pipelines.run_records import FAILURE_FILE, RUN_DIR, RunFailure
from eyrie_pipelines.runner import JOB_FILE, JobFile

log = logging.getLogger(__name__)

SET_ASIDE = "set-aside"
_PAGE = 200
_MAX_LOGGED = 20
_RESTORE = "restore the latest backup (docs/operations.md); the files of jobs are not in it and stay"
_LOG_HINT = ("what the last requests before the end changed may be missing: compare jobs and endpoints with what is "
             "expected, or restore the latest backup (docs/operations.md)")
_ENDED = ("Succeeded", "Failed", "Cancelled")

_WRITTEN_AGAIN = "a running control plane writes it again by itself"
_RUN_RECORDS: Mapping[str, type[Frozen]] = {
    JOB_FILE: JobFile, f"{RUN_DIR}/run.json": RunHandle, f"{RUN_DIR}/result.json": RunResult,
    f"{RUN_DIR}/{FAILURE_FILE}": RunFailure}
"""Below the directory of a job."""

Repair = Literal["set-aside", "run-again", "write-again", "none"]
"""Move the directory away; rename the manifest; remove the record; nothing that a program should decide."""


class DatabaseDamaged(Permanent):
    """SQLite's own checks fail."""

    exit_code = 74  # EX_IOERR


class Defect(Frozen):
    reason: Literal["DatabaseDamaged", "LogDamaged", "TablesBehind", "UnknownDirectory", "JobWithoutFiles",
                    "StageDamaged", "StageMissing", "DrafterMissing", "RecordDamaged"]
    where: str
    """A path below the home, a key or URL of the store, or the id of a row."""

    message: str
    hint: str
    repair: Repair = "none"
    repaired: bool = False


@dataclass(frozen=True)
class Home:
    path: Path
    database: Database
    digests: bool
    """Compare every file of every stage with its digest, which reads them all."""

    store: ArtifactStore | None = None
    """The work area of the jobs; None where their directories are in the home."""


def examine(home: Home) -> Iterator[Defect]:
    """All findings, the database's first. A database that cannot be read ends the examination."""
    ignored = _log_damage(home.database)  # before a connection: closing the last one removes the log
    if ignored:
        yield Defect(reason="LogDamaged", where="eyrie.db-wal", message=ignored, hint=_LOG_HINT)
    try:  # nothing on PostgreSQL, whose checks are its own
        damage = _cut_off(home.database) or (
            _sqlite_finds(home.database, "integrity_check") if home.database.is_sqlite else [])
    except DatabaseError as error:
        damage = [str(error.orig)]
    for message in damage:
        yield Defect(reason="DatabaseDamaged", where="eyrie.db", message=message, hint=_RESTORE)
    if damage:
        return
    if schema_state(home.database) == "behind":
        yield Defect(reason="TablesBehind", where="the database",
                     message="it has no tables, or those of an earlier Eyrie",
                     hint="migrate it, then examine again: `eyrie migrate`, or start the control plane once")
        return
    rows = Jobs(home.database)
    pages = [rows.list(limit=_PAGE)]
    while pages[-1].next_cursor is not None:
        pages.append(rows.list(limit=_PAGE, cursor=pages[-1].next_cursor))
    jobs = {job.id: job for page in pages for job in page.items}
    endpoints = {endpoint.name: endpoint for endpoint in Endpoints(home.database).list().items}
    if home.store is None:
        yield from _unknown_directories(home, "jobs", jobs)
        for job in jobs.values():
            yield from _examine_job(home, job)
    else:
        yield from _examine_store(home, home.store, jobs)
    yield from _unknown_directories(home, "endpoints", endpoints)
    for endpoint in endpoints.values():
        yield from _examine_records(home.path, endpoint)
        yield from _examine_drafters(home, endpoint)


def check_start(home: Home) -> None:
    """Log the directories that no row knows. The tables are migrated."""
    jobs = {job_id for job_id, _ in Jobs(home.database).changed_since(datetime.fromtimestamp(0, UTC))}
    endpoints = {endpoint.name for endpoint in Endpoints(home.database).list().items}
    unknown = [*_unknown_directories(home, "jobs", jobs), *_unknown_directories(home, "endpoints", endpoints)]
    for defect in unknown[:_MAX_LOGGED]:
        log.warning("%s: %s; `eyrie doctor`: %s", defect.where, defect.message, defect.hint)
    if len(unknown) > _MAX_LOGGED:
        log.warning("%d more directories that no row knows: `eyrie doctor` lists them", len(unknown) - _MAX_LOGGED)


def check_database(database: Database, *, thoroughly: bool = False) -> None:
    """Raises DatabaseDamaged. Every page is read; indexes are compared with their rows if `thoroughly`."""
    if not database.is_sqlite:
        return
    try:
        damage = _sqlite_finds(database, "integrity_check" if thoroughly else "quick_check")
    except OperationalError:
        return  # locked, or no space: no damage, and the migration that follows reports it
    except DatabaseError as error:
        damage = [str(error.orig)]
    if damage:
        raise DatabaseDamaged(f"the database {database.engine.url.database} is damaged: {damage[0]}", _RESTORE)


def check_whole(database: Database) -> bool:
    """Raises DatabaseDamaged for a file that is cut off. Of a damaged log a copy is kept, a warning logged, and True
    returned. It opens no connection: closing the last one writes the log into the file, with zeros in place of what is
    lost, and nothing shows the damage afterwards."""
    if lost := _cut_off(database):
        raise DatabaseDamaged(f"the database {database.engine.url.database} is damaged: {lost[0]}", _RESTORE)
    message = _log_damage(database)
    if message:
        path = Path(str(database.engine.url.database))
        damaged = path.with_name(f"{path.name}-wal")
        try:
            (path.parent / SET_ASIDE).mkdir(exist_ok=True)
            copy = f"a copy is kept at {shutil.copy(damaged, _free(path.parent / SET_ASIDE / damaged.name))}"
        except OSError as error:  # a full disk is no reason not to start
            copy = f"no copy could be made ({error})"
        log.warning("%s: %s; %s; %s", damaged, message, copy, _LOG_HINT)
    return bool(message)


def begin_log(database: Database) -> None:
    """Write the log into the file and empty it, so that what is left of a damaged one is not reported again."""
    with database.engine.connect() as connection:
        connection.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _log_damage(database: Database) -> str:
    """What is wrong with the log of a SQLite database; empty if nothing. To be called before a connection is opened.
    Where another process writes, a frame may be half written: real damage is there the second time as well."""
    path = Path(str(database.engine.url.database))
    if not database.is_sqlite or not path.is_file():
        return ""
    commits = min(ignored_commits(path), ignored_commits(path))
    return (f"the log of the database is damaged: SQLite ignores the damaged part and what follows it, {commits} "
            f"committed or unconfirmed transactions") if commits else ""


def _unknown_directories(home: Home, kind: Literal["jobs", "endpoints"], known: Collection[str]) -> Iterator[Defect]:
    removed = _to_be_removed(home)
    for directory in sorted((home.path / kind).glob("*/")):
        if directory.name not in known and directory.name not in removed:
            yield Defect(
                reason="UnknownDirectory", where=f"{kind}/{directory.name}", repair="set-aside",
                message=f"the database knows no such {kind[:-1]}: it is older than its files, or was replaced",
                hint=f"restore a newer database, or move the directory to {SET_ASIDE} with --repair")


def _to_be_removed(home: Home) -> set[str]:
    """Ids of deleted jobs whose files a worker removes soon."""
    outbox = Outbox(home.database)
    return {*outbox.recent("remove_files"), *(chore.argument for chore in outbox.pending())}


def _cut_off(database: Database) -> list[str]:
    if not database.is_sqlite or not Path(str(database.engine.url.database)).is_file():
        return []  # of a path that cannot be a database the first connection says why
    lost = lost_pages(Path(str(database.engine.url.database)))
    return [f"its file is cut off: {lost} of its pages are neither in it nor in its log"] if lost else []


def _sqlite_finds(database: Database, check: Literal["quick_check", "integrity_check"]) -> list[str]:
    with database.reading() as session:
        damage = [str(row[0]) for row in session.execute(text(f"PRAGMA {check}(20)")) if row[0] != "ok"]
        damage += [f"{row[0]} row {row[1]} refers to a row of {row[2]} that does not exist"
                   for row in session.execute(text("PRAGMA foreign_key_check"))]
    return damage


def _examine_job(home: Home, job: Job) -> Iterator[Defect]:
    directory = home.path / "jobs" / job.id
    begun = [stage for stage in job.status.stages if stage.state != "Pending"]
    if job.status.phase not in _ENDED and begun and not directory.is_dir():
        yield Defect(reason="JobWithoutFiles", where=job.id,
                     message=f"the job is {job.status.phase} and has no directory: its files are lost or elsewhere",
                     hint=f"restore {directory}, or `eyrie cancel {job.id}` and submit it again")
        return
    if not directory.is_dir():
        return  # of an ended job: its files were removed or are in a store
    for name, record in _RUN_RECORDS.items():
        yield from _examine_record(home.path, directory / name, record,
                                   f"it counts as absent: a job that has not ended starts its run again, which writes "
                                   f"it; of job {job.id}, which is {job.status.phase}")
    for place in _finished_stages(job):
        if not (home.path / place / MANIFEST).exists():
            yield _stage_missing(place)
    for path in sorted((directory / "stages").glob(f"**/{MANIFEST}")):
        try:
            manifest = read_manifest(path)
            if home.digests:
                verify_files(manifest, path.parent)
        except EyrieError as error:
            yield Defect(reason="StageDamaged", where=str(path.parent.relative_to(home.path)), message=error.message,
                         hint=f"with --repair a retried job runs the stage again: eyrie retry {job.id}",
                         repair="run-again")


def _finished_stages(job: Job) -> list[str]:
    """Where the stages are that are finished for the database, below the home or in the store."""
    return sorted(f"jobs/{job.id}/stages/{stage.stage}/{stage.key}".rstrip("/")
                  for stage in job.status.stages if stage.state == "Succeeded")


def _stage_missing(place: str) -> Defect:
    return Defect(reason="StageMissing", where=place,
                  message=f"the stage is finished for the database and has no {MANIFEST}",
                  hint="restore the directory; a retried job runs the stage again")


def _examine_store(home: Home, store: ArtifactStore, jobs: Mapping[str, Job]) -> Iterator[Defect]:
    """Rows compared with objects: one listing of all objects, and one read for each manifest."""
    stored: dict[str, dict[str, int]] = {}
    for item in store.list("jobs"):
        stored.setdefault(item.key.split("/")[1], {})[item.key] = item.size_bytes
    removed = _to_be_removed(home)
    for job_id in sorted(set(stored) - set(jobs) - removed):
        yield Defect(reason="UnknownDirectory", where=f"{store.url}/jobs/{job_id}",
                     message="the database knows no such job: it is older than the store, or was replaced",
                     hint="restore a newer database, or delete these objects when no database knows the job")
    for job in jobs.values():
        sizes = stored.get(job.id, {})
        begun = any(stage.state != "Pending" for stage in job.status.stages)
        if job.status.phase not in _ENDED and begun and not sizes:
            yield Defect(reason="JobWithoutFiles", where=job.id,
                         message=f"the job is {job.status.phase} and has no object in {store.url}",
                         hint=f"restore the objects, or `eyrie cancel {job.id}` and submit it again")
        if not sizes:
            continue
        yield from (_stage_missing(place) for place in _finished_stages(job) if f"{place}/{MANIFEST}" not in sizes)
        for key in (key for key in sizes if key.endswith(f"/{MANIFEST}")):
            message = _stage_damage(home, store, key, sizes)
            if message:
                yield Defect(reason="StageDamaged", where=key.removesuffix(f"/{MANIFEST}"), message=message,
                             hint=f"restore the objects, or delete {key} in {store.url}: a retried job then runs the "
                                  f"stage again: eyrie retry {job.id}")


def _stage_damage(home: Home, store: ArtifactStore, key: str, sizes: Mapping[str, int]) -> str:
    """What is wrong with a finished stage in a store; empty if nothing. Without `digests`, sizes are compared."""
    directory = key.removesuffix(f"/{MANIFEST}")
    try:
        manifest = parse_manifest(store.read(key), key)
        for entry in manifest.files:
            place = f"{directory}/{entry.path}"
            if sizes.get(place) != entry.size_bytes:
                return (f"{place} is listed in its manifest with {entry.size_bytes} bytes and "
                        + (f"has {sizes[place]}" if place in sizes else "does not exist"))
            if home.digests and digest_stored(store, place, entry.size_bytes) != entry.sha256:
                return f"{place} differs from the digest in its manifest"
    except (ArtifactCorrupt, ArtifactMissing) as error:
        return error.message
    return ""


def _examine_records(home: Path, endpoint: Endpoint) -> Iterator[Defect]:
    directory = home / "endpoints" / endpoint.name
    kinds: list[tuple[Path, type[Frozen]]] = [(directory / ROUTE_FILE, RouteRecord),
                                              (directory / GATEWAY_FILE, GatewayRecord)]
    kinds += [(path, EngineRecord) for path in sorted(directory.glob(f"engines/*/{ENGINE_FILE}"))]
    for path, kind in kinds:
        yield from _examine_record(home, path, kind)
    port = directory / PORT_FILE
    if port.exists() and stored_port(directory) is None:
        yield _damaged_record(home, port, "not the number of a port")


def _examine_record(home: Path, path: Path, kind: type[Frozen], hint: str = _WRITTEN_AGAIN) -> Iterator[Defect]:
    try:
        if path.exists():
            read_sealed(path.read_bytes(), kind)
    except ValueError as error:  # without JSON, with another digest, or another model's
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        yield _damaged_record(home, path, f"not a {kind.__name__}: {problem}", hint)


def _examine_drafters(home: Home, endpoint: Endpoint) -> Iterator[Defect]:
    numbers = {endpoint.active_revision, endpoint.candidate_revision}
    for revision in endpoint.revisions:
        if revision.number not in numbers or not revision.drafter_dir:
            continue
        drafter = Path(revision.drafter_dir)
        if home.store is None:
            exists = drafter.is_dir()
        else:  # a drafter that is not below `jobs` is part of the engine's image
            exists = not drafter.is_relative_to(home.path / "jobs") or next(
                iter(home.store.list(drafter.relative_to(home.path).as_posix())), None) is not None
        if not exists:
            yield Defect(reason="DrafterMissing", where=f"endpoint {endpoint.name}, revision {revision.number}",
                         message=f"{revision.drafter_dir} does not exist, so its engine cannot start",
                         hint=f"restore it, or `eyrie rollback {endpoint.name}`")


def _damaged_record(home: Path, path: Path, message: str, hint: str = _WRITTEN_AGAIN) -> Defect:
    return Defect(reason="RecordDamaged", where=str(path.relative_to(home)), message=message, hint=hint,
                  repair="write-again")


def repair(home: Path, finding: Defect) -> Defect:
    """Do the finding's repair, if it has one. Safe to repeat."""
    path = home / finding.where
    if finding.repair == "set-aside":
        to = home / SET_ASIDE / finding.where
        to.parent.mkdir(parents=True, exist_ok=True)
        path.rename(_free(to))
    elif finding.repair == "run-again":
        (path / MANIFEST).rename(_free(path / f"{MANIFEST}.damaged"))
    elif finding.repair == "write-again":
        path.unlink(missing_ok=True)
    else:
        return finding
    return finding.model_copy(update={"repaired": True})


def _free(path: Path) -> Path:
    """The path, or with a number where it is taken."""
    taken = (path.with_name(f"{path.name}.{number}") for number in range(2, 1000))
    return path if not path.exists() else next(numbered for numbered in taken if not numbered.exists())
