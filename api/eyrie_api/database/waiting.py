"""The repository of DrafterJobs that wait for a quota of their project.

Such an object has no job yet, or one that is to be resumed. Its row is a copy of the operator's latest decision, for
REST and console: nothing else reads it. The operator compares before it writes (`eyrie_operator.cluster.reconcile`) and
deletes rows of objects that do not wait any more.
"""

from sqlalchemy import delete, func, select

from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.database.engine import Database, upsert
from eyrie_api.database.tables import WaitingRow
from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.resources import WaitingList, WaitingObject

MAX_LISTED = 1000


class WaitingObjects:
    """Rows of waiting objects of one database, as `scope` sees them."""

    def __init__(self, database: Database, scope: Scope = SYSTEM) -> None:
        self._database, self._scope = database, scope

    def list(self, *, limit: int = 100) -> WaitingList:
        """Those that have waited longest, and the number of all, in one statement. Raises InvalidInput for an invalid
        limit."""
        if not 1 <= limit <= MAX_LISTED:
            raise InvalidInput(f"limit {limit} is out of range", f"request 1 to {MAX_LISTED} objects")
        query = (select(WaitingRow, func.count().over()).where(self._scope.sees(WaitingRow.project, "jobs:read"))
                 .order_by(WaitingRow.since, WaitingRow.namespace, WaitingRow.name).limit(limit))
        with self._database.reading() as session:
            rows = session.execute(query).all()
            return WaitingList(items=tuple(_render(row) for row, _total in rows), total=rows[0][1] if rows else 0)

    # For the operator.

    def all(self) -> tuple[WaitingObject, ...]:
        """Every row."""
        with self._database.reading() as session:
            return tuple(_render(row) for row in session.scalars(select(WaitingRow)))

    def find(self, namespace: str, name: str) -> WaitingObject | None:
        """The row of an object; None when it does not wait."""
        with self._database.reading() as session:
            row = session.get(WaitingRow, (namespace, name))
            return None if row is None else _render(row)

    def record(self, waiting: WaitingObject) -> None:
        """Write the row of an object."""
        values = waiting.model_dump(include=set(WaitingObject.model_fields) - {"namespace", "name"})
        with self._database.writing() as session:
            upsert(session, WaitingRow, {"namespace": waiting.namespace, "name": waiting.name}, values)

    def remove(self, waiting: WaitingObject) -> None:
        """Delete the row of an object, if it is still that of this uid: another one may have been applied under the
        name meanwhile."""
        with self._database.writing() as session:
            session.execute(delete(WaitingRow).where(
                WaitingRow.namespace == waiting.namespace, WaitingRow.name == waiting.name,
                WaitingRow.uid == waiting.uid))


def _render(row: WaitingRow) -> WaitingObject:
    return WaitingObject(namespace=row.namespace, name=row.name, uid=row.uid, project=row.project, reason=row.reason,
                         message=row.message, hint=row.hint, since=row.since)
