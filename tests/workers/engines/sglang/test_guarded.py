"""The filters in front of SGLang. tests/sglang starts the real server behind them."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from eyrie_workers.sglang.plugin.guarded import MAX_CHECKED_BYTES, CheckedValues, InferenceOnly


def asked(kind: str, path: str) -> list[dict[str, Any]]:
    """What a client of a filtered application gets."""
    sent: list[dict[str, Any]] = []

    async def application(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "reached"})

    async def send(message: Any) -> None:
        sent.append(dict(message))

    asyncio.run(InferenceOnly(application)({"type": kind, "path": path}, None, send))
    return sent


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models/a/b", "/generate", "/health", "/ready",
                                  "/metrics"])
def test_inference_health_and_metrics_reach_the_server(path: str) -> None:
    assert asked("http", path) == asked("websocket", path) == [{"type": "reached"}]


@pytest.mark.parametrize("path", ["/flush_cache", "/server_info", "/update_weights_from_disk", "/", "", "/v1", "/v1x",
                                  "/V1/models", "/v1/../flush_cache", "/flush_cache/v1/", "/health/../flush_cache"])
def test_other_paths_do_not(path: str) -> None:
    start, body = asked("http", path)
    assert start["status"] == 404
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert asked("websocket", path) == [{"type": "websocket.close", "code": 1008}]


def test_the_start_of_the_server_passes() -> None:
    assert asked("lifespan", "/flush_cache") == [{"type": "reached"}]


GONE = {"type": "http.disconnect"}
JSON = {b"content-type": b"application/json; charset=utf-8"}


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def posted(parts: Sequence[dict[str, Any]], headers: dict[bytes, bytes] = JSON, method: str = "POST",
           kind: str = "http") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the application behind the filter receives, and what the client gets."""
    arriving, reached, sent = iter([*parts, GONE]), [], []

    async def application(_scope: Any, receive: Any, _send: Any) -> None:
        reached.append(await receive())
        while reached[-1] != GONE:
            reached.append(await receive())

    async def receive() -> dict[str, Any]:
        return next(arriving)

    async def send(message: Any) -> None:
        sent.append(dict(message))

    asyncio.run(CheckedValues(application)(
        {"type": kind, "method": method, "headers": [*headers.items()]}, receive, send))
    return reached, sent


DEEP_CALL = json.dumps({"messages": [{"role": "assistant", "tool_calls": [
    {"type": "function", "function": {"name": "f", "arguments": '{"a":' + "[" * 600 + "]" * 600 + "}"}}]}]}).encode()


@pytest.mark.parametrize("padding", [b"", b" " * 100_000])
@pytest.mark.parametrize("body", [DEEP_CALL, b'{"prompt": "\\ud800"}', b'{"seed": ' + b"9" * 5000 + b"}", b"[1]", b"{"])
def test_a_body_with_values_that_are_refused_is_answered_with_400_and_not_read_by_the_server(
        body: bytes, padding: bytes) -> None:
    half = len(body) // 2
    reached, (start, answer) = posted([part(body[:half], True), part(padding + body[half:], True), part(b"")])
    assert reached == []
    assert start["status"] == 400
    assert dict(start["headers"])[b"content-length"] == str(len(answer["body"])).encode()
    error = json.loads(answer["body"])["error"]
    assert error["type"] == "invalid_request_error"
    assert error["hint"] in error["message"]


@pytest.mark.parametrize("parts", [
    [part(b'{"prompt": "x", "seed": 1}')], [part(b'{"prom', True), part(b'pt": "x"}', True), part(b"")],
    [part(b"")], [], [part(b'{"prom', True)],
    [part(b"[" + b" " * MAX_CHECKED_BYTES, True), part(b" ", True), part(b"1]")],
], ids=["whole", "in parts", "empty", "gone", "gone in the middle", "too large to check"])
def test_any_other_body_arrives_as_it_was_sent_and_the_server_sees_when_the_client_leaves(
        parts: list[dict[str, Any]]) -> None:
    assert posted(parts) == ([*parts, GONE], [])


def test_what_is_no_json_of_a_post_is_not_looked_at() -> None:
    parts = [part(b"\xff")]
    for headers in ({}, {b"content-type": b"multipart/form-data; boundary=x"}, JSON | {b"content-encoding": b"gzip"}):
        assert posted(parts, headers) == ([*parts, GONE], [])
    assert posted(parts, method="GET") == ([*parts, GONE], [])
    assert posted(parts, kind="lifespan") == ([*parts, GONE], [])
