"""The audit log: what was done is written in the transaction of the change, what was refused in one of its own."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.access import AuditEntry, AuditPage
from eyrie_api.database.engine import Database
from eyrie_api.database.rendering import render
from eyrie_api.database.tables import AuditRow


def record_change(session: Session, scope: Scope, clock: Clock, verb: str, thing: str, project: str | None) -> None:
    """Write a change to the audit log, in the transaction that makes it."""
    if scope.principal is not None:  # the control plane's own changes are not audited
        session.add(AuditRow(time=clock(), actor=scope.principal.subject, verb=verb, object=thing, project=project,
                             outcome="done", request_id=scope.request_id))


class Audit:
    """Audit rows of one database, as `scope` sees them."""

    def __init__(self, database: Database, clock: Clock = utc_now, scope: Scope = SYSTEM) -> None:
        self._database, self._clock, self._scope = database, clock, scope

    def read(self, *, actor: str | None = None, verb: str | None = None, thing: str | None = None,
             before: int | None = None, limit: int = 100) -> AuditPage:
        """The latest entries, or the latest before an id; newest first."""
        query = select(AuditRow).where(self._scope.sees(AuditRow.project, "audit:read"))
        for column, value in ((AuditRow.actor, actor), (AuditRow.verb, verb), (AuditRow.object, thing)):
            query = query if value is None else query.where(column == value)
        query = query if before is None else query.where(AuditRow.id < before)
        with self._database.reading() as session:
            rows = session.scalars(query.order_by(AuditRow.id.desc()).limit(limit + 1)).all()
            items = tuple(render(AuditEntry, row) for row in rows[:limit])
        return AuditPage(items=items, next_before=items[-1].id if len(rows) > limit else None)

    def refused(self, actor: str, verb: str, thing: str, project: str | None, status: int, request_id: str) -> None:
        with self._database.writing() as session:
            session.add(AuditRow(time=self._clock(), actor=actor[:512], verb=verb[:63], object=thing[:512],
                                 project=project, outcome=f"refused: {status}", request_id=request_id))
