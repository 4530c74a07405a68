"""What a retraining job reads, where stages read this machine's files and where they read a bucket's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import Idempotency
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_operator.endpoints.plan import ReportDrift
from eyrie_operator.endpoints.records import EndpointRecords, retraining_job
from tests.api.samples import job_body

LOG = "s3://logs/chats/*.jsonl.gz"
HOME = Path("/var/lib/eyrie")
HEAD = HOME / "jobs/j-1/stages/train/base/checkpoints/base-step-9"
"""On no disk here: as where the operator has no volume of the stages'."""


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(Settings(home=tmp_path).resolved_database_url)
    upgrade(made)
    yield made
    made.close()


def reported(database: Database, directory: Path, traffic_file: str | None, stored: Path | None,
             reads: ReadRules | None = None) -> tuple[str, JobSpec | None]:
    """The words of the report, and the job that it offers."""
    jobs = Jobs(database, idempotency=Idempotency(database, 60.0))
    histories, endpoints = Histories(database), Endpoints(database)
    body = job_body(promotion={"drift": {"traffic_file": traffic_file}})
    promoted = jobs.submit(derive(JobSpec.model_validate(body)).model_copy(update={"reads": reads}))
    endpoints.create("chat", TargetSpec(model="quickstart"), EndpointServeSpec(), "quickstart")
    endpoints.propose("chat", job_id=promoted.id, checkpoint="base-step-9", tree=DraftTreeShape(),
                      drafter_dir=str(HEAD), reason="better", tau=3.0)
    served = endpoints.get("chat")
    EndpointRecords(Settings(home=directory.parent), database, stored=stored).record(
        ReportDrift(served.revisions[-1].number, (2.0,), 3.0, "tau stays low"), served, (), directory)
    (found,) = histories.latest(["chat"], ["drift"])
    return found.message, JobSpec.model_validate(found.data["job"]) if "job" in found.data else None


def test_a_log_at_an_address_is_what_the_job_reads_and_the_stored_drafter_is_continued(
        database: Database, tmp_path: Path) -> None:
    _, job = reported(database, tmp_path / "chat", LOG, HOME / "jobs")
    assert job is not None
    assert [(one.path, one.format) for one in job.data.sources] == [(LOG, "messages")]
    assert job.drafter.init_from == str(HEAD)


def test_a_drafter_that_stages_cannot_read_is_not_continued(database: Database, tmp_path: Path) -> None:
    _, job = reported(database, tmp_path / "chat", LOG, None)
    assert job is not None
    assert job.drafter.init_from is None


def test_a_log_that_stages_cannot_read_offers_no_job_and_says_what_to_name(database: Database, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    message, job = reported(database, tmp_path / "chat", str(log), HOME / "jobs")
    assert job is None
    assert "set promotion.drift.traffic_file to the s3:// or https:// address" in message
    assert not (tmp_path / "chat").exists(), "nothing is copied that no stage would read"


def test_a_log_on_this_machine_is_copied_for_the_job(database: Database, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    _, job = reported(database, tmp_path / "chat", str(log), None)
    assert job is not None
    (source,) = job.data.sources
    assert source.path != str(log)
    assert Path(source.path).read_text() == log.read_text()


def test_a_log_that_became_a_link_to_another_projects_rows_is_not_copied(database: Database, tmp_path: Path) -> None:
    theirs = tmp_path / "jobs/theirs/rows.jsonl"
    theirs.parent.mkdir(parents=True)
    theirs.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    log = tmp_path.with_name("log-of-tenant.jsonl")
    log.symlink_to(theirs)
    message, job = reported(database, tmp_path / "endpoints/chat", str(log), None, ReadRules(home=str(tmp_path)))
    assert job is None
    assert "not of your project" in message
    assert not (tmp_path / "endpoints").exists()


def test_a_retraining_job_may_read_what_the_promoted_one_may_its_endpoints_traffic_and_its_drafter() -> None:
    reads = ReadRules(home=str(HOME), places=("jobs/data",), private_hosts=("llm.example",))
    promoted = derive(JobSpec.model_validate(job_body())).model_copy(update={"reads": reads})
    traffic = str(HOME / "endpoints/chat/snapshots/1-1.jsonl")
    retraining = retraining_job("j-2", promoted, "chat", traffic, head=HEAD)
    assert retraining.reads == reads.model_copy(update={"places": ("jobs/data", "endpoints/chat", "jobs/j-1")})
    assert retraining_job("j-2", promoted.model_copy(update={"reads": None}), "chat", traffic).reads is None
