"""What every request passes before a route sees it: who asks, what kind of body, how large; and how long it took.

Plain ASGI middleware, because a streamed body has to be counted as it arrives and a live stream must not be buffered.

- Who asks, and in which project, becomes the request's `Scope` (`scope["state"]["access"]`), by which routes see rows.
  A bind that others can reach demands proof of it on everything but the two probes.
- Where no proof is demanded (loopback) the Host header must name this machine: otherwise a web page could reach the API
  of whoever reads it, by a DNS name that resolves to 127.0.0.1. For the same reason a body must say that it is JSON.
- A caller or a project that makes too many requests is told to wait (429, Retry-After).
- Bodies over the limit are refused at the announced length already, or at the byte that passes it.
- A change that was refused goes into the audit; one that was made is written there by whoever made it.
- A stream held open asks again, as it sends, whether its reader is still let in.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from anyio import to_thread
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Request

from eyrie_api.access.limits import buckets_of, require
from eyrie_api.access.roles import ALL_PROJECTS, Principal
from eyrie_api.access.scope import Scope
from eyrie_api.database.audit import Audit
from eyrie_api.errors import EyrieError, Forbidden, NotFound, TooLarge, Unauthorized
from eyrie_api.http.authentication import LOCAL, Callers
from eyrie_api.http.problems import UnsupportedMediaType, refuse
from eyrie_api.settings import Settings, is_loopback_host

PROBES = ("/healthz", "/readyz")
MUTATING = ("POST", "PUT", "PATCH", "DELETE")
NOBODY = Principal(subject="nobody", roles={})
Observe = Callable[[str, str, int, float], None]
"""(method, route, status, seconds)."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_STREAM_ASKS_AGAIN_S = 5.0
_NOBODY_EVERY_S = 1.0
"""Refused changes of callers who proved nothing are audited at most so often: anybody could fill the table."""


def _header(request: Request, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in request["headers"] if key == name), "")


class Guard:
    """Refuses what no route should see, and says to the others who asks."""

    def __init__(self, app: ASGIApp, settings: Settings, callers: Callers, audit: Audit) -> None:
        self._app, self._settings = app, settings
        self._callers, self._audit, self._buckets = callers, audit, buckets_of(settings)
        self._nobody_until = 0.0

    async def __call__(self, request: Request, receive: Receive, send: Send) -> None:
        if request["type"] != "http":
            await self._app(request, receive, send)
            return
        request_id = _header(request, b"x-request-id")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(8)
        access: Scope | None = None
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            access = Scope(await self._caller(request), request_id=request_id)
            access = await self._narrowed(request, access)
            await self._limit(access)
            request.setdefault("state", {})["access"] = access
            self._check_body(request)
            ended = asyncio.Event()
            await self._app(request, self._counted(receive, ended), self._watched(request, access, noted, ended))
        except EyrieError as error:  # ours, raised before a route began to answer
            await refuse(error, request["path"])(request, receive, noted)
        if request["method"] in MUTATING and 400 <= status < 500:
            await self._audit_refusal(request, access, status, request_id)

    async def _caller(self, request: Request) -> Principal:
        """Raises Unauthorized, or Forbidden for a request that was meant for another host."""
        if request["path"] in PROBES:
            return NOBODY
        if not self._callers.demands_proof:
            host = urlsplit("//" + _header(request, b"host")).hostname or ""
            if not is_loopback_host(host):
                raise Forbidden(f"Host {host!r} is not this machine, and no token is set",
                                "call it by 127.0.0.1 or localhost, or start it with EYRIE_TOKEN")
        scheme, _, given = _header(request, b"authorization").partition(" ")
        shown = given.strip() if scheme.lower() == "bearer" else ""
        known = self._callers.remembered(shown)
        return known if known is not None else await to_thread.run_sync(self._callers.identify, shown)

    async def _narrowed(self, request: Request, access: Scope) -> Scope:
        """The scope, held to the project that the request names. Raises NotFound for one the caller is not in."""
        name = _header(request, b"eyrie-project")
        if not name and b"project=" in request["query_string"]:
            name = parse_qs(request["query_string"].decode("latin-1")).get("project", [""])[0]
        if not name:
            return access
        assert access.principal is not None
        mine = bool({name, ALL_PROJECTS} & access.principal.roles.keys())
        there = self._callers.is_known_project(name) or await to_thread.run_sync(self._callers.has_project, name)
        if not (mine and there):
            raise NotFound(f"no project {name!r}", "list the projects you are in")
        return Scope(access.principal, name, access.request_id)

    async def _limit(self, access: Scope) -> None:
        """Raises RateLimited. Who needs no proof on this machine needs no limit either."""
        principal = access.principal
        if principal is None or principal is NOBODY or principal is LOCAL:
            return
        most = self._settings.rate_limit_per_minute
        require(await self._buckets.take(principal.subject, most), principal.subject, most)
        project = access.project or (next(iter(principal.roles)) if len(principal.roles) == 1 else ALL_PROJECTS)
        if project == ALL_PROJECTS:
            return
        known = self._callers.known_limit(project)
        limit = known[0] if known is not None else await to_thread.run_sync(self._callers.limit, project)
        if limit is not None:
            whose = f"project {project!r}"
            require(await self._buckets.take(whose, limit), whose, limit)

    def _check_body(self, request: Request) -> None:
        announced = _header(request, b"content-length")
        if announced.isdigit() and int(announced) > self._settings.max_body_bytes:
            raise self._too_large(f"{announced} bytes")
        if request["method"] in ("POST", "PUT", "PATCH") and announced != "0":
            kind = _header(request, b"content-type").partition(";")[0].strip().lower()
            has_body = bool(announced) or bool(_header(request, b"transfer-encoding"))
            if has_body and kind != "application/json" and not kind.endswith("+json"):
                raise UnsupportedMediaType(f"content-type {kind or 'is missing'!r}",
                                           "send the body as Content-Type: application/json")

    def _too_large(self, size: str) -> TooLarge:
        return TooLarge(f"the body has {size}, more than the {self._settings.max_body_bytes} allowed",
                        "send less (data belongs in files the spec names), or raise EYRIE_MAX_BODY_BYTES")

    def _counted(self, receive: Receive, ended: asyncio.Event) -> Receive:
        seen, whole = 0, False

        async def counted() -> Message:
            nonlocal seen, whole
            if whole:  # what is still waited for is the end of the connection
                return await _first(receive, ended)
            message = await receive()
            whole = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > self._settings.max_body_bytes:
                raise self._too_large(f"over {self._settings.max_body_bytes} bytes")
            return message

        return counted

    def _watched(self, request: Request, access: Scope, send: Send, ended: asyncio.Event) -> Send:
        """Sends as long as the caller is let in. A stream of one who no longer is, ends in order, and its route is told
        that the reader has gone."""
        asked_at = time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal asked_at
            if ended.is_set():
                return
            if message["type"] == "http.response.body" and time.monotonic() - asked_at > _STREAM_ASKS_AGAIN_S:
                asked_at = time.monotonic()
                if not await self._is_still(request, access):
                    ended.set()
                    message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        return watched

    async def _is_still(self, request: Request, access: Scope) -> bool:
        """Whether the caller is who it was, and may what it might."""
        try:
            return await self._caller(request) == access.principal
        except Unauthorized:
            return False

    async def _audit_refusal(self, request: Request, access: Scope | None, status: int, request_id: str) -> None:
        principal = NOBODY if access is None or access.principal is None else access.principal
        if principal is NOBODY:
            if time.monotonic() < self._nobody_until:
                return
            self._nobody_until = time.monotonic() + _NOBODY_EVERY_S
        project = None if access is None else access.project
        verb = _verb(request)
        await to_thread.run_sync(self._audit.refused, principal.subject, verb, request["path"], project, status,
                                 request_id)


def _verb(request: Request) -> str:
    """The name of the route that was asked for, reached or not."""
    routes = request["app"].state.routes
    return next((str(one.name) for one in routes if one.matches(request)[0] is Match.FULL), str(request["method"]))


async def _first(receive: Receive, ended: asyncio.Event) -> Message:
    """What comes, or that the reader has gone, whichever is first."""
    coming, end = asyncio.ensure_future(receive()), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait((coming, end), return_when=asyncio.FIRST_COMPLETED)
        return coming.result() if coming.done() else {"type": "http.disconnect"}
    finally:
        coming.cancel()
        end.cancel()


class Stopwatch:
    """Tells `observe` how long each request took, by route rather than by path."""

    def __init__(self, app: ASGIApp, observe: Observe) -> None:
        self._app, self._observe = app, observe

    async def __call__(self, request: Request, receive: Receive, send: Send) -> None:
        if request["type"] != "http":
            await self._app(request, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(request, receive, noted)
        finally:
            route = getattr(request.get("route"), "path", "unmatched")
            self._observe(request["method"], route, status, time.perf_counter() - started)
