"""The custom resources: DrafterJob and DraftEndpoint, as `kubectl apply` gives them and `kubectl get` shows them.

A DrafterJob is a job of the REST API as a Kubernetes object: `spec.job` is the JobSpec, field for field, in the REST
API's spelling. Fields of the status that Kubernetes programs read (`kubectl wait`, Argo CD, Flux) have Kubernetes
spelling: `observedGeneration`, and conditions in the shape of metav1.Condition.

A status is a projection of rows. It has no progress: 1,000 running jobs would be 1,000 writes every few seconds.
Progress is in the REST API and its event stream.

`eyrie_operator.manifests.crd` makes CustomResourceDefinitions of these models.
"""

from datetime import datetime
from typing import Literal

from pydantic import ConfigDict, Field

from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.reports import LeaderboardEntry
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.status import ConditionStatus, RevisionState, StageState
from eyrie_api.contract.targets import TargetSpec

GROUP = "eyrie.dev"
VERSION = "v1alpha1"
FINALIZER = f"{GROUP}/outside"
"""Held while something outside the cluster (rows, files, runs) belongs to the object."""

JOB_ID_ANNOTATION = f"{GROUP}/job-id"
"""The job of the REST API that this object is."""

OUTSIDE_ANNOTATION = f"{GROUP}/outside"
"""`keep`: deleting the object leaves the job, its record and its files, and waits for nothing."""

UID_LABEL = "kubernetes-uid"
NAMESPACE_LABEL = "kubernetes-namespace"
NAME_LABEL = "kubernetes-name"
"""Labels of a job that was applied: which object it is. `eyrie jobs` can filter by them."""

ResourcePhase = Literal["Pending", "Running", "Suspended", "Succeeded", "Failed", "Cancelling", "Cancelled"]


class _Kubernetes(Frozen):
    """Fields that Kubernetes itself reads are spelled its way."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class ResourceCondition(_Kubernetes):
    """metav1.Condition: one observation."""

    type: str = Field(min_length=1, max_length=316)
    status: ConditionStatus
    reason: str = Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", min_length=1, max_length=1024)
    message: str = Field("", max_length=32_768)
    last_transition_time: datetime = Field(alias="lastTransitionTime")
    observed_generation: int = Field(0, ge=0, alias="observedGeneration")


class DrafterJobSpec(Frozen):
    """A drafter to be trained, chosen, tuned and served for one target."""

    job: JobSpec
    """What POST /v1alpha1/jobs takes. It cannot be changed: another job is another object."""

    suspend: bool = False
    """true stops the job and frees its resources; false resumes it after its last finished stage."""

    ttl_seconds_after_finished: int | None = Field(None, ge=0, le=2**31 - 1)
    """Delete this object so long after the job has ended. The job's record, measurements and drafter stay: an endpoint
    may serve it."""


class ResourceStage(Frozen):
    """One box of the pipeline, without its progress."""

    stage: StageName
    key: str = ""
    """Candidate or checkpoint; empty for the stages that run once."""

    state: StageState
    attempt: int = 0
    message: str | None = None


class DrafterJobStatus(_Kubernetes):
    """What was observed of the job."""

    observed_generation: int = Field(0, ge=0, alias="observedGeneration")
    job_id: str | None = None
    """Its id at the REST API."""

    phase: ResourcePhase = "Pending"
    """For display; programs read conditions."""

    conditions: tuple[ResourceCondition, ...] = ()
    stages: tuple[ResourceStage, ...] = ()
    attempt: int = 1
    run_id: str | None = None
    """The pipeline run."""

    best: LeaderboardEntry | None = None
    verdict: str | None = None
    """Whether the drafter is promoted: promote, keep-incumbent, no-drafter, awaits-approval."""

    endpoint: str | None = None
    """The DraftEndpoint it was promoted to."""

    started_at: datetime | None = None
    finished_at: datetime | None = None


class WaitingObject(Frozen):
    """A DrafterJob whose job is not accepted, or not resumed, until its project's quota has room. It is tried again
    every 15 seconds."""

    namespace: str
    name: str
    uid: str
    """Of the object: one that is deleted and applied again has another."""

    project: str
    reason: str
    message: str
    """What it waits for: the quota, and what is in use."""

    hint: str
    since: datetime
    """When it was first refused, without interruption."""


class WaitingList(Frozen):
    """DrafterJobs that wait, those that have waited longest first."""

    items: tuple[WaitingObject, ...]
    total: int
    """Of all that wait: more than there are items when `limit` was lower."""


class DraftEndpointSpec(Frozen):
    """A stable URL for a target, served with the best drafter there is for it."""

    target: TargetSpec
    """It cannot be changed: a URL must not change its model under its users."""

    serve: EndpointServeSpec = EndpointServeSpec()
    """How it is served. `endpoint` is this object's name, whatever is written here."""

    desired: Literal["on", "off"] = "on"
    """off gives the hardware back and keeps name, URL and history."""


class ResourceRevision(Frozen):
    """One thing the endpoint has served or may serve."""

    number: int
    job_id: str | None
    checkpoint: str | None
    setting: str
    """`off`, or num_steps/top_k/num_draft_tokens, preceded by the method when it is not the drafter."""

    state: RevisionState
    speedup: float | None
    tau: float | None


class DraftEndpointStatus(_Kubernetes):
    """What was observed of the endpoint."""

    observed_generation: int = Field(0, ge=0, alias="observedGeneration")
    url: str | None = None
    """OpenAI-compatible base URL, up to and including `/v1`."""

    model: str | None = None
    """What clients name in requests."""

    conditions: tuple[ResourceCondition, ...] = ()
    active_revision: int | None = None
    candidate_revision: int | None = None
    revisions: tuple[ResourceRevision, ...] = ()
    """The last twenty, oldest first; all of them at the REST API."""
