"""What a job or an endpoint may request of a cluster: amounts and kinds of hardware, and queues.

No image, service account, Secret or path of a node: a job must not give its submitter access to other users' data.
Those are set by the administrator (`v1alpha1.cluster`). On one machine only `num_gpus` of the train stage is used.
"""

from typing import Literal

from pydantic import Field, model_validator

from eyrie_api.v1alpha1.model import Frozen, Name
from eyrie_api.v1alpha1.placement import LabelKey, LabelValue, ObjectName, Quantity, Toleration

StageKey = Literal["regenerate", "capture", "train", "benchmark", "tune", "prove"]
"""Names of stages. `v1alpha1.stages` has the same list, and a test compares them: stages are made of jobs and jobs of
this, so it cannot be imported here."""


class PlacementRequest(Frozen):
    """Merged into the administrator's placement: None and empty fields keep its values; dicts are merged by key,
    tolerations are added."""

    num_gpus: int | None = Field(None, ge=0, le=64)
    """GPUs of one pod. Training starts one process for each by torchrun; on one machine as well."""

    gpu_type: LabelValue | None = None
    """Node label value of the GPU model, for example `NVIDIA-H100-80GB-HBM3`."""

    requests: dict[LabelKey, Quantity] = Field(default_factory=dict, max_length=16)
    """Kubernetes resource requests of the container, such as `{cpu: 8, memory: 64Gi}`."""

    limits: dict[LabelKey, Quantity] = Field(default_factory=dict, max_length=16)
    """Kubernetes resource limits of the container."""

    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    """Node labels that a pod's node must have."""

    tolerations: tuple[Toleration, ...] = Field((), max_length=32)
    """Taints of nodes that a pod accepts."""

    shared_memory: Quantity | None = None
    """Size of /dev/shm; the processes of one pod exchange data through it."""

    queue: Name | None = None
    """Kueue LocalQueue."""

    priority_class: ObjectName | None = None
    """Name of a PriorityClass of the cluster."""


class JobPlacement(Frozen):
    """Where a job's stages run."""

    every: PlacementRequest = PlacementRequest()
    """For every stage."""

    stages: dict[StageKey, PlacementRequest] = Field(default_factory=dict)
    """Merged into `every`, for single stages."""

    train_nodes: int = Field(1, ge=1, le=256)
    """Nodes of one training. More than one, or `train_launcher` trainjob, goes through Kubeflow Trainer."""

    train_launcher: Literal["pod", "trainjob"] = "pod"
    """pod: one process for each GPU of the stage's own pod. trainjob: a TrainJob of several pods, each with such
    processes, that the stage's pod waits for."""

    @model_validator(mode="after")
    def _nodes_need_a_trainjob(self) -> "JobPlacement":
        if self.train_nodes > 1 and self.train_launcher == "pod":
            raise ValueError(f"placement.train_nodes is {self.train_nodes} and placement.train_launcher is pod, which "
                             "has one node: set it to trainjob, or train on one node")
        return self
