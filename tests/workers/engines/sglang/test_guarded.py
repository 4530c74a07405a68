"""The filter of paths in front of SGLang. tests/sglang starts the real server behind it."""

import asyncio
from typing import Any

import pytest

from eyrie_workers.engines.sglang.plugin.guarded import InferenceOnly


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
