"""`python -m eyrie_workers.sglang.plugin.guarded`: SGLang's launcher, whose server answers inference alone.

The HTTP server of SGLang also changes weights, flushes caches, ends other clients' requests and shows its whole
configuration. `--admin-api-key` does not prevent it: `/server_info`, which needs no such key, shows that key (0.5.23).
In a cluster all clients of an endpoint reach the port of its pods through the Service, so pods are started by this
module: it takes the flags of `sglang.launch_server` and does what that does, with filters of paths and of values
in bodies (`engines.request_rules`) in front of the application. Where it cannot put them, the server does not start.
"""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from eyrie_workers.engines.request_rules import RefusedBody, is_inference, read_values
from eyrie_workers.sglang.plugin.prefix_cache import select_prefix_cache

MAX_CHECKED_BYTES = 4 * 2**20
"""Larger bodies hold images; SGLang reads those alone, since parsing one twice costs memory and time."""

_SMALL_BYTES = 16_384
"""Parsed within a millisecond, which a thread would cost too."""

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[Any, Any, _Send], Awaitable[None]]


class InferenceOnly:
    """ASGI middleware: 404 for requests to other paths, WebSockets to them are closed."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        if scope["type"] not in ("http", "websocket") or is_inference(scope["path"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(send, 404, {"message": "this endpoint serves inference alone", "code": "not_found"})


class CheckedValues:
    """ASGI middleware: 400 for JSON bodies that `read_values` refuses. Others arrive as they were sent."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" and scope["method"] == "POST" else {}
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json" or b"content-encoding" in headers:
            await self._app(scope, receive, send)
            return
        received: list[_Message] = []
        size, is_whole = 0, False
        while not is_whole and size <= MAX_CHECKED_BYTES:
            message = await receive()
            received.append(message)
            if message["type"] != "http.request":  # the client has gone
                break
            size += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
        if is_whole and 0 < size <= MAX_CHECKED_BYTES:
            body = b"".join(message.get("body", b"") for message in received)
            try:
                await asyncio.to_thread(read_values, body) if size > _SMALL_BYTES else read_values(body)
            except RefusedBody as refused:
                await _refuse(send, 400, {"message": f"{refused}; {refused.hint}", "hint": refused.hint,
                                          "param": refused.param, "code": refused.code})
                return
        waiting = iter(received)

        async def replay() -> _Message:
            message = next(waiting, None)
            return message if message is not None else await receive()

        await self._app(scope, replay, send)


async def _refuse(send: _Send, status: int, error: dict[str, str | None]) -> None:
    body = json.dumps({"error": {"type": "invalid_request_error", **error}}).encode()
    await send({"type": "http.response.start", "status": status, "headers": [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Serve until SIGTERM, with the flags of SGLang's own launcher."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    select_prefix_cache()
    load_plugins()
    arguments = prepare_server_args(sys.argv[1:])
    if arguments.tokenizer_worker_num != 1 or arguments.grpc_port is not None or os.environ.get("SGLANG_RUST_SERVER"):
        sys.exit("error: several tokenizer processes, gRPC and SGLang's Rust server have no filters\n"
                 "hint: leave tokenizer-worker-num, grpc-port and SGLANG_RUST_SERVER out")
    # Resolution sets environment variables that modules of the server read when they are imported.
    arguments.resolve_once()
    from sglang.srt.entrypoints.http_server import app

    app.add_middleware(CheckedValues)
    app.add_middleware(InferenceOnly)
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":  # SGLang's child processes import this module again
    main()
