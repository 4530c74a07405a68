"""Middleware in front of every route: authentication, project scope, rate limits, body checks, audit, timing.

Plain ASGI, because a streamed body has to be counted as it arrives and a live stream must not be buffered.

- The authenticated caller and the project become the request's `Scope` (`scope["state"]["access"]`), which filters the
  rows that routes see. A bind that other machines can reach requires a token on everything but the two probes and the
  console's script and style. Reading is allowed to the console's cookie as well, and a change to the cookie with a
  page's proof in a header, both from this origin alone, so that no other web page can change anything by it; a browser
  without a cookie gets the page that asks for a key. What gives access that outlasts a session (`_RECENT_VERBS`) takes
  a recent sign-in.
- Without a token (loopback) requests of web pages are refused (`eyrie_api.web_server`): by Host, Origin and
  Sec-Fetch-Site. A body must be declared as JSON everywhere.
- A caller or project over its rate limit gets 429 with Retry-After.
- A body over the limit is refused by its Content-Length, or at the byte that exceeds the limit.
- A refused change is written to the audit log here, before it is answered: while that row cannot be written, the answer
  is 503. A change that was made is written in its own transaction.
- An open stream authenticates its caller again every `_REAUTHENTICATE_S` seconds, and ends when access was revoked.
"""

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote_to_bytes

from anyio import to_thread
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as Request

from eyrie_api.access.browser_sign_in import CHANGE_HEADER, COOKIE, RECENT_S
from eyrie_api.access.limits import Buckets, LocalBuckets, SharedBuckets, require
from eyrie_api.access.roles import ALL_PROJECTS, Principal
from eyrie_api.access.scope import Scope
from eyrie_api.database.audit import Audit
from eyrie_api.errors import EyrieError, InvalidInput, NotFound, TooLarge, Unauthorized
from eyrie_api.http.authentication import LOCAL, Authenticator
from eyrie_api.http.console import pages
from eyrie_api.http.problems import DATABASE_ERRORS, database_unavailable, is_invalid_statement, refuse
from eyrie_api.request_origin import check_host, check_json, check_origin
from eyrie_api.settings import Settings

log = logging.getLogger(__name__)

PROBES = ("/healthz", "/readyz")
MUTATING = ("POST", "PUT", "PATCH", "DELETE")
ANONYMOUS = Principal(subject="nobody", roles={})
Observe = Callable[[str, str, int, float], None]
"""(method, route, status, seconds)."""

_RECENT_VERBS = ("key.create", "key.rotate", "member.add")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_REAUTHENTICATE_S = 5.0
_MAX_QUERY_BYTES, _MAX_PARAMETERS = 8192, 64
_AUDIT_ANONYMOUS_EVERY_S = 1.0
"""Refused changes of unauthenticated callers are audited at most once in this time: anyone could fill the table."""


def _bearer(request: Request) -> str:
    """The bearer token; empty without one."""
    scheme, _, token = Headers(scope=request).get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _check_target(request: Request) -> None:
    """Refuse a NUL in path or query, since PostgreSQL has no such text and no file such a name, and queries that cost
    more to parse than any answer is worth. Raises InvalidInput."""
    query = request["query_string"]
    if len(query) > _MAX_QUERY_BYTES or query.count(b"&") >= _MAX_PARAMETERS:
        raise InvalidInput(f"the query has {len(query)} bytes and {query.count(b'&') + 1} parameters, above "
                           f"{_MAX_QUERY_BYTES} or {_MAX_PARAMETERS}", "ask with fewer filters")
    if "\0" in request["path"] or b"\0" in unquote_to_bytes(request["query_string"]):
        raise InvalidInput("the path or the query has a NUL character (%00)",
                           "no id, name or value has one: leave it out")


_IMPOSSIBLE = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
_TEXT_THEN_IMPOSSIBLE = re.compile(
    rb"(?:[^\\]++|\\(?:[^u]|u[dD][89abAB]..\\u[dD][c-fC-F]..|u(?!0000|[dD][89a-fA-F])))*+\\u", re.DOTALL)


def check_text(body: bytes | bytearray) -> None:
    """Raises InvalidInput for a body with text that no database, file name or answer can hold: bytes that are not
    UTF-8, half of a surrogate pair, a NUL. JSON may have them, so each route would have to refuse them by itself."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"the body is not UTF-8 (byte {error.start})", "send JSON in UTF-8") from None
    # Most bodies end here. The second pattern passes over whole pairs, and over backslashes that are escaped.
    if _IMPOSSIBLE.search(body) and (match := _TEXT_THEN_IMPOSSIBLE.match(body)):
        escape = body[match.end() - 2:match.end() + 4].decode(errors="replace")
        raise InvalidInput(f"the body has the character {escape} at {_pointer(body) or f'byte {match.end() - 2}'}",
                           "leave out NUL characters and halves of surrogate pairs")


def _pointer(body: bytes | bytearray) -> str:
    """JSON pointer of a string in the body that `check_text` refuses; empty where the body is not JSON."""
    try:
        open_values: list[tuple[str, Any]] = [("", json.loads(body))]
    except (ValueError, RecursionError):
        return ""
    while open_values:
        pointer, value = open_values.pop()
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            return pointer
        if isinstance(value, dict):
            open_values += [(f"{pointer}/{ascii(name)[1:-1]}", part)
                            for name, member in value.items() for part in (name, member)]
        elif isinstance(value, list):
            open_values += [(f"{pointer}/{number}", part) for number, part in enumerate(value)]
    return ""


class AccessMiddleware:
    """Authenticates requests, refuses invalid ones, and passes the others on with their scope."""

    def __init__(self, app: ASGIApp, settings: Settings, authenticator: Authenticator, audit: Audit) -> None:
        self._app, self._settings = app, settings
        self._authenticator, self._audit = authenticator, audit
        shared = settings.broker_url.startswith("redis")
        self._buckets: Buckets = SharedBuckets(settings.broker_url) if shared else LocalBuckets()
        self._anonymous_audited_until = 0.0

    async def __call__(self, request: Request, receive: Receive, send: Send) -> None:
        if request["type"] != "http":
            await self._app(request, receive, send)
            return
        request_id, cookies = Headers(scope=request).get("x-request-id", ""), list[bytes]()
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(8)
        access: Scope | None = None
        is_replaced = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_replaced
            if is_replaced:
                return
            if message["type"] == "http.response.start":
                if request["method"] in MUTATING and 400 <= message["status"] < 500:
                    # Before the answer. After it, the row would wait for SQLite's lock behind the caller's next
                    # changes, and be lost when it waits too long or the process ends.
                    unaudited = await self._audit_refusal(request, access, message["status"], request_id)
                    if unaudited is not None:
                        await refuse(unaudited, request["path"])(request, receive, send_with_id)
                        is_replaced = True
                        return
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode()),
                                                  *((b"set-cookie", cookie) for cookie in cookies)]}
            await send(message)

        try:
            access = Scope(await self._caller(request), request_id=request_id)
            cookies += await self._renewal(request)
            _check_target(request)
            access = await self._narrowed(request, access)
            await self._limit(access)
            self._check_recent(request)
            request.setdefault("state", {})["access"] = access
            length, most = Headers(scope=request).get("content-length", ""), self._settings.max_body_bytes
            if length.isdigit() and int(length) > most:
                raise _too_large(f"{length} bytes", most)
            check_json(request["method"], Headers(scope=request))
            ended = asyncio.Event()
            await self._app(request, self._counted(request, receive, ended),
                            self._while_authorised(request, access, send_with_id, ended))
        except EyrieError as error:  # raised before a route began its response
            await self._refusal(request, error)(request, receive, send_with_id)
        except DATABASE_ERRORS as error:  # of the queries above: the app answers its own
            if is_invalid_statement(error):
                raise
            unavailable = database_unavailable(error, request["method"], request["path"])
            await self._refusal(request, unavailable)(request, receive, send_with_id)

    def _refusal(self, request: Request, error: EyrieError) -> Response:
        """The problem, or what a browser shows of it: that a page asks to sign in."""
        asks = isinstance(error, Unauthorized) and pages.is_asked_for(request["method"], Headers(scope=request),
                                                                     request["path"])
        if asks:
            sign_in = self._authenticator.sign_in
            return pages.sign_in_page(None if sign_in is None else sign_in.issuer.url, request["path"])
        return pages.for_a_browser(HttpRequest(request), refuse(error, request["path"]))

    async def _caller(self, request: Request) -> Principal:
        """The authenticated caller. Raises Unauthorized, or Forbidden for a request of a web page."""
        is_open = request["path"].startswith(pages.STATIC_PATH) or request["path"] in (
            pages.SIGN_IN_START, pages.SIGN_IN_END)
        if request["path"] in PROBES or (is_open and request["method"] in ("GET", "HEAD")):
            return ANONYMOUS
        if not self._authenticator.requires_token:
            headers = Headers(scope=request)
            check_host(headers)
            check_origin(request["method"], headers)
        token = _bearer(request)
        cookie = self._session(request)
        if cookie and not token:
            check_origin(request["method"], Headers(scope=request))
            if request["method"] in MUTATING:
                change = Headers(scope=request).get(CHANGE_HEADER, "")
                return await to_thread.run_sync(self._authenticator.authenticate_change, cookie, change)
            known = self._authenticator.cached_session(cookie)
            if known is None:
                known = await to_thread.run_sync(self._authenticator.authenticate_session, cookie)
            return known
        cached = self._authenticator.cached(token)
        return cached if cached is not None else await to_thread.run_sync(self._authenticator.authenticate, token)

    def _check_recent(self, request: Request) -> None:
        """Raises Unauthorized where a change takes a session that has signed in recently."""
        if request["method"] not in MUTATING or _bearer(request):
            return
        cookie = self._session(request)
        if cookie and _verb(request) in _RECENT_VERBS and not self._authenticator.signed_in_recently(cookie):
            raise Unauthorized(f"{_verb(request)} takes a sign-in within the last {RECENT_S // 60} minutes",
                               "sign out, sign in again, and repeat it")

    def _session(self, request: Request) -> str:
        """The console's cookie, where it is accepted."""
        reads = request["method"] in ("GET", "HEAD")
        if not self._authenticator.requires_token or not (reads or Headers(scope=request).get(CHANGE_HEADER)):
            return ""
        if request["path"] == pages.SIGN_IN:  # takes the credential: a session would sign in again by itself
            return ""
        return cookie_parser(Headers(scope=request).get("cookie", "")).get(COOKIE, "")

    async def _renewal(self, request: Request) -> list[bytes]:
        """The Set-Cookie header of a session that is old enough to be replaced."""
        cookie = self._session(request)
        if not cookie or Headers(scope=request).get("authorization") or request["path"] == pages.SIGN_OUT:
            return []
        new = await to_thread.run_sync(self._authenticator.renewed, cookie)
        return [] if new is None else [pages.set_cookie(new, Headers(scope=request), request["scheme"])]

    async def _narrowed(self, request: Request, access: Scope) -> Scope:
        """The scope, narrowed to the project that the request names. Raises NotFound for one without a role there."""
        name = Headers(scope=request).get("eyrie-project", "")
        if not name and b"project=" in request["query_string"]:
            name = parse_qs(request["query_string"].decode("latin-1")).get("project", [""])[0]
        if not name:
            return access
        assert access.principal is not None
        has_role = bool({name, ALL_PROJECTS} & access.principal.roles.keys())
        exists = (name in self._authenticator.known_projects  # a project is never deleted
                  or await to_thread.run_sync(self._authenticator.has_project, name))
        if not (has_role and exists):
            raise NotFound(f"no project {name!r}", "list the projects you are in")
        return Scope(access.principal, name, access.request_id)

    async def _limit(self, access: Scope) -> None:
        """Raises RateLimited. Loopback requests without a token are not limited."""
        principal = access.principal
        if principal is None or principal is ANONYMOUS or principal is LOCAL:
            return
        per_minute = self._settings.rate_limit_per_minute
        require(await self._buckets.take(principal.subject, per_minute), principal.subject, per_minute)
        project = access.project or (next(iter(principal.roles)) if len(principal.roles) == 1 else ALL_PROJECTS)
        if project == ALL_PROJECTS:
            return
        cached = self._authenticator.cached_limit(project)
        limit = cached[0] if cached is not None else await to_thread.run_sync(self._authenticator.limit, project)
        if limit is not None:
            bucket = f"project {project!r}"
            require(await self._buckets.take(bucket, limit), bucket, limit)

    def _counted(self, request: Request, receive: Receive, ended: asyncio.Event) -> Receive:
        received, complete, most = bytearray(), False, self._settings.max_body_bytes

        async def counted() -> Message:
            nonlocal received, complete
            if complete:  # the only message left is the disconnect
                return await _first(receive, ended)
            message = await receive()
            complete = not message.get("more_body", False)
            received += message.get("body", b"")
            if len(received) > most:
                raise _too_large(f"over {most} bytes", most)
            if complete:
                check_text(received)
            return message

        return counted

    def _while_authorised(self, request: Request, access: Scope, send: Send, ended: asyncio.Event) -> Send:
        """Sends while the caller is authorised. After that the response is ended in order, and `ended` makes `receive`
        report a disconnect to the route."""
        checked_at = time.monotonic()

        async def send_if_authorised(message: Message) -> None:
            nonlocal checked_at
            if ended.is_set():
                return
            if message["type"] == "http.response.body" and time.monotonic() - checked_at > _REAUTHENTICATE_S:
                checked_at = time.monotonic()
                try:
                    is_authorised = await self._caller(request) == access.principal
                except (Unauthorized, *DATABASE_ERRORS):  # the client connects again, once the database is back
                    is_authorised = False
                if not is_authorised:
                    ended.set()
                    message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        return send_if_authorised

    async def _audit_refusal(self, request: Request, access: Scope | None, status: int,
                             request_id: str) -> EyrieError | None:
        """Write the row of a refused change. Returns what to answer instead when it cannot be written; of callers who
        are not authenticated the rows are a sample, so that their answer does not depend on it."""
        principal = ANONYMOUS if access is None or access.principal is None else access.principal
        if principal is ANONYMOUS:
            if time.monotonic() < self._anonymous_audited_until:
                return None
            self._anonymous_audited_until = time.monotonic() + _AUDIT_ANONYMOUS_EVERY_S
        verb, path = _verb(request), request["path"].replace("\0", "%00")
        try:
            await to_thread.run_sync(self._audit.refused, principal.subject, verb, path,
                                     None if access is None else access.project, status, request_id)
        except SQLAlchemyError as error:
            if principal is not ANONYMOUS:
                return database_unavailable(error, str(request["method"]), path)
            log.warning("refused %s of a caller without a valid token is not audited: %s", verb, error)
        return None


def _too_large(size: str, most: int) -> TooLarge:
    return TooLarge(f"the body has {size}, more than the {most} allowed",
                    "send less (data belongs in files that the spec names), or raise EYRIE_MAX_BODY_BYTES")


def _verb(request: Request) -> str:
    """The name of the requested route, also when the request was refused before it."""
    routes = request["app"].state.routes
    return next((str(route.name) for route in routes if route.matches(request)[0] is Match.FULL), request["method"])


async def _first(receive: Receive, ended: asyncio.Event) -> Message:
    """The next message, or a disconnect once `ended` is set, whichever is first."""
    message, end = asyncio.ensure_future(receive()), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait((message, end), return_when=asyncio.FIRST_COMPLETED)
        return message.result() if message.done() else {"type": "http.disconnect"}
    finally:
        message.cancel()
        end.cancel()


class RequestTimer:
    """Reports the duration of each request to `observe`, by route rather than by path."""

    def __init__(self, app: ASGIApp, observe: Observe) -> None:
        self._app, self._observe = app, observe

    async def __call__(self, request: Request, receive: Receive, send: Send) -> None:
        if request["type"] != "http":
            await self._app(request, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(request, receive, record_status)
        finally:
            route = getattr(request.get("route"), "path", "unmatched")
            self._observe(request["method"], route, status, time.perf_counter() - started)
