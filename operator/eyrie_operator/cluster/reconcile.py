"""What an object of the cluster wants and what its row says, in; what to do, out. Pure.

Called for every event, at every change of a row and at every resync; it remembers nothing, and every action may be
applied twice or not at all. What happens to a DrafterJob:

    applied                  -> our finalizer, and in the same breath a job with its labels (kubernetes-uid: its uid)
    refused by the contract  -> Accepted=False, Succeeded=False, Failed=True, with the words
    suspended                -> the job is cancelled, which keeps finished stages; resumed, it goes on from them
    the row changed          -> its projection, when that differs from the status; an Event per changed condition
    ended `ttl` ago          -> the object is deleted, marked to leave job and files where they are
    deleted                  -> the job is cancelled and its record deleted; the finalizer goes when nothing is left
    the row is gone          -> it was deleted at the REST API: so is the object

The last line is drawn with care. A database that was lost or mistaken for another must not empty the cluster: an object
goes only when this database remembers having had its job (`JobHistory.deleted`). Otherwise it is told and left alone.

A DraftEndpoint that was applied says how its row is served; one made for a row of its own (a promotion's, the REST
API's) shows the row, and speaks only when somebody has written to it since it was last shown.

Submission is idempotent by the object's uid. Not by its generation too: `spec.suspend` raises that, and a suspended
job must not become two.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.resources import (
    JOB_ID_ANNOTATION,
    OUTSIDE_ANNOTATION,
    DraftEndpointSpec,
    DraftEndpointStatus,
    DrafterJobStatus,
    ResourceCondition,
)
from eyrie_api.v1alpha1.serving import ServeSpec
from eyrie_api.v1alpha1.status import Endpoint, Job
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_operator.cluster.resources import (
    SUSPENDED_ANNOTATION,
    EndpointResource,
    EventRecord,
    Identity,
    JobResource,
    dump,
    endpoint_status,
    event_records,
    job_status,
    labels_of,
)
from eyrie_operator.conditions import is_over, is_true

STOPPING_CHECK_S = 5.0
"""How soon to look again at what is being stopped. The row's change tells us sooner; this is for a change missed."""


@dataclass(frozen=True)
class JobHistory:
    """What the database knows of an object's job besides the row itself."""

    deleted: bool = False
    """The job was submitted into this database and has been deleted since."""

    served_by: str | None = None
    """An endpoint that serves, or is about to serve, its drafter."""


@dataclass(frozen=True)
class EndpointObjects:
    """What of an endpoint is in the cluster besides its DraftEndpoint."""

    objects: bool = False
    """Anything at all."""

    owned: bool = False
    """Something that the garbage collector would take with the DraftEndpoint."""


@dataclass(frozen=True)
class AddFinalizer:
    """Put our finalizer on the object."""


@dataclass(frozen=True)
class RemoveFinalizer:
    """Take our finalizer off."""


@dataclass(frozen=True)
class CreateJob:
    """Submit, once per uid."""

    key: str
    spec: JobSpec


@dataclass(frozen=True)
class CancelJob:
    """Stop it at a safe line."""

    job_id: str


@dataclass(frozen=True)
class RetryJob:
    """Go on from the last finished stage."""

    job_id: str


@dataclass(frozen=True)
class DeleteJob:
    """Cancel it if it runs, and delete its record and files once it has stopped."""

    job_id: str


@dataclass(frozen=True)
class Annotate:
    """Set an annotation of ours, or take it away."""

    name: str
    value: str | None


@dataclass(frozen=True)
class DeleteResource:
    """Delete the object."""

    why: str


@dataclass(frozen=True)
class CreateEndpoint:
    """Make the endpoint's row, or find it."""

    name: str
    target: TargetSpec
    serve: ServeSpec
    model: str


@dataclass(frozen=True)
class UpdateServing:
    """Serve the endpoint as the object says from now on."""

    name: str
    serve: ServeSpec


@dataclass(frozen=True)
class UpdateMirror:
    """Write the row into the spec of the object that was made for it."""

    name: str


@dataclass(frozen=True)
class SetDesired:
    """Switch an endpoint."""

    name: str
    desired: Literal["on", "off"]


@dataclass(frozen=True)
class UpdateStatus:
    """Write the status."""

    status: dict[str, Any]


@dataclass(frozen=True)
class PostEvent:
    """Post an Event."""

    event: EventRecord


@dataclass(frozen=True)
class RequeueAfter:
    """Look again after so long, whether or not anything is heard."""

    after_s: float


Action = (AddFinalizer | RemoveFinalizer | CreateJob | CancelJob | RetryJob | DeleteJob | Annotate | DeleteResource
          | CreateEndpoint | UpdateServing | UpdateMirror | SetDesired | UpdateStatus | PostEvent | RequeueAfter)
Actions = tuple[Action, ...]


def reconcile_job(resource: JobResource, job: Job | None, history: JobHistory, now: datetime) -> Actions:
    """What a DrafterJob needs next; see the module's essay."""
    if resource.deleting:
        return _let_go(resource, job, history, now)
    if job is None:
        return _submit(resource, history, now)
    if resource.spec is None:  # it was accepted once: the job goes on as it was accepted
        return _project(resource, job, now)
    actions: list[Action] = [] if resource.held else [AddFinalizer()]
    actions += _suspend_or_resume(resource, job, suspend=resource.spec.suspend)
    ttl_s, finished_at = resource.spec.ttl_seconds_after_finished, job.status.finished_at
    if ttl_s is not None and finished_at is not None and is_over(job.status.conditions) and not resource.spec.suspend:
        left_s = (finished_at + timedelta(seconds=ttl_s) - now).total_seconds()
        if left_s <= 0:
            return (Annotate(OUTSIDE_ANNOTATION, "keep"), DeleteResource(f"ended more than {ttl_s} s ago"))
        actions.append(RequeueAfter(left_s))
    return (*actions, *_project(resource, job, now))


def _submit(resource: JobResource, history: JobHistory, now: datetime) -> Actions:
    if resource.mirrored:
        return (DeleteResource(f"job {resource.job_id} was deleted"),)
    if history.deleted:
        return (DeleteResource("its job was deleted at the REST API"),)
    if resource.job_id is not None:
        message = (f"job {resource.job_id} is not in this database, or not this object's: restore the database, or "
                   f"apply the object anew without the annotation {JOB_ID_ANNOTATION}")
        return refuse_job(resource, "JobUnknown", message, now, over=False)
    if resource.spec is None:
        return refuse_job(resource, "InvalidSpec", resource.refusal, now, over=True)
    if resource.spec.suspend:
        return refuse_job(resource, "Suspended", "not submitted while spec.suspend is true", now, over=False)
    if _was_refused(resource):  # what was refused stays refused until the object changes
        return ()
    spec = resource.spec.job
    labelled = spec.model_copy(update={"labels": {**spec.labels, **labels_of(resource)}})
    return (AddFinalizer(), CreateJob(resource.identity.uid, labelled))


def _suspend_or_resume(resource: JobResource, job: Job, *, suspend: bool) -> list[Action]:
    over, cancelled = is_over(job.status.conditions), is_true(job.status.conditions, "Cancelled")
    if suspend and not over:
        marked = resource.suspended_attempt == job.status.attempt
        # Marked first: killed between the two, the mark makes the cancelled job resumable all the same.
        return [*(() if marked else (Annotate(SUSPENDED_ANNOTATION, str(job.status.attempt)),)),
                *(() if job.status.phase == "Cancelling" else (CancelJob(job.id),)), RequeueAfter(STOPPING_CHECK_S)]
    if suspend or resource.suspended_attempt is None:
        return []
    if resource.suspended_attempt == job.status.attempt:
        if cancelled:
            return [RetryJob(job.id)]
        if not over:  # resumed before it had stopped
            return [RequeueAfter(STOPPING_CHECK_S)]
    return [Annotate(SUSPENDED_ANNOTATION, None)]


def _let_go(resource: JobResource, job: Job | None, history: JobHistory, now: datetime) -> Actions:
    if not resource.held:
        return ()
    if job is None or resource.keep_outside:
        return (RemoveFinalizer(),)
    if history.served_by is not None:
        message = (f"endpoint {history.served_by!r} serves a drafter of this job: promote another or roll it back, or "
                   f"annotate this object with {OUTSIDE_ANNOTATION}=keep to leave the job where it is")
        waiting = _condition("Deleted", "False", "EndpointServes", message, resource, now)
        return (*_project(resource, job, now, waiting), RequeueAfter(STOPPING_CHECK_S))
    return (DeleteJob(job.id), *_project(resource, job, now), RequeueAfter(STOPPING_CHECK_S))


def _project(resource: JobResource, job: Job, now: datetime, *more: ResourceCondition) -> Actions:
    status = job_status(job, resource)
    if resource.spec is not None and resource.spec.suspend:
        more = (*more, _suspended(resource, job, now))
    elif _stored(resource.status, "Suspended") is not None:
        more = (*more, _condition("Suspended", "False", "Resumed", "", resource, now))
    return _write(resource.identity, resource.status, status.model_copy(
        update={"conditions": (*status.conditions, *more)}))


def _suspended(resource: JobResource, job: Job, now: datetime) -> ResourceCondition:
    if is_over(job.status.conditions):
        ended = is_true(job.status.conditions, "Cancelled")
        words = ("Suspended", "stopped; finished stages are kept") if ended else ("AlreadyEnded", "it had ended before")
        return _condition("Suspended", "True" if ended else "False", *words, resource, now)
    return _condition("Suspended", "False", "Stopping", "stops at its next safe line", resource, now)


def _was_refused(resource: JobResource) -> bool:
    failed = _stored(resource.status, "Failed")
    return (failed is not None and failed.get("status") == "True"
            and resource.status.get("observedGeneration") == resource.identity.generation)


def refuse_job(resource: JobResource, reason: str, message: str, now: datetime, *, over: bool) -> Actions:
    """A status for an object that has no job; `over`, when it will not get one as it is written."""
    told = [_condition("Accepted", "False", reason, message, resource, now)]
    if reason == "Suspended":
        told.append(_condition("Suspended", "True", reason, message, resource, now))
    if over:  # nothing will come of it: whoever waits for its end must not wait for ever
        told += [_condition("Succeeded", "False", reason, message, resource, now),
                 _condition("Failed", "True", reason, message, resource, now)]
    status = DrafterJobStatus(observed_generation=resource.identity.generation, conditions=tuple(told),
                              phase="Failed" if over else "Suspended" if reason == "Suspended" else "Pending")
    return _write(resource.identity, resource.status, status)


# Endpoints.


def reconcile_endpoint(resource: EndpointResource, endpoint: Endpoint | None, model: str, now: datetime,
                       taken_by: str | None = None, serve: ServeSpec | None = None,
                       existing: EndpointObjects | None = None) -> Actions:
    """What a DraftEndpoint needs next. Its row outlives it, switched off: name, URL and history stay.

    taken_by  an older object of the same name in another namespace: endpoints have one name in all of them
    serve     the row's serving section
    """
    existing = existing or EndpointObjects()
    if resource.deleting:
        return _let_endpoint_go(resource, endpoint, existing, ours=taken_by is None)
    if taken_by is not None:
        return _refuse_endpoint(resource, "NameTaken", f"{taken_by} is the endpoint of that name: choose another", now)
    if resource.spec is None:
        return _refuse_endpoint(resource, "InvalidSpec", resource.refusal, now)
    if endpoint is None:
        if resource.mirrored:
            return _refuse_endpoint(resource, "EndpointUnknown", "this database has no endpoint of that name: restore "
                                    "the database, or delete this object", now)
        wanted = resource.spec.serve.model_copy(update={"endpoint": resource.identity.name})
        return (AddFinalizer(), CreateEndpoint(resource.identity.name, resource.spec.target, wanted, model))
    if endpoint.target != resource.spec.target.model:
        message = (f"the name serves target {endpoint.target!r} already, not {resource.spec.target.model!r}: apply "
                   "this endpoint under another name")
        return _refuse_endpoint(resource, "TargetDiffers", message, now)
    actions: list[Action] = [] if resource.held else [AddFinalizer()]
    actions += _serve_as_said(resource, resource.spec, endpoint, serve)
    accepted = _condition("Accepted", "True", "EndpointAccepted", "the spec is valid", resource, now)
    status = endpoint_status(endpoint, resource)
    status = status.model_copy(update={"conditions": (accepted, *status.conditions)})
    return (*actions, *_write(resource.identity, resource.status, status))


def _serve_as_said(resource: EndpointResource, spec: DraftEndpointSpec, endpoint: Endpoint,
                   serve: ServeSpec | None) -> list[Action]:
    """Who has the last word: an applied object on `desired`, always; on how it is served whoever spoke last, since a
    promotion brings the serving section of its job. For a mirror, on both, whoever has written to it, once."""
    serve = serve or spec.serve
    wanted = spec.serve.model_copy(update={"endpoint": endpoint.name, "port": serve.port})
    actions: list[Action] = []
    if endpoint.desired != spec.desired and (resource.edited or not resource.mirrored):
        actions.append(SetDesired(endpoint.name, spec.desired))
    if wanted != serve and resource.edited:
        actions.append(UpdateServing(endpoint.name, wanted))
    differs = (spec.desired, wanted) != (endpoint.desired, serve)
    if resource.mirrored and not actions and (differs or resource.edited):
        actions.append(UpdateMirror(endpoint.name))
    return actions


def _let_endpoint_go(resource: EndpointResource, endpoint: Endpoint | None, existing: EndpointObjects, *,
                     ours: bool) -> Actions:
    """Switched off and its objects gone; kept, once nothing of it would be taken along."""
    if not resource.held:
        return ()
    if endpoint is None or not ours:
        return (RemoveFinalizer(),)
    if resource.keep_outside:
        return (RequeueAfter(STOPPING_CHECK_S),) if existing.owned else (RemoveFinalizer(),)
    if endpoint.desired == "on":
        return (SetDesired(endpoint.name, "off"), RequeueAfter(STOPPING_CHECK_S))
    return (RequeueAfter(STOPPING_CHECK_S),) if existing.objects else (RemoveFinalizer(),)


def _refuse_endpoint(resource: EndpointResource, reason: str, message: str, now: datetime) -> Actions:
    refused = _condition("Accepted", "False", reason, message, resource, now)
    status = DraftEndpointStatus(observed_generation=resource.identity.generation, conditions=(refused,))
    return _write(resource.identity, resource.status, status)


# Both.


def _write(identity: Identity, stored: Any, status: DrafterJobStatus | DraftEndpointStatus) -> Actions:
    """The status, if it differs from the one stored, with its events first: an event told twice is refused by its
    name, one that was never told would be lost."""
    wanted = dump(status)
    if wanted == stored:
        return ()
    told = event_records(identity, stored.get("conditions", ()), status.conditions)
    return (*(PostEvent(one) for one in told), UpdateStatus(wanted))


def _condition(kind: str, status: Literal["True", "False"], reason: str, message: str,
               resource: JobResource | EndpointResource, now: datetime) -> ResourceCondition:
    """A condition of the object's own, which no row holds: its transition time is kept in the stored status."""
    before = _stored(resource.status, kind)
    kept = before is not None and before.get("status") == status
    since = datetime.fromisoformat(before["lastTransitionTime"]) if before is not None and kept else now
    return ResourceCondition(type=kind, status=status, reason=reason, message=message, last_transition_time=since,
                             observed_generation=resource.identity.generation)


def _stored(status: Any, kind: str) -> dict[str, Any] | None:
    return next((one for one in status.get("conditions", ()) if one.get("type") == kind), None)
