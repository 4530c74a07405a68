"""The history of endpoints: promotion decisions, changes of the serving revision, and windows of live metrics.

`record_history` writes an entry inside the transaction of the change it describes, so that there is no change without
its entry and no entry without its change. What may be reported twice (a decision after a crash, a drift) has a key in
`once`; the second report has no effect. Windows are written as long as there is traffic, so only the latest are kept.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from eyrie_api.access.scope import DEFAULT_PROJECT, SYSTEM, Scope
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.endpoints import Actor, History, HistoryEntry, HistoryKind
from eyrie_api.contract.reports import PromotionDecision
from eyrie_api.database import endpoint_names
from eyrie_api.database.engine import Database
from eyrie_api.database.rendering import render
from eyrie_api.database.tables import EndpointRow, HistoryRow
from eyrie_api.database.webhooks import announce
from eyrie_api.decisions.promotion import decision_reason
from eyrie_api.errors import NotFound

KEPT_WINDOWS = 200
"""Windows kept per endpoint: over three hours of one-minute windows, more than any drift rule uses."""

MAX_PAGE = 500


@dataclass(frozen=True)
class RecentWindows:
    windows: tuple[float, ...] = ()
    """tau of each window since its activation, or since its last drift report; oldest first."""

    drift_reported: bool = False
    """Drift has been reported since its activation."""

    last_window: int = 0
    """Entry id of the latest window."""


def record_history(session: Session, clock: Clock, endpoint: str, kind: HistoryKind, reason: str, message: str, *,
         revision: int | None = None, job_id: str | None = None, actor: Actor = "policy",
         figures: Mapping[str, float | None] | None = None, data: Mapping[str, Any] | None = None,
         once: str | None = None) -> int | None:
    """Add an entry; figures that are None are omitted. Returns its id, or None when `once` was recorded before."""
    if once is not None:
        recorded = select(HistoryRow.id).where(HistoryRow.endpoint == endpoint, HistoryRow.once == once)
        if session.execute(recorded).first() is not None:
            return None
    known = {name: value for name, value in (figures or {}).items() if value is not None}
    row = HistoryRow(endpoint=endpoint, time=clock(), kind=kind, revision=revision, job_id=job_id, reason=reason,
                     message=message, actor=actor, figures=known, data=dict(data or {}), once=once)
    session.add(row)
    session.flush()
    return row.id


class Histories:
    def __init__(self, database: Database, clock: Clock = utc_now, scope: Scope = SYSTEM) -> None:
        self._database, self._clock, self._scope = database, clock, scope

    def read(self, endpoint: str, *, limit: int = 200, before: int | None = None,
             kind: HistoryKind | None = None) -> History:
        """The latest entries of a name, or the latest before an id; oldest first. Raises NotFound."""
        query = select(HistoryRow).where(HistoryRow.endpoint == endpoint)
        query = query if before is None else query.where(HistoryRow.id < before)
        query = query if kind is None else query.where(HistoryRow.kind == kind)
        with self._database.reading() as session:
            project = endpoint_names.project_of(session, endpoint) or DEFAULT_PROJECT
            absent = NotFound(f"no endpoint {endpoint!r}, and nothing was ever decided for one",
                              "list the endpoints; one is made when a job first promotes to it")
            self._scope.check("endpoints:read", project, absent)
            rows = session.scalars(query.order_by(HistoryRow.id.desc()).limit(limit + 1)).all()
            any_entry = select(HistoryRow.id).where(HistoryRow.endpoint == endpoint).limit(1)
            if not rows and session.get(EndpointRow, endpoint) is None and session.execute(any_entry).first() is None:
                raise absent
            items = tuple(render(HistoryEntry, row) for row in reversed(rows[:limit]))
        return History(items=items, next_before=items[0].id if len(rows) > limit else None)

    def latest(self, endpoints: Collection[str], kinds: Collection[HistoryKind]) -> tuple[HistoryEntry, ...]:
        """The latest entry of each of these kinds of those of the endpoints that the caller sees; by one query."""
        latest = select(func.max(HistoryRow.id)).where(
            HistoryRow.kind.in_(kinds), HistoryRow.endpoint.in_(endpoints),
            endpoint_names.visible_to(HistoryRow.endpoint, self._scope, "endpoints:read"),
        ).group_by(HistoryRow.endpoint, HistoryRow.kind)
        with self._database.reading() as session:
            rows = session.scalars(select(HistoryRow).where(HistoryRow.id.in_(latest)).order_by(HistoryRow.id)).all()
            return tuple(render(HistoryEntry, row) for row in rows)

    def record_decision(self, endpoint: str, decision: PromotionDecision, *, job_id: str, attempt: int) -> None:
        """Record the promotion decision about a job's candidate; no effect when this attempt was recorded before."""
        failed = [check.words for check in decision.checks if not check.passed]
        figures = {"speedup": decision.candidate_speedup, "incumbent_speedup": decision.incumbent_speedup}
        figures |= {check.name: check.figure for check in decision.checks}
        with self._database.writing() as session:
            record_history(session, self._clock, endpoint, "decided", decision_reason(decision),
                 "; ".join(failed or decision.reasons), job_id=job_id, figures=figures,
                 data={"decision": decision.model_dump(mode="json")}, once=f"decided/{job_id}/{attempt}")

    def record_window(self, endpoint: str, revision: int, tau: float | None, rounds: float, proven: float | None, *,
                      accepted: Sequence[float] = (), rollback_below: float | None = None,
                      drift_below: float | None = None, requests: float | None = None,
                      generated: float | None = None, seconds: float | None = None) -> None:
        """Record one window and delete the oldest beyond KEPT_WINDOWS.

        tau        None of a revision whose acceptance is not watched: the window has requests and tokens alone, and
                   replaces the latest one of the same kind, so that none with acceptance is deleted for it
        accepted   draft tokens accepted at each position; empty where the engine does not say
        requests   requests that ended in the window, `generated` the tokens, and `seconds` its length; None where not
                   known
        """
        if tau is None:
            message = f"{requests or 0:.0f} requests in {seconds or 0:.0f} s"
        else:
            message = f"tau {tau:.2f} over {rounds:.0f} rounds" + ("" if proven is None else f", proven {proven:.2f}")
        counted = None if tau is None else rounds
        windows = select(HistoryRow).where(HistoryRow.endpoint == endpoint, HistoryRow.kind == "window").order_by(
            HistoryRow.id.desc())
        with self._database.writing() as session:
            latest = session.scalars(windows.limit(1)).first()
            if tau is None and latest is not None and "tau" not in latest.figures:
                session.delete(latest)
            record_history(session, self._clock, endpoint, "window", "Watched", message, revision=revision,
                           actor="watch", figures={
                               "tau": tau, "rounds": counted, "proven_tau": proven, "drift_below": drift_below,
                               "rollback_below": rollback_below, "requests": requests, "tokens": generated,
                               "seconds": seconds,
                               **{f"accepted/{position}": count for position, count in enumerate(accepted, start=1)}})
            oldest = session.scalars(windows.offset(KEPT_WINDOWS - 1).limit(1)).first()
            if oldest is not None:
                session.execute(delete(HistoryRow).where(
                    HistoryRow.endpoint == endpoint, HistoryRow.kind == "window", HistoryRow.id < oldest.id))

    def record(self, endpoint: str, kind: HistoryKind, reason: str, message: str, *, once: str, revision: int,
               job_id: str | None = None, figures: Mapping[str, float | None] | None = None,
               data: Mapping[str, Any] | None = None) -> None:
        """Record an observation or an action of the watch."""
        with self._database.writing() as session:
            entry_id = record_history(session, self._clock, endpoint, kind, reason, message, revision=revision,
                                      job_id=job_id, actor="watch", figures=figures, data=data, once=once)
            if kind == "drift" and entry_id is not None:
                project = endpoint_names.project_of(session, endpoint) or DEFAULT_PROJECT
                announce(session, self._clock, project, "endpoint.drift",
                         {"endpoint": {"name": endpoint, "revision": revision, "reason": reason, "message": message}})

    def watched(self, endpoint: str, revision: int) -> RecentWindows:
        """The windows and drift reports of a revision since its last activation."""
        with self._database.reading() as session:
            since = _last(session, endpoint, revision, "activated", 0)
            drift = _last(session, endpoint, revision, "drift", since)
            rows = session.scalars(select(HistoryRow).where(
                HistoryRow.endpoint == endpoint, HistoryRow.revision == revision, HistoryRow.kind == "window",
                HistoryRow.id > max(since, drift)).order_by(HistoryRow.id)).all()
            taus = tuple(row.figures["tau"] for row in rows if "tau" in row.figures)
            return RecentWindows(taus, drift > since, rows[-1].id if rows else 0)


def _last(session: Session, endpoint: str, revision: int, kind: str, after: int) -> int:
    """Id of the latest entry of that kind, or `after` when there is none beyond it."""
    latest = session.execute(select(func.max(HistoryRow.id)).where(
        HistoryRow.endpoint == endpoint, HistoryRow.revision == revision, HistoryRow.kind == kind)).scalar()
    return max(latest or 0, after)
