"""What our HTTP servers share: connections whose request does not arrive are closed, descriptors are kept for health
checks, and pauses are short.

A client that sends its headers or its body too slowly, or nothing at all, holds a connection, and with it a file
descriptor and memory, for as long as it likes; some thousands of them leave none for health checks. uvicorn limits idle
connections alone. `TimedProtocol` is its HTTP protocol with two further limits:

- the headers of a request are complete `HEADER_S` after the connection, or after the first of their bytes;
- a body makes progress: at least `PACE_BYTES` in every `BODY_S`, or it is complete by then.

Answers are not limited: a stream may take as long as it takes. An answer that is sent before the whole body has arrived
(401, 413) is complete for the client at once, and what is left of the body is received and dropped for at most
`LINGER_S`: a system that closes a connection with bytes that nobody has read resets it, and a client that is still
sending then reports a broken connection in place of the answer.

Above `most_connections` a new connection takes the place of the one that has been without a request longest. Where all
have requests, a new one is answered on the paths of health checks alone, elsewhere 503 with Retry-After.
"""

import asyncio
import gc
import resource
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADER_S, BODY_S, PACE_BYTES = 20.0, 60.0, 64 * 1024
LINGER_S, LINGER_IDLE_S = 30.0, 5.0
"""For the rest of a body that is dropped: in all, and without a byte of it."""

_CHECKS = 4
"""Per HEADER_S: what is too slow is closed at most a quarter later."""

HEALTH = ("/healthz", "/readyz", "/health")
"""Paths of health checks: of the API, the operator, and the engines behind the gateway."""

_RESERVED = 128
"""Descriptors for everything but connections: the database, logs, child processes, health checks."""

_MOST_FILES = 65_536
_RETRY_S = 5

_App = Callable[[Any, Any, Any], Awaitable[None]]


def most_connections() -> int:
    """Connections at the same time, from this process's limit of open files: a request that is passed on to an engine
    holds two descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - _RESERVED) // 2)


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to what it may be, within reason: libraries close them one by one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MOST_FILES)), hard))


def _health_checks_alone(app: _App) -> _App:
    body = "too many connections"
    refusal = JSONResponse({"title": "Service Unavailable", "status": 503, "detail": body,
                            "error": {"message": body, "type": "overloaded_error"}},  # OpenAI's clients read this
                           503, {"retry-after": str(_RETRY_S), "connection": "close"}, "application/problem+json")

    async def limited(scope: Any, receive: Any, send: Any) -> None:
        await (app if scope["path"] in HEALTH else refusal)(scope, receive, send)

    return limited


def _receives_the_rest(app: _App) -> _App:
    async def answering(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        # A client that has asked before it sends its body (Expect: 100-continue) does not send it after a refusal.
        has_rest = not any(name == b"expect" for name, _ in scope["headers"])
        is_held = False

        async def received() -> Any:
            nonlocal has_rest
            message = await receive()
            has_rest = has_rest and message.get("more_body", False)
            return message

        async def sent(message: Any) -> None:
            nonlocal is_held
            is_held = has_rest and message["type"] == "http.response.body" and not message.get("more_body", False)
            await send({**message, "more_body": True} if is_held else message)

        await app(scope, received, sent)
        if is_held:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while has_rest:
                        await asyncio.wait_for(received(), LINGER_IDLE_S)
            await send({"type": "http.response.body", "body": b""})

    return answering


_Base: Any = AutoHTTPProtocol  # either of two classes, chosen at import


class TimedProtocol(_Base):  # type: ignore[misc]
    """uvicorn's protocol of one connection; pass it as `uvicorn.Config(http=...)`."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the clock of the headers."""
        super().connection_made(transport)
        self._heard_at = self.loop.time()
        if len(self.connections) > most_connections():
            idle = [other for other in self.connections if other is not self and other._has_no_request()]
            if idle:
                min(idle, key=lambda other: other._heard_at).transport.close()
            else:
                self.app: _App = _health_checks_alone(self.app)
        self.app = _receives_the_rest(self.app)
        self._received = self._counted = 0
        self._begun = True  # of headers that are not complete
        self._waited_s = 0.0
        self._timer = self.loop.call_later(HEADER_S / _CHECKS, self._check)

    def data_received(self, data: bytes) -> None:
        """Count, and notice headers that begin."""
        self._received += len(data)
        self._heard_at = self.loop.time()
        super().data_received(data)
        self._begun = self._has_no_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _has_no_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _check(self) -> None:
        if self.transport.is_closing():
            return
        if self._has_no_request():
            limit, waits = HEADER_S, self._begun  # else it is idle, which uvicorn limits
        else:
            limit, waits = BODY_S, self.cycle.more_body and self._received - self._counted < PACE_BYTES
        if not waits:
            self._waited_s, self._counted = 0.0, self._received
        elif (waited := self._waited_s + HEADER_S / _CHECKS) >= limit:
            self.transport.close()
            return
        else:
            self._waited_s = waited
        self._timer = self.loop.call_later(HEADER_S / _CHECKS, self._check)


def prefer_short_waits() -> None:
    """Reduce the pauses of this process; call it once, when everything is imported and before it serves.

    By default a thread keeps the GIL for 5 ms while others wait, and each full garbage collection takes 100 ms or more
    for the imported modules, none of which is garbage: `gc.freeze` excludes them.
    """
    sys.setswitchinterval(0.001)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
