"""The transactional outbox: chores enqueued in the same transaction as the change that needs them.

A row is committed together with the job row; a dispatcher publishes it to the broker afterwards and only then marks it.
Race: a dispatcher killed between the two leaves the row unmarked, and the next one publishes it again. Delivery is at
least once, so chores are idempotent.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from sqlalchemy import BindParameter, bindparam, delete, func, select, update
from sqlalchemy.orm import Session

from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.engine import Database, rowcount
from eyrie_api.database.tables import OutboxRow

ChoreName = Literal["advance_job", "reconcile_endpoint", "remove_files", "deliver"]


_SWEPT_AT_ONCE = 5000
"""Rows deleted per transaction. A busy control plane writes a million rows a day; deleting all of them in one
transaction would block other writers."""


@dataclass(frozen=True)
class Chore:
    id: int
    task: ChoreName
    argument: str
    """The job's id, the endpoint's name, or the delivery's id."""


def enqueue(session: Session, task: ChoreName, argument: str, clock: Clock) -> None:
    """Enqueue a chore in the running transaction."""
    session.add(OutboxRow(task=task, argument=argument, created_at=clock()))


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
        """How many are not yet dispatched."""
        query = select(func.count()).select_from(OutboxRow).where(OutboxRow.dispatched_at.is_(None))
        with self._database.reading() as session:
            return session.execute(query).scalar_one()

    def mark_dispatched(self, ids: Iterable[int]) -> None:
        with self._database.writing() as session:
            session.execute(update(OutboxRow).where(OutboxRow.id.in_(list(ids))).values(dispatched_at=self._clock()))

    def recent(self, task: ChoreName) -> tuple[str, ...]:
        """Arguments of the dispatched chores of a kind that have not been swept yet."""
        # A literal instead of a parameter: the partial index applies only where the planner sees the task's name.
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
                deleted = rowcount(session, delete(OutboxRow).where(OutboxRow.id.in_(old)).execution_options(
                    synchronize_session=False))
            swept += deleted
            if deleted < _SWEPT_AT_ONCE:
                return swept
