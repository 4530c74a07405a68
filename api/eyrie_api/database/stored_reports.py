"""The repository of pushed reports: figures and pages in the database, so that replicas and backups have them.

A report's id is a digest of its project and contents. Pushed again, it is the same report, also when two push it at the
same time, and an id says nothing about other projects. Lists do not read figures and pages.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import and_, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, undefer

from eyrie_api.access.scope import SYSTEM, Scope
from eyrie_api.clock import Clock, utc_now
from eyrie_api.database.audit import record_change
from eyrie_api.database.engine import Database
from eyrie_api.database.rendering import decode_cursor, encode_cursor
from eyrie_api.database.tables import ReportRow
from eyrie_api.errors import InvalidInput, NotFound
from eyrie_api.v1alpha1.access import Action
from eyrie_api.v1alpha1.stored_reports import StoredReport, StoredReportFigures, StoredReportList, StoreReport

MAX_PAGE = 200


def report_id(project: str, wanted: StoreReport) -> str:
    """The id of a report: of its project and all that it says."""
    text = json.dumps([project, wanted.model_dump(mode="json")], sort_keys=True)
    return "rep_" + hashlib.sha256(text.encode()).hexdigest()[:16]


class StoredReports:
    """Report rows of one database, as `scope` sees them."""

    def __init__(self, database: Database, clock: Clock = utc_now, scope: Scope = SYSTEM) -> None:
        self._database, self._clock, self._scope = database, clock, scope

    def store(self, wanted: StoreReport) -> tuple[StoredReport, bool]:
        """Keep a report in the scope's project. Returns it, and False when it was kept before. Raises NotFound or
        Forbidden."""
        project = self._scope.home("jobs:write")
        found = report_id(project, wanted)
        try:
            with self._database.writing() as session:
                row = session.get(ReportRow, found)
                if row is not None:
                    return _render(row), False
                row = self._row(found, project, wanted)
                session.add(row)
                session.flush()
                record_change(session, self._scope, self._clock, "report.create", f"report/{found}", project)
                return _render(row), True
        except IntegrityError:  # race: the same report was pushed through another replica between the two statements
            with self._database.reading() as session:
                return _render(self._find(session, found)), False

    def _row(self, found: str, project: str, wanted: StoreReport) -> ReportRow:
        text = json.dumps(wanted.report)
        actor = "system" if self._scope.principal is None else self._scope.principal.subject
        return ReportRow(id=found, project=project, kind=wanted.kind, title=wanted.title,
                         decision=list(wanted.decision), size_bytes=len(text) + len(wanted.page.encode()),
                         created_by=actor, created_at=self._clock(), report=text, page=wanted.page)

    def list(self, *, limit: int = 50, cursor: str | None = None) -> StoredReportList:
        """One page of reports, newest first. Raises InvalidInput for an invalid limit or cursor."""
        if not 1 <= limit <= MAX_PAGE:
            raise InvalidInput(f"limit {limit} is out of range", f"request 1 to {MAX_PAGE} reports per page")
        query = select(ReportRow).where(self._scope.sees(ReportRow.project, "jobs:read"))
        if cursor is not None:
            when, last = decode_cursor(cursor)
            query = query.where(or_(ReportRow.created_at < when,
                                    and_(ReportRow.created_at == when, ReportRow.id < last)))
        query = query.order_by(ReportRow.created_at.desc(), ReportRow.id.desc()).limit(limit + 1)
        with self._database.reading() as session:
            rows: Sequence[ReportRow] = session.scalars(query).all()
            items = tuple(_render(row) for row in rows[:limit])
        more = encode_cursor(rows[limit - 1].created_at, rows[limit - 1].id) if len(rows) > limit else None
        return StoredReportList(items=items, next_cursor=more)

    def get(self, report_id: str) -> StoredReport:
        """One report without its figures. Raises NotFound or Forbidden."""
        with self._database.reading() as session:
            return _render(self._find(session, report_id))

    def figures(self, report_id: str) -> StoredReportFigures:
        """One report with its figures. Raises NotFound or Forbidden."""
        with self._database.reading() as session:
            row = self._find(session, report_id, with_part=ReportRow.report)
            return StoredReportFigures(**_render(row).model_dump(), report=json.loads(row.report))

    def page(self, report_id: str) -> str:
        """Its HTML page. Raises NotFound or Forbidden."""
        with self._database.reading() as session:
            return self._find(session, report_id, with_part=ReportRow.page).page

    def delete(self, report_id: str) -> None:
        """Delete a report. Raises NotFound or Forbidden."""
        with self._database.writing() as session:
            row = self._find(session, report_id, "jobs:write")
            record_change(session, self._scope, self._clock, "report.delete", f"report/{report_id}", row.project)
            session.delete(row)

    def _find(self, session: Session, report_id: str, action: Action = "jobs:read", *,
              with_part: Any = None) -> ReportRow:
        row = session.get(ReportRow, report_id, options=[] if with_part is None else [undefer(with_part)])
        absent = NotFound(f"no report {report_id!r}", "list the reports to see their ids")
        if row is None:
            raise absent
        self._scope.check(action, row.project, absent)
        return row


def _render(row: ReportRow) -> StoredReport:
    return StoredReport.model_validate({
        "id": row.id, "project": row.project, "kind": row.kind, "title": row.title, "decision": row.decision,
        "size_bytes": row.size_bytes, "created_by": row.created_by, "created_at": row.created_at})
