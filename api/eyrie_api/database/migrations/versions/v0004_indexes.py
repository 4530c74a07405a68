"""Indexes for two periodic queries: jobs changed since a time, and dispatched chores that remove files.

Few of the chores dispatched in a day remove files, so their index is partial.
"""

import sqlalchemy as sa
from alembic import op

revision = "v0004"
down_revision = "v0003"
branch_labels = None
depends_on = None

_REMOVING = sa.text("task = 'remove_files'")


def upgrade() -> None:
    """Create the indexes."""
    op.create_index("ix_jobs_updated_at", "jobs", ["updated_at"])
    op.create_index("ix_outbox_removing", "outbox", ["dispatched_at"], postgresql_where=_REMOVING,
                    sqlite_where=_REMOVING)


def downgrade() -> None:
    """Drop the indexes."""
    op.drop_index("ix_outbox_removing", table_name="outbox")
    op.drop_index("ix_jobs_updated_at", table_name="jobs")
