"""Real servers as fixtures. Where one cannot be had, the tests that want it are skipped, naming what to install."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.servers.mlflow_server import shared_mlflow
from tests.servers.postgres import Postgres, shared_postgres
from tests.servers.processes import Unavailable
from tests.servers.redis import Redis
from tests.servers.s3 import S3Server, shared_moto, shared_rclone

ServerT = TypeVar("ServerT")


def or_skip(start: Callable[[], ServerT]) -> ServerT:
    """What `start` returns; skips the test when this machine cannot run it."""
    try:
        return start()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def postgres_server() -> Postgres:
    """The session's PostgreSQL."""
    return or_skip(shared_postgres)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    """A Redis of the test's own."""
    server = or_skip(lambda: Redis(tmp_path))
    or_skip(server.start)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def rclone_s3() -> S3Server:
    """An S3 server that verifies signatures."""
    return or_skip(shared_rclone)


@pytest.fixture(scope="session")
def moto_s3() -> S3Server:
    """An S3 server that honours conditional writes."""
    return or_skip(shared_moto)


@pytest.fixture(scope="session")
def mlflow_address() -> str:
    """Of the session's MLflow tracking server."""
    return or_skip(shared_mlflow)
