"""The tables, in SQLAlchemy 2, for SQLite and PostgreSQL.

Times are stored as naive UTC and read as aware datetimes, because SQLite stores no time zone.
`eyrie_api.database.migrations` creates the tables; `engine` opens sessions on them.

A job belongs to a project. Rows of a job (labels, stages, events, metrics, results) have no project column, since their
project is that of the job; the same holds for an endpoint's revisions and history, by the endpoint's name.
"""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, stored as naive UTC."""

    impl = sa.DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise TypeError("a time without a zone reached the database: pass datetime.now(UTC)")
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class Base(DeclarativeBase):
    """Base of all tables. Constraints are named by a convention, so that batch migrations find them on SQLite."""

    metadata = sa.MetaData(naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    })
    type_annotation_map = {datetime: UtcDateTime(), dict[str, Any]: sa.JSON(), list[Any]: sa.JSON()}


def _job_reference() -> Any:
    return mapped_column(sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)


class JobRow(Base):
    """One job. `status` is the JobStatus of the API; the other columns are for filters and the reconciler."""

    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    name: Mapped[str | None] = mapped_column(sa.String(63), index=True)
    target: Mapped[str] = mapped_column(sa.String(4096))
    spec: Mapped[dict[str, Any]]
    status: Mapped[dict[str, Any]]
    phase: Mapped[str] = mapped_column(sa.String(16), index=True)
    ended: Mapped[bool] = mapped_column(index=True)
    generation: Mapped[int]
    attempt: Mapped[int]
    cancel_requested: Mapped[bool]
    delete_requested: Mapped[bool]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime] = mapped_column(index=True)
    lease_owner: Mapped[str | None] = mapped_column(sa.String(255))
    lease_until: Mapped[datetime | None]
    project: Mapped[str] = mapped_column(sa.String(63))
    # `records.WaitingPod`s of its run, which the operator writes and the driver reads.
    waiting_pods: Mapped[list[Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    # The job's `resolved.Demand`.
    num_gpus: Mapped[int]
    num_replicas: Mapped[int]
    # `document` as it was sent, and `resolved`, a `resolved.ResolvedJob` without its spec.
    submission: Mapped[dict[str, Any]] = mapped_column(deferred=True)
    __table_args__ = (sa.Index("ix_jobs_created_at_id", "created_at", "id"),
                      sa.Index("ix_jobs_project_created_at_id", "project", "created_at", "id"))


class WaitingRow(Base):
    """One DrafterJob that waits for a quota of its project (`database.quotas`). `uid` is that of the object."""

    __tablename__ = "waiting"
    namespace: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(253), primary_key=True)
    uid: Mapped[str] = mapped_column(sa.String(63))
    project: Mapped[str] = mapped_column(sa.String(63), index=True)
    reason: Mapped[str] = mapped_column(sa.String(63))
    message: Mapped[str] = mapped_column(sa.Text)
    hint: Mapped[str] = mapped_column(sa.Text)
    since: Mapped[datetime]


class LabelRow(Base):
    """One label of a job. A table of its own, because filters inside JSON differ between databases."""

    __tablename__ = "labels"
    job_id: Mapped[str] = _job_reference()
    key: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    value: Mapped[str] = mapped_column(sa.String(4096))
    __table_args__ = (sa.Index("ix_labels_key_job_id", "key", "job_id"),)


class StageRow(Base):
    """The status of one stage of a job; `key` is the candidate or checkpoint, or empty."""

    __tablename__ = "stages"
    job_id: Mapped[str] = _job_reference()
    stage: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    key: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    state: Mapped[str] = mapped_column(sa.String(16))
    attempt: Mapped[int]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    progress: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    reason: Mapped[str | None] = mapped_column(sa.String(63))
    message: Mapped[str | None] = mapped_column(sa.Text)
    hint: Mapped[str | None] = mapped_column(sa.Text)


class EventRow(Base):
    """One event of a job; its id is the SSE event id."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(sa.ForeignKey("jobs.id", ondelete="CASCADE"))
    time: Mapped[datetime]
    type: Mapped[str] = mapped_column(sa.String(8))
    reason: Mapped[str] = mapped_column(sa.String(63))
    message: Mapped[str] = mapped_column(sa.Text)
    stage: Mapped[str | None] = mapped_column(sa.String(16))
    key: Mapped[str] = mapped_column(sa.String(63))
    data: Mapped[dict[str, Any]]
    # Without AUTOINCREMENT SQLite reuses the id of a deleted last row, and Last-Event-ID would skip an event.
    __table_args__ = (sa.Index("ix_events_job_id_id", "job_id", "id"), {"sqlite_autoincrement": True})


class MetricRow(Base):
    """One point of a metric series. A point recorded again replaces the row with its primary key."""

    __tablename__ = "metrics"
    job_id: Mapped[str] = _job_reference()
    stage: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    key: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(127), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time: Mapped[datetime]
    value: Mapped[float]


class IngestRow(Base):
    """The byte offset up to which a stage's `events.jsonl` has been imported."""

    __tablename__ = "ingest"
    job_id: Mapped[str] = _job_reference()
    stage: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    key: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    offset_bytes: Mapped[int] = mapped_column(sa.BigInteger)


_REMOVING = sa.text("task = 'remove_files'")


class OutboxRow(Base):
    """A chore enqueued in the transaction of the change that needs it."""

    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    task: Mapped[str] = mapped_column(sa.String(63))
    argument: Mapped[str] = mapped_column(sa.String(255))
    created_at: Mapped[datetime]
    dispatched_at: Mapped[datetime | None] = mapped_column(index=True)
    __table_args__ = (
        sa.Index("ix_outbox_removing", "dispatched_at", postgresql_where=_REMOVING, sqlite_where=_REMOVING),
        {"sqlite_autoincrement": True})


class IdempotencyRow(Base):
    __tablename__ = "idempotency"
    key: Mapped[str] = mapped_column(sa.String(255), primary_key=True)
    route: Mapped[str] = mapped_column(sa.String(255), primary_key=True)
    body_digest: Mapped[str] = mapped_column(sa.String(80))
    status: Mapped[int]
    response: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)


class ResultRow(Base):
    __tablename__ = "results"
    job_id: Mapped[str] = _job_reference()
    checkpoint: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    tuned: Mapped[bool] = mapped_column(primary_key=True)
    family: Mapped[str] = mapped_column(sa.String(32))
    target: Mapped[str] = mapped_column(sa.String(4096))
    drafter_dir: Mapped[str] = mapped_column(sa.String(4096))
    speedup: Mapped[float]
    lossless: Mapped[bool]
    report: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class EndpointRow(Base):
    """One endpoint. `target`, `serve` and `reads` are a TargetSpec, an EndpointServeSpec and EndpointRules; `reads` is
    NULL in rows of versions without rules."""

    __tablename__ = "endpoints"
    name: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    target: Mapped[dict[str, Any]]
    serve: Mapped[dict[str, Any]]
    model: Mapped[str] = mapped_column(sa.String(255))
    url: Mapped[str | None] = mapped_column(sa.String(1024))
    desired: Mapped[str] = mapped_column(sa.String(8))
    active_revision: Mapped[int | None]
    candidate_revision: Mapped[int | None]
    conditions: Mapped[list[Any]]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    num_replicas: Mapped[int]
    reads: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True))


class RevisionRow(Base):
    """One revision of an endpoint. `job_id` has no foreign key, so that revisions remain when the job is deleted."""

    __tablename__ = "revisions"
    endpoint: Mapped[str] = mapped_column(sa.ForeignKey("endpoints.name", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str | None] = mapped_column(sa.String(63), index=True)
    checkpoint: Mapped[str | None] = mapped_column(sa.String(63))
    speedup: Mapped[float | None]
    tau: Mapped[float | None]
    reason: Mapped[str] = mapped_column(sa.Text)
    use: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(sa.String(16))
    rejected_reason: Mapped[str | None] = mapped_column(sa.Text)
    url: Mapped[str | None] = mapped_column(sa.String(2048))
    created_at: Mapped[datetime]


class HistoryRow(Base):
    """One entry of an endpoint's history. `endpoint` has no foreign key, because decisions are recorded for names that
    have no endpoint yet. An entry with `once` is recorded only once."""

    __tablename__ = "history"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    endpoint: Mapped[str] = mapped_column(sa.String(63))
    time: Mapped[datetime]
    kind: Mapped[str] = mapped_column(sa.String(16))
    revision: Mapped[int | None]
    job_id: Mapped[str | None] = mapped_column(sa.String(63))
    reason: Mapped[str] = mapped_column(sa.String(63))
    message: Mapped[str] = mapped_column(sa.Text)
    actor: Mapped[str] = mapped_column(sa.String(16))
    figures: Mapped[dict[str, Any]]
    data: Mapped[dict[str, Any]]
    once: Mapped[str | None] = mapped_column(sa.String(255))
    __table_args__ = (sa.Index("ix_history_endpoint_id", "endpoint", "id"),
                      sa.UniqueConstraint("endpoint", "once"), {"sqlite_autoincrement": True})


class EndpointNameRow(Base):
    """The project that owns an endpoint name: that of the first job or promotion that names it, permanently."""

    __tablename__ = "endpoint_names"
    name: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    project: Mapped[str] = mapped_column(sa.String(63), index=True)
    claimed_at: Mapped[datetime]


class ProjectRow(Base):
    """A project and its quotas; NULL means no limit."""

    __tablename__ = "projects"
    name: Mapped[str] = mapped_column(sa.String(63), primary_key=True)
    description: Mapped[str] = mapped_column(sa.String(255))
    max_jobs: Mapped[int | None]
    max_endpoints: Mapped[int | None]
    requests_per_minute: Mapped[int | None]
    max_gpus: Mapped[int | None]
    max_replicas: Mapped[int | None]
    priority_classes: Mapped[list[Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    created_at: Mapped[datetime]


class ApiKeyRow(Base):
    """The stored part of an API key. A key without a project is valid in all of them."""

    __tablename__ = "api_keys"
    id: Mapped[str] = mapped_column(sa.String(12), primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(63))
    secret_sha256: Mapped[str] = mapped_column(sa.String(64))
    project: Mapped[str | None] = mapped_column(sa.ForeignKey("projects.name"), index=True)
    role: Mapped[str] = mapped_column(sa.String(16))
    scopes: Mapped[list[Any] | None] = mapped_column(sa.JSON(none_as_null=True))
    created_by: Mapped[str] = mapped_column(sa.String(512))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class MembershipRow(Base):
    """The role that a subject or a group of an OIDC issuer has in a project."""

    __tablename__ = "memberships"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    project: Mapped[str] = mapped_column(sa.ForeignKey("projects.name"))
    issuer: Mapped[str] = mapped_column(sa.String(255))
    kind: Mapped[str] = mapped_column(sa.String(8))
    value: Mapped[str] = mapped_column(sa.String(255))
    role: Mapped[str] = mapped_column(sa.String(16))
    created_at: Mapped[datetime]
    __table_args__ = (sa.UniqueConstraint("project", "issuer", "kind", "value"),
                      sa.Index("ix_memberships_issuer_kind_value", "issuer", "kind", "value"),
                      {"sqlite_autoincrement": True})


_KEPT = "the audit is kept: rows are neither changed nor deleted"


class AuditRow(Base):
    """One change or refused request. Triggers prevent UPDATE and DELETE."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    time: Mapped[datetime]
    actor: Mapped[str] = mapped_column(sa.String(512))
    verb: Mapped[str] = mapped_column(sa.String(63))
    object: Mapped[str] = mapped_column(sa.String(512))
    project: Mapped[str | None] = mapped_column(sa.String(63))
    outcome: Mapped[str] = mapped_column(sa.String(63))
    request_id: Mapped[str] = mapped_column(sa.String(64))
    __table_args__ = (sa.Index("ix_audit_project_id", "project", "id"), {"sqlite_autoincrement": True})


# The triggers refuse changes by any client. The database's owner can drop them.
for _dialect, _statement in (
        ("sqlite", f"CREATE TRIGGER audit_is_kept_from_update BEFORE UPDATE ON audit "
                   f"BEGIN SELECT RAISE(ABORT, '{_KEPT}'); END"),
        ("sqlite", f"CREATE TRIGGER audit_is_kept_from_delete BEFORE DELETE ON audit "
                   f"BEGIN SELECT RAISE(ABORT, '{_KEPT}'); END"),
        ("postgresql", f"CREATE OR REPLACE FUNCTION eyrie_audit_is_kept() RETURNS trigger LANGUAGE plpgsql AS "
                       f"$$ BEGIN RAISE EXCEPTION '{_KEPT}'; END $$"),
        ("postgresql", "CREATE TRIGGER audit_is_kept BEFORE UPDATE OR DELETE ON audit FOR EACH ROW "
                       "EXECUTE FUNCTION eyrie_audit_is_kept()"),
        ("postgresql", "CREATE TRIGGER audit_is_kept_whole BEFORE TRUNCATE ON audit FOR EACH STATEMENT "
                       "EXECUTE FUNCTION eyrie_audit_is_kept()")):
    sa.event.listen(AuditRow.__table__, "after_create",
                 sa.DDL(_statement).execute_if(dialect=_dialect))  # type: ignore[no-untyped-call]


class WebhookRow(Base):
    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    project: Mapped[str] = mapped_column(sa.ForeignKey("projects.name"), index=True)
    url: Mapped[str] = mapped_column(sa.String(2048))
    events: Mapped[list[Any]]
    secret_encrypted: Mapped[str] = mapped_column(sa.Text)
    failures: Mapped[int]
    disabled_reason: Mapped[str | None] = mapped_column(sa.String(255))
    created_by: Mapped[str] = mapped_column(sa.String(512))
    created_at: Mapped[datetime]


class DeliveryRow(Base):
    __tablename__ = "deliveries"
    id: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    webhook_id: Mapped[str] = mapped_column(sa.ForeignKey("webhooks.id", ondelete="CASCADE"))
    event: Mapped[str] = mapped_column(sa.String(32))
    body: Mapped[str] = mapped_column(sa.Text)
    state: Mapped[str] = mapped_column(sa.String(16))
    attempts: Mapped[int]
    next_at: Mapped[datetime | None]
    status: Mapped[int | None]
    error: Mapped[str | None] = mapped_column(sa.String(255))
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    __table_args__ = (sa.Index("ix_deliveries_webhook_id_created_at", "webhook_id", "created_at"),
                      sa.Index("ix_deliveries_state_next_at", "state", "next_at"))
