"""What every request passes before a route sees it: who asks, what kind of body, how large; and how long it took.

Plain ASGI middleware, because a streamed body has to be counted as it arrives and a live stream must not be buffered.

- A bind that others can reach demands a bearer token on everything but the two probes.
- Without a token (loopback) the Host header must name this machine: otherwise a web page could reach the API of whoever
  reads it, by a DNS name that resolves to 127.0.0.1. For the same reason a body must say that it is JSON.
- Bodies over the limit are refused at the announced length already, or at the byte that passes it.
"""

import hmac
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyrie_api.errors import EyrieError, Forbidden, TooLarge, Unauthorized
from eyrie_api.problems import UnsupportedMediaType, refuse
from eyrie_api.settings import Settings, is_loopback_host

PROBES = ("/healthz", "/readyz")
Observe = Callable[[str, str, int, float], None]
"""(method, route, status, seconds)."""


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


class Guard:
    """Refuses what no route should see."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._limit = app, settings.max_body_bytes
        self._token = settings.required_token()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            await self._app(scope, self._counted(receive), send)
        except EyrieError as error:  # ours, raised before a route began to answer
            await refuse(error, scope["path"])(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if scope["path"] not in PROBES:
            self._check_caller(scope)
        announced = _header(scope, b"content-length")
        if announced.isdigit() and int(announced) > self._limit:
            raise self._too_large(f"{announced} bytes")
        if scope["method"] in ("POST", "PUT", "PATCH") and announced != "0":
            kind = _header(scope, b"content-type").partition(";")[0].strip().lower()
            has_body = bool(announced) or bool(_header(scope, b"transfer-encoding"))
            if has_body and kind != "application/json" and not kind.endswith("+json"):
                raise UnsupportedMediaType(f"content-type {kind or 'is missing'!r}",
                                           "send the body as Content-Type: application/json")

    def _check_caller(self, scope: Scope) -> None:
        if self._token is None:
            host = urlsplit("//" + _header(scope, b"host")).hostname or ""
            if not is_loopback_host(host):
                raise Forbidden(f"Host {host!r} is not this machine, and no token is set",
                                "call it by 127.0.0.1 or localhost, or start it with EYRIE_TOKEN")
            return
        scheme, _, given = _header(scope, b"authorization").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            raise Unauthorized("this server demands a bearer token",
                               "send Authorization: Bearer <token>; it is EYRIE_TOKEN, or lies in <home>/token")

    def _too_large(self, size: str) -> TooLarge:
        return TooLarge(f"the body has {size}, more than the {self._limit} allowed",
                        "send less (data belongs in files the spec names), or raise EYRIE_MAX_BODY_BYTES")

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise self._too_large(f"over {self._limit} bytes")
            return message

        return counted


class Stopwatch:
    """Tells `observe` how long each request took, by route rather than by path."""

    def __init__(self, app: ASGIApp, observe: Observe) -> None:
        self._app, self._observe = app, observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self._observe(scope["method"], route, status, time.perf_counter() - started)
