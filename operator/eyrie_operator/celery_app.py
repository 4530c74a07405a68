"""The chores as a Celery app of their own process: `eyrie worker`, or `celery -A eyrie_operator.celery_app worker`.

For chore workers beside the API server, on one Redis (EYRIE_BROKER_URL) and one database (EYRIE_DATABASE_URL). Without
a cluster profile they drive runs and endpoints of this machine; their files must be shared, so all of them run on one
machine or on one shared volume; leases keep them apart. With EYRIE_CLUSTER_PROFILE they drive runs of Kubeflow, and
endpoints are the operator's. On one machine without Redis nothing of this is needed: `eyrie up` runs the same chores in
its own process.
"""

import logging
from dataclasses import dataclass
from typing import Any

from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.chores.tasks import Step, make_celery
from eyrie_api.chores.worker import run_worker
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.errors import InvalidInput
from eyrie_api.http.job_files import work_store
from eyrie_api.settings import Settings
from eyrie_api.submission.placement import read_profile
from eyrie_operator.embedded.endpoints import EmbeddedEndpoints
from eyrie_operator.jobs.driver import Driver
from eyrie_pipelines.kubeflow import KubeflowRunner
from eyrie_pipelines.local import LocalRunner
from eyrie_pipelines.runner import Runner
from eyrie_pipelines.unavailable_runner import UnavailableRunner, has_stage_programs

log = logging.getLogger(__name__)

_UPLOAD_S = 7 * 24 * 3600.0
"""No upload takes so long."""


@dataclass(frozen=True)
class World:
    """Where jobs run, and who tends endpoints from here."""

    runner: Runner
    tend: Step | None
    store: ArtifactStore | None = None
    """The work area, where it is a store."""

    def sweep(self) -> None:
        """Remove what uploads of pods that were killed have left in the work area, where nobody sees it."""
        if self.store is not None:
            self.store.sweep_unfinished("jobs", older_than_s=_UPLOAD_S)


def runtime_of(settings: Settings, database: Database) -> World:
    """The cluster of the profile, or this machine. Raises InvalidInput for a profile that cannot be followed."""
    if settings.cluster_profile is None:
        runner = LocalRunner(settings.home) if has_stage_programs() else UnavailableRunner()
        return World(runner, EmbeddedEndpoints(settings, database).tend)
    profile = read_profile(settings.cluster_profile)
    if str(settings.home.absolute()) != profile.home:
        raise InvalidInput(f"EYRIE_HOME is {settings.home.absolute()} and the cluster profile's home is {profile.home}",
                           "make them equal: paths in stage specs are the same in every pod")
    store = work_store(profile, settings)
    return World(KubeflowRunner(profile, settings.home, store), None, store)


def make_app() -> Any:
    """The Celery app, from EYRIE_* variables."""
    settings = Settings.from_env()
    return _celery(settings, Database(settings.resolved_database_url))


def _celery(settings: Settings, database: Database) -> Any:
    world = runtime_of(settings, database)
    return make_celery(settings, Driver(settings, database, world.runner).advance, reconcile_endpoint=world.tend,
                       forget=world.runner.delete, sweep=world.sweep, database=database)


def work(settings: Settings, concurrency: int) -> None:
    """Take chores in prefork processes until told to stop."""
    database = Database(settings.resolved_database_url)
    upgrade(database)
    world = runtime_of(settings, database)
    if world.store is not None:
        world.store.check()
        log.info("the work area %s can be written", world.store.url)
    database.engine.dispose()  # children open connections of their own
    run_worker(_celery(settings, database), settings, concurrency=concurrency, database=database)


def __getattr__(name: str) -> Any:
    """`app`, made when celery asks for it: importing this module must open no database."""
    if name == "app":
        globals()["app"] = make_app()
        return globals()["app"]
    raise AttributeError(name)
