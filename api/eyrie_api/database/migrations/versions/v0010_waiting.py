"""DrafterJobs that wait for a quota of their project."""

import sqlalchemy as sa
from alembic import op

from eyrie_api.database.tables import UtcDateTime

revision = "v0010"
down_revision = "v0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "waiting",
        sa.Column("namespace", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=253), nullable=False),
        sa.Column("uid", sa.String(length=63), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("reason", sa.String(length=63), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("since", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "name", name=op.f("pk_waiting")))
    op.create_index("ix_waiting_project", "waiting", ["project"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("waiting")
