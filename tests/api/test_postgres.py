"""The same rows on PostgreSQL: on the session's server, or on the empty database EYRIE_TEST_POSTGRES_URL names."""

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import delete, make_url, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from eyrie_api.access.scope import Scope
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Job, StageStatus
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.database.audit import Audit
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.idempotency import Idempotency, Once
from eyrie_api.database.jobs import JobFilter, Jobs
from eyrie_api.database.migrations import schema_state, upgrade
from eyrie_api.database.outbox import Outbox
from eyrie_api.database.quotas import QuotaReached
from eyrie_api.database.results import ResultFilter, Results
from eyrie_api.database.tables import Base, IdempotencyRow, ProjectRow
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint
from eyrie_api.errors import Conflict
from eyrie_api.http.authentication import LOCAL
from eyrie_api.planning.resolve import derive
from tests.api.samples import NOW, benchmark_report, ended, job_spec, record_event, record_metrics, set_stage
from tests.servers.postgres import program

URL = os.environ.get("EYRIE_TEST_POSTGRES_URL")


@pytest.mark.parametrize("table", Base.metadata.sorted_tables, ids=lambda table: table.name)
def test_every_table_and_index_can_be_spelled_in_postgresql(table: object) -> None:
    text = str(CreateTable(table).compile(dialect=postgresql.dialect()))  # type: ignore[arg-type]
    for index in table.indexes:  # type: ignore[attr-defined]
        text += str(CreateIndex(index).compile(dialect=postgresql.dialect()))
    assert "AUTOINCREMENT" not in text
    assert "sqlite" not in text.lower()


@pytest.fixture
def postgres(request: pytest.FixtureRequest) -> Iterator[Database]:
    url = URL
    if url is None:
        server = request.getfixturevalue("postgres_server")
        url = server.url(server.create())
    opened = Database(url)
    upgrade(opened)
    yield opened
    drop_tables(opened)
    opened.close()


def drop_tables(database: Database) -> None:
    with database.writing() as session:
        Base.metadata.drop_all(session.connection())
        session.execute(text("DROP TABLE alembic_version"))


@pytest.mark.skipif(URL is not None, reason="the dump is restored into a database that this test makes")
def test_a_restored_dump_has_the_jobs_and_continues_their_numbers(
        request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The commands are those of docs/operations.md."""
    server = request.getfixturevalue("postgres_server")
    source, target, dump = server.create(), server.create(), str(tmp_path / "eyrie.dump")
    with_job = Database(server.url(source))
    upgrade(with_job)
    job = Jobs(with_job).submit(derive(job_spec(name="kept")))
    with_job.close()
    url = make_url(server.url(source))
    where = ["--host", str(url.host), "--port", str(url.port), "--username", str(url.username)]
    subprocess.run([program("pg_dump"), *where, "--format=custom", "--file", dump, source], check=True, timeout=60)
    subprocess.run([program("pg_restore"), *where, "--exit-on-error", "--dbname", target, dump], check=True, timeout=60)
    restored = Database(server.url(target))
    assert schema_state(restored) == "current"
    assert Jobs(restored).get(job.id) == job
    before = Jobs(restored).count_events()
    record_event(Jobs(restored), job.id, "Restored", "goes on")
    assert Jobs(restored).count_events() == before + 1
    restored.close()


def in_threads(work: object, count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_of_many_requests_with_one_key_at_once_one_is_done_and_the_others_get_its_answer(postgres: Database) -> None:
    jobs = Jobs(postgres, idempotency=Idempotency(postgres, 60.0), scope=Scope(LOCAL, request_id="r"))
    seen: list[Job | dict[str, Any]] = []

    def send(_number: int) -> None:
        seen.append(jobs.submit_once(derive(job_spec(labels={"a": "b"})), Once("k", "r", "d"), "default"))

    for _ in range(2):  # the first time the endpoint's name is taken on the way; then everything is as usual
        in_threads(send, 6)
        with postgres.writing() as session:
            session.execute(delete(IdempotencyRow))
    done = [one for one in seen if isinstance(one, Job)]
    result = {one["id"] for one in seen if not isinstance(one, Job)}
    assert (len(done), len(seen), result) == (2, 12, {one.id for one in done})
    assert {one.id: one for one in jobs.list(JobFilter(labels={"a": "b"})).items} == {one.id: one for one in done}
    assert [one.object for one in Audit(postgres).read(verb="job.create").items] == [f"job/{done[1].id}",
                                                                                   f"job/{done[0].id}"]
    assert [[one.reason for one in jobs.events(job.id)] for job in done] == [["Accepted"], ["Accepted"]]
    assert [one.argument for one in Outbox(postgres).pending()] == [one.id for one in done]


def test_a_quota_and_a_name_of_another_project_refuse_a_request_and_its_key_stays_free(postgres: Database) -> None:
    jobs = Jobs(postgres, idempotency=Idempotency(postgres, 60.0))
    spec = job_spec()
    jobs.submit_once(derive(spec), None, "default")
    with postgres.writing() as session:
        session.execute(update(ProjectRow).where(ProjectRow.name == "default").values(max_jobs=1))
    with pytest.raises(QuotaReached):
        jobs.submit_once(derive(spec), Once("k", "r", "d"), "default")
    with pytest.raises(Conflict):
        jobs.submit_once(derive(spec), Once("k", "r", "d"), "other")
    assert len(jobs.list().items) == 1
    assert Idempotency(postgres, 60.0).find(Once("k", "r", "d")) is None


def test_the_walk_of_a_job_is_the_same_on_postgresql(postgres: Database) -> None:
    with postgres.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    drop_tables(postgres)
    upgrade(postgres)
    jobs = Jobs(postgres, idempotency=Idempotency(postgres, 60.0))
    once = Once("k", "r", "d")
    job = jobs.submit_once(derive(job_spec(labels={"a": "b"})), once)
    assert isinstance(job, Job)
    assert isinstance(jobs.submit_once(derive(job_spec(labels={"a": "b"})), once), dict)
    assert jobs.list(JobFilter(labels={"a": "b"}, phase="Pending")).items == (job,)

    won: list[int] = []

    def race(number: int) -> None:
        if jobs.take_lease(job.id, str(number), 60.0):
            won.append(number)

    in_threads(race, 8)
    assert len(won) == 1

    def observe(_number: int) -> None:
        for step in range(10):
            set_stage(jobs, job.id, StageStatus(stage="train", key=str(step), state="Running", started_at=NOW))
            record_metrics(jobs, job.id, "train", "", [("loss", step, 1.0, NOW)])

    in_threads(observe, 4)
    assert len(jobs.get(job.id).status.stages) == len(jobs.metrics(job.id)[0].points) == 10

    endpoints, results = Endpoints(postgres), Results(postgres)
    endpoints.create("x", TargetSpec(model="quickstart"), EndpointServeSpec(), "m")
    endpoints.propose("x", job_id=job.id, checkpoint="c", tree=DraftTreeShape(), drafter_dir="/d", reason="test")
    endpoints.activate("x", 2)
    assert endpoints.roll_back("x").candidate_revision == 1
    for _ in range(2):
        report = benchmark_report("c", {"chat": (2.0,)})
        results.record(MeasuredCheckpoint(job.id, "eagle3", "quickstart", True, report), "/d")
    assert len(results.leaderboard(ResultFilter(tuned=True, lossless=True))) == 1
    endpoints.activate("x", 1)
    jobs.save_status(job.id, ended("Failed"))
    assert jobs.retry(job.id).status.attempt == 2
    jobs.save_status(job.id, ended("Cancelled"))
    assert jobs.delete(job.id)
