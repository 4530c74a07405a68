"""Pages of reports: all of them, and one with its page in a frame.

The frame has the attribute `sandbox`, and what it shows is answered with a policy of its own (`routes.stored_reports`):
the HTML is somebody's. Frames are permitted on this page alone.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, Response

from eyrie_api.http.console import pages
from eyrie_api.http.control import Here

router = APIRouter(tags=["console"], include_in_schema=False)

_LISTED = 50


@router.get("/console/reports", response_class=HTMLResponse)
def reports(control: Here, request: Request,
            cursor: Annotated[str | None, Query(max_length=512)] = None) -> Response:
    """Reports, newest first, a page at a time; or that the caller may not see any."""
    principal = control.scope.principal
    may_read = principal is None or principal.readable("jobs:read") != frozenset()
    listed = control.stored_reports.list(limit=_LISTED, cursor=cursor) if may_read else None
    return pages.render_page("reports.html", control, request, reports=listed, cursor=cursor,
                             server=pages.server_of(request))


@router.get("/console/reports/{report_id}", response_class=HTMLResponse)
def report(report_id: str, control: Here, request: Request) -> Response:
    """One report: what was found, by whom it was pushed and when, and its page."""
    found = control.stored_reports.get(report_id)
    answer = pages.render_page("report.html", control, request, report=found, server=pages.server_of(request),
                               may_work=pages.may(control, "jobs:write", found.project))
    answer.headers["Content-Security-Policy"] += "; frame-src 'self'"
    return answer
