"""The document of a job as it was submitted, and what its stages were planned to take."""

import sqlalchemy as sa
from alembic import op

revision = "v0011"
down_revision = "v0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    with op.batch_alter_table("jobs") as table:
        table.add_column(sa.Column("submission", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Drop it."""
    with op.batch_alter_table("jobs") as table:
        table.drop_column("submission")
