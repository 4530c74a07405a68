"""The chores as a Celery app of their own process: `eyrie worker`, or `celery -A eyrie_operator.celery_app worker`.

For chore workers in addition to the API server, on one Redis (EYRIE_BROKER_URL) and one database (EYRIE_DATABASE_URL).
Without a cluster profile they drive runs and endpoints of this machine; all of them then run on one machine or one
shared volume, and leases serialise them. With EYRIE_CLUSTER_PROFILE they drive runs of Kubeflow, and the operator
reconciles endpoints. On one machine without Redis this module is not used: `eyrie up` runs the same chores in its own
process.
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
from eyrie_pipelines.runner import Runner, UnavailableRunner, has_stage_programs

log = logging.getLogger(__name__)

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
        runner = LocalRunner(settings.home) if has_stage_programs() else UnavailableRunner()
        return Runtime(runner, EmbeddedEndpoints(settings, database).reconcile)
    profile = read_profile(settings.cluster_profile)
    if str(settings.home.absolute()) != profile.home:
        raise InvalidInput(f"EYRIE_HOME is {settings.home.absolute()} and the cluster profile's home is {profile.home}",
                           "make them equal: paths in stage specs are the same in every pod")
    store = work_store(profile, settings)
    return Runtime(KubeflowRunner(profile, settings.home, store), None, store)


def make_app() -> Any:
    """The Celery app, from EYRIE_* variables."""
    settings = Settings.from_env()
    return _celery(settings, Database(settings.resolved_database_url))


def _celery(settings: Settings, database: Database) -> Any:
    runtime = runtime_of(settings, database)
    return make_celery(settings, Driver(settings, database, runtime.runner).advance,
                       reconcile_endpoint=runtime.reconcile_endpoint, forget=runtime.runner.delete,
                       sweep=runtime.sweep, database=database)


def work(settings: Settings, concurrency: int) -> None:
    """Run chores in prefork processes until SIGTERM."""
    database = Database(settings.resolved_database_url)
    upgrade(database)
    runtime = runtime_of(settings, database)
    if runtime.store is not None:
        runtime.store.check()
        log.info("the work area %s is writable", runtime.store.url)
    database.engine.dispose()  # a forked child must not share the parent's connections
    run_worker(_celery(settings, database), settings, concurrency=concurrency, database=database)


def __getattr__(name: str) -> Any:
    """`app`, created on first access: importing this module must not open a database."""
    if name == "app":
        globals()["app"] = make_app()
        return globals()["app"]
    raise AttributeError(name)
