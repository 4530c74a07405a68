"""Where a worker runs jobs: as its profile and its image say."""

from pathlib import Path

from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_operator.conditions import find
from eyrie_operator.control_plane import runtime_of
from eyrie_operator.jobs.driver import Driver
from eyrie_pipelines.local import LocalRunner
from eyrie_pipelines.runner import UnavailableRunner
from tests.api.samples import job_spec


def test_without_a_profile_jobs_run_on_the_workers_machine(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    database = Database(settings.resolved_database_url)
    upgrade(database)
    assert isinstance(runtime_of(settings, database).runner, LocalRunner)
    database.close()


def test_without_a_profile_and_without_stage_programs_each_job_ends_at_once_with_what_to_set(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    database = Database(settings.resolved_database_url)
    upgrade(database)
    jobs = Jobs(database)
    job = jobs.submit(derive(job_spec()))
    Driver(settings, database, UnavailableRunner()).advance(job.id)
    failed = find(jobs.get(job.id).status.conditions, "Failed")
    assert failed is not None
    assert (failed.status, failed.reason) == ("True", "RuntimeUnavailable")
    assert "cluster.kubeflow.url" in failed.message
    database.close()
