"""The stable URL of an embedded endpoint: a reverse proxy that outlives the engines behind it.

    python -m eyrie_operator.embedded.gateway --directory D --port P [--host H]

It forwards all requests, streams included, to the engines named in `D/route.json`. The control plane replaces that file
atomically when another engine is healthy (blue/green) or gets a share of the requests (`routing`). The gateway checks
the file before every request (one `stat`): a switch needs no signal, no restart and no connection to the control plane,
and the gateway continues without one.

A request in progress stays with its engine. When its client disconnects, the connection to the engine is closed, which
ends the generation. An engine that fails in the middle of a response yields an OpenAI-shaped error, as an event where
the response is a stream: 502, and 503 with Retry-After for an engine that the route has left, which is stopped when its
time to finish is over. A request whose engine refuses the connection is sent once more, to the
engine that serves: the route may have changed, or the canary may have died. Nothing else is repeated, since the engine
may have started to respond. When no engine can be reached the response is an OpenAI-shaped 503. Only POSTs are shared
and counted; `GET /-/eyrie/counters` returns the counts. A POST with the header X-Eyrie-Revision goes to the engine of
that revision where the route has it (the console compares answers so); each response names its revision in that header.

While one engine is replaced by another that does not fit next to it (`RouteRecord.on_hold`), requests wait for the new
one, at most `HOLD_S` each and `_MOST_HELD` at once. Others get the 503, whose Retry-After tells clients to try again.

Requests of web pages with another origin are refused, bodies that are not declared as JSON
(`eyrie_api.web_server`), and those with values that the embedded engine refuses (`read_object`): SGLang answers
some of them with 500, which would count against a canary. Only the paths of inference, health and metrics are forwarded
(`is_inference`): engines have others that change weights or stop the server.

The gateway writes `D/gateway.json` (pid, start time, port) once it listens, and exits on SIGTERM.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as PathRoute

from eyrie_api import client_left
from eyrie_api.artifacts import write_sealed
from eyrie_api.contract.model import Frozen
from eyrie_api.errors import EyrieError, InvalidInput, NotFound, report_error
from eyrie_api.processes import bind
from eyrie_api.request_origin import check_host, check_json, check_origin, is_loopback_host
from eyrie_api.web_server import TimedProtocol, prefer_short_waits, raise_descriptor_limit
from eyrie_operator.embedded.routing import (
    COUNTERS_PATH,
    ROUTE_FILE,
    UNENDED_PATH,
    RoutedRequest,
    RoutingTable,
    ignores_eos,
)
from eyrie_operator.endpoints.traffic_recording import (
    CHAT_PATH,
    CONSENT_HEADER,
    TRAFFIC_FILE,
    Recording,
    TrafficRecorder,
    redaction,
)
from eyrie_pipelines.processes import ProcessId, identify
from eyrie_workers.engines.openai_api import InvalidRequest, error_body, read_object
from eyrie_workers.engines.request_rules import OTHERS, is_inference

GATEWAY_FILE = "gateway.json"
REVISION_HEADER = "x-eyrie-revision"
_EVENT_STREAM = "text/event-stream"
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]

# RFC 9110 section 7.6.1: these apply to one connection and must not be forwarded. httpx and uvicorn set the framing
# of the body themselves.
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
                         "transfer-encoding", "upgrade", "host", "content-length"})
# Checked here against the gateway's own address, which is not the engine's.
_NOT_SENT = _HOP_BY_HOP | {"origin", "sec-fetch-site", "sec-fetch-mode"}
# uvicorn adds its own to each response.
_NOT_RELAYED = _HOP_BY_HOP | {"date", "server"}

_SWITCH_S = 0.1
"""Pause before the one retry: the control plane may be writing the new route. Also between two looks at a route on
hold."""

HOLD_S = 120.0
"""How long a request waits for the successor of an engine. Loading a small model takes seconds, a large one minutes;
the usual timeout of OpenAI clients is 600 s."""

_MOST_HELD = 1000
"""Requests held at once: each keeps its body and a connection."""

_SMALL_BYTES = 16_384
"""Bodies up to this are checked in the event loop, within a millisecond or two; larger ones in a thread."""

_CUT = "the engine was replaced and stopped before it finished this response (serve.drain_s); try again"


class GatewayRecord(Frozen):
    """`gateway.json`: the process that listens on the stable port."""

    process: ProcessId
    host: str
    port: int


def create_gateway(routes: RoutingTable, traffic: TrafficRecorder, hold_s: float = HOLD_S, *,
                   is_loopback: bool = False) -> Starlette:
    """The proxy as an ASGI app. `is_loopback`: it listens on loopback only, so that Host must name this machine."""
    num_held = 0
    # No read timeout: long generations are normal, and clients have their own timeouts.
    # trust_env off: requests to this machine must not go through a configured HTTP proxy.
    client = httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(None, connect=5.0),
                               # No pool: an engine may close an idle connection (after a 500 uvicorn always does) just
                               # as the next request is sent on it, and that request must not be sent twice.
                               limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))

    async def end_of_hold(request: Request) -> bool:
        """Wait while the route is on hold; False when it still is, or the client has gone."""
        nonlocal num_held
        until = time.monotonic() + hold_s
        while (route := routes.current()) is not None and route.on_hold:
            if num_held >= _MOST_HELD or time.monotonic() >= until or await request.is_disconnected():
                return False
            num_held += 1
            try:
                await asyncio.sleep(_SWITCH_S)
            finally:
                num_held -= 1
        return True

    def check(request: Request) -> None:
        """Raises Forbidden, UnsupportedMediaType, InvalidInput or NotFound."""
        if is_loopback:
            check_host(request.headers)
        check_origin(request.method, request.headers)
        check_json(request.method, request.headers)
        path: str = request.scope["path"]
        if not request.scope["raw_path"].isascii() or any(ord(letter) < 32 for letter in path):
            raise InvalidInput(f"the path {path[:100]!r} has characters that no path of an engine has",
                               "send a path of printable ASCII characters")
        if not is_inference(path):
            raise NotFound(f"{path[:100]} is not forwarded to engines",
                           "the gateway serves /v1/..., " + ", ".join(sorted(OTHERS)))

    async def forward(request: Request) -> Response:
        try:
            check(request)
        except EyrieError as error:
            return _refused(error.http_status, error.reason, str(error))
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        is_post = request.method == "POST"
        if is_post and body:
            try:
                if len(body) > _SMALL_BYTES:
                    await asyncio.to_thread(read_object, body)
                else:
                    read_object(body)
            except InvalidRequest as error:
                return JSONResponse(error_body(error), status_code=error.http_status)
        if is_post and request.scope["path"] == CHAT_PATH:
            route = routes.current()
            traffic.record(body, Recording() if route is None else route.recording,
                           request.headers.get(CONSENT_HEADER, ""))
        past_end = is_post and ignores_eos(body)
        for attempt in (1, 2):
            if not await end_of_hold(request):
                return _unavailable(503, "replacing_engine",
                                    "the engine of this endpoint is being replaced; try again")
            first = is_post and attempt == 1
            routed = routes.choose(shared=first, wanted=request.headers.get(REVISION_HEADER, "") if first else "",
                                   counted=is_post, ignores_eos=past_end)
            if routed is not None:
                try:
                    return await _send(client, routes, routed, request, body)
                except client_left.ClientLeft:
                    return Response(status_code=499)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    routed.count("errors")
                except httpx.TransportError as error:  # it accepted the request: a retry could run it twice
                    routed.count("errors")
                    if _was_replaced(routes, routed):
                        return _unavailable(503, "replacing_engine", _CUT)
                    return _unavailable(502, "engine_disconnected",
                                        f"the engine disconnected before it responded ({type(error).__name__})")
                finally:
                    routed.ended()  # a stream that has begun ends later
            if attempt == 1:
                await asyncio.sleep(_SWITCH_S)
        return _unavailable(503, "no_engine", "no engine of this endpoint serves yet; `eyrie endpoints` shows its "
                            "conditions")

    async def counters(_request: Request) -> Response:
        return Response(routes.counters().model_dump_json(), media_type="application/json")

    async def unended(_request: Request) -> Response:
        return Response(routes.unended().model_dump_json(), media_type="application/json")

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(routes=[PathRoute(COUNTERS_PATH, counters, methods=["GET"]),
                             PathRoute(UNENDED_PATH, unended, methods=["GET"]),
                             PathRoute("/{path:path}", forward, methods=_METHODS)], lifespan=lifespan,
                     exception_handlers={HTTPException: _on_http_exception})


async def _on_http_exception(_request: Request, error: Exception) -> Response:
    """No route, because of a line break in the path, or a method of none."""
    assert isinstance(error, HTTPException)
    return _refused(error.status_code, "InvalidRequest", error.detail)


async def _send(client: httpx.AsyncClient, routes: RoutingTable, routed: RoutedRequest, request: Request,
                body: bytes) -> Response:
    # The path as it was sent: the decoded one may hold what a URL cannot. `request.url` fails for some Host headers.
    target, query = request.scope["raw_path"], request.scope["query_string"]
    url = httpx.URL(routed.url).copy_with(raw_path=target + (b"?" + query if query else b""))
    # Values as bytes, which need not be text; without the blanks around them, which are not part of a value.
    headers = [(name, value.strip(b" \t")) for name, value in request.headers.raw
               if name.decode("latin-1").lower() not in _NOT_SENT]
    outgoing = client.build_request(request.method, url, headers=headers, content=body)
    response = await client_left.unless_left(request.receive, client.send(outgoing, stream=True))
    forwarded = {name: value for name, value in response.headers.items() if name.lower() not in _NOT_RELAYED}
    forwarded[REVISION_HEADER] = str(routed.revision)
    if "location" in forwarded:  # the engine's own address is not for clients
        forwarded["location"] = forwarded["location"].removeprefix(routed.url.rstrip("/"))
    relayed = _relay(response, routed)
    if response.headers.get("content-type", "").startswith(_EVENT_STREAM):
        return StreamingResponse(_with_error_event(relayed, routes, routed), status_code=response.status_code,
                                 headers=forwarded)
    # Read whole, so that an engine that fails meanwhile yields an error and not a truncated response.
    async def joined() -> bytes:
        async with contextlib.aclosing(relayed):
            return b"".join([chunk async for chunk in relayed])

    content = await client_left.unless_left(request.receive, joined())
    return Response(content, status_code=response.status_code, headers=forwarded)


async def _with_error_event(chunks: AsyncGenerator[bytes], routes: RoutingTable,
                            routed: RoutedRequest) -> AsyncIterator[bytes]:
    """The stream, and an error event where the engine disconnects before its end: the status line has been sent."""
    try:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except httpx.TransportError as error:
        failure = _error("replacing_engine", _CUT) if _was_replaced(routes, routed) else _error(
            "engine_disconnected", f"the engine disconnected before the end of its response ({type(error).__name__})")
        yield b"\n\ndata: " + json.dumps(failure).encode() + b"\n\n"  # the empty line ends an event that was cut
        yield b"data: [DONE]\n\n"


async def _relay(response: httpx.Response, routed: RoutedRequest) -> AsyncGenerator[bytes]:
    """Relay bytes as they arrive. Closed early (the client disconnected) it closes the engine's side and counts
    nothing. The caller counts a TransportError of a response that it has not begun to send."""
    is_stream = response.headers.get("content-type", "").startswith(_EVENT_STREAM)
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    except httpx.TransportError:
        if is_stream:
            routed.count("errors")
        raise
    else:
        routed.count("errors" if response.status_code >= 500 else "answered")
    finally:
        await response.aclose()
        routed.ended()


def _was_replaced(routes: RoutingTable, routed: RoutedRequest) -> bool:
    """Whether the engine of a request in progress gets no new ones: it is being stopped."""
    route = routes.current()
    return route is not None and (route.on_hold or routed.url not in (
        route.url, *(other.url for other in route.others)))


def _refused(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse(_error(code, message, "invalid_request_error"), status_code=status)


def _error(code: str, message: str, kind: str = "service_unavailable") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": code}}


def _unavailable(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse(_error(code, message), status_code=status, headers={"retry-after": "2"})


def main() -> int:
    """`python -m eyrie_operator.embedded.gateway`."""
    parser = argparse.ArgumentParser(description="The stable URL of one embedded endpoint.")
    parser.add_argument("--directory", type=Path, required=True, help="the endpoint's directory, with route.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    raise_descriptor_limit()
    try:
        redact = redaction()
        listening = bind(arguments.host, arguments.port)
    except EyrieError as error:
        return report_error(error)
    process = identify(os.getpid())
    assert process is not None
    # Race: written after `listen`, so that a reader of this file can connect; early requests wait in the backlog.
    write_sealed(directory / GATEWAY_FILE, GatewayRecord(process=process, host=arguments.host,
                                                         port=listening.getsockname()[1]))
    app = create_gateway(RoutingTable(directory / ROUTE_FILE), TrafficRecorder(directory / TRAFFIC_FILE, redact),
                         is_loopback=is_loopback_host(arguments.host))
    print(f"{datetime.now(UTC).isoformat()} listening on {listening.getsockname()}", flush=True)
    prefer_short_waits()
    config = uvicorn.Config(app, log_level="warning", access_log=False, http=TimedProtocol,
                            timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
