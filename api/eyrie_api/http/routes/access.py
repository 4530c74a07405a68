"""Routes of API keys, projects with members and quotas, the audit log, webhooks, and `whoami`."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Response

from eyrie_api.clock import utc_now
from eyrie_api.contract import access as contract
from eyrie_api.contract.model import Items, Name
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.http.control import RequestControl

router = APIRouter(tags=["access"])
webhooks_router = APIRouter(tags=["webhooks"])
KEYS = "/v1alpha1/keys"
PROJECTS = "/v1alpha1/projects"
WEBHOOKS = "/v1alpha1/webhooks"


@router.get("/v1alpha1/whoami")
def whoami(control: RequestControl) -> contract.WhoAmI:
    """Show the authenticated identity, its roles, and the project of its new jobs."""
    principal = control.scope.principal
    assert principal is not None, "a request without a caller reached a route"
    try:
        home = control.scope.home("jobs:read")
    except EyrieError:
        home = None
    return contract.WhoAmI(subject=principal.subject, roles=dict(principal.roles), project=home,
                           scopes=None if principal.scopes is None else tuple(sorted(principal.scopes)))


@router.post(KEYS, status_code=201, name="key.create")
def create_key(request: contract.CreateKey, control: RequestControl) -> contract.CreatedKey:
    """A new API key of the project, shown whole this once."""
    days, principal = request.expires_in_days, control.scope.principal
    expires_at = None if days is None else utc_now() + timedelta(days=days)
    if "expires_in_days" not in request.model_fields_set and principal is not None and principal.expires_at is not None:
        expires_at = principal.expires_at if expires_at is None else min(expires_at, principal.expires_at)
    scopes = None if request.scopes is None else frozenset(request.scopes)
    key, secret = control.keys.create(request.name, request.role, scopes=scopes, expires_at=expires_at,
                                      everywhere=request.everywhere)
    return contract.CreatedKey(key=key, secret=secret)


@router.get(KEYS)
def list_keys(control: RequestControl) -> Items[contract.ApiKey]:
    """ApiKeys, without their secrets, newest first."""
    return Items[contract.ApiKey](items=control.keys.list())


@router.post(KEYS + "/{key_id}/revoke", name="key.revoke")
def revoke_key(key_id: str, control: RequestControl) -> contract.ApiKey:
    """End a key. It is refused everywhere within seconds."""
    return control.keys.revoke(key_id)


@router.post(KEYS + "/{key_id}/rotate", status_code=201, name="key.rotate")
def rotate_key(key_id: str, control: RequestControl,
               request: Annotated[contract.RotateKey | None, Body()] = None) -> contract.CreatedKey:
    """A new key that may do the same; the old one ends, at once or after an overlap."""
    key, secret = control.keys.rotate(key_id, request.overlap_s if request is not None else 0.0)
    return contract.CreatedKey(key=key, secret=secret)


@router.post(PROJECTS, status_code=201, name="project.create")
def create_project(request: contract.CreateProject, control: RequestControl) -> contract.Project:
    """A new project. For those with a role in all of them."""
    return control.projects.create(request)


@router.get(PROJECTS)
def list_projects(control: RequestControl) -> Items[contract.Project]:
    """Projects one has a role in."""
    return Items[contract.Project](items=control.projects.list())


@router.get(PROJECTS + "/{project}")
def get_project(project: Name, control: RequestControl) -> contract.Project:
    """One project, and what it uses now."""
    return control.projects.get(project)


@router.put(PROJECTS + "/{project}/quotas", name="project.quotas")
def set_quotas(project: Name, request: contract.Quotas, control: RequestControl) -> contract.Project:
    """Replace what a project may use. For those with a role in all of them."""
    return control.projects.set_quotas(project, request)


@router.get(PROJECTS + "/{project}/members")
def list_members(project: Name, control: RequestControl) -> Items[contract.Member]:
    """Roles given to subjects and groups of OIDC issuers."""
    return Items[contract.Member](items=control.projects.members(project))


@router.post(PROJECTS + "/{project}/members", status_code=201, name="member.add")
def add_member(project: Name, request: contract.CreateMember, control: RequestControl) -> contract.Member:
    """Give a role to a subject or a group."""
    issuer = request.issuer or control.settings.oidc_issuer
    if issuer is None:
        raise InvalidInput("no issuer: this server trusts none and the request names none",
                           "set EYRIE_OIDC_ISSUER, or give `issuer`")
    return control.projects.add_member(project, request, issuer)


@router.delete(PROJECTS + "/{project}/members/{member_id}", status_code=204, name="member.remove")
def remove_member(project: Name, member_id: Annotated[int, Path(ge=1, le=2**53)], control: RequestControl) -> Response:
    """Take a role back."""
    control.projects.remove_member(project, member_id)
    return Response(status_code=204)


@router.get("/v1alpha1/audit")
def read_audit(
    control: RequestControl,
    actor: Annotated[str | None, Query(max_length=512, description="e.g. key:<id>")] = None,
    verb: Annotated[str | None, Query(max_length=63, description="e.g. job.create")] = None,
    thing: Annotated[str | None, Query(alias="object", max_length=512, description="e.g. job/<id>")] = None,
    before: Annotated[int | None, Query(ge=1, le=2**53)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> contract.AuditPage:
    """Entries of the projects whose audit one may read, newest first."""
    return control.audit.read(actor=actor, verb=verb, thing=thing, before=before, limit=limit)


@webhooks_router.post(WEBHOOKS, status_code=201, name="webhook.create")
def create_webhook(request: contract.CreateWebhook, control: RequestControl) -> contract.CreatedWebhook:
    """A new webhook of the project, with the secret its deliveries are signed with, shown this once."""
    webhook, secret = control.webhooks.create(request)
    return contract.CreatedWebhook(webhook=webhook, secret=secret)


@webhooks_router.get(WEBHOOKS)
def list_webhooks(control: RequestControl) -> Items[contract.Webhook]:
    """Webhooks, without their secrets."""
    return Items[contract.Webhook](items=control.webhooks.list())


@webhooks_router.delete(WEBHOOKS + "/{webhook_id}", status_code=204, name="webhook.delete")
def delete_webhook(webhook_id: str, control: RequestControl) -> Response:
    """Delete a webhook with its deliveries."""
    control.webhooks.delete(webhook_id)
    return Response(status_code=204)


@webhooks_router.post(WEBHOOKS + "/{webhook_id}/rotate", status_code=201, name="webhook.rotate")
def rotate_webhook(webhook_id: str, control: RequestControl) -> contract.CreatedWebhook:
    """Replace the secret: the new one, shown this once, signs every attempt from now on."""
    webhook, secret = control.webhooks.rotate(webhook_id)
    return contract.CreatedWebhook(webhook=webhook, secret=secret)


@webhooks_router.get(WEBHOOKS + "/{webhook_id}/deliveries")
def list_deliveries(webhook_id: str, control: RequestControl) -> Items[contract.Delivery]:
    """Its latest hundred deliveries, newest first. Ended ones are kept for two weeks."""
    return Items[contract.Delivery](items=control.webhooks.deliveries(webhook_id))


@webhooks_router.post(WEBHOOKS + "/{webhook_id}/ping", status_code=202, name="webhook.ping")
def ping_webhook(webhook_id: str, control: RequestControl) -> contract.Delivery:
    """Send it a test event, once. One that arrives switches a webhook on again that was switched off."""
    delivery = control.webhooks.ping(webhook_id)
    control.wake()
    return delivery
