"""Pages of administration: projects with quotas and members, keys, webhooks, storage, and the audit.

Each section shows what the REST API answers to the same caller, and where its role does not allow that, says so. A
change is a form that calls the public REST route (`static/admin.js`), next to the `eyrie` and the `curl` line that does
the same. Nothing is changed here.

For these pages alone a session reads with all that its credential may do (`Authenticator.rights_of`): by its cookie
alone it could not list what it administers.
"""

from dataclasses import replace
from typing import Annotated, get_args

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, Response

from eyrie_api.access.browser_sign_in import COOKIE
from eyrie_api.access.roles import ALL_PROJECTS
from eyrie_api.clock import utc_now
from eyrie_api.contract.access import Action, WebhookEvent
from eyrie_api.contract.model import Name
from eyrie_api.errors import EyrieError
from eyrie_api.http.console import pages
from eyrie_api.http.control import Control, RequestControl

router = APIRouter(tags=["console"], include_in_schema=False)

_ENTRIES, _JOBS = 50, 50
_EVENTS = tuple(event for event in get_args(WebhookEvent) if event != "ping")


@router.get("/console/admin", response_class=HTMLResponse)
def admin(control: RequestControl, request: Request) -> Response:
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
    projects = control.projects.list()
    names = [project.name for project in projects]
    return pages.render_page("admin.html", control, request, projects=projects, keys=keys,
                             webhooks=hooks, storage=storage, storage_unknown=unknown,
                             key_projects=[name for name in names if _may(control, "keys:write", name)],
                             hook_projects=[name for name in names if _may(control, "webhooks:write", name)],
                             may_create_projects=_may(control, "quotas:write", ALL_PROJECTS),
                             may_create_keys_everywhere=_may(control, "keys:write", ALL_PROJECTS),
                             may_audit=_may_in_some(control, "audit:read"), events=_EVENTS, now=utc_now(),
                             is_recent=_is_recent(request))


@router.get("/console/admin/projects/{project}", response_class=HTMLResponse)
def project(project: Name, control: RequestControl, request: Request) -> Response:
    """One project: its quotas, what is used of them, and its members."""
    control = _with_rights(control, request)
    shown, may_list = control.projects.get(project), _may(control, "members:write", project)
    return pages.render_page("admin_project.html", control, request, project=shown,
                             members=control.projects.members(project) if may_list else None,
                             may_set_quotas=_may(control, "quotas:write", ALL_PROJECTS),
                             issuer=control.settings.oidc_issuer, is_recent=_is_recent(request))


@router.get("/console/admin/audit", response_class=HTMLResponse)
def audit(control: RequestControl, request: Request,
          before: Annotated[int | None, Query(ge=1, le=2**53)] = None) -> Response:
    """The audit log, newest first, a page at a time."""
    control = _with_rights(control, request)
    page = control.audit.read(before=before, limit=_ENTRIES) if _may_in_some(control, "audit:read") else None
    return pages.render_page("admin_audit.html", control, request, audit=page, before=before)


def _with_rights(control: Control, request: Request) -> Control:
    principal = control.scope.principal
    if principal is None:
        return control
    return control.within(replace(control.scope, principal=request.app.state.authenticator.rights_of(principal)))


def _is_recent(request: Request) -> bool:
    """Whether the caller may make what takes a recent sign-in; without a session it takes none."""
    authenticator, cookie = request.app.state.authenticator, request.cookies.get(COOKIE, "")
    if not cookie or not authenticator.requires_token or "authorization" in request.headers:
        return True
    return bool(authenticator.signed_in_recently(cookie))


def _may(control: Control, action: Action, project: str) -> bool:
    principal = control.scope.principal
    return principal is None or principal.allows(action, project)


def _may_in_some(control: Control, action: Action) -> bool:
    """Whether the caller may do this in a project or in all of them."""
    principal = control.scope.principal
    return principal is None or principal.readable(action) != frozenset()
