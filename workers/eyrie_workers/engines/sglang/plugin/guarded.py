"""`python -m eyrie_workers.engines.sglang.plugin.guarded`: SGLang's launcher, whose server answers inference alone.

The HTTP server of SGLang also changes weights, flushes caches, ends other clients' requests and shows its whole
configuration. `--admin-api-key` does not prevent it: `/server_info`, which needs no such key, shows that key (0.5.23).
In a cluster all clients of an endpoint reach the port of its pods through the Service, so pods are started by this
module: it takes the flags of `sglang.launch_server` and does what that does, with a filter of paths (`paths`) in front
of the application. Where it cannot put the filter, the server does not start.
"""

import json
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from eyrie_workers.engines.sglang.plugin.paths import is_inference

_Message = MutableMapping[str, Any]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[Any, Any, _Send], Awaitable[None]]


class InferenceOnly:
    """ASGI middleware: 404 for requests to other paths, WebSockets to them are closed."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: _Send) -> None:
        """Answer one connection."""
        if scope["type"] not in ("http", "websocket") or is_inference(scope["path"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps({"error": {"message": "this endpoint serves inference alone", "code": "not_found",
                                         "type": "invalid_request_error"}}).encode()
            await send({"type": "http.response.start", "status": 404, "headers": [
                (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]})
            await send({"type": "http.response.body", "body": body})


def main() -> None:
    """Serve until SIGTERM, with the flags of SGLang's own launcher."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    arguments = prepare_server_args(sys.argv[1:])
    if arguments.tokenizer_worker_num != 1 or arguments.grpc_port is not None or os.environ.get("SGLANG_RUST_SERVER"):
        sys.exit("error: several tokenizer processes, gRPC and SGLang's Rust server have no filter of paths\n"
                 "hint: leave tokenizer-worker-num, grpc-port and SGLANG_RUST_SERVER out")
    # Resolution sets environment variables that modules of the server read when they are imported.
    arguments.resolve_once()
    from sglang.srt.entrypoints.http_server import app

    app.add_middleware(InferenceOnly)
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":  # SGLang's child processes import this module again
    main()
