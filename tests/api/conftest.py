"""Fixtures of the control plane: a migrated SQLite file, and a real server on a real port over it."""

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
from eyrie_api.control import Control
from eyrie_api.database import Database
from eyrie_api.jobs import Jobs
from eyrie_api.server import create_app
from eyrie_api.settings import Settings
from tests.api.samples import ManualClock


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", sse_heartbeat_s=0.2, sse_poll_s=0.02)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy: migrating costs more than most tests."""
    path = tmp_path_factory.mktemp("template") / "eyrie.db"
    made = Database(f"sqlite:///{path}")
    made.migrate()
    made.close()
    return path


@pytest.fixture
def database(settings: Settings, migrated: Path) -> Iterator[Database]:
    settings.home.mkdir()
    shutil.copy(migrated, settings.home / "eyrie.db")
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
