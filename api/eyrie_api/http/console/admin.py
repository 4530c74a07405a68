"""Pages of administration: projects with quotas and members, keys, webhooks, storage, and the audit. They only read.

Each section shows what the REST API answers to the same caller, and where its role does not allow that, says so. A
change has no button, since a session administers nothing: its `eyrie` and its `curl` line are shown instead.

For these pages alone a session reads with all that its credential may do (`Authenticator.rights_of`): by its cookie
alone it could not list what it administers.
"""

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, Response

from eyrie_api.clock import utc_now
from eyrie_api.errors import EyrieError
from eyrie_api.http.console import pages
from eyrie_api.http.control import Control, Here
from eyrie_api.v1alpha1.access import Action
from eyrie_api.v1alpha1.model import Name

router = APIRouter(tags=["console"], include_in_schema=False)

_ENTRIES, _JOBS = 50, 50


@router.get("/console/admin", response_class=HTMLResponse)
def admin(control: Here, request: Request) -> Response:
    """Projects with their quotas, API keys, webhooks, and what the files of jobs occupy."""
    control = _with_rights(control, request)
    keys = control.keys.list() if _may_in_some(control, "keys:write") else None
    hooks = None
    if _may_in_some(control, "webhooks:write"):
        hooks = [(hook, next(iter(control.webhooks.deliveries(hook.id)), None)) for hook in control.webhooks.list()]
    storage, unknown = None, None
    if _may_in_some(control, "jobs:read"):
        try:
            storage = control.storage.page(control.scope, limit=_JOBS)
        except EyrieError as error:  # the other sections do not depend on the files
            unknown = error
    return pages.render_page("admin.html", control, request, projects=control.projects.list(), keys=keys,
                             webhooks=hooks, storage=storage, storage_unknown=unknown,
                             may_audit=_may_in_some(control, "audit:read"), now=utc_now(),
                             server=pages.server_of(request))


@router.get("/console/admin/projects/{project}", response_class=HTMLResponse)
def project(project: Name, control: Here, request: Request) -> Response:
    """One project: its quotas, what is used of them, and its members."""
    control = _with_rights(control, request)
    found, principal = control.projects.get(project), control.scope.principal
    may_list = principal is None or principal.allows("members:write", project)
    return pages.render_page("admin_project.html", control, request, project=found, server=pages.server_of(request),
                             members=control.projects.members(project) if may_list else None)


@router.get("/console/admin/audit", response_class=HTMLResponse)
def audit(control: Here, request: Request, before: Annotated[int | None, Query(ge=1, le=2**53)] = None) -> Response:
    """The audit log, newest first, a page at a time."""
    control = _with_rights(control, request)
    found = control.audit.read(before=before, limit=_ENTRIES) if _may_in_some(control, "audit:read") else None
    return pages.render_page("admin_audit.html", control, request, audit=found, before=before,
                             server=pages.server_of(request))


def _with_rights(control: Control, request: Request) -> Control:
    principal = control.scope.principal
    if principal is None:
        return control
    return control.within(replace(control.scope, principal=request.app.state.authenticator.rights_of(principal)))


def _may_in_some(control: Control, action: Action) -> bool:
    """Whether the caller may do this in a project or in all of them."""
    principal = control.scope.principal
    return principal is None or principal.readable(action) != frozenset()
