"""Access: projects with keys, members and quotas, the audit log, webhooks. Existing rows get the project `default`.

Jobs get the project column by a plain ALTER TABLE. Alembic's batch mode would copy the table and drop the old one, and
with foreign keys enforced SQLite would delete every stage, event and metric by cascade.

Triggers on the audit log refuse UPDATE and DELETE (on PostgreSQL also TRUNCATE), by any client. The database's owner
can drop the triggers.
"""

import sqlalchemy as sa
from alembic import op

from eyrie_api.clock import utc_now
from eyrie_api.database.tables import UtcDateTime

revision = "v0003"
down_revision = "v0002"
branch_labels = None
depends_on = None

_KEPT = "the audit is kept: rows are neither changed nor deleted"
_POSTGRESQL = (
    f"CREATE FUNCTION eyrie_audit_is_kept() RETURNS trigger LANGUAGE plpgsql AS "
    f"$$ BEGIN RAISE EXCEPTION '{_KEPT}'; END $$",
    "CREATE TRIGGER audit_is_kept BEFORE UPDATE OR DELETE ON audit FOR EACH ROW EXECUTE FUNCTION eyrie_audit_is_kept()",
    "CREATE TRIGGER audit_is_kept_whole BEFORE TRUNCATE ON audit FOR EACH STATEMENT "
    "EXECUTE FUNCTION eyrie_audit_is_kept()",
)
_SQLITE = tuple(f"CREATE TRIGGER audit_is_kept_from_{what.lower()} BEFORE {what} ON audit "
                f"BEGIN SELECT RAISE(ABORT, '{_KEPT}'); END" for what in ("UPDATE", "DELETE"))


def upgrade() -> None:
    """Create the tables and the project `default`, which gets every job and every endpoint name."""
    projects = op.create_table("projects",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("description", sa.String(length=255), nullable=False),
        sa.Column("max_jobs", sa.Integer(), nullable=True),
        sa.Column("max_endpoints", sa.Integer(), nullable=True),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_projects"))
    op.bulk_insert(projects, [{"name": "default", "description": "where everything is that names no project",
                               "created_at": utc_now()}])
    op.add_column("jobs", sa.Column("project", sa.String(length=63), nullable=False, server_default="default"))
    op.create_index("ix_jobs_project_created_at_id", "jobs", ["project", "created_at", "id"])
    op.create_table("endpoint_names",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("claimed_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_endpoint_names"))
    op.create_index("ix_endpoint_names_project", "endpoint_names", ["project"])
    _claim_names()
    op.create_table("api_keys",
        sa.Column("id", sa.String(length=12), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=True),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("scopes", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("created_by", sa.String(length=512), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=True),
        sa.Column("revoked_at", UtcDateTime(), nullable=True),
        sa.Column("last_used_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name="fk_api_keys_project_projects"))
    op.create_index("ix_api_keys_project", "api_keys", ["project"])
    op.create_table("memberships",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("issuer", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("value", sa.String(length=255), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_memberships"),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name="fk_memberships_project_projects"),
        sa.UniqueConstraint("project", "issuer", "kind", "value", name="uq_memberships_project_issuer_kind_value"),
        sqlite_autoincrement=True)
    op.create_index("ix_memberships_issuer_kind_value", "memberships", ["issuer", "kind", "value"])
    _make_audit()
    _make_webhooks()


def _claim_names() -> None:
    """Claim the names of all endpoints, and those in the specs of jobs that have not ended."""
    connection = op.get_bind()
    names = set(connection.execute(sa.select(sa.table("endpoints", sa.column("name")))).scalars())
    jobs = sa.table("jobs", sa.column("spec", sa.JSON()), sa.column("ended", sa.Boolean()))
    for spec in connection.execute(sa.select(jobs.c.spec).where(jobs.c.ended.is_(False))).scalars():
        names.add(spec.get("serve", {}).get("endpoint", "default"))
    made = sa.table("endpoint_names", sa.column("name"), sa.column("project"), sa.column("claimed_at", UtcDateTime()))
    op.bulk_insert(made, [{"name": name, "project": "default", "claimed_at": utc_now()} for name in sorted(names)])


def _make_audit() -> None:
    op.create_table("audit",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("time", UtcDateTime(), nullable=False),
        sa.Column("actor", sa.String(length=512), nullable=False),
        sa.Column("verb", sa.String(length=63), nullable=False),
        sa.Column("object", sa.String(length=512), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=True),
        sa.Column("outcome", sa.String(length=63), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        sqlite_autoincrement=True)
    op.create_index("ix_audit_project_id", "audit", ["project", "id"])
    for statement in _POSTGRESQL if op.get_bind().dialect.name == "postgresql" else _SQLITE:
        op.execute(statement)


def _make_webhooks() -> None:
    op.create_table("webhooks",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("url", sa.String(length=2048), nullable=False),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("secret", sa.String(length=63), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("disabled_reason", sa.String(length=255), nullable=True),
        sa.Column("created_by", sa.String(length=512), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name="fk_webhooks_project_projects"))
    op.create_index("ix_webhooks_project", "webhooks", ["project"])
    op.create_table("deliveries",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("webhook_id", sa.String(length=16), nullable=False),
        sa.Column("event", sa.String(length=32), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", UtcDateTime(), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("error", sa.String(length=255), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("ended_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_deliveries"),
        sa.ForeignKeyConstraint(["webhook_id"], ["webhooks.id"], ondelete="CASCADE",
                                name="fk_deliveries_webhook_id_webhooks"))
    op.create_index("ix_deliveries_webhook_id_created_at", "deliveries", ["webhook_id", "created_at"])
    op.create_index("ix_deliveries_state_next_at", "deliveries", ["state", "next_at"])


def downgrade() -> None:
    """Drop the tables and the project column; the audit log is lost."""
    for table in ("deliveries", "webhooks", "audit", "memberships", "api_keys", "endpoint_names", "projects"):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION eyrie_audit_is_kept()")
    op.drop_index("ix_jobs_project_created_at_id", table_name="jobs")
    op.drop_column("jobs", "project")
