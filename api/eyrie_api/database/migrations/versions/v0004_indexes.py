"""Indexes for what is asked of all rows again and again: which jobs changed, whose files go.

The chores that remove files are a handful among all that were dispatched in a day: their index holds that handful only.
"""

import sqlalchemy as sa
from alembic import op

revision = "v0004"
down_revision = "v0003"
branch_labels = None
depends_on = None

_REMOVING = sa.text("task = 'remove_files'")


def upgrade() -> None:
    """Make them."""
    op.create_index("ix_jobs_updated_at", "jobs", ["updated_at"])
    op.create_index("ix_outbox_removing", "outbox", ["dispatched_at"], postgresql_where=_REMOVING,
                    sqlite_where=_REMOVING)


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_outbox_removing", table_name="outbox")
    op.drop_index("ix_jobs_updated_at", table_name="jobs")
