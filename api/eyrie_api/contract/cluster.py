"""What a cluster's administrator decides, once, for every job and endpoint; and what a job may ask for beyond it.

A `ClusterProfile` is a file of the installation (EYRIE_CLUSTER_PROFILE; the chart makes it of its values): images, work
area, service accounts, secrets, host paths, where Kubeflow is. A `PlacementRequest` is part of a job, written by its
submitter, and so has nothing that gives access to other users' data: no image, no account, no Secret, no path of a
node. `eyrie_api.planning.placement` merges the two.
"""

from pydantic import Field, model_validator

from eyrie_api.contract.model import Frozen, Name
from eyrie_api.contract.placement import AbsolutePath, LabelKey, LabelValue, ObjectName, Placement, StageKey


class KubeflowSpec(Frozen):
    """Where pipelines run."""

    url: str = Field(pattern=r"^https?://[^\s]+$", max_length=4096)
    """Of the KFP API server, without `/apis`: `http://ml-pipeline.kubeflow:8888`."""

    namespace: Name | None = None
    """Of the runs, in a multi-user installation; None in a single-user one."""

    experiment: str = Field("eyrie", min_length=1, max_length=256)
    """KFP experiment in which the runs are listed."""

    token_file: AbsolutePath | None = None
    """Bearer token, read again for each request: a projected service account token is rotated."""

    ca_file: AbsolutePath | None = None
    """Certificate authorities of the KFP API server, in PEM form. Default: the image's."""

    service_account: ObjectName | None = None
    """Of the runs' pods. Default: KFP's own."""

    timeout_s: float = Field(30.0, gt=0.0, le=600.0)
    """Of one request."""


class GatewaySpec(Frozen):
    """The Gateway whose listener routes to endpoints."""

    name: ObjectName
    """Name of the Gateway object."""

    namespace: Name | None = None
    """Namespace of the Gateway. Default: that of the endpoints."""

    section: str | None = Field(None, min_length=1, max_length=253)
    """Name of the Gateway's listener. Default: every listener that accepts the route."""

    hostnames: tuple[str, ...] = Field((), max_length=16)
    """`{endpoint}` in a name is replaced by the endpoint's name."""

    request_timeout_s: float | None = Field(None, ge=0.0, le=86_400.0)
    """Limit of one request through the Gateway; 0: none. Default: the Gateway's own."""



class AutoscaleSpec(Frozen):
    """KEDA keeps requests per replica near a number."""

    prometheus_url: str = Field(pattern=r"^https?://[^\s]+$", max_length=4096)
    """Prometheus server that KEDA asks for the number of requests."""

    max_replicas: int = Field(8, ge=1, le=1000)
    """Most pods of one endpoint; `replicas` is the fewest."""

    target_requests: float = Field(8.0, gt=0.0)
    """Running and queued requests per pod."""



NODE_GPUS = 8
"""GPUs of one node, where nothing else is known."""

MODEL_CACHE_DIR = "/var/cache/eyrie/models"
"""Where the pods of stages and engines have the model cache."""


class ModelCacheSpec(Frozen):
    """The volume where targets of the Hub are kept: filled once per revision, read by stages and engines. Give a claim
    or a path."""

    claim: ObjectName | None = None
    """A PersistentVolumeClaim, ReadWriteMany where pods run on several nodes. There has to be one of this name in the
    namespace of the runs and one in that of the endpoints; both may be bound to the same file system."""

    node_path: AbsolutePath | None = None
    """A directory of the nodes: of a file system that all of them mount, or filled on each of them beforehand."""

    @model_validator(mode="after")
    def _is_one_volume(self) -> "ModelCacheSpec":
        if (self.claim is None) == (self.node_path is None):
            raise ValueError(f"model_cache has claim {self.claim!r} and node_path {self.node_path!r}: give exactly one "
                             "of them, or leave model_cache out")
        return self


class ServingSpec(Frozen):
    """How endpoints stand on this cluster."""

    namespace: Name
    """Namespace of the endpoints' objects."""

    placement: Placement
    hardware_profile: str = Field("cpu", min_length=1, max_length=64)
    """The accelerator that SGLang's command line is made for (attention backend, page size, memory fraction), unless an
    endpoint names another. One of `a10`, `a100-40gb`, `a100-80gb`, `l40s`, `rtx-4090`, `h100` (80 GB), `h200` (141 GB),
    `b200` (180 GB), `gb200` (186 GB), `rtx-pro-6000-blackwell`, `mi300x` (AMD), `cpu`. Name the GPU of the nodes that
    `placement` selects; with `cpu`, an SGLang endpoint on GPUs is refused. The embedded engine ignores it."""

    replicas: int = Field(1, ge=1, le=1000)
    """Number of pods of one endpoint."""

    port: int = Field(30000, ge=1, le=65535)
    """Port on which an engine listens in its pod."""

    startup_timeout_s: float = Field(1800.0, gt=0.0, le=86_400.0)
    """Seconds until a started engine has to be ready, the download of its weights included."""

    drain_timeout_s: float = Field(600.0, gt=0.0, le=86_400.0)
    """Seconds that a pod which is replaced has to finish its answers (`terminationGracePeriodSeconds`)."""

    leave_delay_s: float = Field(10.0, gt=0.0, le=600.0)
    """Seconds of `drain_timeout_s` that a pod still accepts requests, until no proxy sends it any."""

    surge: bool = True
    """Whether a new engine starts next to the one that serves. False: the old one stops first, and the endpoint is away
    meanwhile."""

    run_as: int = Field(65532, ge=0, le=2**31 - 1)
    """User and group of the pods. 0 is root, which namespaces that enforce PodSecurity `baseline` let through and those
    that enforce `restricted` refuse: for images and host paths that only root may read."""

    key_secret: ObjectName | None = None
    """Secret with `engine.yaml`, SGLang's --config file with the line `api-key: ...`."""

    gateway: GatewaySpec | None = None
    autoscale: AutoscaleSpec | None = None
    monitoring: bool = False
    """Whether each endpoint gets a PodMonitor, alert rules and a dashboard."""

    monitoring_labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=16)
    """Labels by which Prometheus selects PodMonitors and rules."""

    python: tuple[str, ...] = Field(("python3",), min_length=1, max_length=8)
    """How the image starts Python."""


class ClusterProfile(Frozen):
    """One installation on one cluster."""

    kubeflow: KubeflowSpec
    stages: Placement
    """Pods of the pipeline, unless `per_stage` says otherwise. Its `work` is the job's work area."""

    per_stage: dict[StageKey, Placement] = Field(default_factory=dict)
    """Stages that need another image or other nodes. In this file each is a whole placement, of which `work` alone is
    taken from `stages`; in the chart's values it has what differs, and the chart makes it whole."""

    model_cache: ModelCacheSpec | None = None
    """Targets of the Hub, for stages and engines. None: each pod downloads the target for itself."""

    home: AbsolutePath = "/var/lib/eyrie"
    """EYRIE_HOME in every pod, the control plane's included: paths in stage specs are the same wherever they are read.
    """

    python: tuple[str, ...] = Field(("python3",), min_length=1, max_length=8)
    """How the stages' images start Python."""

    serving: ServingSpec | None = None
    """None: nothing is served from here; winners are measured and kept."""

    node_gpus: int = Field(NODE_GPUS, ge=1, le=64)
    """GPUs of the largest node. A server of SGLang is in one pod, and a pod on one node: jobs that request more for one
    are refused."""

    max_runs: int = Field(16, ge=1, le=100_000)
    """Pipelines that run at the same time; further jobs are queued. Kueue, where installed, queues their pods as
    well."""

    sync_s: float = Field(15.0, gt=0.0, le=3600.0)
    """How often a stage's pod puts progress and resumable state into the store: what a lost node costs at most."""

    @model_validator(mode="before")
    @classmethod
    def _has_one_model_cache(cls, document: object) -> object:
        serving = document.get("serving") if isinstance(document, dict) else None
        if isinstance(serving, dict) and "model_cache_claim" in serving:
            raise ValueError("cluster profile: serving.model_cache_claim is no longer a field: write model_cache: "
                             f"{{claim: {serving['model_cache_claim']}}} in the profile, for stages and engines")
        return document

    @model_validator(mode="after")
    def _work_is_shared(self) -> "ClusterProfile":
        if self.stages.work is None:
            raise ValueError("cluster profile: stages.work is missing: stages run in pods of their own and pass their "
                             "output on by a volume or an artifact store; give kind `s3` or `volume`")
        for name, placement in self.per_stage.items():
            if placement.work is not None and placement.work != self.stages.work:
                raise ValueError(f"cluster profile: per_stage.{name}.work differs from stages.work: a job has one work "
                                 "area; leave it out")
        return self
