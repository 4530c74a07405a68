"""Conversion between objects of the cluster and values of the contract. Pure.

Reading: an object of the API server becomes a `JobResource` or an `EndpointResource`; an invalid spec becomes its error
message, since a server without CEL admits specs that field schemas alone cannot reject. Writing: a Job becomes a
status. The projection omits what changes continuously (see `eyrie_api.contract.resources`): equal statuses need no
write.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from eyrie_api.contract.model import API_VERSION
from eyrie_api.contract.resources import (
    FINALIZER,
    GROUP,
    JOB_ID_ANNOTATION,
    OUTSIDE_ANNOTATION,
    UID_LABEL,
    DraftEndpointSpec,
    DraftEndpointStatus,
    DrafterJobSpec,
    DrafterJobStatus,
    ResourceCondition,
    ResourcePhase,
    ResourceRevision,
    ResourceStage,
)
from eyrie_api.contract.rules import rule_of
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Condition, Endpoint, Job
from eyrie_api.contract.targets import TargetSpec
from eyrie_operator.manifests.deployment import digest

SUSPENDED_ANNOTATION = f"{GROUP}/suspended-attempt"
"""The attempt that was cancelled because the object was suspended; resuming retries it. A job cancelled by a user stays
cancelled."""

ORIGIN_LABEL = f"{GROUP}/origin"
MIRRORED = "rest"
"""Value of the origin label on mirrors of jobs posted to the REST API."""

SHOWN_ANNOTATION = f"{GROUP}/shown"
"""On a mirrored DraftEndpoint: digest of the spec we wrote. A different spec was edited by a user."""

_REVISIONS_SHOWN = 20
_Spec = TypeVar("_Spec", bound=BaseModel)


@dataclass(frozen=True)
class Identity:
    kind: Literal["DrafterJob", "DraftEndpoint"]
    namespace: str
    name: str
    uid: str
    generation: int
    resource_version: str


@dataclass(frozen=True)
class Resource:
    """What both kinds have."""

    identity: Identity
    refusal: str = ""
    """The validation error of an invalid spec."""

    deleting: bool = False
    held: bool = False
    """Whether our finalizer is on it."""

    keep_outside: bool = False
    mirrored: bool = False
    """A mirror of a job posted to the REST API, or of an endpoint created by a promotion or through the REST API."""

    status: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobResource(Resource):
    """A DrafterJob as the API server has it."""

    spec: DrafterJobSpec | None = None
    """None when it is invalid."""

    job_id: str | None = None
    """From the annotation, or from the status."""

    suspended_attempt: int | None = None


@dataclass(frozen=True)
class EndpointResource(Resource):
    """A DraftEndpoint as the API server has it."""

    spec: DraftEndpointSpec | None = None
    edited: bool = False
    """Its spec was changed since its status was written or, for a mirror, since the operator wrote it."""


def read_job(raw: Mapping[str, Any], mirror_namespace: str | None) -> JobResource:
    """A DrafterJob object. Only objects in `mirror_namespace` are mirrors: anyone who may create an object in another
    namespace can write a mirror's label and annotation."""
    common, annotations = _read("DrafterJob", raw, mirror_namespace)
    spec, refusal = _read_spec(DrafterJobSpec, raw.get("spec"))
    suspended = annotations.get(SUSPENDED_ANNOTATION) or ""
    job_id = annotations.get(JOB_ID_ANNOTATION) or common.status.get("job_id")
    # A mirror is named after its job: a copy applied under another name is a new job.
    mirrored = common.mirrored and job_id is not None and common.identity.name == job_id
    return JobResource(**vars(common) | {"mirrored": mirrored, "refusal": refusal}, spec=spec, job_id=job_id,
                       suspended_attempt=int(suspended) if suspended.isdigit() else None)


def read_endpoint(raw: Mapping[str, Any], mirror_namespace: str | None) -> EndpointResource:
    """A DraftEndpoint object; mirrors as in `read_job`."""
    common, annotations = _read("DraftEndpoint", raw, mirror_namespace)
    spec, refusal = _read_spec(DraftEndpointSpec, raw.get("spec"))
    if common.mirrored:
        edited = spec is not None and annotations.get(SHOWN_ANNOTATION) != _digest_of(spec)
    else:
        edited = common.status.get("observedGeneration") != raw["metadata"].get("generation", 1)
    return EndpointResource(**vars(common) | {"refusal": refusal}, spec=spec, edited=edited)


def _read(kind: Literal["DrafterJob", "DraftEndpoint"], raw: Mapping[str, Any],
          mirror_namespace: str | None) -> tuple[Resource, Mapping[str, str]]:
    """What both kinds have, and the annotations."""
    metadata = raw["metadata"]
    annotations, namespace = metadata.get("annotations") or {}, metadata["namespace"]
    return Resource(
        identity=Identity(kind, namespace, metadata["name"], metadata["uid"], int(metadata.get("generation", 1)),
                          str(metadata.get("resourceVersion", ""))),
        deleting="deletionTimestamp" in metadata, held=FINALIZER in (metadata.get("finalizers") or ()),
        keep_outside=annotations.get(OUTSIDE_ANNOTATION) == "keep",
        mirrored=(metadata.get("labels") or {}).get(ORIGIN_LABEL) == MIRRORED and namespace == mirror_namespace,
        status=raw.get("status") or {}), annotations


def _read_spec(model: type[_Spec], raw: Any) -> tuple[_Spec | None, str]:
    try:
        return model.model_validate(raw), ""
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("spec", *first["loc"]))
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        return None, f"{where}: {rule_of(first)}{more}"


def applied_uid(job: Job) -> str | None:
    """The uid of the object of an applied job; None for a job posted to the REST API."""
    return job.spec.labels.get(UID_LABEL)


def mirror_of(job: Job, namespace: str) -> dict[str, Any]:
    """The mirror of a job posted to the REST API, for server-side apply."""
    return _mirror("DrafterJob", job.id, namespace, {JOB_ID_ANNOTATION: job.id},
                   {"job": job.spec.model_dump(mode="json", exclude_none=True)})


def mirror_of_endpoint(endpoint: Endpoint, target: TargetSpec, serve: EndpointServeSpec,
                       namespace: str) -> dict[str, Any]:
    """The mirror of an endpoint that was not applied, for server-side apply."""
    spec = DraftEndpointSpec(target=target, serve=serve, desired=endpoint.desired)
    return _mirror("DraftEndpoint", endpoint.name, namespace, {SHOWN_ANNOTATION: _digest_of(spec)},
                   spec.model_dump(mode="json", exclude_none=True))


def _mirror(kind: str, name: str, namespace: str, annotations: dict[str, str], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "spec": spec, "metadata": {
        "name": name, "namespace": namespace, "labels": {ORIGIN_LABEL: MIRRORED}, "annotations": annotations,
        "finalizers": [FINALIZER]}}


def _digest_of(spec: DraftEndpointSpec) -> str:
    return digest(spec.model_dump(mode="json"))


# Status.


def job_status(job: Job, resource: JobResource) -> DrafterJobStatus:
    """The projection of a job onto its object."""
    generation, status = resource.identity.generation, job.status
    phase: ResourcePhase = status.phase
    if resource.spec is not None and resource.spec.suspend and phase == "Cancelled":
        phase = "Suspended"
    return DrafterJobStatus(
        observed_generation=generation, job_id=job.id, phase=phase,
        conditions=conditions_of(status.conditions, generation),
        stages=tuple(ResourceStage(stage=stage.stage, key=stage.key, state=stage.state, attempt=stage.attempt,
                                   message=stage.message) for stage in status.stages),
        attempt=status.attempt, run_id=status.run_id, best=status.best,
        verdict=status.decision.verdict if status.decision else None, endpoint=status.endpoint,
        started_at=status.started_at, finished_at=status.finished_at)


def endpoint_status(endpoint: Endpoint, resource: EndpointResource) -> DraftEndpointStatus:
    """The projection of an endpoint onto its object."""
    generation = resource.identity.generation
    return DraftEndpointStatus(
        observed_generation=generation, url=endpoint.url, model=endpoint.model,
        conditions=conditions_of(endpoint.conditions, generation), active_revision=endpoint.active_revision,
        candidate_revision=endpoint.candidate_revision,
        revisions=tuple(ResourceRevision(
            number=revision.number, job_id=revision.job_id, checkpoint=revision.checkpoint,
            setting=revision.use.setting.label(), state=revision.state, speedup=revision.speedup, tau=revision.tau)
            for revision in endpoint.revisions[-_REVISIONS_SHOWN:]))


def conditions_of(conditions: Iterable[Condition], generation: int) -> tuple[ResourceCondition, ...]:
    """Conditions in the format of Kubernetes, with the observed generation."""
    return tuple(ResourceCondition(
        type=condition.type, status=condition.status, reason=condition.reason, message=condition.message[:32_768],
        last_transition_time=condition.last_transition_time, observed_generation=generation)
        for condition in conditions)


def dump(status: BaseModel) -> dict[str, Any]:
    """A status as the API server stores it: nulls left out, times as metav1.Time (RFC 3339, whole seconds, Z).

    Empty strings are left out as well: server-side apply of Kubernetes 1.20 turns them into nulls, and rejects those.
    """
    plain: dict[str, Any] = _plain(status.model_dump(mode="python", by_alias=True, exclude_none=True))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item != ""}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# Events.


@dataclass(frozen=True)
class KubernetesEvent:
    """One Kubernetes Event to post. Its name is a digest of its content, so that a duplicate is rejected."""

    name: str
    type: Literal["Normal", "Warning"]
    reason: str
    message: str


_BAD_WHEN_TRUE = frozenset({"Failed", "RolledBack"})


def event_records(identity: Identity, before: Iterable[Mapping[str, Any]],
                  after: Iterable[ResourceCondition]) -> tuple[KubernetesEvent, ...]:
    """An event per condition whose status or reason has changed."""
    known = {stored.get("type"): (stored.get("status"), stored.get("reason")) for stored in before}
    records = []
    for new in after:
        if known.get(new.type) == (new.status, new.reason):
            continue
        bad = new.status == ("True" if new.type in _BAD_WHEN_TRUE else "False")
        content = f"{identity.uid}/{new.type}/{new.status}/{new.reason}/{new.last_transition_time.isoformat()}"
        name = f"{identity.name[:200]}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        message = f"{new.type}={new.status}" + (f": {new.message}" if new.message else "")
        records.append(KubernetesEvent(name, "Warning" if bad else "Normal", new.reason, message[:1024]))
    return tuple(records)
