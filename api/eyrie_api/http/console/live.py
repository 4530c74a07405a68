"""Streams of the console's pages: server-sent events with the live part of a page whenever it has changed.

Each message has the same HTML that the page was loaded with; `static/console.js` puts it in place of the elements with
the same ids. Rendered once for all readers with equal rights (`http.live_pages`).
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from eyrie_api.database.rendering import decode_cursor
from eyrie_api.http.console import pages
from eyrie_api.http.control import Control, Here
from eyrie_api.http.live_pages import LivePages, PageKey, Rendered
from eyrie_api.http.routes.outcomes import LeaderboardQuery

router = APIRouter(tags=["console"], include_in_schema=False)


@router.get("/console/live")
def home(control: Here, request: Request, before: pages.Before = None) -> Response:
    """Home with one page of jobs, as it changes. Its readers share it, those of the newest jobs as those of older
    ones."""
    if before is not None:
        decode_cursor(before)
    return _stream(control, request, partial(_home, control, before), pages.home_address(request.url.path, before))


@router.get("/console/jobs/{job_id}/live")
def job(job_id: str, control: Here, request: Request,
        selected: Annotated[LeaderboardQuery, Query()]) -> Response:
    """A job's page, as it changes; it ends with the job."""
    control.jobs.get(job_id)
    render = partial(_job, control, job_id, pages.server_of(request), selected)
    return _stream(control, request, render, selected.address(request.url.path), job_id)


@router.get("/console/endpoints/{name}/live")
def endpoint(name: str, control: Here, request: Request) -> Response:
    """An endpoint's page, as it changes."""
    control.endpoints.get(name)
    return _stream(control, request, partial(_endpoint, control, name, pages.server_of(request)), request.url.path)


def _home(control: Control, before: str | None) -> Rendered:
    return Rendered(pages.rendered("home_live.html", pages.home_values(control, before)))


def _job(control: Control, job_id: str, server: str, selected: LeaderboardQuery) -> Rendered:
    values = pages.job_values(control, job_id, server, selected)
    html = "".join(pages.rendered(part, values) for part in ("job_live.html", "job_actions.html"))
    return Rendered(html, ended=values["job"].status.phase in pages.ENDED)


def _endpoint(control: Control, name: str, server: str) -> Rendered:
    values = pages.endpoint_values(control, name, server)
    parts = ("endpoint_live.html", "endpoint_unmeasured.html", "endpoint_history.html", "endpoint_actions.html")
    return Rendered("".join(pages.rendered(part, values) for part in parts))


def _stream(control: Control, request: Request, render: Callable[[], Rendered], path: str,
            job_id: str | None = None) -> Response:
    principal = control.scope.principal
    rights = "" if principal is None else repr((sorted(principal.roles.items()), principal.scopes
                                                and sorted(principal.scopes), control.scope.project))
    live: LivePages = request.app.state.live_pages
    key = PageKey(path, rights, pages.server_of(request), job_id)
    return StreamingResponse(live.stream(key, render), media_type="text/event-stream",
                             headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
