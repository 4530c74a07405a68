"""URLs of single revisions, on clusters."""

import sqlalchemy as sa
from alembic import op

revision = "v0008"
down_revision = "v0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    with op.batch_alter_table("revisions") as table:
        table.add_column(sa.Column("url", sa.String(length=2048), nullable=True))


def downgrade() -> None:
    """Drop it."""
    with op.batch_alter_table("revisions") as table:
        table.drop_column("url")
