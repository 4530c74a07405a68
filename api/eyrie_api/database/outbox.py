"""The outbox: chores promised in the same transaction as the change that needs them.

A row is written beside the job row and committed with it; a dispatcher publishes it to the broker afterwards and only
then marks it. Killed between the two, the next dispatcher publishes it again: at least once, never lost. Chores are
therefore idempotent.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from sqlalchemy import BindParameter, bindparam, delete, func, select, update
from sqlalchemy.orm import Session

from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.engine import Database, rowcount
from eyrie_api.database.tables import OutboxRow

ChoreName = Literal["advance_job", "reconcile_endpoint", "remove_files", "deliver"]


_SWEPT_AT_ONCE = 5000
"""A day of a busy control plane is a million rows: deleted in one transaction they would hold others up."""


@dataclass(frozen=True)
class Chore:
    """One promised chore."""

    id: int
    task: ChoreName
    argument: str
    """The job's id, the endpoint's name, or the delivery's id."""


def promise(session: Session, task: ChoreName, argument: str, clock: Clock) -> None:
    """Add a chore to the running transaction."""
    session.add(OutboxRow(**promised(task, argument, clock)))


def promised(task: ChoreName, argument: str, clock: Clock) -> dict[str, Any]:
    """The chore's row, for who inserts it with others."""
    return {"task": task, "argument": argument, "created_at": clock()}


class Outbox:
    """The dispatcher's side."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._database, self._clock = database, clock

    def pending(self, limit: int = 100) -> tuple[Chore, ...]:
        """Chores not yet dispatched, oldest first."""
        query = select(OutboxRow).where(OutboxRow.dispatched_at.is_(None)).order_by(OutboxRow.id).limit(limit)
        with self._database.reading() as session:
            return tuple(Chore(row.id, row.task, row.argument)  # type: ignore[arg-type]
                         for row in session.scalars(query))

    def depth(self) -> int:
        """How many wait."""
        query = select(func.count()).select_from(OutboxRow).where(OutboxRow.dispatched_at.is_(None))
        with self._database.reading() as session:
            return session.execute(query).scalar_one()

    def mark_dispatched(self, ids: Iterable[int]) -> None:
        """The broker has them."""
        with self._database.writing() as session:
            session.execute(update(OutboxRow).where(OutboxRow.id.in_(list(ids))).values(dispatched_at=self._clock()))

    def recent(self, task: ChoreName) -> tuple[str, ...]:
        """Arguments of the dispatched chores of a kind that have not been swept yet."""
        # In the statement rather than beside it: a partial index is for that name, and a parameter may be any.
        named: BindParameter[str] = bindparam(None, task, literal_execute=True)
        query = select(OutboxRow.argument).where(OutboxRow.task == named, OutboxRow.dispatched_at.is_not(None))
        with self._database.reading() as session:
            return tuple(session.scalars(query))

    def sweep(self, older_than_s: float) -> int:
        """Delete dispatched rows of that age; return how many."""
        before = self._clock() - timedelta(seconds=older_than_s)
        old, swept = select(OutboxRow.id).where(OutboxRow.dispatched_at < before).limit(_SWEPT_AT_ONCE), 0
        while True:
            with self._database.writing() as session:
                gone = rowcount(session, delete(OutboxRow).where(OutboxRow.id.in_(old)).execution_options(
                    synchronize_session=False))
            swept += gone
            if gone < _SWEPT_AT_ONCE:
                return swept
