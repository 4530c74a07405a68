"""Pages beside that of a job: its plan against what it took, and its document against that of another job.

The plan is the one that the job was accepted with; the page has what `GET /v1alpha1/jobs/ID/plan/actual` answers.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import JsonValue
from starlette.responses import HTMLResponse, Response

from eyrie_api.errors import NotFound
from eyrie_api.http.console import pages
from eyrie_api.http.console.job_details import differences
from eyrie_api.http.control import Control, Here
from eyrie_api.http.routes.outcomes import compare_plan
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.status import Job

router = APIRouter(tags=["console"], include_in_schema=False)

_LISTED = 50


@router.get("/console/jobs/{job_id}/plan", response_class=HTMLResponse)
def plan(job_id: str, control: Here, request: Request) -> Response:
    """Hours and bytes of every stage as planned when the job was accepted, and as they were; or that none was kept."""
    job = control.jobs.get(job_id)
    try:
        found = compare_plan(job_id, control)
    except NotFound:
        found = None
    return pages.render_page("job_plan.html", control, request, job=job, found=found)


@router.get("/console/jobs/{job_id}/diff", response_class=HTMLResponse)
def diff(job_id: str, control: Here, request: Request,
         other_id: Annotated[str, Query(alias="with", max_length=63)] = "") -> Response:
    """Where the documents of two jobs differ, defaults included. Both must be readable by the caller."""
    job = control.jobs.get(job_id)
    other, missing = _other(control, other_id.strip())
    found = () if other is None else differences(_document(job.spec), _document(other.spec))
    recent = [one for one in control.jobs.list(limit=_LISTED).items if one.id != job_id]
    answer = pages.render_page("job_diff.html", control, request, job=job, other=other, other_id=other_id,
                               missing=missing, found=found, recent=recent)
    if missing is not None:
        answer.status_code = 404
    return pages.may_submit(answer)


def _other(control: Control, job_id: str) -> tuple[Job | None, NotFound | None]:
    """The job to compare with, if one is given; or that the caller sees none of that id."""
    try:
        return (control.jobs.get(job_id) if job_id else None), None
    except NotFound as error:
        return None, error


def _document(spec: JobSpec) -> dict[str, JsonValue]:
    return spec.model_dump(mode="json")
