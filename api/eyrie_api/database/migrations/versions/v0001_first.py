"""The first tables: jobs with stages, events and metrics, the outbox, idempotency keys, results, endpoints."""

import sqlalchemy as sa
from alembic import op

from eyrie_api.database.tables import UtcDateTime

revision = "v0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table("endpoints",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("target", sa.JSON(), nullable=False),
        sa.Column("serve", sa.JSON(), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("url", sa.String(length=1024), nullable=True),
        sa.Column("desired", sa.String(length=8), nullable=False),
        sa.Column("active_revision", sa.Integer(), nullable=True),
        sa.Column("candidate_revision", sa.Integer(), nullable=True),
        sa.Column("conditions", sa.JSON(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_endpoints"))
    op.create_table("idempotency",
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("route", sa.String(length=255), nullable=False),
        sa.Column("body_digest", sa.String(length=80), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("response", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("key", "route", name="pk_idempotency"))
    op.create_index("ix_idempotency_expires_at", "idempotency", ["expires_at"])
    op.create_table("jobs",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=True),
        sa.Column("target", sa.String(length=4096), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("status", sa.JSON(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("ended", sa.Boolean(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("delete_requested", sa.Boolean(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.Column("lease_owner", sa.String(length=255), nullable=True),
        sa.Column("lease_until", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"))
    op.create_index("ix_jobs_created_at_id", "jobs", ["created_at", "id"])
    op.create_index("ix_jobs_ended", "jobs", ["ended"])
    op.create_index("ix_jobs_name", "jobs", ["name"])
    op.create_index("ix_jobs_phase", "jobs", ["phase"])
    op.create_table("outbox",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("task", sa.String(length=63), nullable=False),
        sa.Column("argument", sa.String(length=255), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("dispatched_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sqlite_autoincrement=True)
    op.create_index("ix_outbox_dispatched_at", "outbox", ["dispatched_at"])
    op.create_table("events",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("time", UtcDateTime(), nullable=False),
        sa.Column("type", sa.String(length=8), nullable=False),
        sa.Column("reason", sa.String(length=63), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=True),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sqlite_autoincrement=True)
    op.create_index("ix_events_job_id_id", "events", ["job_id", "id"])
    op.create_table("ingest",
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=False),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("offset_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_ingest_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "stage", "key", name="pk_ingest"))
    op.create_table("labels",
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("value", sa.String(length=4096), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_labels_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "key", name="pk_labels"))
    op.create_index("ix_labels_key_job_id", "labels", ["key", "job_id"])
    op.create_table("metrics",
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=False),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=127), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("time", UtcDateTime(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_metrics_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "stage", "key", "name", "step", name="pk_metrics"))
    op.create_table("results",
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("checkpoint", sa.String(length=63), nullable=False),
        sa.Column("tuned", sa.Boolean(), nullable=False),
        sa.Column("family", sa.String(length=32), nullable=False),
        sa.Column("target", sa.String(length=4096), nullable=False),
        sa.Column("drafter_dir", sa.String(length=4096), nullable=False),
        sa.Column("speedup", sa.Double(), nullable=False),
        sa.Column("lossless", sa.Boolean(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_results_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "checkpoint", "tuned", name="pk_results"))
    op.create_table("revisions",
        sa.Column("endpoint", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("job_id", sa.String(length=63), nullable=True),
        sa.Column("checkpoint", sa.String(length=63), nullable=True),
        sa.Column("tree", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("drafter_dir", sa.String(length=4096), nullable=True),
        sa.Column("speedup", sa.Double(), nullable=True),
        sa.Column("tau", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.ForeignKeyConstraint(["endpoint"], ["endpoints.name"], name="fk_revisions_endpoint_endpoints",
                                ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("endpoint", "number", name="pk_revisions"))
    op.create_index("ix_revisions_job_id", "revisions", ["job_id"])
    op.create_table("stages",
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=False),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("started_at", UtcDateTime(), nullable=True),
        sa.Column("finished_at", UtcDateTime(), nullable=True),
        sa.Column("progress", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("reason", sa.String(length=63), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("hint", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_stages_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "stage", "key", name="pk_stages"))


def downgrade() -> None:
    """Drop the tables, referring ones first; indexes are dropped with their tables."""
    op.drop_table("stages")
    op.drop_table("revisions")
    op.drop_table("results")
    op.drop_table("metrics")
    op.drop_table("labels")
    op.drop_table("ingest")
    op.drop_table("events")
    op.drop_table("outbox")
    op.drop_table("jobs")
    op.drop_table("idempotency")
    op.drop_table("endpoints")
