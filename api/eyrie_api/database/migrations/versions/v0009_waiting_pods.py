"""Pods of a job's run that have no node, on clusters."""

import sqlalchemy as sa
from alembic import op

revision = "v0009"
down_revision = "v0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    with op.batch_alter_table("jobs") as table:
        table.add_column(sa.Column("waiting_pods", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Drop it."""
    with op.batch_alter_table("jobs") as table:
        table.drop_column("waiting_pods")
