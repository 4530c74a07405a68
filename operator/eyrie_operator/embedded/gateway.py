"""The stable URL of an embedded endpoint: a small reverse proxy that outlives the engines behind it.

    python -m eyrie_operator.embedded.gateway --directory D --port P [--host H]

It forwards everything, streams included, to the engines named in `D/route.json`, which the control plane replaces
atomically when it has brought up another engine (blue/green) or gives it a share of the requests (`routing`). The file
is looked at before every request (one `stat`), so a switch needs no signal, no restart and no connection to the control
plane: the gateway serves on when that is gone.

Requests under way stay with the engine that began them. A request that finds its engine's door closed is sent once more
to the engine that serves now: the route may just have moved, or an engine on trial may have died, which no user should
notice. Nothing else is ever repeated, since the engine may have begun to answer. When nothing can be reached the answer
is an OpenAI-shaped 503. Only POSTs are shared out and counted; `GET /-/eyrie/counters` tells the counts.

It says who it is in `D/gateway.json` once it listens (pid, start time, port) and ends on SIGTERM.
"""

import argparse
import asyncio
import contextlib
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
from eyrie_api.program_exit import report_error
from eyrie_api.v1alpha1.model import Frozen
from eyrie_operator.embedded.routing import COUNTERS_PATH, ROUTE_FILE, RoutedRequest, Routes
from eyrie_operator.endpoints.traffic_recording import CHAT_PATH, TRAFFIC_FILE, Traffic
from eyrie_pipelines.processes import ProcessId, identify

GATEWAY_FILE = "gateway.json"
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]

# RFC 9110 section 7.6.1: these describe one connection and must not be passed on. The length of a streamed body is
# the engine's business; httpx and uvicorn frame it anew.
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
                         "transfer-encoding", "upgrade", "host", "content-length"})

_SWITCH_S = 0.1
"""Pause before the one repetition: the control plane is just moving the route."""


class GatewayRecord(Frozen):
    """`gateway.json`: who listens on the stable port."""

    process: ProcessId
    host: str
    port: int


def create_gateway(routes: Routes, traffic: Traffic) -> Starlette:
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
        asks = request.method == "POST"
        if asks and request.url.path == CHAT_PATH:
            route = routes.current()
            traffic.keep(body, 0 if route is None else route.record_prompts)
        for attempt in (1, 2):
            lot = routes.draw(shared=asks and attempt == 1)
            if lot is not None:
                try:
                    return await _send(client, lot, request, body, counts=asks)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    if asks:
                        lot.failed()
                except httpx.TransportError as error:  # it took the request and died: nobody may ask again
                    if asks:
                        lot.failed()
                    return _unavailable(502, "engine_broke_off",
                                        f"the engine broke off before it answered ({type(error).__name__})")
            if attempt == 1:
                await asyncio.sleep(_SWITCH_S)
        return _unavailable(503, "no_engine", "no engine is serving behind this endpoint yet; see `eyrie endpoints` "
                            "for what it is waiting for")

    async def counters(_request: Request) -> Response:
        return Response(routes.counters().model_dump_json(), media_type="application/json")

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(routes=[PathRoute(COUNTERS_PATH, counters, methods=["GET"]),
                             PathRoute("/{path:path}", forward, methods=_METHODS)], lifespan=lifespan)


async def _send(client: httpx.AsyncClient, lot: RoutedRequest, request: Request, body: bytes, *,
                counts: bool) -> Response:
    url = lot.url.rstrip("/") + request.url.path
    if request.url.query:
        url += f"?{request.url.query}"
    headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP]
    outgoing = client.build_request(request.method, url, headers=headers, content=body)
    answer = await client.send(outgoing, stream=True)
    kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
    kept["x-eyrie-revision"] = str(lot.revision)
    return StreamingResponse(_relay(answer, lot if counts else None), status_code=answer.status_code, headers=kept)


async def _relay(answer: httpx.Response, lot: RoutedRequest | None) -> AsyncIterator[bytes]:
    """Bytes as they come; closing it early (the client went away) closes the engine's side too and counts nothing."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    except httpx.TransportError:
        if lot is not None:
            lot.failed()
        raise
    else:
        if lot is not None:
            (lot.failed if answer.status_code >= 500 else lot.answered)()
    finally:
        await answer.aclose()


def _unavailable(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "service_unavailable", "code": code}},
                        status_code=status, headers={"retry-after": "2"})


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
    """`python -m eyrie_operator.embedded.gateway`."""
    parser = argparse.ArgumentParser(description="The stable URL of one embedded endpoint.")
    parser.add_argument("--directory", type=Path, required=True, help="the endpoint's directory, with route.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    try:
        listening = bind(arguments.host, arguments.port)
    except EyrieError as error:
        return report_error(error)
    process = identify(os.getpid())
    assert process is not None
    # The socket listens already, so whoever reads this may connect: early requests wait in its queue.
    write_model(directory / GATEWAY_FILE, GatewayRecord(process=process, host=arguments.host,
                                                        port=listening.getsockname()[1]))
    app = create_gateway(Routes(directory / ROUTE_FILE), Traffic(directory / TRAFFIC_FILE))
    print(f"{datetime.now(UTC).isoformat()} listening on {listening.getsockname()}", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
