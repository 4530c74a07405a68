"""Reports of comparisons and experiments, pushed to the control plane."""

import sqlalchemy as sa
from alembic import op

from eyrie_api.database.tables import UtcDateTime

revision = "v0007"
down_revision = "v0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "reports",
        sa.Column("id", sa.String(length=20), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("title", sa.String(length=2000), nullable=False),
        sa.Column("decision", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("created_by", sa.String(length=512), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.Column("page", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project"], ["projects.name"], name=op.f("fk_reports_project_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reports")))
    op.create_index("ix_reports_created_at_id", "reports", ["created_at", "id"])
    op.create_index("ix_reports_project_created_at_id", "reports", ["project", "created_at", "id"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("reports")
