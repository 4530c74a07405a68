"""Revisions get the columns `use`, `state` and `rejected_reason`; endpoints get a history.

In v0001 a rejection was appended to the revision's reason (`...; rejected: <Reason>: <message>`): it is moved into
`rejected_reason`. v0001 did not record which other revisions have served; they become retired.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from eyrie_api.database.tables import UtcDateTime

revision = "v0002"
down_revision = "v0001"
branch_labels = None
depends_on = None

_REJECTED = "; rejected: "
_DEFAULT_TREE = {"num_steps": 5, "top_k": 1, "num_draft_tokens": 6}
"""The draft tree that the engine of v0001 used when none was given."""

_revisions = sa.table(
    "revisions", sa.column("endpoint", sa.String), sa.column("number", sa.Integer), sa.column("reason", sa.Text),
    sa.column("tree", sa.JSON(none_as_null=True)), sa.column("drafter_dir", sa.String), sa.column("use", sa.JSON),
    sa.column("state", sa.String), sa.column("rejected_reason", sa.Text))
_endpoints = sa.table("endpoints", sa.column("name", sa.String), sa.column("active_revision", sa.Integer),
                      sa.column("candidate_revision", sa.Integer))


def upgrade() -> None:
    """Add the columns, fill them from the columns of v0001, and create the history."""
    with op.batch_alter_table("revisions") as batch:
        batch.add_column(sa.Column("use", sa.JSON(), nullable=True))
        batch.add_column(sa.Column("state", sa.String(length=16), nullable=True))
        batch.add_column(sa.Column("rejected_reason", sa.Text(), nullable=True))
    _fill(op.get_bind())
    with op.batch_alter_table("revisions") as batch:
        batch.alter_column("use", existing_type=sa.JSON(), nullable=False)
        batch.alter_column("state", existing_type=sa.String(length=16), nullable=False)
    op.create_table("history",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("endpoint", sa.String(length=63), nullable=False),
        sa.Column("time", UtcDateTime(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=True),
        sa.Column("job_id", sa.String(length=63), nullable=True),
        sa.Column("reason", sa.String(length=63), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("actor", sa.String(length=16), nullable=False),
        sa.Column("figures", sa.JSON(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("once", sa.String(length=255), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_history"),
        sa.UniqueConstraint("endpoint", "once", name="uq_history_endpoint_once"),
        sqlite_autoincrement=True)
    op.create_index("ix_history_endpoint_id", "history", ["endpoint", "id"])


def downgrade() -> None:
    """Append rejections to the reasons again and drop the columns; the history is lost."""
    op.drop_table("history")
    connection = op.get_bind()
    for row in connection.execute(sa.select(_revisions).where(_revisions.c.state == "rejected")).all():
        _set(connection, row, {"reason": f"{row.reason}{_REJECTED}{row.rejected_reason}"})
    with op.batch_alter_table("revisions") as batch:
        for name in ("rejected_reason", "state", "use"):
            batch.drop_column(name)


def _fill(connection: sa.Connection) -> None:
    aims = {row.name: row for row in connection.execute(sa.select(_endpoints))}
    known = sa.select(*(_revisions.c[name] for name in ("endpoint", "number", "reason", "tree", "drafter_dir")))
    for row in connection.execute(known).all():
        reason, rejected, why = row.reason.partition(_REJECTED)
        endpoint = aims[row.endpoint]
        if row.number == endpoint.active_revision:
            state = "active"
        elif row.number == endpoint.candidate_revision:
            state = "proposed"
        else:
            state = "rejected" if rejected else "retired"
        drafts = row.drafter_dir is not None
        setting = {"method": "drafter" if drafts else "off", "tree": (row.tree or _DEFAULT_TREE) if drafts else None}
        _set(connection, row, {
            "reason": reason, "rejected_reason": why if state == "rejected" else None, "state": state,
            "use": {"drafter_dir": row.drafter_dir, "setting": setting, "map": None, "context_length": None}})


def _set(connection: sa.Connection, row: Any, values: dict[str, Any]) -> None:
    connection.execute(sa.update(_revisions).where(
        _revisions.c.endpoint == row.endpoint, _revisions.c.number == row.number).values(**values))
