"""The route of the audit log: changes made and requests refused."""

from typing import Annotated

from fastapi import APIRouter, Query

from eyrie_api.database.audit import MAX_PAGE
from eyrie_api.http.control import Here
from eyrie_api.v1alpha1.access import AuditPage

router = APIRouter(tags=["access"])


@router.get("/v1alpha1/audit")
def read_audit(
    control: Here,
    actor: Annotated[str | None, Query(max_length=512, description="e.g. key:<id>")] = None,
    verb: Annotated[str | None, Query(max_length=63, description="e.g. job.create")] = None,
    thing: Annotated[str | None, Query(alias="object", max_length=512, description="e.g. job/<id>")] = None,
    before: Annotated[int | None, Query(ge=1, le=2**53)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
) -> AuditPage:
    """Entries of the projects whose audit one may read, newest first."""
    return control.audit.read(actor=actor, verb=verb, thing=thing, before=before, limit=limit)
