"""What is damaged or does not belong together in a home, and its repair: `eyrie doctor`, and a part at every start.

Four things are compared: the database with itself (SQLite's own checks), its rows with the directories of the home,
every finished stage with its manifest, the records of endpoints with their format. A database that is older than its
files (a restored backup, a disk that lost its last writes) shows as directories that no row knows, and as jobs that are
running for the database and have nothing on disk.

A repair deletes nothing that cannot be made again: directories that no row knows are moved to `<home>/set-aside`, a
damaged manifest is renamed, so that a retried job runs that stage again, and damaged records of endpoints are removed,
since the control plane writes them again.

`check_start` is what a control plane does before it serves: it does not start on a damaged database, and logs which
directories no row knows.
"""

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError
from sqlalchemy import text
from sqlalchemy.exc import DatabaseError, OperationalError

from eyrie_api.artifacts import MANIFEST, read_manifest, verify_files
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.outbox import Outbox
from eyrie_api.errors import EyrieError, Permanent
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.status import Endpoint, Job
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_operator.embedded.processes import ENGINE_FILE, PORT_FILE, EngineRecord, parse_port
from eyrie_operator.embedded.routing import ROUTE_FILE, RouteRecord

log = logging.getLogger(__name__)

SET_ASIDE = "set-aside"
_PAGE = 200
_MAX_LOGGED = 20
_RESTORE = "restore the latest backup (docs/operations.md); the files of jobs are not in it and stay"
_ENDED = ("Succeeded", "Failed", "Cancelled")

Repair = Literal["set-aside", "run-again", "write-again", "none"]
"""Move the directory away; rename the manifest; remove the record; nothing that a program should decide."""


class DatabaseDamaged(Permanent):
    """SQLite's own checks fail."""

    exit_code = 74  # EX_IOERR
    reason = "DatabaseDamaged"


class Finding(Frozen):
    """One thing that is wrong."""

    reason: Literal["DatabaseDamaged", "UnknownDirectory", "JobWithoutFiles", "StageDamaged", "StageMissing",
                    "DrafterMissing", "RecordDamaged"]
    where: str
    """A path below the home, or the id of a row."""

    message: str
    hint: str
    repair: Repair = "none"
    repaired: bool = False


@dataclass(frozen=True)
class Home:
    """What is examined."""

    path: Path
    database: Database
    digests: bool
    """Compare every file of every stage with its digest, which reads them all."""


def examine(home: Home) -> Iterator[Finding]:
    """All findings, the database's first. A database that cannot be read ends the examination."""
    damage = database_damage(home.database)
    yield from damage
    if damage:
        return
    jobs = {job.id: job for job in _all_jobs(Jobs(home.database))}
    endpoints = {endpoint.name: endpoint for endpoint in Endpoints(home.database).list().items}
    yield from _unknown_directories(home, jobs, endpoints)
    for job in jobs.values():
        yield from _examine_job(home, job)
    for endpoint in endpoints.values():
        yield from _examine_endpoint(home.path, endpoint)


def check_start(home: Home) -> None:
    """Log the directories that no row knows. The tables are migrated."""
    jobs = {job_id for job_id, _ in Jobs(home.database).changed_since(datetime.fromtimestamp(0, UTC))}
    endpoints = {endpoint.name for endpoint in Endpoints(home.database).list().items}
    found = list(_unknown_directories(home, jobs, endpoints))
    for one in found[:_MAX_LOGGED]:
        log.warning("%s: %s; `eyrie doctor`: %s", one.where, one.message, one.hint)
    if len(found) > _MAX_LOGGED:
        log.warning("%d more directories that no row knows: `eyrie doctor` lists them", len(found) - _MAX_LOGGED)


def check_database(database: Database) -> None:
    """Raises DatabaseDamaged. Every page is read, indexes are not compared with their rows (`quick_check`)."""
    if not database.is_sqlite:
        return
    try:
        damage = _sqlite_finds(database, "quick_check")
    except OperationalError:
        return  # locked, or no space: no damage, and the migration that follows reports it
    except DatabaseError as error:
        damage = [str(error.orig)]
    if damage:
        raise DatabaseDamaged(f"the database {database.engine.url.database} is damaged: {damage[0]}", _RESTORE)


def _unknown_directories(home: Home, jobs: Collection[str], endpoints: Collection[str]) -> Iterator[Finding]:
    outbox = Outbox(home.database)
    removed = {*outbox.recent("remove_files"), *(chore.argument for chore in outbox.pending())}  # of deleted jobs
    for kind, known in (("jobs", jobs), ("endpoints", endpoints)):
        for directory in sorted((home.path / kind).glob("*/")):
            if directory.name not in known and directory.name not in removed:
                yield Finding(
                    reason="UnknownDirectory", where=f"{kind}/{directory.name}", repair="set-aside",
                    message=f"the database knows no such {kind[:-1]}: it is older than its files, or was replaced",
                    hint=f"restore a newer database, or move the directory to {SET_ASIDE} with --repair")


def database_damage(database: Database) -> list[Finding]:
    """What SQLite finds wrong with its file; nothing on PostgreSQL, whose checks are its own."""
    if not database.is_sqlite:
        return []
    try:
        found = _sqlite_finds(database, "integrity_check")
    except DatabaseError as error:
        found = [str(error.orig)]
    return [Finding(reason="DatabaseDamaged", where="eyrie.db", message=message, hint=_RESTORE) for message in found]


def _sqlite_finds(database: Database, check: Literal["quick_check", "integrity_check"]) -> list[str]:
    with database.reading() as session:
        found = [str(row[0]) for row in session.execute(text(f"PRAGMA {check}(20)")) if row[0] != "ok"]
        found += [f"{row[0]} row {row[1]} refers to a row of {row[2]} that does not exist"
                  for row in session.execute(text("PRAGMA foreign_key_check"))]
    return found


def _all_jobs(jobs: Jobs) -> Iterator[Job]:
    page = jobs.list(limit=_PAGE)
    yield from page.items
    while page.next_cursor is not None:
        page = jobs.list(limit=_PAGE, cursor=page.next_cursor)
        yield from page.items


def _examine_job(home: Home, job: Job) -> Iterator[Finding]:
    directory = home.path / "jobs" / job.id
    begun = [stage for stage in job.status.stages if stage.state != "Pending"]
    if job.status.phase not in _ENDED and begun and not directory.is_dir():
        yield Finding(reason="JobWithoutFiles", where=job.id,
                      message=f"the job is {job.status.phase} and has no directory: its files are lost or elsewhere",
                      hint=f"restore {directory}, or `eyrie cancel {job.id}` and submit it again")
        return
    if not directory.is_dir():
        return  # of an ended job: its files were removed or are in a store
    finished = {(stage.stage, stage.key) for stage in job.status.stages if stage.state == "Succeeded"}
    for stage, key in sorted(finished):
        if not (directory / "stages" / stage / key / MANIFEST).exists():
            yield Finding(reason="StageMissing", where=f"jobs/{job.id}/stages/{stage}/{key}".rstrip("/"),
                          message=f"the stage is finished for the database and has no {MANIFEST}",
                          hint="restore the directory; a retried job runs the stage again")
    for path in sorted((directory / "stages").glob(f"**/{MANIFEST}")):
        try:
            manifest = read_manifest(path)
            if home.digests:
                verify_files(manifest, path.parent)
        except EyrieError as error:
            yield Finding(reason="StageDamaged", where=str(path.parent.relative_to(home.path)), message=error.message,
                          hint=f"with --repair a retried job runs the stage again: eyrie retry {job.id}",
                          repair="run-again")


def _examine_endpoint(home: Path, endpoint: Endpoint) -> Iterator[Finding]:
    directory = home / "endpoints" / endpoint.name
    kinds: list[tuple[Path, type[Frozen]]] = [(directory / ROUTE_FILE, RouteRecord),
                                              (directory / GATEWAY_FILE, GatewayRecord)]
    kinds += [(path, EngineRecord) for path in sorted(directory.glob(f"engines/*/{ENGINE_FILE}"))]
    for path, kind in kinds:
        try:
            if path.exists():
                kind.model_validate_json(path.read_bytes())
        except ValidationError as error:
            yield _damaged_record(home, path, f"not a {kind.__name__}: {error.errors()[0]['msg']}")
    port = directory / PORT_FILE
    if port.exists() and parse_port(port.read_bytes()) is None:
        yield _damaged_record(home, port, "not the number of a port")
    numbers = {endpoint.active_revision, endpoint.candidate_revision}
    for revision in endpoint.revisions:
        if revision.number in numbers and revision.drafter_dir and not Path(revision.drafter_dir).is_dir():
            yield Finding(reason="DrafterMissing", where=f"endpoint {endpoint.name}, revision {revision.number}",
                          message=f"{revision.drafter_dir} does not exist, so its engine cannot start",
                          hint=f"restore it, or `eyrie rollback {endpoint.name}`")


def _damaged_record(home: Path, path: Path, message: str) -> Finding:
    return Finding(reason="RecordDamaged", where=str(path.relative_to(home)), message=message,
                   hint="a running control plane writes it again by itself", repair="write-again")


def repair(home: Path, finding: Finding) -> Finding:
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
    return path if not path.exists() else next(one for one in taken if not one.exists())
