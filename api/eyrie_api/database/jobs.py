"""The repository of job rows: requests of users, leases of drivers, observations.

Three groups of methods:

- requests: `submit`, `cancel`, `retry`, `delete`. Each changes the row and enqueues the chore that acts on it in one
  transaction, so that no accepted request is lost;
- leases: `take_lease`, `renew_lease`, `release_lease`, `unfinished`. Race: two drivers may take the same job at the
  same time. A lease is one UPDATE ... WHERE, so exactly one of them succeeds in every database. A driver that finds an
  unfinished job without a live lease takes it over. This, not the broker, guarantees progress after kill -9;
- observations: `save_status`. Race: a driver that was suspended may write after its lease has expired and another
  driver has taken over. `save_status` with its name is then refused, since the late write would undo the new driver's.

Nothing here depends on `phase`; a job has ended when a condition says so.

Requests and all reads are filtered by the scope of the repository (`access.scope`); drivers and observers are the
control plane itself.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import JsonValue
from sqlalchemy import ColumnElement, and_, exists, func, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, undefer

from eyrie_api.access.scope import DEFAULT_PROJECT, SYSTEM, Scope
from eyrie_api.clock import Clock, utc_now
from eyrie_api.contract.access import Action, WebhookEvent
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.records import MetricRecord, WaitingPod
from eyrie_api.contract.resolved import Demand, ResolvedJob
from eyrie_api.contract.stages import STAGES, StageName
from eyrie_api.contract.status import (
    Condition,
    Event,
    Job,
    JobList,
    JobStatus,
    MetricPoint,
    MetricSeries,
    Phase,
)
from eyrie_api.database import endpoint_names
from eyrie_api.database.audit import record_change
from eyrie_api.database.engine import Database, rowcount, upsert
from eyrie_api.database.idempotency import Idempotency, Once
from eyrie_api.database.outbox import enqueue
from eyrie_api.database.quotas import check_job
from eyrie_api.database.rendering import (
    ENDS,
    TIME_CURSOR,
    decode_cursor,
    encode_cursor,
    is_over,
    new_job_id,
    render,
    render_job,
)
from eyrie_api.database.tables import (
    EndpointRow,
    EventRow,
    JobRow,
    LabelRow,
    MetricRow,
    RevisionRow,
    StageRow,
)
from eyrie_api.database.webhooks import announce
from eyrie_api.errors import Conflict, EyrieError, NotFound

MAX_PAGE = 200
_END_EVENTS: Mapping[str, WebhookEvent] = {"Succeeded": "job.succeeded", "Failed": "job.failed",
                                     "Cancelled": "job.cancelled"}


_CLOCKS_DIFFER = 3
"""Multiple of a lease's length by which its end may lie ahead, where the clocks of machines differ."""


class LeaseLost(Conflict):
    """Another driver has taken the job over, or the lease has run out."""


@dataclass(frozen=True)
class JobFilter:
    """Which jobs to list; empty fields do not restrict."""

    phase: Phase | None = None
    name: str | None = None
    target: str | None = None
    project: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Intent:
    """What the user requested of a job after its submission."""

    attempt: int
    generation: int
    cancel_requested: bool
    delete_requested: bool


@dataclass(frozen=True)
class NewEvent:
    reason: str
    message: str
    type: Literal["Normal", "Warning"] = "Normal"
    stage: StageName | None = None
    key: str = ""


class Jobs:
    """Job rows of one database, as `scope` sees them. `clock` stamps every change."""

    def __init__(self, database: Database, clock: Clock = utc_now, idempotency: Idempotency | None = None,
                 scope: Scope = SYSTEM) -> None:
        self.database, self._clock, self._scope = database, clock, scope
        self._idempotency = idempotency

    # Requests.

    def submit_once(self, resolved: ResolvedJob, once: Once | None, project: str | None = None,
                    submitted: JobSpec | None = None) -> Job | dict[str, Any]:
        """`submit`, or the response of the first request with this key. Raises as `submit` and `Idempotency.find`.

        Race: of two requests with the same key, the unique constraint on the key rejects the second one's transaction
        (IntegrityError); it then returns the response that the first has stored.
        """
        for attempt in range(2):
            try:
                return self.submit(resolved, project, submitted, once=once)
            except (IntegrityError, EyrieError) as error:  # refused now, a quota say, but perhaps accepted earlier
                replay = None if once is None or self._idempotency is None else self._idempotency.find(once)
                if replay is not None:
                    return replay
                if attempt or isinstance(error, EyrieError):
                    raise
        raise AssertionError("unreachable: the loop returns or raises")

    def submit(self, resolved: ResolvedJob, project: str | None = None, submitted: JobSpec | None = None, *,
               once: Once | None = None) -> Job:
        """Accept a job: its row, its first event and the chore that starts it, in one transaction.

        With `once`, the response is stored for its Idempotency-Key in the same transaction. `project` defaults to the
        scope's; for the control plane itself, which continues earlier requests, to that of the endpoint's name.
        `submitted` is the document as it was sent, of which the job was made; default: its spec. Raises Conflict when
        the name belongs to another project, QuotaReached and PriorityClassRefused.
        """
        with self.database.writing() as session:
            spec, named = resolved.spec, project or (None if self._scope.is_system else self._scope.home("jobs:write"))
            endpoint = spec.serve.endpoint
            project = named or endpoint_names.project_of(session, endpoint) or DEFAULT_PROJECT
            endpoint_names.claim(session, endpoint, project, self._clock)
            if named is not None:
                check_job(session, named, spec, resolved.demand)
            now, job_id = self._clock(), new_job_id()
            accepted = Condition(type="Accepted", status="True", reason="JobAccepted", message="the spec is valid",
                                 last_transition_time=now)
            status = JobStatus(conditions=(accepted,), attempt=1, observed_generation=1)
            submission = {"document": (submitted or spec).model_dump(mode="json", exclude_unset=True),
                          "resolved": resolved.model_dump(mode="json", exclude={"spec"})}  # the spec has its own column
            session.add(JobRow(
                id=job_id, name=spec.name, target=spec.target.model, spec=spec.model_dump(mode="json"),
                status=status.model_dump(mode="json"), phase=status.phase, ended=False, generation=1, attempt=1,
                cancel_requested=False, delete_requested=False, project=project, created_at=now, updated_at=now,
                submission=submission, num_gpus=resolved.demand.num_gpus, num_replicas=resolved.demand.num_replicas))
            session.flush()  # the rows below refer to it
            session.add_all(LabelRow(job_id=job_id, key=key, value=value) for key, value in spec.labels.items())
            self._note(session, job_id, "Accepted", f"job {spec.name or job_id} accepted")
            enqueue(session, "advance_job", job_id, self._clock)
            record_change(session, self._scope, self._clock, "job.create", f"job/{job_id}", project)
            job = Job(id=job_id, generation=1, created_at=now, updated_at=now, spec=spec, status=status)
            if once is not None and self._idempotency is not None:
                self._idempotency.store(session, once, job.model_dump(mode="json"))
            return job

    def get(self, job_id: str) -> Job:
        """One job. Raises NotFound."""
        with self.database.reading() as session:
            return self._render(session, self._find(session, job_id))

    def submitted(self, job_id: str) -> dict[str, JsonValue]:
        """The document of a job as it was sent, without defaults. Raises NotFound."""
        with self.database.reading() as session:
            document: dict[str, JsonValue] = self._find(session, job_id).submission["document"]
            return document

    def resolved(self, job_id: str) -> ResolvedJob:
        """A job as it was resolved at its submission. Raises NotFound."""
        with self.database.reading() as session:
            return _resolved(self._find(session, job_id))

    def all_resolved(self, job_ids: Collection[str]) -> dict[str, ResolvedJob]:
        """These jobs by id, without those that are not visible."""
        query = select(JobRow).options(undefer(JobRow.submission)).where(
            JobRow.id.in_(job_ids), self._scope.sees(JobRow.project, "jobs:read"))
        with self.database.reading() as session:
            return {row.id: _resolved(row) for row in session.scalars(query)}

    def project_of(self, job_id: str) -> str:
        """The project of a job. Raises NotFound."""
        with self.database.reading() as session:
            return self._find(session, job_id).project

    def list(self, wanted: JobFilter | None = None, *, limit: int = 50, cursor: str | None = None) -> JobList:
        """One page of jobs, newest first. Raises InvalidInput for an invalid cursor."""
        query, wanted = select(JobRow).where(self._scope.sees(JobRow.project, "jobs:read")), wanted or JobFilter()
        for column, value in ((JobRow.phase, wanted.phase), (JobRow.name, wanted.name), (JobRow.target, wanted.target),
                              (JobRow.project, wanted.project)):
            query = query if value is None else query.where(column == value)
        for key, value in wanted.labels.items():
            query = query.where(exists().where(
                LabelRow.job_id == JobRow.id, LabelRow.key == key, LabelRow.value == value))
        if cursor is not None:
            when, job_id = decode_cursor(cursor, TIME_CURSOR)
            query = query.where(or_(JobRow.created_at < when, and_(JobRow.created_at == when, JobRow.id < job_id)))
        query = query.order_by(JobRow.created_at.desc(), JobRow.id.desc()).limit(limit + 1)
        with self.database.reading() as session:
            rows: Sequence[JobRow] = session.scalars(query).all()
            stages: dict[str, list[StageRow]] = {row.id: [] for row in rows[:limit]}
            for stage in session.scalars(select(StageRow).where(StageRow.job_id.in_(stages))):
                stages[stage.job_id].append(stage)
            items = tuple(render_job(row, stages[row.id]) for row in rows[:limit])
        more = encode_cursor(rows[limit - 1].created_at, rows[limit - 1].id) if len(rows) > limit else None
        return JobList(items=items, next_cursor=more)

    def count_by_phase(self) -> dict[str, int]:
        with self.database.reading() as session:
            counted = session.execute(select(JobRow.phase, func.count()).group_by(JobRow.phase))
            return {row[0]: row[1] for row in counted}

    def cancel(self, job_id: str) -> Job:
        """Request that a job stops; idempotent. Raises Conflict when it has already ended in another way."""
        with self.database.writing() as session:
            row = self._hold(session, job_id, "jobs:write")
            if row.ended and row.phase != "Cancelled":
                raise Conflict(f"job {job_id} has already ended: {row.phase}", "delete it, or retry it if it failed")
            if not row.ended and not row.cancel_requested:
                self._request_cancel(session, row)
            record_change(session, self._scope, self._clock, "job.cancel", f"job/{job_id}", row.project)
            return self._render(session, row)

    def retry(self, job_id: str, from_stage: StageName | None = None) -> Job:
        """Resume from the failed stage: finished stages keep their manifests, the others return to Pending.

        from_stage   run again from this stage, of a job that has succeeded too; the driver removes its output and that
                     of the later ones before the attempt starts

        Raises Conflict when the job has not ended, has succeeded, or is being deleted, and where an endpoint serves a
        drafter that would be removed; QuotaReached and PriorityClassRefused.
        """
        again = () if from_stage is None else STAGES[STAGES.index(from_stage):]
        with self.database.writing() as session:
            row = self._hold(session, job_id, "jobs:write")
            if row.delete_requested:
                raise Conflict(f"job {job_id} is being deleted", "submit a new job")
            if not row.ended:
                raise Conflict(f"job {job_id} has not ended: {row.phase}", "cancel it first, or wait")
            if row.phase == "Succeeded" and not again:
                raise Conflict(f"job {job_id} has succeeded",
                               "name the stage to run again from (eyrie retry JOB --from STAGE), or submit a new job")
            spec = JobSpec.model_validate(row.spec)
            if from_stage is not None and from_stage not in spec.stages:
                raise Conflict(f"job {job_id} has no stage {from_stage}", f"its stages are {', '.join(spec.stages)}")
            # Where its own drafters are: those that were trained elsewhere are copied by benchmark.
            if ("train" if spec.trains else "benchmark") in again:
                self._require_unserved(session, job_id)
            demand = Demand(num_gpus=row.num_gpus, num_replicas=row.num_replicas)
            check_job(session, row.project, spec, demand)
            row.attempt += 1
            row.cancel_requested = row.ended = False
            row.phase = "Pending"
            old = JobStatus.model_validate(row.status)
            remaining = tuple(condition for condition in old.conditions if condition.type not in ENDS)
            row.status = old.model_copy(update={
                "conditions": remaining, "attempt": row.attempt, "phase": "Pending", "finished_at": None,
                "run_id": None, "restarted_from": from_stage}).model_dump(mode="json")
            row.updated_at = self._clock()
            session.execute(update(StageRow).where(
                StageRow.job_id == job_id,
                or_(StageRow.state.in_(("Failed", "Cancelled", "Running")), StageRow.stage.in_(again)),
            ).values(state="Pending", progress=None, reason=None, message=None, hint=None, finished_at=None))
            self._note(session, job_id, "Retried", f"attempt {row.attempt}: " + (
                f"from {from_stage} again" if again else "resuming after the last finished stage"))
            record_change(session, self._scope, self._clock, "job.retry", f"job/{job_id}", row.project)
            enqueue(session, "advance_job", job_id, self._clock)
            session.flush()
            return self._render(session, row)

    def delete(self, job_id: str) -> bool:
        """Delete an ended job with its rows, and enqueue the removal of its files. True when it was deleted at once.

        A job that has not ended is cancelled first and deleted by retention once it has stopped (False). Raises
        Conflict while an endpoint serves, or is about to serve, a drafter of this job.
        """
        with self.database.writing() as session:
            row = self._hold(session, job_id, "jobs:write")
            self._require_unserved(session, job_id)
            record_change(session, self._scope, self._clock, "job.delete", f"job/{job_id}", row.project)
            if row.ended:
                session.delete(row)
                enqueue(session, "remove_files", job_id, self._clock)
                return True
            if not row.delete_requested:
                row.delete_requested = True
                self._note(session, job_id, "DeleteRequested", "it is deleted once it has stopped")
                if not row.cancel_requested:
                    self._request_cancel(session, row)
            return False

    @staticmethod
    def _require_unserved(session: Session, job_id: str) -> None:
        serving = session.scalars(select(RevisionRow.endpoint).join(
            EndpointRow, EndpointRow.name == RevisionRow.endpoint).where(
            RevisionRow.job_id == job_id,
            or_(EndpointRow.active_revision == RevisionRow.number,
                EndpointRow.candidate_revision == RevisionRow.number))).first()
        if serving is not None:
            raise Conflict(f"endpoint {serving!r} serves a drafter of job {job_id}",
                           "promote another job's drafter or roll the endpoint back first")

    def to_be_deleted(self) -> tuple[str, ...]:
        """Jobs marked for deletion that have stopped: retention calls `delete` on them."""
        query = select(JobRow.id).where(JobRow.delete_requested, JobRow.ended)
        with self.database.reading() as session:
            return tuple(session.scalars(query))

    # Leases.

    def intent(self, job_id: str) -> Intent:
        """What the user requested after the submission. Raises NotFound."""
        with self.database.reading() as session:
            row = self._find(session, job_id)
            return Intent(row.attempt, row.generation, row.cancel_requested, row.delete_requested)

    def take_lease(self, job_id: str, owner: str, ttl_s: float) -> bool:
        """Become the job's driver for `ttl_s` seconds, unless another holds the lease; its holder renews it."""
        now = self._clock()
        free = or_(_free(now, ttl_s), JobRow.lease_owner == owner)
        return self._set_lease(job_id, and_(free, JobRow.ended.is_(False)), owner, now + timedelta(seconds=ttl_s))

    def renew_lease(self, job_id: str, owner: str, ttl_s: float) -> bool:
        """Extend the lease. False when it has expired or another driver has it: the caller must stop."""
        now = self._clock()
        held = and_(JobRow.lease_owner == owner, JobRow.lease_until >= now)
        return self._set_lease(job_id, held, owner, now + timedelta(seconds=ttl_s))

    def release_lease(self, job_id: str, owner: str) -> bool:
        return self._set_lease(job_id, JobRow.lease_owner == owner, None, None)

    def _set_lease(self, job_id: str, condition: Any, owner: str | None, until: datetime | None) -> bool:
        statement = update(JobRow).where(JobRow.id == job_id, condition).values(lease_owner=owner, lease_until=until)
        with self.database.writing() as session:
            return rowcount(session, statement.execution_options(synchronize_session=False)) > 0

    def unfinished(self, ttl_s: float | None = None) -> tuple[str, ...]:
        """Jobs that have not ended, oldest first; with `ttl_s` those without a live lease of that length: what the
        reconciler advances."""
        query = select(JobRow.id).where(JobRow.ended.is_(False)).order_by(JobRow.created_at)
        query = query if ttl_s is None else query.where(_free(self._clock(), ttl_s))
        with self.database.reading() as session:
            return tuple(session.scalars(query))

    def changed_since(self, when: datetime) -> tuple[tuple[str, datetime], ...]:
        """Jobs changed at that time or later, and when: for projecting rows into another system."""
        query = select(JobRow.id, JobRow.updated_at).where(JobRow.updated_at >= when).order_by(JobRow.updated_at)
        with self.database.reading() as session:
            return tuple((row[0], row[1]) for row in session.execute(query))

    # Observations.

    def waiting_pods(self, job_id: str) -> tuple[WaitingPod, ...]:
        """Pods of the job's runs that had no node when the operator last looked. Raises NotFound."""
        with self.database.reading() as session:
            return tuple(map(WaitingPod.model_validate, self._find(session, job_id).waiting_pods or ()))

    def record_waiting_pods(self, pods: Iterable[WaitingPod]) -> None:
        """Replace those of every job that has not ended; only what differs is written. Their jobs are found by run."""
        by_run: dict[str, list[Any]] = {}
        for pod in pods:
            by_run.setdefault(pod.run_id, []).append(pod.model_dump(mode="json"))
        run_id = JobRow.status["run_id"].as_string()
        query = select(JobRow.id, run_id, JobRow.waiting_pods).where(
            JobRow.ended.is_(False), or_(run_id.in_(by_run), JobRow.waiting_pods.is_not(None)))
        with self.database.reading() as session:
            rows = session.execute(query).all()
        changed = {job_id: now for job_id, run, before in rows if (now := by_run.get(run or "", [])) != (before or [])}
        if changed:
            with self.database.writing() as session:
                for job_id, now in changed.items():
                    session.execute(update(JobRow).where(JobRow.id == job_id).values(waiting_pods=now or None))

    def save_status(self, job_id: str, status: JobStatus, owner: str | None = None,
                    events: Iterable[NewEvent] = ()) -> None:
        """Store the observed status, its stages, and the events of what changed, in one transaction. A stage without
        `progress` keeps the stored one.

        With `owner`, only while that driver holds the lease: raises LeaseLost otherwise. Raises NotFound.
        """
        now = self._clock()
        with self.database.writing() as session:
            row = self._hold(session, job_id)
            if owner is not None and (row.lease_owner != owner or row.lease_until is None or row.lease_until < now):
                raise LeaseLost(f"job {job_id} is no longer driven by {owner}", "its new driver continues")
            if is_over(status.conditions) and not row.ended:
                end = next(condition for condition in status.conditions
                           if condition.type in _END_EVENTS and condition.status == "True")
                announce(session, self._clock, row.project, _END_EVENTS[end.type], {"job": {
                    "id": row.id, "name": row.name, "target": row.target, "reason": end.reason,
                    "message": end.message}})
            row.status = status.model_copy(update={"stages": ()}).model_dump(mode="json")
            row.phase, row.ended = status.phase, is_over(status.conditions)
            row.updated_at = now
            for stage in status.stages:
                values = stage.model_dump(exclude={"stage", "key", "progress"})
                if stage.progress is not None:  # else the stored one is kept: `Ingest` writes it from records
                    values["progress"] = stage.progress.model_dump(mode="json")
                upsert(session, StageRow, {"job_id": job_id, "stage": stage.stage, "key": stage.key}, values)
            for event in events:
                self._note(session, job_id, event.reason, event.message, type=event.type, stage=event.stage,
                           key=event.key)

    def events(self, job_id: str, *, after: int = 0, limit: int = 500) -> tuple[Event, ...]:
        """Events of a job with an id above `after`, in order. Raises NotFound."""
        query = select(EventRow).where(EventRow.job_id == job_id, EventRow.id > after).order_by(EventRow.id)
        with self.database.reading() as session:
            self._find(session, job_id)
            return tuple(render(Event, row) for row in session.scalars(query.limit(limit)))

    def count_events(self) -> int:
        """How many events have been recorded, deleted ones included: the highest id; for metrics."""
        with self.database.reading() as session:
            return session.execute(select(func.max(EventRow.id))).scalar() or 0

    def metrics(self, job_id: str, *, stage: StageName | None = None, key: str | None = None,
                name: str | None = None) -> tuple[MetricSeries, ...]:
        """Series of a job, each ordered by step. Raises NotFound."""
        columns: tuple[Any, ...] = (MetricRow.stage, MetricRow.key, MetricRow.name, MetricRow.step, MetricRow.time,
                                    MetricRow.value)
        query = select(*columns).where(MetricRow.job_id == job_id)
        for column, value in ((MetricRow.stage, stage), (MetricRow.key, key), (MetricRow.name, name)):
            query = query if value is None else query.where(column == value)
        query = query.order_by(*columns[:4])
        series: dict[tuple[str, str, str], list[MetricPoint]] = {}
        with self.database.reading() as session:
            self._find(session, job_id)
            for row in session.execute(query):
                point = MetricPoint(step=row.step, time=row.time, value=row.value)
                series.setdefault((row.stage, row.key, row.name), []).append(point)
        return tuple(MetricSeries.model_validate({"stage": of, "key": keyed, "name": named, "points": points})
                     for (of, keyed, named), points in series.items())

    # Inside a transaction.

    def _request_cancel(self, session: Session, row: JobRow) -> None:
        row.cancel_requested = True
        row.phase = "Cancelling"
        row.updated_at = self._clock()
        self._note(session, row.id, "CancelRequested", "stopping running stages")
        enqueue(session, "advance_job", row.id, self._clock)
        session.flush()

    def _note(self, session: Session, job_id: str, reason: str, message: str, *,
              type: Literal["Normal", "Warning"] = "Normal", stage: StageName | None = None, key: str = "") -> None:
        session.add(EventRow(job_id=job_id, time=self._clock(), type=type, reason=reason, message=message, stage=stage,
                             key=key, data={}))

    def _find(self, session: Session, job_id: str, action: Action = "jobs:read", *, hold: bool = False) -> JobRow:
        """The row, if this scope may access it. Raises NotFound, or Forbidden."""
        row = session.get(JobRow, job_id, with_for_update=hold or None)
        absent = NotFound(f"no job {job_id!r}", "list the jobs to see their ids")
        if row is None:
            raise absent
        self._scope.check(action, row.project, absent)
        return row

    def _hold(self, session: Session, job_id: str, action: Action = "jobs:read") -> JobRow:
        """The row, locked until the transaction ends where the database has row locks (SQLite locks the whole file).

        Race: it serialises all writers of a job. What was read stays true until it is written, and events become
        visible in the order of their ids, so that a stream that continues after the last id misses none.
        """
        return self._find(session, job_id, action, hold=True)

    def _render(self, session: Session, row: JobRow) -> Job:
        return render_job(row, session.scalars(select(StageRow).where(StageRow.job_id == row.id)))


def _free(now: datetime, ttl_s: float) -> ColumnElement[bool]:
    """Whether a job has no live lease. One that ends far later than any lease lasts is of a clock that was ahead: its
    driver, if it lives, finds it taken at the next renewal."""
    return or_(JobRow.lease_until.is_(None), JobRow.lease_until < now,
               JobRow.lease_until > now + timedelta(seconds=_CLOCKS_DIFFER * ttl_s))


def put_metric(session: Session, job_id: str, stage: str, key: str, point: MetricRecord) -> None:
    upsert(session, MetricRow, {"job_id": job_id, "stage": stage, "key": key, "name": point.name, "step": point.step},
           {"time": point.time, "value": point.value})


def _resolved(row: JobRow) -> ResolvedJob:
    return ResolvedJob.model_validate(row.submission["resolved"] | {"spec": row.spec})
