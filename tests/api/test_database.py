"""Migrations against the metadata, transactions that do not trip over each other, upserts."""

import json
import threading
from datetime import datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert, inspect, select, text
from sqlalchemy.exc import IntegrityError, StatementError

from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database, upsert
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import downgrade, upgrade
from eyrie_api.database.projects import Projects
from eyrie_api.database.tables import Base, EventRow, IngestRow, JobRow, OutboxRow
from eyrie_api.errors import InvalidInput
from eyrie_api.submission.resolve import derive
from eyrie_api.v1alpha1.plan import StagePlan
from eyrie_api.v1alpha1.serving import EndpointServeSpec
from eyrie_api.v1alpha1.targets import TargetSpec
from tests.api.samples import NOW, job_body, job_spec, planned


def test_the_migrated_tables_equal_the_metadata(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "render_as_batch": True})
        assert compare_metadata(context, Base.metadata) == []


def test_every_migration_is_undone_by_its_downgrade_and_can_be_made_again(database: Database) -> None:
    downgrade(database)
    assert set(inspect(database.engine).get_table_names()) == {"alembic_version"}
    upgrade(database)
    assert set(inspect(database.engine).get_table_names()) == {*Base.metadata.tables, "alembic_version"}


def test_the_first_tables_are_brought_up_to_date_with_what_they_hold(database: Database) -> None:
    downgrade(database, "v0001")
    write = ("INSERT INTO revisions (endpoint, number, reason, checkpoint, tree, drafter_dir, created_at) "
             "VALUES ('default', :number, :reason, :checkpoint, :tree, :drafter_dir, :now)")
    tree = '{"num_steps": 3, "top_k": 2, "num_draft_tokens": 8}'
    rows: list[dict[str, object]] = [
        {"number": 1, "reason": "the target without a drafter", "checkpoint": None, "tree": None, "drafter_dir": None},
        {"number": 2, "reason": "better; rejected: HealthTimeout: not healthy after 60 s", "checkpoint": "a",
         "tree": tree, "drafter_dir": "/d/a"},
        {"number": 3, "reason": "better", "checkpoint": "b", "tree": tree, "drafter_dir": "/d/b"},
        {"number": 4, "reason": "by hand", "checkpoint": "c", "tree": None, "drafter_dir": "/d/c"}]
    with database.writing() as session:
        target, serve = (json.dumps(one.model_dump(mode="json"))
                         for one in (TargetSpec(model="m"), EndpointServeSpec()))
        session.execute(text(
            "INSERT INTO endpoints (name, target, serve, model, desired, active_revision, candidate_revision, "
            "conditions, created_at, updated_at) VALUES ('default', :target, :serve, 'm', 'on', 3, 4, '[]', :now, "
            ":now)"), {"target": target, "serve": serve, "now": NOW.replace(tzinfo=None)})
        for row in rows:
            session.execute(text(write), row | {"now": NOW.replace(tzinfo=None)})
    upgrade(database)
    endpoints = Endpoints(database)
    seen = endpoints.get("default").revisions
    assert [one.state for one in seen] == ["retired", "rejected", "active", "proposed"]
    assert (seen[1].reason, seen[1].rejected_reason) == ("better", "HealthTimeout: not healthy after 60 s")
    assert [one.use.setting.label() for one in seen] == ["off", "3/2/8", "3/2/8", "5/1/6"]
    assert [one.use.drafter_dir for one in seen] == [None, "/d/a", "/d/b", "/d/c"]
    assert endpoints.roll_back("default").candidate_revision == 1
    downgrade(database, "v0001")
    with database.reading() as session:
        result = session.execute(text("SELECT reason FROM revisions ORDER BY number")).scalars().all()
    assert result == [row["reason"] for row in rows]


def test_jobs_of_tables_without_what_was_submitted_stay_and_have_none(database: Database) -> None:
    jobs = Jobs(database)
    kept = planned(job_spec(name="kept"), StagePlan(stage="train", tokens=1, bytes_on_disk=1, hours=1.5))
    job = jobs.submit(kept)
    assert jobs.all_resolved((job.id, "job-none")) == {job.id: kept}
    downgrade(database, "v0010")
    assert "submission" not in {column["name"] for column in inspect(database.engine).get_columns("jobs")}
    upgrade(database)
    assert jobs.get(job.id) == job
    assert (jobs.submitted(job.id), jobs.all_resolved((job.id,))) == (None, {})
    again = jobs.submit(derive(job_spec(name="new")))
    assert jobs.submitted(again.id) == job_body(name="new")


def test_endpoints_of_older_tables_count_the_replicas_they_name(database: Database) -> None:
    endpoints = Endpoints(database)
    for name, serve in (("three", EndpointServeSpec(replicas=3)), ("unnamed", EndpointServeSpec())):
        endpoints.create(name, TargetSpec(model="m"), serve, "m")
    downgrade(database, "v0005")
    upgrade(database)
    assert Projects(database).get("default").live_replicas == 4


@pytest.mark.parametrize(("index", "query"), [
    ("ix_jobs_updated_at", "SELECT id FROM jobs WHERE updated_at >= '2026-01-01' ORDER BY updated_at"),
    ("ix_outbox_dispatched_at", "SELECT argument FROM outbox WHERE dispatched_at IS NULL"),
    ("ix_outbox_removing", "SELECT argument FROM outbox WHERE task = 'remove_files' AND dispatched_at IS NOT NULL")])
def test_what_is_asked_of_all_rows_again_and_again_is_found_by_an_index(
        database: Database, index: str, query: str) -> None:
    with database.writing() as session:
        if database.is_sqlite:
            result = [row[3] for row in session.execute(text(f"EXPLAIN QUERY PLAN {query}"))]
        else:
            session.execute(text("SET LOCAL enable_seqscan = off"))  # a table without rows is read as it is
            session.execute(text("SET LOCAL enable_bitmapscan = off"))
            result = [row[0] for row in session.execute(text(f"EXPLAIN {query}"))]
    assert index in " ".join(result)


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_processes_that_migrate_at_the_same_time_all_succeed(backend: str, tmp_path: Path,
                                                            request: pytest.FixtureRequest) -> None:
    url = f"sqlite:///{tmp_path}/race.db"
    if backend == "postgresql":
        server = request.getfixturevalue("postgres_server")
        url = server.url(server.create())
    failures: list[BaseException] = []

    def migrate() -> None:
        opened = Database(url)
        try:
            upgrade(opened)
        except BaseException as error:  # noqa: BLE001 - the test reports whatever it is
            failures.append(error)
        finally:
            opened.close()

    threads = [threading.Thread(target=migrate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_sqlite_connections_use_a_durable_wal_wait_for_locks_and_enforce_foreign_keys(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/new.db")
    with database.engine.connect() as connection:
        values = {name: connection.execute(text(f"PRAGMA {name}")).scalar()
                  for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")}
    database.close()
    full = 2  # a commit is on the disk
    assert values == {"journal_mode": "wal", "synchronous": full, "busy_timeout": 10_000, "foreign_keys": 1}


def test_what_one_reader_sees_does_not_change_while_it_reads(database: Database) -> None:
    jobs = Jobs(database)
    with database.reading() as session:
        before = session.scalars(select(JobRow.id)).all()
        jobs.submit(derive(job_spec()))
        assert session.scalars(select(JobRow.id)).all() == before == []
    with database.reading() as session:
        assert len(session.scalars(select(JobRow.id)).all()) == 1


def test_a_failed_transaction_leaves_nothing(database: Database) -> None:
    def half_way() -> None:
        with database.writing() as session:
            session.add(OutboxRow(task="advance_job", argument="x", created_at=NOW, dispatched_at=None))
            session.flush()
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        half_way()
    with database.reading() as session:
        assert session.scalars(select(OutboxRow)).all() == []


def test_threads_that_read_then_write_do_not_lose_updates_or_fail_with_locked(database: Database) -> None:
    jobs = Jobs(database)
    job_id = jobs.submit(derive(job_spec())).id
    key = {"job_id": job_id, "stage": "train", "key": ""}

    def count() -> None:
        for _ in range(10):
            with database.writing() as session:
                session.get(JobRow, job_id, with_for_update=True)  # how writers of a job take turns
                row = session.get(IngestRow, (job_id, "train", ""))
                upsert(session, IngestRow, key, {"offset_bytes": 1 if row is None else row.offset_bytes + 1})

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.reading() as session:
        row = session.get(IngestRow, (job_id, "train", ""))
        assert row is not None
        assert row.offset_bytes == 40


def test_an_upsert_reports_an_error_that_is_not_about_its_own_key(database: Database) -> None:
    with pytest.raises(IntegrityError), database.writing() as session:
        upsert(session, IngestRow, {"job_id": "nobody", "stage": "train", "key": ""}, {"offset_bytes": 1})


def test_a_time_without_zone_is_refused_and_an_aware_one_comes_back_aware(database: Database) -> None:
    with pytest.raises(StatementError, match="time without a zone"), database.writing() as session:
        session.execute(insert(OutboxRow).values(task="x", argument="x", created_at=datetime(2026, 1, 1)))
    with database.writing() as session:
        session.add(OutboxRow(task="x", argument="x", created_at=NOW, dispatched_at=None))
    with database.reading() as session:
        assert session.scalars(select(OutboxRow.created_at)).one() == NOW


def test_event_ids_are_not_handed_out_again_after_the_last_row_is_deleted(database: Database) -> None:
    jobs = Jobs(database)
    first = jobs.submit(derive(job_spec()))
    last_id = jobs.events(first.id)[-1].id
    with database.writing() as session:
        session.execute(EventRow.__table__.delete())  # type: ignore[attr-defined]
    assert jobs.record_event(first.id, "Again", "x").id > last_id


@pytest.mark.parametrize("url", ["not a url", "sqlite://", "sqlite:///:memory:"])
def test_a_database_url_that_cannot_work_is_refused_with_the_hint(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Database(url)
    assert caught.value.hint


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_a_postgresql_url_may_be_written_as_other_programs_write_it(scheme: str) -> None:
    opened = Database(f"{scheme}://eyrie:secret@db.example/eyrie?sslmode=require")
    assert opened.engine.url.drivername == "postgresql+psycopg"
    assert not opened.is_sqlite
    assert "secret" not in repr(opened.engine.url)
