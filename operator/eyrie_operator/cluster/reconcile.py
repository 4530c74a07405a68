"""From an object of the cluster and its row to actions. Pure.

Called for every event, every change of a row and every resync. It keeps no state, and every action is idempotent. For a
DrafterJob:

    applied                  -> our finalizer, and in the same pass a job with its labels (kubernetes-uid: its uid)
    no room in a quota       -> Accepted=False (a resumed one keeps its status), a row among those that wait, and
                                another attempt later; the row is deleted in the next pass in which it does not wait
    invalid                  -> Accepted=False, Succeeded=False, Failed=True, with the message
    suspended                -> the job is cancelled, which keeps finished stages; when resumed, it continues from them
    the row changed          -> its projection, if that differs from the status; an Event per changed condition
    finished `ttl` ago       -> the object is deleted, annotated so that job and files stay
    deleted                  -> the job is cancelled and its record deleted; then the finalizer is removed
    the row is gone          -> it was deleted through the REST API: the object is deleted as well

The last case is restricted: a lost or wrong database must not empty the cluster. An object is deleted only if this
database has recorded its job (`JobHistory.deleted`); otherwise the condition reports it and the object stays.

An applied DraftEndpoint determines how its row is served. A mirror (of a promotion's or a REST client's endpoint) shows
the row, and changes it only when a user has edited the mirror since it was written.

Submission is idempotent by the object's uid, not by its generation: `spec.suspend` increments the generation, and a
suspended job must not become two jobs.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.resources import (
    JOB_ID_ANNOTATION,
    NAME_LABEL,
    NAMESPACE_LABEL,
    OUTSIDE_ANNOTATION,
    UID_LABEL,
    DraftEndpointSpec,
    DraftEndpointStatus,
    DrafterJobStatus,
    ResourceCondition,
    WaitingObject,
)
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Endpoint, Job
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import EyrieError
from eyrie_operator.cluster.resources import (
    SUSPENDED_ANNOTATION,
    EndpointResource,
    Identity,
    JobResource,
    KubernetesEvent,
    dump,
    endpoint_status,
    event_records,
    job_status,
)
from eyrie_operator.conditions import is_over, is_true

STOPPING_CHECK_S = 5.0
"""Requeue delay while a job or endpoint stops. The change of its row triggers earlier; this covers a missed one."""


@dataclass(frozen=True)
class JobHistory:
    """What the database records of an object's job besides the row."""

    deleted: bool = False
    """The job was submitted into this database and has been deleted since."""

    served_by: str | None = None
    """An endpoint whose active or candidate revision is of this job."""

    waiting: WaitingObject | None = None
    """The row of the object, or of an earlier one of its name, among those that wait for a quota."""


@dataclass(frozen=True)
class SetFinalizer:
    """Add our finalizer to the object, or remove it."""

    held: bool


@dataclass(frozen=True)
class CreateJob:
    """Submit, once per uid."""

    key: str
    spec: JobSpec


@dataclass(frozen=True)
class ChangeJob:
    """Cancel the job; retry it from its last finished stage; or cancel it if it runs, and delete its record and files
    once it has stopped."""

    change: Literal["cancel", "retry", "delete"]
    job_id: str


@dataclass(frozen=True)
class RecordWaiting:
    """Write the object's row among those that wait."""

    waiting: WaitingObject


@dataclass(frozen=True)
class RemoveWaiting:
    waiting: WaitingObject


@dataclass(frozen=True)
class Annotate:
    name: str
    value: str | None


@dataclass(frozen=True)
class DeleteResource:
    why: str


@dataclass(frozen=True)
class CreateEndpoint:
    target: TargetSpec
    serve: EndpointServeSpec


@dataclass(frozen=True)
class UpdateServing:
    """Change the serving section of the endpoint's row."""

    serve: EndpointServeSpec


@dataclass(frozen=True)
class UpdateMirror:
    """Show the endpoint's row in its mirror."""


@dataclass(frozen=True)
class SetDesired:
    desired: Literal["on", "off"]


@dataclass(frozen=True)
class UpdateStatus:
    status: dict[str, Any]


@dataclass(frozen=True)
class RequeueAfter:
    """Reconcile again after this time, without an event."""

    after_s: float


Action = (SetFinalizer | CreateJob | ChangeJob | RecordWaiting | RemoveWaiting | Annotate | DeleteResource
          | CreateEndpoint | UpdateServing | UpdateMirror | SetDesired | UpdateStatus | KubernetesEvent | RequeueAfter)
Actions = tuple[Action, ...]


def reconcile_job(resource: JobResource, job: Job | None, history: JobHistory, now: datetime) -> Actions:
    """The next actions for a DrafterJob; see the module docstring."""
    actions = _reconcile_job(resource, job, history, now)
    # Whether the object still waits is known when its job is submitted or retried: `wait_for_quota`.
    if history.waiting is None or any(isinstance(action, CreateJob) or (
            isinstance(action, ChangeJob) and action.change == "retry") for action in actions):
        return actions
    return (RemoveWaiting(history.waiting), *actions)


def _reconcile_job(resource: JobResource, job: Job | None, history: JobHistory, now: datetime) -> Actions:
    if resource.deleting:
        return _finalize(resource, job, history, now)
    if job is None:
        return _submit(resource, history, now)
    if resource.spec is None:  # invalid now, accepted before: the job continues as accepted
        return _project(resource, job, now)
    actions: list[Action] = [] if resource.held else [SetFinalizer(held=True)]
    actions += _suspend_or_resume(resource, job, suspend=resource.spec.suspend)
    ttl_s, finished_at = resource.spec.ttl_seconds_after_finished, job.status.finished_at
    if ttl_s is not None and finished_at is not None and is_over(job.status.conditions) and not resource.spec.suspend:
        left_s = (finished_at + timedelta(seconds=ttl_s) - now).total_seconds()
        if left_s <= 0:
            return (Annotate(OUTSIDE_ANNOTATION, "keep"), DeleteResource(f"finished more than {ttl_s} s ago"))
        actions.append(RequeueAfter(left_s))
    return (*actions, *_project(resource, job, now))


def _submit(resource: JobResource, history: JobHistory, now: datetime) -> Actions:
    if resource.mirrored:
        return (DeleteResource(f"job {resource.job_id} was deleted"),)
    if history.deleted:
        return (DeleteResource("its job was deleted at the REST API"),)
    if resource.job_id is not None:
        message = (f"job {resource.job_id} is not in this database, or belongs to another object: restore it, "
                   f"or apply the object again without the annotation {JOB_ID_ANNOTATION}")
        return refuse_job(resource, "JobUnknown", message, now, over=False)
    if resource.spec is None:
        return refuse_job(resource, "InvalidSpec", resource.refusal, now, over=True)
    if resource.spec.suspend:
        return refuse_job(resource, "Suspended", "not submitted while spec.suspend is true", now, over=False)
    failed = _stored(resource.status, "Failed")
    if (failed is not None and failed.get("status") == "True"
            and resource.status.get("observedGeneration") == resource.identity.generation):
        return ()  # rejected for this generation: retried when the spec changes
    spec, identity = resource.spec.job, resource.identity
    # They tie the job to its applied object.
    labelled = spec.model_copy(update={"labels": {
        **spec.labels, UID_LABEL: identity.uid, NAMESPACE_LABEL: identity.namespace, NAME_LABEL: identity.name}})
    # An added finalizer leads to another pass at once; an object that is refused for now would be tried without pause.
    return (*(() if resource.held else (SetFinalizer(held=True),)), CreateJob(identity.uid, labelled))


def _suspend_or_resume(resource: JobResource, job: Job, *, suspend: bool) -> list[Action]:
    over, cancelled = is_over(job.status.conditions), is_true(job.status.conditions, "Cancelled")
    if suspend and not over:
        marked, stopping = resource.suspended_attempt == job.status.attempt, job.status.phase == "Cancelling"
        # Race: the annotation is written before the cancellation. If this operator is killed in between, the job can
        # still be resumed. One that stops without the annotation was cancelled by a user, and is not resumed.
        return [*(() if marked or stopping else (Annotate(SUSPENDED_ANNOTATION, str(job.status.attempt)),)),
                *(() if stopping else (ChangeJob("cancel", job.id),)), RequeueAfter(STOPPING_CHECK_S)]
    if suspend or resource.suspended_attempt is None:
        return []
    if resource.suspended_attempt == job.status.attempt:
        if cancelled:
            return [ChangeJob("retry", job.id)]
        if not over:  # resumed while it was still stopping
            return [RequeueAfter(STOPPING_CHECK_S)]
    return [Annotate(SUSPENDED_ANNOTATION, None)]


def _finalize(resource: JobResource, job: Job | None, history: JobHistory, now: datetime) -> Actions:
    if not resource.held:
        return ()
    if job is None or resource.keep_outside:
        return (SetFinalizer(held=False),)
    if history.served_by is not None:
        message = (f"endpoint {history.served_by!r} serves a drafter of this job: promote another or roll it back, or "
                   f"annotate this object with {OUTSIDE_ANNOTATION}=keep to keep the job")
        waiting = _condition("Deleted", "False", "EndpointServes", message, resource, now)
        return (*_project(resource, job, now, waiting), RequeueAfter(STOPPING_CHECK_S))
    return (ChangeJob("delete", job.id), *_project(resource, job, now), RequeueAfter(STOPPING_CHECK_S))


def _project(resource: JobResource, job: Job, now: datetime, *more: ResourceCondition) -> Actions:
    status = job_status(job, resource)
    if resource.spec is not None and resource.spec.suspend:
        if is_true(job.status.conditions, "Cancelled"):
            state = _condition("Suspended", "True", "Suspended", "stopped; finished stages are kept", resource, now)
        elif is_over(job.status.conditions):
            state = _condition("Suspended", "False", "AlreadyFinished", "finished before", resource, now)
        else:
            state = _condition("Suspended", "False", "Stopping", "stops at its next pause point", resource, now)
        more = (*more, state)
    elif _stored(resource.status, "Suspended") is not None:
        more = (*more, _condition("Suspended", "False", "Resumed", "", resource, now))
    return _write(resource.identity, resource.status, status.model_copy(
        update={"conditions": (*status.conditions, *more)}))


def refuse_job(resource: JobResource, reason: str, message: str, now: datetime, *, over: bool) -> Actions:
    """The status of an object without a job; `over`: its spec will never be accepted."""
    conditions = [_condition("Accepted", "False", reason, message, resource, now)]
    if reason == "Suspended":
        conditions.append(_condition("Suspended", "True", reason, message, resource, now))
    if over:  # set terminal conditions, so that `kubectl wait` returns
        conditions += [_condition("Succeeded", "False", reason, message, resource, now),
                       _condition("Failed", "True", reason, message, resource, now)]
    status = DrafterJobStatus(observed_generation=resource.identity.generation, conditions=tuple(conditions),
                              phase="Failed" if over else "Suspended" if reason == "Suspended" else "Pending")
    return _write(resource.identity, resource.status, status)


def wait_for_quota(identity: Identity, project: str, refusal: EyrieError, stored: WaitingObject | None,
                   now: datetime) -> Actions:
    """The row of an object whose job was refused because of a quota, if it differs from the stored one."""
    since = stored.since if stored is not None and stored.uid == identity.uid else now
    wanted = WaitingObject(namespace=identity.namespace, name=identity.name, uid=identity.uid, project=project,
                           reason=refusal.reason, message=refusal.message, hint=refusal.hint, since=since)
    return () if wanted == stored else (RecordWaiting(wanted),)


def orphaned(rows: Iterable[WaitingObject], uids: Collection[str]) -> tuple[WaitingObject, ...]:
    """Rows of objects that do not exist any more. `uids` are those of all objects, listed after the rows."""
    return tuple(row for row in rows if row.uid not in uids)


# Endpoints.


def reconcile_endpoint(resource: EndpointResource, endpoint: Endpoint | None, now: datetime,
                       taken_by: str | None = None, serve: EndpointServeSpec | None = None,
                       existing: Collection[Mapping[str, Any]] | None = ()) -> Actions:
    """The next actions for a DraftEndpoint. Its row outlives it, switched off, with name, URL and history.

    taken_by  an older object of the same name in another namespace: endpoint names are unique over namespaces
    serve     the row's serving section
    existing  the endpoint's other objects in the cluster; None where they are not known
    """
    if resource.deleting:
        return _finalize_endpoint(resource, endpoint, existing, ours=taken_by is None)
    if taken_by is not None:
        message = f"{taken_by} already has this endpoint name: choose another"
        return refuse_endpoint(resource, "NameTaken", message, now)
    if resource.spec is None:
        return refuse_endpoint(resource, "InvalidSpec", resource.refusal, now)
    if endpoint is None:
        if resource.mirrored:
            return refuse_endpoint(resource, "EndpointUnknown", "this database has no endpoint of this name: restore "
                                    "the database, or delete this object", now)
        wanted = resource.spec.serve.model_copy(update={"endpoint": resource.identity.name})
        return (SetFinalizer(held=True), CreateEndpoint(resource.spec.target, wanted))
    if endpoint.target != resource.spec.target.model:
        message = (f"the name serves target {endpoint.target!r} already, not {resource.spec.target.model!r}: apply "
                   "this endpoint under another name")
        return refuse_endpoint(resource, "TargetDiffers", message, now)
    actions: list[Action] = [] if resource.held else [SetFinalizer(held=True)]
    actions += _apply_serving(resource, resource.spec, endpoint, serve)
    accepted = _condition("Accepted", "True", "EndpointAccepted", "the spec is valid", resource, now)
    status = endpoint_status(endpoint, resource)
    status = status.model_copy(update={"conditions": (accepted, *status.conditions)})
    return (*actions, *_write(resource.identity, resource.status, status))


def _apply_serving(resource: EndpointResource, spec: DraftEndpointSpec, endpoint: Endpoint,
                   serve: EndpointServeSpec | None) -> list[Action]:
    """Precedence: for an applied object, `desired` always comes from the object, and the serving section from the last
    writer, since a promotion sets that of its job. For a mirror, both come from the object once after an edit."""
    serve = serve or spec.serve
    wanted = spec.serve.model_copy(update={"endpoint": endpoint.name, "port": serve.port})
    actions: list[Action] = []
    if endpoint.desired != spec.desired and (resource.edited or not resource.mirrored):
        actions.append(SetDesired(spec.desired))
    if wanted != serve and resource.edited:
        actions.append(UpdateServing(wanted))
    differs = (spec.desired, wanted) != (endpoint.desired, serve)
    if resource.mirrored and not actions and (differs or resource.edited):
        actions.append(UpdateMirror())
    return actions


def _finalize_endpoint(resource: EndpointResource, endpoint: Endpoint | None,
                       existing: Collection[Mapping[str, Any]] | None, *, ours: bool) -> Actions:
    """Remove the finalizer once the endpoint is off and its objects are deleted; with the keep annotation, once no
    object is owned by the DraftEndpoint: the garbage collector would delete it."""
    if not resource.held:
        return ()
    if endpoint is None or not ours:
        return (SetFinalizer(held=False),)
    if resource.keep_outside:
        is_held = existing is None or any(owner["uid"] == resource.identity.uid for each in existing
                                          for owner in each["metadata"].get("ownerReferences", ()))
        return (RequeueAfter(STOPPING_CHECK_S),) if is_held else (SetFinalizer(held=False),)
    if endpoint.desired == "on":
        return (SetDesired("off"), RequeueAfter(STOPPING_CHECK_S))
    is_held = existing is None or any(each["kind"] != "Pod" for each in existing)
    return (RequeueAfter(STOPPING_CHECK_S),) if is_held else (SetFinalizer(held=False),)


def refuse_endpoint(resource: EndpointResource, reason: str, message: str, now: datetime) -> Actions:
    """The status of an object that is not applied."""
    refused = _condition("Accepted", "False", reason, message, resource, now)
    status = DraftEndpointStatus(observed_generation=resource.identity.generation, conditions=(refused,))
    return _write(resource.identity, resource.status, status)


# Both.


def _write(identity: Identity, stored: Any, status: DrafterJobStatus | DraftEndpointStatus) -> Actions:
    """The status, if it differs from the stored one. Its events come first: if this operator is killed in between, they
    are posted again, and the API server rejects duplicates by name; in the other order they would be lost."""
    wanted = dump(status)
    if _in_order(wanted) == _in_order(stored):
        return ()
    events = event_records(identity, stored.get("conditions", ()), status.conditions)
    return (*events, UpdateStatus(wanted))


def _in_order(status: dict[str, Any]) -> dict[str, Any]:
    """A status for comparison. The API server merges conditions by type and keeps the order in which they first came: a
    status that differs in the order alone would be written at every look."""
    return {**status, "conditions": sorted(status.get("conditions", ()), key=lambda stored: str(stored.get("type")))}


def _condition(kind: str, status: Literal["True", "False"], reason: str, message: str,
               resource: JobResource | EndpointResource, now: datetime) -> ResourceCondition:
    """A condition without a row: its transition time is kept in the stored status."""
    before = _stored(resource.status, kind)
    kept = before is not None and before.get("status") == status
    since = datetime.fromisoformat(before["lastTransitionTime"]) if before is not None and kept else now
    return ResourceCondition(type=kind, status=status, reason=reason, message=message, last_transition_time=since,
                             observed_generation=resource.identity.generation)


def _stored(status: Any, kind: str) -> dict[str, Any] | None:
    return next((stored for stored in status.get("conditions", ()) if stored.get("type") == kind), None)
