"""Routes of reports that were pushed: what `eyrie compare`, `eyrie compare-hardware` and the experiments wrote.

The page of a report is HTML that somebody sent. It is answered with a Content-Security-Policy by which a browser runs
no script of it, loads nothing that it names and gives it an origin of its own (`sandbox`), so that it reaches neither
the console's session nor the API, in a frame of the console as well as alone.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from starlette.responses import HTMLResponse

from eyrie_api.database.stored_reports import MAX_PAGE
from eyrie_api.http.control import Here
from eyrie_api.v1alpha1.stored_reports import StoredReport, StoredReportFigures, StoredReportList, StoreReport

router = APIRouter(tags=["reports"])
REPORTS = "/v1alpha1/reports"
_PAGE_HEADERS = {
    "Content-Security-Policy": "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
                               "base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin"}


@router.post(REPORTS, status_code=201, name="report.create",
             responses={200: {"model": StoredReport, "description": "kept before: nothing was changed"}})
def create_report(request: StoreReport, control: Here, response: Response) -> StoredReport:
    """Keep a report in the project. The same one is kept once: pushed again, it is answered with 200."""
    stored, is_new = control.stored_reports.store(request)
    response.status_code = 201 if is_new else 200
    response.headers["Location"] = f"{REPORTS}/{stored.id}"
    return stored


@router.get(REPORTS)
def list_reports(
    control: Here,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
    cursor: Annotated[str | None, Query(max_length=512, description="next_cursor of the page before")] = None,
) -> StoredReportList:
    """Reports without their figures, newest first."""
    return control.stored_reports.list(limit=limit, cursor=cursor)


@router.get(REPORTS + "/{report_id}")
def get_report(report_id: str, control: Here) -> StoredReportFigures:
    """One report with all figures."""
    return control.stored_reports.figures(report_id)


@router.get(REPORTS + "/{report_id}/page", response_class=HTMLResponse)
def read_report_page(report_id: str, control: Here) -> Response:
    """Its page, as HTML that runs no script and loads nothing."""
    return HTMLResponse(control.stored_reports.page(report_id), headers=_PAGE_HEADERS)


@router.delete(REPORTS + "/{report_id}", status_code=204, name="report.delete")
def delete_report(report_id: str, control: Here) -> Response:
    """Delete a report."""
    control.stored_reports.delete(report_id)
    return Response(status_code=204)
