"""Quotas of GPUs, replicas and priority classes, and what jobs and endpoints count for them.

Jobs accepted before count no GPUs until they end, since their demand depends on the cluster profile of that time.
Endpoints count the replicas that their serving section names, or one.
"""

import sqlalchemy as sa
from alembic import op

revision = "v0006"
down_revision = "v0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns."""
    op.add_column("projects", sa.Column("max_gpus", sa.Integer(), nullable=True))
    op.add_column("projects", sa.Column("max_replicas", sa.Integer(), nullable=True))
    op.add_column("projects", sa.Column("priority_classes", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("jobs", sa.Column("num_gpus", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("num_replicas", sa.Integer(), nullable=False, server_default="1"))
    op.add_column("endpoints", sa.Column("num_replicas", sa.Integer(), nullable=False, server_default="1"))
    endpoints = sa.table("endpoints", sa.column("name"), sa.column("serve", sa.JSON()), sa.column("num_replicas"))
    for name, serve in op.get_bind().execute(sa.select(endpoints.c.name, endpoints.c.serve)).all():
        if serve.get("replicas"):
            op.execute(endpoints.update().where(endpoints.c.name == name).values(num_replicas=serve["replicas"]))


def downgrade() -> None:
    """Drop the columns."""
    for table, column in (("endpoints", "num_replicas"), ("jobs", "num_replicas"), ("jobs", "num_gpus"),
                          ("projects", "priority_classes"), ("projects", "max_replicas"), ("projects", "max_gpus")):
        op.drop_column(table, column)
