"""The FastAPI application: routes, middleware, and error responses as problem documents.

`eyrie up` passes `create_app(settings)` to uvicorn. The app reads and writes database rows and starts nothing: its
caller runs the chores (`eyrie_api.chores.worker.ChoreLoop`) and passes `wake`, so that a chore enqueued by a request is
dispatched at once rather than at the next tick.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from anyio import to_thread
from fastapi import FastAPI
from starlette.routing import Route

from eyrie_api.artifacts import installed_version
from eyrie_api.contract.status import Problem
from eyrie_api.database.engine import Database
from eyrie_api.http import api_page, problems
from eyrie_api.http.authentication import Authenticator
from eyrie_api.http.console import admin, job_form, job_pages, pages
from eyrie_api.http.control import Control
from eyrie_api.http.event_fanout import EventFanout
from eyrie_api.http.live_pages import LivePages
from eyrie_api.http.middleware import AccessMiddleware, RequestTimer
from eyrie_api.http.routes import access, alerts, endpoints, jobs, operations, outcomes, streams
from eyrie_api.settings import Settings

DESCRIPTION = """Train a speculative-decoding drafter for your own LLM, measure it, promote it, serve it.

Every refusal is `application/problem+json` (RFC 9457) with a `hint`: what to do instead."""

_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": words, "content": {problems.MEDIA_TYPE: {
        "schema": {"$ref": "#/components/schemas/Problem"}}}}
    for status, words in (
        (401, "No bearer token, or a wrong one"),
        (403, "Not allowed, or a Host header that does not name this machine"),
        (404, "No such object"), (409, "The current state does not allow it"),
        (413, "The body is too large"), (415, "The body is not JSON"),
        (429, "Too many requests, or the project's quota is used up"),
        (422, "The request is wrong; `errors` has pointers, values and rules"), (503, "Try again later"),
        (507, "The disk is too small"))
}


_THREADS = 8
"""Threads that run handlers; the default of anyio is 40. More threads compete for the GIL and the database connections,
and delay streams and probes."""


@asynccontextmanager
async def _few_threads(_app: FastAPI) -> AsyncIterator[None]:
    to_thread.current_default_thread_limiter().total_tokens = _THREADS
    yield


def create_app(settings: Settings, *, database: Database | None = None, wake: Callable[[], None] | None = None,
               checks: Mapping[str, Callable[[], bool]] | None = None,
               queues: Mapping[str, Callable[[], int]] | None = None) -> FastAPI:
    """The application.

    database   opened from the settings when absent; must have been migrated (`migrations.upgrade`)
    wake       called after each change that enqueued a chore
    checks     further readiness checks by name, for example `{"chores": lambda: loop.is_running}`
    queues     number of messages waiting in each queue of the broker, for the metric `eyrie_queue_length`
    """
    database = database or Database(settings.resolved_database_url)
    control = Control(settings, database, wake, checks, queues)
    app = FastAPI(title="Eyrie", version=installed_version(), description=DESCRIPTION,
                  responses=_REFUSALS, redirect_slashes=False, lifespan=_few_threads, docs_url=None, redoc_url=None)
    app.state.control = control
    app.state.event_fanout = EventFanout(database, settings.sse_poll_s)
    app.state.live_pages = LivePages(database, settings.sse_heartbeat_s)
    app.state.telemetry = operations.ControlMetrics(control)
    parts = (jobs, streams, outcomes, alerts, endpoints, access, operations, pages, job_pages, job_form,
             admin)
    routers = [*(part.router for part in parts), access.webhooks_router]
    for router in routers:
        app.include_router(router)
    api_page.install(app)
    # A flat list of routes for the Allow header: newer versions of FastAPI keep an included router as one entry.
    app.state.routes = [route for router in (app.router, *routers) for route in router.routes
                        if isinstance(route, Route)]
    problems.install(app, pages.for_a_browser)
    app.state.authenticator = Authenticator(settings, database)
    app.add_middleware(AccessMiddleware, settings=settings, authenticator=app.state.authenticator, audit=control.audit)
    app.add_middleware(RequestTimer, observe=app.state.telemetry.observe)
    _describe_problem(app)
    return app


def _describe_problem(app: FastAPI) -> None:
    """Put the Problem schema into the OpenAPI document in place of FastAPI's own validation error."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schemas = document["components"]["schemas"]
            schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
