"""The page of training curves of several jobs together.

The page names the jobs, in its address too; `static/curves.js` reads the curves of each from the REST API, defined in
`figures.training_curves`, and draws them. A job of another project is answered as one that is not there.
"""

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, Response

from eyrie_api.http.console import pages
from eyrie_api.http.control import Here

router = APIRouter(tags=["console"], include_in_schema=False)

_MAX_JOBS = 10  # each job's metrics are a request every few seconds
_LISTED = 50


@router.get("/console/curves", response_class=HTMLResponse)
def curves(control: Here, request: Request,
           job: Annotated[list[str], Query(min_length=1, max_length=_MAX_JOBS)]) -> Response:
    """Curves of the jobs, with links to add and remove one."""
    ids = tuple(dict.fromkeys(job))
    found = [control.jobs.get(one) for one in ids]
    others = control.jobs.list(limit=_LISTED).items if len(ids) < _MAX_JOBS else ()
    return pages.render_page(
        "curves.html", control, request, jobs=found,
        curve_jobs=[{"id": one.id, "name": label, "ended": one.status.finished_at is not None}
                    for one, label in zip(found, labels([(one.id, one.spec.name) for one in found]), strict=True)],
        without={one: _address([other for other in ids if other != one]) for one in ids},
        others=[(one, _address([*ids, one.id])) for one in others if one.id not in ids])


def labels(jobs: Sequence[tuple[str, str | None]]) -> list[str]:
    """A job's name, with its id where another of them has the same name."""
    names = [name or job_id for job_id, name in jobs]
    return [f"{name} ({job_id})" if names.count(name) > 1 else name
            for name, (job_id, _) in zip(names, jobs, strict=True)]


def _address(ids: Sequence[str]) -> str:
    return f"/console/curves?{urlencode([('job', one) for one in ids])}"
