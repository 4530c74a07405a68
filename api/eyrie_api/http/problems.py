"""Error responses as RFC 9457 problem documents (application/problem+json), each with a hint.

`type` is `urn:eyrie:problem:<Reason>`, with the reason of the EyrieError, so that the client raises the same class.
Validation errors carry, per field, a JSON pointer into the body (or the parameter's name), the offending value, and the
rule. Unknown routes, wrong methods and internal errors have the same form.
"""

import json
import logging
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DataError, InterfaceError, OperationalError, TimeoutError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from eyrie_api.contract.rules import rule_of
from eyrie_api.contract.status import Problem
from eyrie_api.errors import EyrieError, InvalidInput, NotFound, Transient, Unauthorized
from eyrie_api.unknown_fields import unknown_field_hint

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:eyrie:problem:"
_SHOWN = 200
_Handler = Callable[[Request, Exception], Awaitable[Response]]
DATABASE_ERRORS = (OperationalError, InterfaceError, TimeoutError)
"""What SQLAlchemy raises while the database cannot be reached."""


class DatabaseUnavailable(Transient):
    """The database is unavailable, or has aborted a transaction. Changes confirmed before are committed."""


class MethodNotAllowed(EyrieError):
    """The route exists, the method does not."""

    http_status = 405


def problem_of(error: EyrieError, instance: str | None = None) -> Problem:
    # `TargetNotFound` has the title `Target not found`.
    title = re.sub(r"(?<=[a-z0-9])([A-Z])", lambda match: " " + match[1].lower(), error.reason)
    return Problem(type=TYPE_PREFIX + error.reason, title=title, status=error.http_status,
                   detail=error.message, hint=error.hint, instance=instance)


def respond(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    """The HTTP response of a problem. An echoed value may hold half of a surrogate pair, which UTF-8 cannot encode."""
    body = json.dumps(problem.model_dump(mode="json"), ensure_ascii=False).encode("utf-8", "replace")
    return Response(body, status_code=problem.status, media_type=MEDIA_TYPE, headers=headers)


def refuse(error: EyrieError, path: str) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, Transient):
        headers["Retry-After"] = str(math.ceil(error.after_s))
    elif isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = 'Bearer realm="eyrie"'
    return respond(problem_of(error, path), headers)


def install(app: FastAPI, page_of: Callable[[Request, Response], Response]) -> None:
    """Install handlers that turn every error of `app` into a problem, and that into a page where `page_of` does so."""
    handlers = {EyrieError: _on_eyrie_error, RequestValidationError: _on_validation_error,
                HTTPException: _on_http_exception, DataError: _on_unstorable, Exception: _on_bug,
                **dict.fromkeys(DATABASE_ERRORS, _on_database_error)}
    for kind, answer in handlers.items():
        app.add_exception_handler(kind, _as_page(answer, page_of))


def _as_page(answer: _Handler, page_of: Callable[[Request, Response], Response]) -> _Handler:
    async def handler(request: Request, error: Exception) -> Response:
        return page_of(request, await answer(request, error))

    return handler


async def _on_eyrie_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EyrieError)
    return refuse(error, request.url.path)


async def _on_database_error(request: Request, error: Exception) -> Response:
    if is_invalid_statement(error):
        return await _on_bug(request, error)
    return refuse(database_unavailable(error, request.method, request.url.path), request.url.path)


async def _on_unstorable(request: Request, error: Exception) -> Response:
    """PostgreSQL refuses a value of the request that SQLite stores, such as a text with a NUL."""
    log.warning("%s %s: a value cannot be stored: %s", request.method, request.url.path, error)
    return refuse(InvalidInput("a value of the request cannot be stored: a text has a NUL, or a number is too large",
                               "leave out characters that are not text, and keep integers below 2^63"),
                  request.url.path)


def is_invalid_statement(error: Exception) -> bool:
    """Whether SQLite reports an invalid statement, as an operational error too: a retry does not help there."""
    return getattr(getattr(error, "orig", None), "sqlite_errorname", "") == "SQLITE_ERROR"


def database_unavailable(error: Exception, method: str, path: str) -> DatabaseUnavailable:
    """The error to answer with while the database cannot be reached; the cause goes to the log."""
    log.warning("%s %s: database unavailable: %s", method, path, error)
    return DatabaseUnavailable(f"the database is unavailable: {type(error).__name__}",
                               "retry with the same Idempotency-Key; the control plane's log has details")


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if isinstance(error.__cause__, EyrieError):  # raised by the middleware while the framework read the body
        return refuse(error.__cause__, path)
    headers = dict(error.headers or {})
    if error.status_code == 400:  # the body could not be read as JSON at all
        return refuse(InvalidInput(f"the body cannot be read: {error.detail}", "send one JSON object in UTF-8"), path)
    if error.status_code == 404:
        hint = "it is called /v1alpha1/alerts since 0.2" if path == "/v1alpha1/attention" else "/docs lists the routes"
        return refuse(NotFound(f"no such route: {path}", hint), path)
    if error.status_code == 405:
        # Of all routes on this path; the framework reports the methods of the first one only.
        routes: list[Route] = request.app.state.routes
        on_path = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
        allowed = ", ".join(sorted({method for route in on_path for method in route.methods or ()}))
        return respond(problem_of(MethodNotAllowed(f"{method} is not allowed on {path}", f"allowed: {allowed}"), path),
                       {"Allow": allowed})
    problem = Problem(type=TYPE_PREFIX + "HttpError", title="HTTP error", status=error.status_code,
                      detail=str(error.detail), hint="/docs lists the routes", instance=path)
    return respond(problem, headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("unhandled error on %s %s", request.method, request.url.path, exc_info=error)
    return respond(Problem(
        type=TYPE_PREFIX + "InternalError", title="Internal error", status=500, instance=request.url.path,
        detail=f"the server failed on this request: {type(error).__name__}",
        hint="this is a bug in Eyrie: please report it with the traceback from the server's log"))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    explained = [_explain(fault) for fault in error.errors()]
    first = explained[0]
    more = f" (and {len(explained) - 1} more)" if len(explained) > 1 else ""
    hints = [str(fault["hint"]) for fault in explained if "hint" in fault]
    problem = Problem(
        type=TYPE_PREFIX + "InvalidInput", title="Invalid input", status=422, instance=request.url.path,
        detail=f"{first['pointer'] or first.get('parameter', 'the body')}: {first['rule']}{more}",
        hint=hints[0] if hints else "correct the fields named in `errors`; /docs shows the schema with examples",
        errors=tuple(explained))
    return respond(problem)


def _explain(error: dict[str, Any]) -> dict[str, Any]:
    """Pointer, value and rule of one pydantic error; a hint where there is a likely one."""
    location, *path = error["loc"]
    explained: dict[str, Any] = {"pointer": pointer(path) if location == "body" else "", "rule": rule_of(error),
                                "value": _shown(error.get("input"))}
    if location != "body":
        explained["parameter"] = ".".join(map(str, path))
    if error["type"] == "extra_forbidden" and path:
        explained["hint"] = unknown_field_hint(path)
    if error["type"] == "json_invalid":
        explained["pointer"] = ""
        explained["rule"] = f"the body is not JSON: {error.get('ctx', {}).get('error', 'malformed')}"
        explained["hint"] = "send one JSON object"
    return explained


def pointer(path: Sequence[str | int]) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def _shown(value: Any) -> Any:
    """A value that can be echoed: short, finite, representable in JSON."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and abs(value) < 2**63:
        return value
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
