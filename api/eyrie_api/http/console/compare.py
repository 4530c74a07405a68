"""The page of compared answers: a prompt with and without the drafter, side by side.

The page is the form and two empty answers; `static/compare.js` calls `POST /v1alpha1/endpoints/{name}/compare` and
fills them from its events.
"""

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from eyrie_api.http.console import pages
from eyrie_api.http.control import Here
from eyrie_api.http.routes.endpoints import recorded_prompts
from eyrie_api.v1alpha1.comparison import CompareRequest

router = APIRouter(tags=["console"], include_in_schema=False)


@router.get("/console/endpoints/{name}/compare", response_class=HTMLResponse)
def compare(name: str, control: Here, request: Request) -> Response:
    """The form, or why there is none."""
    endpoint = control.endpoints.get(name)
    active = next((one for one in endpoint.revisions if one.number == endpoint.active_revision), None)
    return pages.render_page("compare.html", control, request, endpoint=endpoint, active=active,
                             server=pages.server_of(request), engine=control.endpoints.serving(name).serve.engine.kind,
                             recorded=recorded_prompts(name, control),
                             default_tokens=CompareRequest.model_fields["max_tokens"].default,
                             may_compare=pages.may(control, "endpoints:write", control.endpoints.project_of(name)))
