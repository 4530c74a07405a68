"""The route of storage: what the files of jobs occupy."""

from typing import Annotated

from fastapi import APIRouter, Query

from eyrie_api.http.control import Here
from eyrie_api.http.job_storage import MAX_PAGE
from eyrie_api.v1alpha1.storage import StoragePage

router = APIRouter(tags=["jobs"])


@router.get("/v1alpha1/storage")
def read_storage(
    control: Here,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
    cursor: Annotated[str | None, Query(max_length=512, description="next_cursor of the page before")] = None,
) -> StoragePage:
    """What the files of jobs occupy, by project and by job, the largest first, and which may be removed."""
    return control.storage.page(control.scope, limit=limit, cursor=cursor)
