"""A refused change is in the audit log before its caller has the answer, also while the database is busy."""

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from eyrie_api.database.audit import Audit
from eyrie_api.database.engine import Database
from eyrie_api.http.server import create_app
from eyrie_api.settings import Settings

DATABASES = ("sqlite",)  # whose one write lock is what a row waits for
TOKEN = "installation-token-of-this-test"
HEADERS = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
KEYS = "/v1alpha1/keys"


def outcomes(database: Database) -> list[tuple[str, str, str]]:
    return [(one.actor, one.verb, one.outcome) for one in Audit(database).read().items]


@pytest.fixture
def client(settings: Settings, database: Database) -> httpx.Client:
    from starlette.testclient import TestClient

    return TestClient(create_app(settings.model_copy(update={"token": TOKEN}), database=database),
                      base_url="https://eyrie.example")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection waits for a lock for a short time; it is set when the connection is opened."""
    monkeypatch.setattr("eyrie_api.database.engine.BUSY_TIMEOUT_MS", 20)


def test_the_row_is_there_when_the_answer_begins(settings: Settings, database: Database) -> None:
    app = create_app(settings.model_copy(update={"token": TOKEN}), database=database)
    seen: list[list[tuple[str, str, str]]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"name": ""}', "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 422
            seen.append(outcomes(database))

    asyncio.run(app({
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "https",
        "path": KEYS, "raw_path": KEYS.encode(), "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1),
        "server": ("eyrie.example", 443),
        "headers": [(name.encode(), value.encode()) for name, value in (HEADERS | {"host": "eyrie.example"}).items()],
    }, receive, send))
    assert seen == [[("token", "key.create", "refused: 422")]]


def test_a_refusal_that_cannot_be_recorded_is_answered_with_503_and_recorded_when_tried_again(
        impatient: None, client: httpx.Client, database: Database) -> None:
    with database.engine.connect().execution_options(eyrie_writes=True) as other, other.begin():
        other.execute(text("SELECT 1"))  # holds the write lock
        busy = client.post(KEYS, json={"name": ""}, headers=HEADERS)
        assert busy.status_code == 503, busy.text
        assert busy.json()["type"] == "urn:eyrie:problem:DatabaseUnavailable"
        assert int(busy.headers["retry-after"]) > 0
        assert busy.headers["x-request-id"]
        assert client.post(KEYS, json={"name": ""}).status_code == 401, "rows of callers without a token are a sample"
    assert outcomes(database) == []
    assert client.post(KEYS, json={"name": ""}, headers=HEADERS).status_code == 422
    assert outcomes(database) == [("token", "key.create", "refused: 422")]
