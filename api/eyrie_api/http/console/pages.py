"""Pages of the console: home, a job, an endpoint.

They call the functions that the REST routes call and show nothing else. A page is whole without script; with it (htmx)
it asks for itself again every few seconds and replaces its live part, and curves are drawn (uPlot). Both libraries are
the unchanged files of their npm packages (`static/LICENSES.md`). No page changes anything: each action is shown as the
`eyrie` and the `curl` line that does it.

Strict Content-Security-Policy: script, style and data from this server alone, nothing inline.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import FileResponse, HTMLResponse, Response

from eyrie_api.database.results import ResultFilter
from eyrie_api.errors import NotFound
from eyrie_api.http.control import Here
from eyrie_api.quantities import duration, size
from eyrie_api.v1alpha1.history import History
from eyrie_api.v1alpha1.stages import STAGES
from eyrie_api.v1alpha1.status import Condition, Endpoint, Job, StageStatus

router = APIRouter(tags=["console"], include_in_schema=False)

HERE = Path(__file__).parent
STATIC = {"console.css": "text/css", "console.js": "text/javascript", "htmx.min.js": "text/javascript",
          "uplot.min.js": "text/javascript", "uplot.min.css": "text/css"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin", "Cache-Control": "no-store"}
_JOBS, _EVENTS, _HISTORY = 50, 100, 60
_ENDED = ("Succeeded", "Failed", "Cancelled")


def _figure(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


_ENVIRONMENT = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined,
                           trim_blocks=True, lstrip_blocks=True)
_ENVIRONMENT.filters |= {"duration": duration, "size": size, "figure": _figure}


@router.get("/", response_class=HTMLResponse)
def home(control: Here) -> Response:
    """Endpoints, jobs, and what needs a person."""
    endpoints, listed = control.endpoints.list().items, control.jobs.list(limit=_JOBS)
    return _page("home.html", endpoints=endpoints, jobs=listed.items, more=listed.next_cursor is not None,
                 attention=attention(listed.items, endpoints), now=datetime.now(UTC))


@router.get("/console/jobs/{job_id}", response_class=HTMLResponse)
def job(job_id: str, control: Here, request: Request) -> Response:
    """One job: its pipeline, decision, leaderboard, curves, events and document."""
    found = control.jobs.get(job_id)
    entries = control.results.leaderboard(ResultFilter(job_id=job_id))
    return _page("job.html", job=found, pipeline=pipeline(found), leaderboard=entries,
                 events=control.jobs.events(job_id, limit=_EVENTS), now=datetime.now(UTC), ended=_ENDED,
                 server=str(request.base_url).rstrip("/"))


@router.get("/console/endpoints/{name}", response_class=HTMLResponse)
def endpoint(name: str, control: Here, request: Request) -> Response:
    """One endpoint: what serves, its revisions, its history."""
    return _page("endpoint.html", endpoint=control.endpoints.get(name), now=datetime.now(UTC),
                 history=_recent(control.histories.read(name, limit=_HISTORY)),
                 server=str(request.base_url).rstrip("/"))


@router.get("/console/static/{file}", response_class=FileResponse)
def static(file: str) -> Response:
    """A script or a style of the pages."""
    if file not in STATIC:
        raise NotFound(f"no file {file!r} of the console", "load the page again")
    return FileResponse(HERE / "static" / file, media_type=STATIC[file], headers={"Cache-Control": "max-age=300"})


def _page(template: str, **values: Any) -> HTMLResponse:
    return HTMLResponse(_ENVIRONMENT.get_template(template).render(**values), headers=_HEADERS)


def _recent(history: History) -> History:
    """Newest first."""
    return history.model_copy(update={"items": history.items[::-1]})


def attention(jobs: Iterable[Job], endpoints: Iterable[Endpoint]) -> list[dict[str, str]]:
    """What a person should look at: title, link, what was seen and what to do. Pure."""
    found = []
    for one in endpoints:
        serving = _condition(one.conditions, "Serving")
        if one.desired == "on" and serving is not None and serving.status == "False":
            found.append({"title": f"Endpoint {one.name}: {serving.reason}", "link": f"/console/endpoints/{one.name}",
                          "words": serving.message})
    for job in jobs:
        name, link = job.spec.name or job.id, f"/console/jobs/{job.id}"
        failed = next((stage for stage in job.status.stages if stage.state == "Failed"), None)
        if job.status.phase == "Failed":
            reason = _condition(job.status.conditions, "Failed")
            words = reason.message if reason else ""
            if failed is not None:
                words = " ".join(filter(None, (failed.message, failed.hint)))
            where = f" in {failed.stage}" if failed is not None else ""
            found.append({"title": f"Job {name} failed{where}", "link": link, "words": words})
        if job.status.decision is not None and job.status.decision.verdict == "awaits-approval":
            found.append({"title": f"Job {name} waits for a decision", "link": link,
                          "words": "promotion.mode is manual and the winner passed every check"})
    return found


def _condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    return next((one for one in conditions if one.type == kind), None)


def pipeline(job: Job) -> list[dict[str, Any]]:
    """The stages in order, each with its boxes (one per candidate or checkpoint) and the state of all of them. Pure."""
    found = []
    for stage in STAGES:
        boxes = [one for one in job.status.stages if one.stage == stage]
        found.append({"stage": stage, "boxes": boxes, "state": _state(boxes)})
    return found


def _state(boxes: list[StageStatus]) -> str:
    states = {box.state for box in boxes}
    for state in ("Failed", "Running", "Cancelled"):
        if state in states:
            return state
    return "Succeeded" if states and states <= {"Succeeded", "Skipped"} else "Pending"
