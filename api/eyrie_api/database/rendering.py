"""Conversion between rows and the models of `v1alpha1`; job ids; page cursors. No session is opened here."""

import base64
import json
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from eyrie_api.contract.endpoints import HistoryEntry
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.stages import STAGES
from eyrie_api.contract.status import Condition, Endpoint, Event, Job, JobStatus, Revision
from eyrie_api.database.tables import EndpointRow, EventRow, HistoryRow, JobRow, RevisionRow, StageRow
from eyrie_api.errors import InvalidInput

ENDS = ("Succeeded", "Failed", "Cancelled")
"""Conditions that end a job."""

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: without i, l, o, u, which are easily misread


def new_job_id() -> str:
    """A DNS label with 50 random bits."""
    bits = secrets.randbits(50)
    return "job-" + "".join(_ALPHABET[bits >> shift & 31] for shift in range(0, 50, 5))


def is_over(conditions: Iterable[Condition]) -> bool:
    """Whether one of the conditions ends the job."""
    return any(condition.type in ENDS and condition.status == "True" for condition in conditions)


def render_job(row: JobRow, stages: Iterable[StageRow]) -> Job:
    """A job as the API shows it; its stages come from their own rows."""
    order: dict[str, int] = {stage: place for place, stage in enumerate(STAGES)}
    rendered = [{
        "stage": stage.stage, "key": stage.key, "state": stage.state, "attempt": stage.attempt,
        "started_at": stage.started_at, "finished_at": stage.finished_at, "progress": stage.progress,
        "reason": stage.reason, "message": stage.message, "hint": stage.hint,
    } for stage in sorted(stages, key=lambda stage: (order[stage.stage], stage.key))]
    status = JobStatus.model_validate({**row.status, "attempt": row.attempt, "observed_generation": row.generation,
                                       "phase": row.phase, "stages": rendered})
    return Job(id=row.id, generation=row.generation, created_at=row.created_at, updated_at=row.updated_at,
               spec=JobSpec.model_validate(row.spec), status=status)


def render_event(row: EventRow) -> Event:
    return Event.model_validate({
        "id": row.id, "job_id": row.job_id, "time": row.time, "type": row.type, "reason": row.reason,
        "message": row.message, "stage": row.stage, "key": row.key, "data": row.data})


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


def render_history(row: HistoryRow) -> HistoryEntry:
    return HistoryEntry.model_validate({
        "id": row.id, "endpoint": row.endpoint, "time": row.time, "kind": row.kind, "revision": row.revision,
        "job_id": row.job_id, "reason": row.reason, "message": row.message, "actor": row.actor,
        "figures": row.figures, "data": row.data})


def encode_cursor(created_at: datetime, job_id: str) -> str:
    """A page cursor: the position of the last job of a page, opaque to clients."""
    return _packed([created_at.isoformat(), job_id])


def decode_cursor(cursor: str) -> tuple[datetime, str]:
    """The inverse of `encode_cursor`. Raises InvalidInput."""
    try:
        created_at, job_id = _unpacked(cursor)
        when = datetime.fromisoformat(created_at)
        if when.tzinfo is None or not isinstance(job_id, str):
            raise ValueError
    except (ValueError, TypeError):
        raise _not_ours(cursor) from None
    return when, job_id


def encode_size_cursor(size_bytes: int, job_id: str) -> str:
    """`encode_cursor`, of a list by size."""
    return _packed([size_bytes, job_id])


def decode_size_cursor(cursor: str) -> tuple[int, str]:
    """The inverse of `encode_size_cursor`. Raises InvalidInput."""
    try:
        size_bytes, job_id = _unpacked(cursor)
        if type(size_bytes) is not int or not isinstance(job_id, str):
            raise ValueError
    except (ValueError, TypeError):
        raise _not_ours(cursor) from None
    return size_bytes, job_id


def _packed(position: list[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def _unpacked(cursor: str) -> Any:
    return json.loads(base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)))


def _not_ours(cursor: str) -> InvalidInput:
    return InvalidInput(f"cursor {cursor!r} was not made by this server",
                        "pass next_cursor of the page before, or leave it out")
