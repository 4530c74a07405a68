"""The rules for the files that engines of endpoints open. Endpoints without them get the strictest."""

import sqlalchemy as sa
from alembic import op

revision = "r002"
down_revision = "r001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Without a default: a program of 0.2.0 leaves the column out."""
    op.add_column("endpoints", sa.Column("reads", sa.JSON(none_as_null=True), nullable=True))
