"""The API server alone, as a cluster runs it: waits for tables, gives chores to Redis, ends in order."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import httpx
import psycopg
import pytest
from sqlalchemy import make_url, text

from eyrie_api.chores.tasks import chore_queue, make_celery, queue_length
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import schema_state, upgrade
from eyrie_api.errors import InvalidInput
from eyrie_api.http.replica import TablesMissing, await_tables, migrate_when_there, serve
from eyrie_api.processes import free_port
from eyrie_api.settings import Settings
from tests.api.samples import job_body
from tests.servers.cutting import relaying
from tests.servers.postgres import Postgres
from tests.servers.redis import Redis
from tests.waiting import wait_for

DATABASES = ("sqlite",)
TOKEN = "a-token-of-a-test-0123456789"
COMMAND = [sys.executable, "-m", "eyrie_operator.command"]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EYRIE_")}
    return kept | {f"EYRIE_{name.upper()}": value for name, value in variables.items()}


def make_newer(database: Database) -> None:
    with database.writing() as session:
        session.execute(text("UPDATE alembic_version SET version_num = 'v9999'"))


def test_tables_are_behind_until_migrated_and_ahead_after_a_newer_program(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'new.db'}")
    assert schema_state(database) == "behind"
    for _ in range(2):
        upgrade(database)
        assert schema_state(database) == "current"
    make_newer(database)
    assert schema_state(database) == "ahead"
    database.close()


def test_tables_of_a_newer_program_are_left_alone_so_that_a_rollback_serves(database: Database) -> None:
    make_newer(database)
    upgrade(database)
    with database.reading() as session:
        assert session.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "v9999"
    assert await_tables(database, 0.0) == "ahead"


def test_whoever_waits_for_tables_sees_them_once_they_are_made(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'new.db'}")
    waits = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        upgrade(database)

    assert await_tables(database, 60.0, pause=pause) == "current"
    assert len(waits) == 1
    database.close()


def test_waiting_for_tables_ends_with_the_hint(tmp_path: Path) -> None:
    empty = Database(f"sqlite:///{tmp_path / 'empty.db'}")
    with pytest.raises(TablesMissing, match="not there") as caught:
        await_tables(empty, 0.0)
    assert "eyrie migrate" in caught.value.hint
    empty.close()


def test_a_database_that_does_not_answer_is_waited_for() -> None:
    with relaying(free_port()) as nobody:  # takes connections and cuts them
        away = Database(f"postgresql://eyrie:secret@127.0.0.1:{nobody.port}/eyrie")
        with pytest.raises(TablesMissing, match="does not answer") as caught:
            await_tables(away, 0.0)
        assert "secret" not in str(caught.value)
        away.close()


def test_a_wrong_password_is_in_the_log_from_the_first_attempt_without_the_password(
        postgres_server: Postgres, caplog: pytest.LogCaptureFixture) -> None:
    right = make_url(postgres_server.url("postgres"))
    wrong = Database(right.set(username="nobody-here", password="of-the-test").render_as_string(hide_password=False))

    def pause(_seconds: float) -> None:
        assert "nobody-here" in caplog.text
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await_tables(wrong, 60.0, pause=pause)
    assert "check EYRIE_DATABASE_URL" in caplog.text
    with pytest.raises(TablesMissing, match="nobody-here") as caught:
        await_tables(wrong, 0.0)
    assert "of-the-test" not in caplog.text + str(caught.value)
    wrong.close()


def test_a_database_without_utf8_is_refused_with_what_to_do(postgres_server: Postgres) -> None:
    name = f"plain_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(host="127.0.0.1", port=postgres_server.port, user="eyrie", dbname="postgres",
                         autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
    plain = Database(postgres_server.url(name))
    try:
        with pytest.raises(InvalidInput, match="encoding SQL_ASCII, and UTF8 is required") as caught:
            migrate_when_there(plain, 60.0)
        assert "ENCODING 'UTF8'" in caught.value.hint
    finally:
        plain.close()
        postgres_server.drop(name)


def test_a_broker_that_no_worker_can_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="memory://"):
        serve(Settings(home=tmp_path))


def test_migrate_makes_the_tables_and_check_changes_nothing(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'new.db'}")
    env = environment(database_url=f"sqlite:///{tmp_path / 'new.db'}")

    def migrate(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, "migrate", *arguments], env=env, cwd=tmp_path, capture_output=True, text=True,
                              check=False, timeout=200)

    assert migrate("--check", "--timeout", "0").returncode == TablesMissing.exit_code
    assert schema_state(database) == "behind"
    made = migrate()
    assert (made.returncode, "current" in made.stdout) == (0, True), made.stderr
    assert schema_state(database) == "current"
    database.close()


def test_a_replica_promises_chores_to_redis_and_ends_on_request(database_url: str | None, tmp_path: Path,
                                                               redis: Redis) -> None:
    home, port = tmp_path / "home", free_port()
    settings = Settings(home=home, database_url=database_url, broker_url=redis.url, chore_queue="named-by-the-chart")
    env = environment(home=str(home), chore_queue="named-by-the-chart", host="0.0.0.0", port=str(port), token=TOKEN,
                      broker_url=redis.url)
    process = subprocess.Popen([*COMMAND, "serve-api"], env=env, cwd=tmp_path)
    try:
        url, authorized = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {TOKEN}"}

        def ready() -> bool:
            assert process.poll() is None, "the server ended"
            try:
                return httpx.get(f"{url}/readyz").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(ready, "the server is ready", 200)
        assert httpx.get(f"{url}/v1alpha1/jobs").status_code == 401
        assert httpx.post(f"{url}/v1alpha1/jobs", json=job_body(), headers=authorized).status_code == 202
        database = Database(settings.resolved_database_url)
        celery = make_celery(settings, lambda _job: None, database=database)
        wait_for(lambda: queue_length(celery, chore_queue(settings)) > 0, "a chore is queued")
        database.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
