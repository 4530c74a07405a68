"""Endpoint and revision rows: what a stable URL serves, has served, and should serve next.

An endpoint is a name with numbered revisions; revision 1 is always the bare target, so that there is something lossless
to roll back to before the first drafter was ever promoted. Nothing here starts or stops an engine: a change of mind
(`propose`, `roll_back`, `set_desired`) moves `candidate_revision` or `desired` and promises the chore `tend_endpoint`.
Whoever tends the endpoint brings the candidate up beside the active engine and says how that went: `activate` or
`reject`. Until then the active revision keeps serving.
"""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from eyrie_api.clock import Clock, utc_now
from eyrie_api.database import Database, EndpointRow, RevisionRow
from eyrie_api.errors import Conflict, NotFound
from eyrie_api.outbox import promise
from eyrie_api.rows import render_endpoint, render_revision
from eyrie_api.v1alpha1.job import DraftTreeShape, ServeSpec, TargetSpec
from eyrie_api.v1alpha1.status import Condition, Endpoint, EndpointList, Revision


@dataclass(frozen=True)
class Serving:
    """What an engine behind an endpoint is started with."""

    target: TargetSpec
    serve: ServeSpec


class Endpoints:
    """Endpoint rows of one database."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._database, self._clock = database, clock

    def create(self, name: str, target: TargetSpec, serve: ServeSpec, model: str) -> Endpoint:
        """Make the endpoint with the bare target as its first candidate, or find it.

        Raises Conflict when it exists for another target: a URL must not change its model under its users.
        """
        now = self._clock()
        with self._database.writing() as session:
            row = session.get(EndpointRow, name)
            if row is None:
                row = EndpointRow(
                    name=name, target=target.model_dump(mode="json"), serve=serve.model_dump(mode="json"), model=model,
                    url=None, desired="on", active_revision=None, candidate_revision=1, conditions=[], created_at=now,
                    updated_at=now)
                session.add(row)
                session.flush()
                session.add(RevisionRow(endpoint=name, number=1, job_id=None, checkpoint=None, tree=None,
                                        drafter_dir=None, speedup=None, tau=None, created_at=now,
                                        reason="the target without a drafter"))
                promise(session, "tend_endpoint", name, self._clock)
                session.flush()
            elif row.target != target.model_dump(mode="json"):
                raise Conflict(f"endpoint {name!r} serves target {row.target['model']!r}, not {target.model!r}",
                               "give serve.endpoint another name")
            return self._render(session, row)

    def get(self, name: str) -> Endpoint:
        """One endpoint. Raises NotFound."""
        with self._database.reading() as session:
            return self._render(session, _find(session, name))

    def list(self) -> EndpointList:
        """All endpoints, by name."""
        with self._database.reading() as session:
            rows = session.scalars(select(EndpointRow).order_by(EndpointRow.name)).all()
            return EndpointList(items=tuple(self._render(session, row) for row in rows))

    def serving(self, name: str) -> Serving:
        """Target and serving section the endpoint was made with. Raises NotFound."""
        with self._database.reading() as session:
            row = _find(session, name)
            return Serving(TargetSpec.model_validate(row.target), ServeSpec.model_validate(row.serve))

    def propose(self, name: str, *, job_id: str | None, checkpoint: str | None, tree: DraftTreeShape | None,
                drafter_dir: str | None, reason: str, speedup: float | None = None,
                tau: float | None = None) -> Revision:
        """Add a revision and make it the candidate. Proposing what is active or candidate already changes nothing."""
        shape = None if tree is None else tree.model_dump(mode="json")
        with self._database.writing() as session:
            row = _find(session, name, hold=True)
            for number in (row.candidate_revision, row.active_revision):
                same = None if number is None else session.get(RevisionRow, (name, number))
                if same is not None and (same.drafter_dir, same.tree) == (drafter_dir, shape):
                    return render_revision(same)
            last = session.execute(select(func.max(RevisionRow.number)).where(RevisionRow.endpoint == name)).scalar()
            revision = RevisionRow(endpoint=name, number=(last or 0) + 1, job_id=job_id, checkpoint=checkpoint,
                                   tree=shape, drafter_dir=drafter_dir, speedup=speedup, tau=tau, reason=reason,
                                   created_at=self._clock())
            session.add(revision)
            self._aim(session, row, revision.number)
            return render_revision(revision)

    def roll_back(self, name: str, revision: int | None = None) -> Endpoint:
        """Make an earlier revision, by default the one before the active one, the candidate.

        Raises Conflict when there is none before, and NotFound when the revision named does not exist.
        """
        with self._database.writing() as session:
            row = _find(session, name, hold=True)
            if revision is not None:
                if session.get(RevisionRow, (name, revision)) is None:
                    raise NotFound(f"endpoint {name!r} has no revision {revision}", "get the endpoint to see them")
                self._aim(session, row, revision)
                return self._render(session, row)
            if row.active_revision is None:
                raise Conflict(f"endpoint {name!r} has nothing active to roll back from", "wait until it serves")
            before = session.execute(select(func.max(RevisionRow.number)).where(
                RevisionRow.endpoint == name, RevisionRow.number < row.active_revision)).scalar()
            if before is None:
                raise Conflict(f"endpoint {name!r} serves its first revision", "there is nothing older to go back to")
            self._aim(session, row, before)
            return self._render(session, row)

    def set_desired(self, name: str, desired: str) -> Endpoint:
        """Switch it `on` or `off`; off keeps name, URL and history."""
        with self._database.writing() as session:
            row = _find(session, name, hold=True)
            row.desired = desired
            self._touch(session, row)
            return self._render(session, row)

    # What the one who tends it reports.

    def activate(self, name: str, number: int, url: str | None = None) -> Endpoint:
        """The candidate `number` is healthy and serves now."""
        with self._database.writing() as session:
            row = _find(session, name, hold=True)
            if session.get(RevisionRow, (name, number)) is None:
                raise NotFound(f"endpoint {name!r} has no revision {number}", "propose it first")
            row.active_revision = number
            row.url = url or row.url
            if row.candidate_revision == number:
                row.candidate_revision = None
            row.updated_at = self._clock()
            return self._render(session, row)

    def reject(self, name: str, number: int, reason: str) -> Endpoint:
        """The candidate `number` did not become healthy, or accepted too little: the active one stays."""
        with self._database.writing() as session:
            row = _find(session, name, hold=True)
            revision = session.get(RevisionRow, (name, number))
            if revision is not None:
                revision.reason = f"{revision.reason}; rejected: {reason}"
            if row.candidate_revision == number:
                row.candidate_revision = None
            row.updated_at = self._clock()
            session.flush()
            return self._render(session, row)

    def observe(self, name: str, *, url: str | None = None, conditions: tuple[Condition, ...] | None = None) -> None:
        """Store the URL or conditions seen. Raises NotFound."""
        with self._database.writing() as session:
            row = _find(session, name, hold=True)
            row.url = url or row.url
            if conditions is not None:
                row.conditions = [one.model_dump(mode="json") for one in conditions]
            row.updated_at = self._clock()

    def _aim(self, session: Session, row: EndpointRow, number: int) -> None:
        row.candidate_revision = None if number == row.active_revision else number
        row.desired = "on"
        self._touch(session, row)

    def _touch(self, session: Session, row: EndpointRow) -> None:
        row.updated_at = self._clock()
        promise(session, "tend_endpoint", row.name, self._clock)
        session.flush()

    def _render(self, session: Session, row: EndpointRow) -> Endpoint:
        return render_endpoint(row, session.scalars(select(RevisionRow).where(RevisionRow.endpoint == row.name)))


def _find(session: Session, name: str, *, hold: bool = False) -> EndpointRow:
    row = session.get(EndpointRow, name, with_for_update=hold or None)
    if row is None:
        raise NotFound(f"no endpoint {name!r}", "list the endpoints; one is made when a job first promotes to it")
    return row
