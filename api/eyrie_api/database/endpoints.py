"""The repository of endpoints and revisions: what a stable URL serves, has served, and is to serve next.

An endpoint is a name with numbered revisions; revision 1 is always the target without a drafter, so that there is a
lossless revision to roll back to before the first promotion. Nothing here starts or stops an engine: a request
(`propose`, `roll_back`, `set_desired`) moves `candidate_revision` or `desired` and enqueues `reconcile_endpoint`.
The reconciler starts the candidate next to the active engine, routes a share of the requests to it (`canary`) and
reports the result: `activate` or `reject`. Until then the active revision keeps serving.

Every change is recorded in the endpoint's history (`eyrie_api.database.endpoint_history`) in the same
transaction. An endpoint is in the project its name belongs to (`eyrie_api.database.endpoint_names`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from eyrie_api.access.scope import DEFAULT_PROJECT, SYSTEM, Scope
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.access import Action
from eyrie_api.contract.endpoints import Actor
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.model import Items
from eyrie_api.contract.read_rules import EndpointRules, ReadRules
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Condition, Endpoint, Revision
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import OFF, DrafterUse, Setting
from eyrie_api.database import endpoint_names
from eyrie_api.database.audit import record_change
from eyrie_api.database.endpoint_history import record_history
from eyrie_api.database.engine import Database
from eyrie_api.database.outbox import enqueue
from eyrie_api.database.quotas import check_endpoint
from eyrie_api.database.rendering import render_endpoint, render_revision
from eyrie_api.database.tables import EndpointRow, HistoryRow, JobRow, RevisionRow
from eyrie_api.database.webhooks import announce
from eyrie_api.errors import Conflict, NotFound


@dataclass(frozen=True)
class Serving:
    """The configuration of an engine behind an endpoint."""

    target: TargetSpec
    serve: EndpointServeSpec
    reads: EndpointRules | None = None
    """None: it was made by a version without rules."""

    def rules(self, home: Path, job_id: str | None) -> ReadRules | None:
        """For the files that the engine of a revision opens, whose drafter is of this job; None: any. An endpoint
        without rules has the strictest: nothing below `home` but that job."""
        known = self.reads or EndpointRules(rules=ReadRules(home=str(home)))
        return None if known.rules is None else known.rules.with_job(job_id)


class Endpoints:
    """Endpoint rows of one database, as `scope` sees them."""

    def __init__(self, database: Database, clock: Clock = utc_now, scope: Scope = SYSTEM) -> None:
        self._database, self._clock, self._scope = database, clock, scope

    def project_of(self, name: str) -> str | None:
        """The project that owns the name; None while it is free. Not filtered by the scope."""
        with self._database.reading() as session:
            return endpoint_names.project_of(session, name)

    def create(self, name: str, target: TargetSpec, serve: EndpointServeSpec, model: str,
               project: str | None = None, num_replicas: int = 1, *, reads: EndpointRules | None = None,
               checked: bool = False) -> Endpoint:
        """Create the endpoint with the target alone as its first candidate, or update an existing one.

        The serving section of the job that promoted last applies from the next engine on, except the port, which is
        kept. Raises Conflict when the endpoint exists for another target, since a URL must not change its model under
        its users, and when its name belongs to another project. `project` defaults to the one that owns the name.
        `num_replicas` is what it counts for quotas; they are checked in requests, and if `checked`. `reads` are kept
        from the first time that they are given: the target stays the same, and so do the pods that serve it.
        """
        now = self._clock()
        with self._database.writing() as session:
            owner = endpoint_names.project_of(session, name) or project or self._scope.home("endpoints:write")
            self._scope.check("endpoints:write", owner, _missing(name))
            endpoint_names.claim(session, name, project or owner, self._clock)
            if checked or not self._scope.is_system:
                check_endpoint(session, owner, name, num_replicas, serve.placement)
            row = session.get(EndpointRow, name)
            if row is None:
                row = EndpointRow(
                    name=name, target=target.model_dump(mode="json"), serve=serve.model_dump(mode="json"), model=model,
                    url=None, desired="on", active_revision=None, candidate_revision=1, conditions=[], created_at=now,
                    updated_at=now, num_replicas=num_replicas, reads=None if reads is None else reads.model_dump())
                session.add(row)
                session.flush()
                session.add(RevisionRow(endpoint=name, number=1, job_id=None, checkpoint=None,
                                        use=DrafterUse().model_dump(mode="json"), speedup=None, tau=None,
                                        created_at=now, reason="the target without a drafter",
                                        state="proposed", rejected_reason=None))
                enqueue(session, "reconcile_endpoint", name, self._clock)
                record_history(session, self._clock, name, "created", "Created", f"serves {target.model}", revision=1)
                record_change(session, self._scope, self._clock, "endpoint.create", f"endpoint/{name}", owner)
            elif row.target != target.model_dump(mode="json"):
                wanted = target.model_dump(mode="json")
                differing = [f"{field} {row.target.get(field)!r}, not {value!r}"
                             for field, value in wanted.items() if row.target.get(field) != value]
                raise Conflict(f"endpoint {name!r} serves another target: {'; '.join(differing)}",
                               "give serve.endpoint another name")
            else:
                row.serve = serve.model_copy(update={"port": row.serve["port"]}).model_dump(mode="json")
                row.num_replicas = num_replicas
                row.reads = row.reads or (None if reads is None else reads.model_dump())
                session.flush()
            return self._render(session, row)

    def get(self, name: str) -> Endpoint:
        """One endpoint. Raises NotFound."""
        with self._database.reading() as session:
            return self._render(session, self._find(session, name))

    def list(self) -> Items[Endpoint]:
        """All endpoints, by name."""
        seen = endpoint_names.visible_to(EndpointRow.name, self._scope, "endpoints:read")
        with self._database.reading() as session:
            rows = session.scalars(select(EndpointRow).where(seen).order_by(EndpointRow.name)).all()
            revisions: dict[str, list[RevisionRow]] = {row.name: [] for row in rows}
            for revision in session.scalars(select(RevisionRow).where(
                    endpoint_names.visible_to(RevisionRow.endpoint, self._scope, "endpoints:read"))):
                revisions.get(revision.endpoint, []).append(revision)
            return Items[Endpoint](items=tuple(render_endpoint(row, revisions[row.name]) for row in rows))

    def serving(self, name: str, action: Action = "endpoints:read") -> Serving:
        """Target and serving section of the endpoint, for a caller who may do `action` on it. Raises NotFound, or
        Forbidden."""
        with self._database.reading() as session:
            row = self._find(session, name, action)
            return Serving(TargetSpec.model_validate(row.target), EndpointServeSpec.model_validate(row.serve),
                           None if row.reads is None else EndpointRules.model_validate(row.reads))

    def propose(self, name: str, *, job_id: str | None, checkpoint: str | None, tree: DraftTreeShape | None = None,
                drafter_dir: str | None = None, reason: str, speedup: float | None = None, tau: float | None = None,
                use: DrafterUse | None = None, actor: Actor = "policy", once: str | None = None) -> Revision:
        """Add a revision and make it the candidate. No effect when the active or candidate revision is the same, or
        when `once` was proposed before, whatever has become of that revision: it is returned.

        `use` configures decoding; a drafter with one tree may be given as `drafter_dir` and `tree`. `tau` is the proven
        acceptance length (`promotion.proven_tau`), with which live traffic is compared.
        """
        use = use or _use(drafter_dir, tree)
        use_json = use.model_dump(mode="json")
        with self._database.writing() as session:
            row = self._hold(session, name)
            job = None if job_id is None else session.get(JobRow, job_id)
            if job is not None and job.project != endpoint_names.project_of(session, row.name):
                raise Conflict(f"job {job_id} and endpoint {row.name!r} are in different projects",
                               "promote a job of the endpoint's own project")
            proposed = None if once is None else session.scalars(select(HistoryRow.revision).where(
                HistoryRow.endpoint == name, HistoryRow.once == once)).first()
            before = None if proposed is None else session.get(RevisionRow, (name, proposed))
            if before is not None:
                return render_revision(before)
            self._note(session, "endpoint.promote", name)
            for number in (row.candidate_revision, row.active_revision):
                same = None if number is None else session.get(RevisionRow, (name, number))
                if same is not None and same.use == use_json:
                    return render_revision(same)
            last = session.execute(select(func.max(RevisionRow.number)).where(RevisionRow.endpoint == name)).scalar()
            revision = RevisionRow(endpoint=name, number=(last or 0) + 1, job_id=job_id, checkpoint=checkpoint,
                                   use=use_json, speedup=speedup, tau=tau, reason=reason,
                                   state="proposed", rejected_reason=None, created_at=self._clock())
            session.add(revision)
            self._set_candidate(session, row, revision)
            record_history(session, self._clock, name, "proposed", "Proposed", f"{use.setting.label()}: {reason}",
                           revision=revision.number, job_id=job_id, actor=actor, once=once,
                           figures={"speedup": speedup, "tau": tau})
            return render_revision(revision)

    def roll_back(self, name: str, revision: int | None = None, *, actor: Actor = "person",
                  reason: str = "RolledBack", message: str = "requested") -> Endpoint:
        """Make an earlier revision, by default the last one that served before the active one, the candidate. Raises
        Conflict when there is none before, and NotFound when the revision named does not exist."""
        with self._database.writing() as session:
            row = self._hold(session, name)
            self._note(session, "endpoint.rollback", name)
            self._check_quota(session, row)
            if revision is not None:
                back = session.get(RevisionRow, (name, revision))
            elif row.active_revision is None:
                raise Conflict(f"endpoint {name!r} has no active revision to roll back from", "wait until it serves")
            else:
                earlier = session.scalars(select(RevisionRow).where(
                    RevisionRow.endpoint == name, RevisionRow.number < row.active_revision,
                ).order_by(RevisionRow.number.desc())).all()
                # The last retired one; without one, the target alone.
                back = next((older for older in earlier if older.state == "retired"),
                            next((older for older in earlier if older.checkpoint is None), None))
                if back is None:
                    raise Conflict(f"endpoint {name!r} serves its first revision", "there is no older revision")
            if back is None:
                raise NotFound(f"endpoint {name!r} has no revision {revision}", "get the endpoint to see them")
            active = self._revision(session, row, row.active_revision)
            if active is not None and active is not back:
                active.rejected_reason = f"{reason}: {message}"
            self._set_candidate(session, row, back)
            record_history(session, self._clock, name, "rolled-back", reason, f"to revision {back.number}: {message}",
                           revision=row.active_revision, actor=actor, figures={"to": float(back.number)})
            return self._render(session, row)

    def set_desired(self, name: str, desired: Literal["on", "off"], *, actor: Actor = "person",
                    checked: bool = False) -> Endpoint:
        """Switch the endpoint `on` or `off`; `off` keeps name, URL and history. Quotas are checked in requests, and if
        `checked`."""
        with self._database.writing() as session:
            row = self._hold(session, name)
            self._note(session, f"endpoint.{desired}", name)
            if desired == "on":
                self._check_quota(session, row, checked=checked)
            if row.desired != desired:
                record_history(session, self._clock, name, desired, "SwitchedOn" if desired == "on" else "SwitchedOff",
                               "requested", revision=row.active_revision, actor=actor)
            row.desired = desired
            self._touch(session, row)
            return self._render(session, row)

    # Reports of the reconciler.

    def canary(self, name: str, number: int, share: float, figures: Mapping[str, float | None] | None = None,
               urls: Mapping[int, str] | None = None) -> Endpoint:
        """The candidate `number` gets that share of the requests. `figures` are those of the step before; `urls` of
        revisions that have one of their own."""
        with self._database.writing() as session:
            row = self._hold(session, name)
            _set_urls(session, name, urls)
            revision = session.get(RevisionRow, (name, number))
            if revision is not None:
                revision.state = "canary"
            record_history(session, self._clock, name, "canary", "CanaryStep", f"{share:.0%} of the requests",
                           revision=number, actor="watch", figures={**(figures or {}), "share": share})
            return self._render(session, row)

    def activate(self, name: str, number: int, url: str | None = None,
                 figures: Mapping[str, float | None] | None = None, urls: Mapping[int, str] | None = None) -> Endpoint:
        """The candidate `number` is healthy and becomes the active revision. `figures` are those of its canary's last
        step; `urls` as in `canary`."""
        with self._database.writing() as session:
            row = self._hold(session, name)
            _set_urls(session, name, urls)
            revision = session.get(RevisionRow, (name, number))
            if revision is None:
                raise NotFound(f"endpoint {name!r} has no revision {number}", "propose it first")
            before = self._revision(session, row, row.active_revision)
            if before is not None and before is not revision:
                before.state = "retired" if before.rejected_reason is None else "rolled-back"
            revision.state, revision.rejected_reason = "active", None
            if row.active_revision != number:
                back = before if before is not None and before.state == "rolled-back" else None
                if back is not None or revision.checkpoint is not None:  # not the target alone, which is no promotion
                    announce(session, self._clock, endpoint_names.project_of(session, name) or DEFAULT_PROJECT,
                             "endpoint.promoted" if back is None else "endpoint.rolled_back", {"endpoint": {
                                 "name": name, "revision": number, "job": revision.job_id,
                                 "checkpoint": revision.checkpoint, "speedup": revision.speedup,
                                 "from_revision": None if before is None else before.number,
                                 "reason": revision.reason if back is None else back.rejected_reason}})
                label = DrafterUse.model_validate(revision.use).setting.label()
                record_history(session, self._clock, name, "activated", "Activated",
                               f"{revision.checkpoint} {label}" if revision.checkpoint else label, revision=number,
                               job_id=revision.job_id, actor="watch", figures=figures)
            row.active_revision = number
            row.url = url or row.url
            if row.candidate_revision == number:
                row.candidate_revision = None
            row.updated_at = self._clock()
            return self._render(session, row)

    def reject(self, name: str, number: int, reason: str, message: str,
               figures: Mapping[str, float | None] | None = None) -> Endpoint:
        """The candidate `number` did not become healthy, failed requests, or accepted too little: the active one
        stays. `reason` is a CamelCase word; `figures` are those of its canary's last step."""
        with self._database.writing() as session:
            row = self._hold(session, name)
            revision, active = self._revision(session, row, number), self._revision(session, row, row.active_revision)
            if revision is not None:
                revision.state, revision.rejected_reason = "rejected", f"{reason}: {message}"
                record_history(session, self._clock, name, "rejected", reason, message, revision=number,
                               job_id=revision.job_id, actor="watch", figures=figures)
            if row.candidate_revision == number:
                row.candidate_revision = None
                if active is not None:
                    active.rejected_reason = None  # it was about to be replaced by the rejected one, and stays
            row.updated_at = self._clock()
            session.flush()
            return self._render(session, row)

    def observe(self, name: str, *, url: str | None = None, conditions: tuple[Condition, ...] | None = None) -> None:
        """Store the observed URL or conditions. Raises NotFound."""
        with self._database.writing() as session:
            row = self._hold(session, name)
            row.url = url or row.url
            if conditions is not None:
                row.conditions = [condition.model_dump(mode="json") for condition in conditions]
            row.updated_at = self._clock()

    def _find(self, session: Session, name: str, action: Action = "endpoints:read", *,
              hold: bool = False) -> EndpointRow:
        """The row, if this scope may access it. Raises NotFound, or Forbidden."""
        row = session.get(EndpointRow, name, with_for_update=hold or None)
        if row is None:
            raise _missing(name)
        if not self._scope.is_system:
            self._scope.check(action, endpoint_names.project_of(session, name), _missing(name))
        return row

    def _hold(self, session: Session, name: str) -> EndpointRow:
        return self._find(session, name, "endpoints:write", hold=True)

    def _note(self, session: Session, verb: str, name: str) -> None:
        project = endpoint_names.project_of(session, name)
        record_change(session, self._scope, self._clock, verb, f"endpoint/{name}", project)

    def _check_quota(self, session: Session, row: EndpointRow, *, checked: bool = False) -> None:
        """For requests only: the control plane itself completes what was accepted. Raises QuotaReached."""
        if checked or not self._scope.is_system:
            check_endpoint(session, endpoint_names.project_of(session, row.name) or DEFAULT_PROJECT, row.name,
                           row.num_replicas, EndpointServeSpec.model_validate(row.serve).placement)

    def _set_candidate(self, session: Session, row: EndpointRow, revision: RevisionRow) -> None:
        waiting = self._revision(session, row, row.candidate_revision)
        if waiting is not None and waiting is not revision and waiting.state in ("proposed", "canary"):
            waiting.state = "retired"
        if revision.state == "rejected":
            revision.state, revision.rejected_reason = "proposed", None  # it is tried again like a new revision
        row.candidate_revision = None if revision.number == row.active_revision else revision.number
        row.desired = "on"
        self._touch(session, row)

    def _revision(self, session: Session, row: EndpointRow, number: int | None) -> RevisionRow | None:
        return None if number is None else session.get(RevisionRow, (row.name, number))

    def _touch(self, session: Session, row: EndpointRow) -> None:
        row.updated_at = self._clock()
        enqueue(session, "reconcile_endpoint", row.name, self._clock)
        session.flush()

    def _render(self, session: Session, row: EndpointRow) -> Endpoint:
        session.flush()
        return render_endpoint(row, session.scalars(select(RevisionRow).where(RevisionRow.endpoint == row.name)))


def _set_urls(session: Session, endpoint: str, urls: Mapping[int, str] | None) -> None:
    for number, url in (urls or {}).items():
        revision = session.get(RevisionRow, (endpoint, number))
        if revision is not None:
            revision.url = url


def _missing(name: str) -> NotFound:
    return NotFound(f"no endpoint {name!r}", "list the endpoints; the first promotion of a job creates one")


def _use(drafter_dir: str | None, tree: DraftTreeShape | None) -> DrafterUse:
    if drafter_dir is None:
        return DrafterUse(setting=OFF)
    return DrafterUse(drafter_dir=drafter_dir, setting=Setting(method="drafter", tree=tree or DraftTreeShape()))
