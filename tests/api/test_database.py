"""Migrations against the metadata, transactions that do not trip over each other, upserts."""

import threading
from datetime import datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert, inspect, select, text
from sqlalchemy.exc import IntegrityError, OperationalError, StatementError

from eyrie_api.database.engine import Database, upsert
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import schema_state, upgrade
from eyrie_api.database.tables import Base, EndpointRow, EventRow, IngestRow, JobRow, OutboxRow
from eyrie_api.errors import InvalidInput, TablesTooOld
from eyrie_api.planning.resolve import derive
from tests.api.samples import NOW, job_spec, record_event


def test_the_migrated_tables_equal_the_metadata(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "render_as_batch": True})
        assert compare_metadata(context, Base.metadata) == []


def test_tables_of_a_version_before_0_2_are_refused_and_left_as_they_are(database: Database) -> None:
    with database.writing() as session:
        session.execute(text("UPDATE alembic_version SET version_num = 'v0011'"))
    for use in (upgrade, schema_state):
        with pytest.raises(TablesTooOld, match="by a version before") as refused:
            use(database)
        assert "new database, or another EYRIE_HOME" in refused.value.hint
    with database.reading() as session:
        assert session.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "v0011"


def test_tables_of_0_2_0_are_migrated_to_the_metadata_and_a_program_of_0_2_0_goes_on_with_them(
        database: Database) -> None:
    with database.writing() as session:
        session.execute(text("ALTER TABLE endpoints DROP COLUMN reads"))
        session.execute(text("UPDATE alembic_version SET version_num = 'r001'"))
        columns = {column["name"]: column for column in inspect(session.connection()).get_columns("endpoints")}
        names = [name for name in columns if name != "url"]
        add = text(f"INSERT INTO endpoints ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)})")
        known = {"target": "{}", "serve": "{}", "conditions": "[]", "num_replicas": 1, "active_revision": None,
                 "candidate_revision": 1, "created_at": NOW, "updated_at": NOW}
        values = {name: known.get(name, "x") for name in names}
        session.execute(add, values)
    assert schema_state(database) == "behind"
    upgrade(database)
    test_the_migrated_tables_equal_the_metadata(database)
    with database.writing() as session:
        session.execute(add, values | {"name": "y"})  # by the older program, after a rollback
    with database.reading() as session:
        assert [row.reads for row in session.scalars(select(EndpointRow))] == [None, None]


def test_tables_of_another_program_are_not_taken_over(tmp_path: Path) -> None:
    other = Database(f"sqlite:///{tmp_path / 'other.db'}")
    with other.writing() as session:
        session.execute(text("CREATE TABLE stages (name TEXT)"))
    with pytest.raises(OperationalError, match="already exists"):
        upgrade(other)
    assert inspect(other.engine).get_table_names() == ["stages"]
    other.close()


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
    record_event(jobs, first.id, "Again", "x")
    assert jobs.events(first.id)[-1].id > last_id


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
