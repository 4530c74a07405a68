"""The processes that run chores: the control plane of one machine, and chore workers.

`run(settings)` implements `eyrie up`: migrate the database, start the chore worker and the ticker, serve HTTP, and shut
down on SIGTERM or SIGINT.

- shut down (Ctrl-C, `eyrie down`): runs stop at their next pause point, gateways and engines are stopped. The database
  keeps the desired state: the next `up` resumes jobs from the last finished stage or checkpoint and serves again.
- killed: runs, gateways and engines continue in their own sessions, and the next `up` finds them by their files.

`work(settings)` implements `eyrie worker`: chores alone, in addition to the API server, on one Redis (EYRIE_BROKER_URL)
and one database (EYRIE_DATABASE_URL). Without a cluster profile workers drive runs and endpoints of this machine; all
of them then run on one machine or one shared volume, and leases serialise them. With EYRIE_CLUSTER_PROFILE they drive
runs of Kubeflow, and the operator reconciles endpoints.
"""

import importlib.util
import logging
import os
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from sqlalchemy.exc import DatabaseError, OperationalError

from eyrie_api.access.keys import SecretKeys
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.chores.tasks import Step, make_celery, queue_lengths
from eyrie_api.chores.worker import ChoreLoop, run_worker
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.database.webhooks import encrypt_again
from eyrie_api.errors import InvalidInput
from eyrie_api.full_disk import free_bytes
from eyrie_api.http.job_files import work_store
from eyrie_api.http.server import create_app
from eyrie_api.planning.placement import read_profile
from eyrie_api.processes import bind
from eyrie_api.settings import Settings
from eyrie_api.web_server import TimedProtocol, prefer_short_waits, raise_descriptor_limit
from eyrie_operator import doctor
from eyrie_operator.embedded.endpoints import EmbeddedEndpoints
from eyrie_operator.embedded.processes import stop_endpoints
from eyrie_operator.jobs.driver import Driver
from eyrie_pipelines.kubeflow import KubeflowRunner
from eyrie_pipelines.local import LocalRunner
from eyrie_pipelines.runner import Runner, UnavailableRunner

log = logging.getLogger(__name__)

RESERVE = "reserve"
_RESERVE_BYTES = 1 << 20
"""Thirty times SQLite's index: what else writes on a full disk may take a part before SQLite does."""

# Open event streams are cut after this time; clients resume by Last-Event-ID.
_GRACEFUL_S = 2


def run(settings: Settings) -> None:
    """Run the control plane until SIGTERM or SIGINT. Raises PortInUse before anything is started."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "alembic", "celery", "kombu"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    raise_descriptor_limit()
    listening = bind(settings.host, settings.port, "--port")
    plane = Plane(settings)
    # Race: in effect before uvicorn installs its handlers and after it has removed them. uvicorn raises a caught signal
    # again after its shutdown; by then `plane` is shutting down already.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_caught: plane.stop())
    prefer_short_waits()
    with plane:
        plane.serve(listening)


class Plane:
    """The parts of a control plane, started and stopped together."""

    def __init__(self, settings: Settings) -> None:
        settings.home.mkdir(parents=True, exist_ok=True)
        self._settings = settings
        self._database, log_damaged = _open_database(settings)
        doctor.check_database(self._database, thoroughly=log_damaged)
        if log_damaged:
            doctor.begin_log(self._database)
        upgrade(self._database)
        doctor.check_start(doctor.Home(settings.home.absolute(), self._database, digests=False))
        encrypt_again(self._database, SecretKeys(settings.required_secret_keys()))
        self._jobs = Driver(settings, self._database, LocalRunner(settings.home))
        self._endpoints = EmbeddedEndpoints(settings, self._database)
        celery = make_celery(settings, self._jobs.advance, reconcile_endpoint=self._endpoints.reconcile,
                             database=self._database)
        self._chores = ChoreLoop(settings, celery)
        app = create_app(settings, database=self._database, wake=self._chores.wake,
                         checks={"chores": lambda: self._chores.is_running},
                         queues=queue_lengths(celery, settings))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, http=TimedProtocol,
                                                     timeout_graceful_shutdown=_GRACEFUL_S))

    def __enter__(self) -> "Plane":
        self._chores.start()
        return self

    def serve(self, listening: socket.socket) -> None:
        """Serve HTTP until `stop` is called."""
        self._server.run(sockets=[listening])

    def stop(self) -> None:
        """Make `serve` return; callable from any thread."""
        self._server.should_exit = True

    def __exit__(self, *_error: object) -> None:
        """Stop chores first, so that none restarts a run or an engine; then runs and endpoints in parallel."""
        self._chores.stop()
        parts = [threading.Thread(target=self._jobs.stop_runs),
                 threading.Thread(target=stop_endpoints, args=(self._settings.home,))]
        for part in parts:
            part.start()
        for part in parts:
            part.join()
        self._database.close()
        _keep_reserve(self._settings.home)


def _open_database(settings: Settings) -> tuple[Database, bool]:
    """The database, and whether its log was damaged. It is opened on a full disk too: SQLite creates its log and its
    index when it opens the file, and cannot start where there is no space for them. The reserve makes that space."""
    database = Database(settings.resolved_database_url)
    log_damaged = doctor.check_whole(database)
    reserve = settings.home / RESERVE
    if database.is_sqlite:
        try:
            database.engine.connect().close()
        except OperationalError as error:
            if not reserve.exists() or free_bytes(settings.home) >= _RESERVE_BYTES:
                raise
            reserve.unlink()
            log.warning("the disk is full (%s): started with the space of %s, changes are refused until there is more",
                        error.orig, reserve)
        except DatabaseError:
            return database, log_damaged  # damaged: `doctor.check_database` says how
        else:
            _keep_reserve(settings.home)
    return database, log_damaged


def _keep_reserve(home: Path) -> None:
    """Set space aside for a start on a full disk, if there is any."""
    reserve = home / RESERVE
    if reserve.exists():
        return
    try:
        with reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
    except OSError as error:
        reserve.unlink(missing_ok=True)
        log.warning("no space can be set aside in %s: %s", home, error.strerror)


def stop_orphans(settings: Settings) -> None:
    """Stop what a killed control plane of this home left running: runs, gateways and engines."""
    database = Database(settings.resolved_database_url)
    try:
        upgrade(database)
        Driver(settings, database, LocalRunner(settings.home)).stop_runs()
    finally:
        database.close()
    stop_endpoints(settings.home)


_UPLOAD_S = 7 * 24 * 3600.0
"""Unfinished uploads older than this are abandoned."""


@dataclass(frozen=True)
class Runtime:
    """Where jobs run, and the reconciler of endpoints where this process has one."""

    runner: Runner
    reconcile_endpoint: Step | None
    store: ArtifactStore | None = None
    """The work area, if it is an artifact store."""

    def sweep(self) -> None:
        """Delete unfinished uploads of killed pods from the work area: listings do not show them, but they use
        space."""
        if self.store is not None:
            self.store.sweep_unfinished("jobs", older_than_s=_UPLOAD_S)


def runtime_of(settings: Settings, database: Database) -> Runtime:
    """The cluster of the profile, or this machine. Raises InvalidInput for a profile that does not match EYRIE_HOME."""
    if settings.cluster_profile is None:
        has_stage_programs = importlib.util.find_spec("torch") is not None
        runner = LocalRunner(settings.home) if has_stage_programs else UnavailableRunner()
        return Runtime(runner, EmbeddedEndpoints(settings, database).reconcile)
    profile = read_profile(settings.cluster_profile)
    if str(settings.home.absolute()) != profile.home:
        raise InvalidInput(f"EYRIE_HOME is {settings.home.absolute()} and the cluster profile's home is {profile.home}",
                           "make them equal: paths in stage specs are the same in every pod")
    store = work_store(profile, settings)
    return Runtime(KubeflowRunner(profile, settings.home, store), None, store)


def work(settings: Settings, concurrency: int) -> None:
    """Run chores in prefork processes until SIGTERM."""
    database = Database(settings.resolved_database_url)
    upgrade(database)
    checked = runtime_of(settings, database).store
    if checked is not None:
        checked.check()
        log.info("the work area %s is writable", checked.url)
    # A forked child must not share the parent's connections: neither the database's, nor those of the store that was
    # checked (two children read each other's objects from them). So the chores get another store.
    database.engine.dispose()
    runtime = runtime_of(settings, database)
    celery = make_celery(settings, Driver(settings, database, runtime.runner).advance,
                         reconcile_endpoint=runtime.reconcile_endpoint, forget=runtime.runner.delete,
                         sweep=runtime.sweep, database=database)
    run_worker(celery, settings, concurrency=concurrency, database=database)
