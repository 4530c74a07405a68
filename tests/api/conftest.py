"""Fixtures of the control plane: a migrated database, and a real server on a real port over it.

Every test that asks for `database` runs twice: on a SQLite file, and on the session's PostgreSQL where there is one.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from eyrie_api.client import Client
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.http.control import Control
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings
from tests.api.samples import ManualClock
from tests.servers.postgres import shared_template


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what touches the database on each of them, or on those that the module names in DATABASES."""
    if "database_url" in metafunc.fixturenames:
        databases = getattr(metafunc.module, "DATABASES", ("sqlite", "postgresql"))
        metafunc.parametrize("database_url", databases, indirect=True)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy: migrating costs more than most tests."""
    path = tmp_path_factory.mktemp("template") / "eyrie.db"
    migrate(f"sqlite:///{path}")
    return path


def migrate(url: str) -> None:
    made = Database(url)
    upgrade(made)
    made.close()


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | None]:
    """A migrated database of the test's own; None where the settings' default under home will do."""
    home = tmp_path / "home"
    home.mkdir()
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated"), home / "eyrie.db")
        yield None
        return
    server = request.getfixturevalue("postgres_server")
    with server.lend(shared_template(server, "eyrie_migrated", migrate)) as url:
        yield url


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    url = request.getfixturevalue("database_url") if "database_url" in request.fixturenames else None
    return Settings(home=tmp_path / "home", database_url=url, sse_heartbeat_s=0.2, sse_poll_s=0.02)


@pytest.fixture
def database(settings: Settings, database_url: str | None) -> Iterator[Database]:
    opened = Database(settings.resolved_database_url)
    yield opened
    opened.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def jobs(database: Database, clock: ManualClock) -> Jobs:
    return Jobs(database, clock)


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    control: Control
    client: Client


@contextmanager
def serving(settings: Settings, database: Database, **options: Any) -> Iterator[Running]:
    """uvicorn in a thread, on a port of its own choosing."""
    app = create_app(settings, database=database, **options)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error",
                                           timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended before it answered"
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with Client(url, token=settings.token) as client:
        yield Running(url, app.state.control, client)
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def server(settings: Settings, database: Database) -> Iterator[Running]:
    with serving(settings, database) as running:
        yield running


@pytest.fixture
def serve() -> Callable[..., Any]:
    return serving
