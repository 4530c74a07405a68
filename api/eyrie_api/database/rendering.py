"""Conversion between rows and the models of `v1alpha1`; job ids; page cursors. No session is opened here."""

import base64
import json
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import TypeVar

from pydantic import AwareDatetime, BaseModel, TypeAdapter

from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.stages import STAGES
from eyrie_api.contract.status import Condition, Endpoint, Job, JobStatus, Revision, StageStatus
from eyrie_api.database.tables import Base, EndpointRow, JobRow, RevisionRow, StageRow
from eyrie_api.errors import InvalidInput

ModelT = TypeVar("ModelT", bound=BaseModel)
PositionT = TypeVar("PositionT")

TIME_CURSOR: TypeAdapter[tuple[datetime, str]] = TypeAdapter(tuple[AwareDatetime, str])
SIZE_CURSOR: TypeAdapter[tuple[int, str]] = TypeAdapter(tuple[int, str])
"""Positions in lists of jobs by time and by size: that of the job, and its id."""

ENDS = ("Succeeded", "Failed", "Cancelled")
"""Conditions that end a job."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: without i, l, o, u, which are easily misread


def new_job_id() -> str:
    """A DNS label with 50 random bits."""
    bits = secrets.randbits(50)
    return "job-" + "".join(_ALPHABET[bits >> shift & 31] for shift in range(0, 50, 5))


def is_over(conditions: Iterable[Condition]) -> bool:
    return any(condition.type in ENDS and condition.status == "True" for condition in conditions)


def render(model: type[ModelT], row: Base) -> ModelT:
    """The model whose fields are columns of the row."""
    return model.model_validate(row, from_attributes=True)


def render_job(row: JobRow, stages: Iterable[StageRow]) -> Job:
    """A job as the API shows it; its stages come from their own rows."""
    order: dict[str, int] = {stage: place for place, stage in enumerate(STAGES)}
    rendered = [render(StageStatus, stage) for stage in sorted(stages, key=lambda row: (order[row.stage], row.key))]
    status = JobStatus.model_validate({**row.status, "attempt": row.attempt, "observed_generation": row.generation,
                                       "phase": row.phase, "stages": rendered})
    return Job(id=row.id, generation=row.generation, created_at=row.created_at, updated_at=row.updated_at,
               spec=JobSpec.model_validate(row.spec), status=status)


def render_endpoint(row: EndpointRow, revisions: Iterable[RevisionRow]) -> Endpoint:
    """One endpoint with its history, oldest first."""
    history = tuple(render_revision(revision) for revision in sorted(revisions, key=lambda revision: revision.number))
    return Endpoint.model_validate({
        "name": row.name, "target": row.target["model"], "url": row.url, "model": row.model, "desired": row.desired,
        "active_revision": row.active_revision, "candidate_revision": row.candidate_revision, "revisions": history,
        "conditions": row.conditions, "updated_at": row.updated_at})


def render_revision(row: RevisionRow) -> Revision:
    return Revision.model_validate({
        "number": row.number, "job_id": row.job_id, "checkpoint": row.checkpoint,
        "tree": row.use["setting"]["tree"], "drafter_dir": row.use["drafter_dir"], "use": row.use,
        "speedup": row.speedup, "tau": row.tau,
        "created_at": row.created_at, "reason": row.reason, "state": row.state,
        "rejected_reason": row.rejected_reason, "url": row.url})


def encode_cursor(position: datetime | int, job_id: str) -> str:
    """A page cursor: the position of the last job of a page, opaque to clients."""
    text = json.dumps([position.isoformat() if isinstance(position, datetime) else position, job_id])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_cursor(cursor: str, kind: TypeAdapter[tuple[PositionT, str]]) -> tuple[PositionT, str]:
    """The inverse of `encode_cursor`. Raises InvalidInput."""
    try:
        return kind.validate_json(base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)), strict=True)
    except ValueError:
        raise InvalidInput(f"cursor {cursor!r} was not made by this server",
                           "pass next_cursor of the page before, or leave it out") from None
