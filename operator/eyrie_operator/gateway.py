"""The stable URL of an embedded endpoint: a small reverse proxy that outlives the engines behind it.

    python -m eyrie_operator.gateway --directory D --port P [--host H]

It forwards everything, streams included, to the engine named in `D/route.json`, which the control plane replaces
atomically when it has brought up another engine (blue/green). The file is looked at before every request (one `stat`),
so a switch needs no signal, no restart and no connection to the control plane: the gateway serves on when that is gone.

Requests under way stay with the engine that began them. A request that finds its engine's door closed, which happens
when the route moves between reading it and connecting, is sent once more along the new route; nothing else is ever
repeated, since the engine may have begun to answer. When nothing can be reached the answer is an OpenAI-shaped 503.

It says who it is in `D/gateway.json` once it listens (pid, start time, port) and ends on SIGTERM.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as PathRoute

from eyrie_api.artifacts import write_model
from eyrie_api.errors import EyrieError, PortInUse
from eyrie_api.v1alpha1.model import Frozen
from eyrie_pipelines.processes import ProcessName, name_of

ROUTE_FILE = "route.json"
GATEWAY_FILE = "gateway.json"
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]

# RFC 9110 section 7.6.1: these describe one connection and must not be passed on. The length of a streamed body is
# the engine's business; httpx and uvicorn frame it anew.
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
                         "transfer-encoding", "upgrade", "host", "content-length"})

_SWITCH_S = 0.1
"""Pause before the one repetition: the control plane is just moving the route."""


class RouteRecord(Frozen):
    """`route.json`: where requests go."""

    revision: int
    url: str
    """The engine's base URL, without `/v1`."""

    since: datetime


class GatewayRecord(Frozen):
    """`gateway.json`: who listens on the stable port."""

    process: ProcessName
    host: str
    port: int


class Routes:
    """The routing file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._record: RouteRecord | None = None

    def current(self) -> RouteRecord | None:
        """Where requests go now; None before the first engine."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            self._seen, self._record = None, None
            return None
        # The inode is new with every atomic replacement, even within one tick of the file system's clock.
        stamp = (stat.st_ino, stat.st_mtime_ns)
        if stamp != self._seen:
            with contextlib.suppress(FileNotFoundError):
                self._record = RouteRecord.model_validate_json(self._path.read_text())
                self._seen = stamp
        return self._record


def create_gateway(routes: Routes) -> Starlette:
    """The proxy as an ASGI app."""
    # No read timeout: a long answer is not a fault, and the client's own patience is the limit.
    # trust_env off: a proxy configured for the internet must not come between us and our own machine.
    client = httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(None, connect=5.0),
                               limits=httpx.Limits(max_connections=None))

    async def forward(request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        for attempt in (1, 2):
            route = routes.current()
            if route is not None:
                try:
                    return await _send(client, route, request, body)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    pass
            if attempt == 1:
                await asyncio.sleep(_SWITCH_S)
        return _unavailable()

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(routes=[PathRoute("/{path:path}", forward, methods=_METHODS)], lifespan=lifespan)


async def _send(client: httpx.AsyncClient, route: RouteRecord, request: Request, body: bytes) -> Response:
    url = route.url.rstrip("/") + request.url.path
    if request.url.query:
        url += f"?{request.url.query}"
    headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP]
    outgoing = client.build_request(request.method, url, headers=headers, content=body)
    answer = await client.send(outgoing, stream=True)
    kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
    kept["x-eyrie-revision"] = str(route.revision)
    return StreamingResponse(_relay(answer), status_code=answer.status_code, headers=kept)


async def _relay(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Bytes as they come; closing it early (the client went away) closes the engine's side too."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


def _unavailable() -> JSONResponse:
    message = "no engine is serving behind this endpoint yet; see `eyrie endpoints` for what it is waiting for"
    return JSONResponse({"error": {"message": message, "type": "service_unavailable", "code": "no_engine"}},
                        status_code=503, headers={"retry-after": "2"})


def bind(host: str, port: int, setting: str = "serve.port") -> socket.socket:
    """A listening socket on that port; `setting` is what the user would change. Raises PortInUse."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(256)
    except OSError as error:
        sock.close()
        raise PortInUse(f"port {port} on {host} cannot be used: {os.strerror(error.errno or 0)}",
                        f"stop what listens there, or choose another {setting} than {port}") from error
    return sock


def main() -> int:
    """`python -m eyrie_operator.gateway`."""
    parser = argparse.ArgumentParser(description="The stable URL of one embedded endpoint.")
    parser.add_argument("--directory", type=Path, required=True, help="the endpoint's directory, with route.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    try:
        listening = bind(arguments.host, arguments.port)
    except EyrieError as error:
        print(json.dumps({"reason": error.reason, "message": error.message, "mend": error.mend}), file=sys.stderr)
        return error.exit_code
    process = name_of(os.getpid())
    assert process is not None
    # The socket listens already, so whoever reads this may connect: early requests wait in its queue.
    write_model(directory / GATEWAY_FILE, GatewayRecord(process=process, host=arguments.host,
                                                        port=listening.getsockname()[1]))
    app = create_gateway(Routes(directory / ROUTE_FILE))
    print(f"{datetime.now(UTC).isoformat()} listening on {listening.getsockname()}", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
