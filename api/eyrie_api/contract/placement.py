"""Where the pods of a stage or of an endpoint run on a cluster, and with which resources.

One model for both: a pipeline stage is placed by kfp-kubernetes, a serving pod by `eyrie_operator.manifests`. Settings
of only one of them (replicas, probes, traffic) are not here. On one machine only `num_gpus` of a training is used.

Secrets are referenced by name, never by value: many users may read a resource that contains a placement.

A job or an endpoint requests amounts and kinds of hardware, and queues (`PlacementRequest`). No image, service account,
Secret or path of a node: a job must not give its submitter access to other users' data. Those are set by the
administrator (`contract.cluster`).
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from eyrie_api.contract.model import Frozen, Name

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_SUBDOMAIN = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"

LabelKey = Annotated[str, StringConstraints(pattern=rf"^({_SUBDOMAIN}/)?{_LABEL}$", max_length=253)]
LabelValue = Annotated[str, StringConstraints(pattern=rf"^({_LABEL})?$")]
ObjectName = Annotated[str, StringConstraints(pattern=rf"^{_SUBDOMAIN}$", max_length=253)]
"""Name of a Kubernetes object in the same namespace."""

Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$", max_length=32)]
"""A Kubernetes quantity: `500m`, `4`, `64Gi`."""

AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^:\s]*$", max_length=4096)]
Image = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][^\s]*$", max_length=1024)]
"""Pin it by digest (`name@sha256:...`): a moved tag changes the serving image without a record."""


class Toleration(Frozen):
    """A toleration, as in `core/v1`."""

    key: LabelKey | None = None
    """None, with operator Exists, tolerates every taint."""

    operator: Literal["Exists", "Equal"] = "Exists"
    """Exists accepts every value of the taint, Equal the given one."""

    value: LabelValue | None = None
    """The taint's value, for operator Equal."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; none accepts all."""

    @model_validator(mode="after")
    def _value_belongs_to_equal(self) -> "Toleration":
        if self.operator == "Exists" and self.value is not None:
            raise ValueError(f"toleration of {self.key!r} has a value, {self.value!r}, and operator Exists: "
                             "leave the value out, or use operator Equal")
        if self.operator == "Equal" and self.key is None:
            raise ValueError("a toleration with operator Equal needs a key: give it, or use operator Exists")
        return self


class SecretVariable(Frozen):
    """One key of a Secret as an environment variable."""

    variable: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)
    """Name of the environment variable."""

    secret: ObjectName
    """Name of the Secret."""

    key: str = Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=253)
    """Key in the Secret."""



class HostPath(Frozen):
    """A directory of the node, such as a model cache on its own disk. Namespaces that enforce PodSecurity `baseline` or
    `restricted` refuse it."""

    path: AbsolutePath
    """Directory of the node."""

    mount_path: AbsolutePath
    """Where the pod has it."""

    read_only: bool = True
    """Whether the pod may only read it."""



class VolumeWork(Frozen):
    """The work area is a PersistentVolumeClaim, shared (ReadWriteMany) where stages run on several nodes."""

    kind: Literal["volume"] = "volume"
    """A work area on a volume."""

    claim: ObjectName
    """Name of the PersistentVolumeClaim."""

    mount_path: AbsolutePath = "/var/lib/eyrie"
    """The same in every pod, since stages read paths that earlier stages recorded."""

    sub_path: str | None = Field(None, pattern=r"^[^/\s][^\s]*$", max_length=4096)
    """Directory in the volume. Default: its root."""



class S3Work(Frozen):
    """The work area is an artifact store; pods keep their working files in an emptyDir."""

    kind: Literal["s3"] = "s3"
    """A work area in a store with S3's interface."""

    url: str = Field(pattern=r"^s3://[^\s]+$", max_length=4096)
    """Bucket and prefix: `s3://bucket/eyrie`."""

    endpoint_url: str | None = Field(None, pattern=r"^https?://[^\s]+$", max_length=4096)
    """Address of a store other than AWS."""

    region: str = Field("us-east-1", min_length=1, max_length=64)
    """Region of the bucket."""

    credentials_secret: ObjectName | None = None
    """Secret with the keys `access_key` and `secret_key`, mounted as files. Default: the pod's own identity."""

    scratch_size: Quantity | None = None
    """Bound of the emptyDir; default: the node's."""

    states: Literal["copied", "ranged"] = "copied"
    """Where hidden states and answers are. `copied`: capture and regenerate write all of them on their pod's disk
    before they are uploaded, and the next stages download them first. `ranged`: for those larger than the disk. Capture
    uploads each shard when it is complete and deletes it, so a pod needs space for two shards of
    `capture.shard_size_bytes` per process; training reads from the store on demand, again in every epoch. Regenerate
    does the same with parts of the answers, 64 MiB each, which capture reads from the store; its pod needs space for
    two of them, and for the prompts while they are selected."""


WorkArea = Annotated[VolumeWork | S3Work, Field(discriminator="kind")]


class PlacementRequest(Frozen):
    """Merged into the administrator's placement: None and empty fields keep its values; dicts are merged by key,
    tolerations are added."""

    num_gpus: int | None = Field(None, ge=0, le=64)
    """GPUs of one pod. Training starts one process for each by torchrun; on one machine as well."""

    gpu_type: LabelValue | None = None
    """Node label value of the GPU model, for example `NVIDIA-H100-80GB-HBM3`."""

    requests: dict[LabelKey, Quantity] = Field(default_factory=dict, max_length=16)
    """Kubernetes resource requests of the container, such as `{cpu: 8, memory: 64Gi}`. GPUs come from `num_gpus`."""

    limits: dict[LabelKey, Quantity] = Field(default_factory=dict, max_length=16)
    """Kubernetes resource limits of the container, without GPUs."""

    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    """Node labels that a pod's node must have."""

    tolerations: tuple[Toleration, ...] = Field((), max_length=32)
    """Taints of nodes that a pod accepts."""

    shared_memory: Quantity | None = None
    """Size of a memory-backed /dev/shm, through which the processes of one pod exchange data. NCCL between several GPUs
    needs gigabytes; the default of a container is 64 MiB. Counts against the memory limit."""

    queue: Name | None = None
    """Kueue LocalQueue, as the label `kueue.x-k8s.io/queue-name`."""

    priority_class: ObjectName | None = None
    """Name of a PriorityClass of the cluster."""


class Placement(PlacementRequest):
    """One kind of pod: its image, its resources and its nodes."""

    image: Image
    """Image of the pod's container."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled: Kubernetes' `imagePullPolicy`."""

    image_pull_secrets: tuple[ObjectName, ...] = Field((), max_length=16)
    """Secrets with the registry's credentials."""

    service_account: ObjectName | None = None
    """Default: the namespace's, whose token is not mounted."""

    num_gpus: int = Field(0, ge=0, le=64)
    """GPUs of one pod."""

    gpu_resource: LabelKey = "nvidia.com/gpu"
    """Resource name of a GPU; `amd.com/gpu` or a MIG profile elsewhere."""

    gpu_type_label: LabelKey = "nvidia.com/gpu.product"
    """Node label that `gpu_type` is compared with."""

    work: WorkArea | None = None
    """None: everything the pod needs is in its image or on `host_paths`."""

    secret_variables: tuple[SecretVariable, ...] = Field((), max_length=32)
    """For example HF_TOKEN."""

    host_paths: tuple[HostPath, ...] = Field((), max_length=16)

    @model_validator(mode="after")
    def _gpus_given_once(self) -> "Placement":
        for field in ("requests", "limits"):
            if self.gpu_resource in getattr(self, field):
                raise ValueError(f"placement.{field} names {self.gpu_resource}: set num_gpus instead")
        if self.gpu_type is not None and self.gpu_type_label in self.node_selector:
            raise ValueError(f"placement.node_selector names {self.gpu_type_label}, which gpu_type sets: give one")
        return self

    @property
    def node_labels(self) -> dict[str, str]:
        """What a pod's node must have, the GPU model included."""
        return self.node_selector | ({} if self.gpu_type is None else {self.gpu_type_label: self.gpu_type})


StageKey = Literal["regenerate", "capture", "train", "benchmark", "tune", "prove"]
"""Names of stages. `contract.stages` has the same list, and a test compares them: stages are made of jobs and jobs of
this, so it cannot be imported here."""


class JobPlacement(Frozen):
    """Where a job's stages run."""

    every: PlacementRequest = PlacementRequest()
    """For every stage."""

    stages: dict[StageKey, PlacementRequest] = Field(default_factory=dict)
    """Merged into `every`, for single stages."""

    train_nodes: int = Field(1, ge=1, le=256)
    """Nodes of one training run. More than one, or `train_launcher` trainjob, goes through Kubeflow Trainer."""

    train_launcher: Literal["pod", "trainjob"] = "pod"
    """pod: one process for each GPU of the stage's own pod. trainjob: a TrainJob of several pods, each with such
    processes, that the stage's pod waits for."""

    @model_validator(mode="after")
    def _nodes_need_a_trainjob(self) -> "JobPlacement":
        if self.train_nodes > 1 and self.train_launcher == "pod":
            raise ValueError(f"placement.train_nodes is {self.train_nodes} and placement.train_launcher is pod, which "
                             "has one node: set it to trainjob, or train on one node")
        return self
