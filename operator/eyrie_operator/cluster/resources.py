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
    NAME_LABEL,
    NAMESPACE_LABEL,
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
    """Identity and version of an object."""

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


def labels_of(resource: JobResource) -> dict[str, str]:
    """Labels that tie a job to its applied object."""
    one = resource.identity
    return {UID_LABEL: one.uid, NAMESPACE_LABEL: one.namespace, NAME_LABEL: one.name}


def applied_uid(job: Job) -> str | None:
    """The uid of the object of an applied job; None for a job posted to the REST API."""
    return job.spec.labels.get(UID_LABEL)


def mirror_of(job: Job, namespace: str) -> dict[str, Any]:
    """The mirror of a job posted to the REST API, for server-side apply."""
    return {
        "apiVersion": API_VERSION, "kind": "DrafterJob",
        "metadata": {"name": job.id, "namespace": namespace, "labels": {ORIGIN_LABEL: MIRRORED},
                     "annotations": {JOB_ID_ANNOTATION: job.id}, "finalizers": [FINALIZER]},
        "spec": {"job": job.spec.model_dump(mode="json", exclude_none=True)},
    }


def mirror_of_endpoint(endpoint: Endpoint, target: TargetSpec, serve: EndpointServeSpec,
                       namespace: str) -> dict[str, Any]:
    """The mirror of an endpoint that was not applied, for server-side apply."""
    spec = DraftEndpointSpec(target=target, serve=serve, desired=endpoint.desired)
    return {
        "apiVersion": API_VERSION, "kind": "DraftEndpoint",
        "metadata": {"name": endpoint.name, "namespace": namespace, "labels": {ORIGIN_LABEL: MIRRORED},
                     "annotations": {SHOWN_ANNOTATION: _digest_of(spec)}, "finalizers": [FINALIZER]},
        "spec": spec.model_dump(mode="json", exclude_none=True),
    }


def _digest_of(spec: DraftEndpointSpec) -> str:
    return digest(spec.model_dump(mode="json"))


# Status.


def job_status(job: Job, resource: JobResource) -> DrafterJobStatus:
    """The projection of a job onto its object."""
    generation = resource.identity.generation
    suspended = resource.spec is not None and resource.spec.suspend
    phase: ResourcePhase = job.status.phase
    if suspended and job.status.phase == "Cancelled":
        phase = "Suspended"
    status = job.status
    return DrafterJobStatus(
        observed_generation=generation, job_id=job.id, phase=phase,
        conditions=conditions_of(status.conditions, generation),
        stages=tuple(ResourceStage(stage=one.stage, key=one.key, state=one.state, attempt=one.attempt,
                                   message=one.message) for one in status.stages),
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
            number=one.number, job_id=one.job_id, checkpoint=one.checkpoint, setting=one.use.setting.label(),
            state=one.state, speedup=one.speedup, tau=one.tau) for one in endpoint.revisions[-_REVISIONS_SHOWN:]))


def conditions_of(conditions: Iterable[Condition], generation: int) -> tuple[ResourceCondition, ...]:
    """Conditions in the format of Kubernetes, with the observed generation."""
    return tuple(ResourceCondition(
        type=one.type, status=one.status, reason=one.reason, message=one.message[:32_768],
        last_transition_time=one.last_transition_time, observed_generation=generation) for one in conditions)


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
        return {key: _plain(one) for key, one in value.items() if one != ""}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


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
    known = {one.get("type"): (one.get("status"), one.get("reason")) for one in before}
    records = []
    for one in after:
        if known.get(one.type) == (one.status, one.reason):
            continue
        bad = one.status == ("True" if one.type in _BAD_WHEN_TRUE else "False")
        content = f"{identity.uid}/{one.type}/{one.status}/{one.reason}/{one.last_transition_time.isoformat()}"
        name = f"{identity.name[:200]}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        message = f"{one.type}={one.status}" + (f": {one.message}" if one.message else "")
        records.append(KubernetesEvent(name, "Warning" if bad else "Normal", one.reason, message[:1024]))
    return tuple(records)
