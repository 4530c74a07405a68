"""Where the boxes of the pipeline run on a cluster: a `Placement` applied to a kfp task, and the whole compiled.

What kfp and kfp-kubernetes can say is said by them: image, pull policy and secrets, CPU, memory, GPUs, node selector,
tolerations, claims (with sub path), Secrets as files and variables, emptyDirs, labels. Kueue takes plain pods by the
label `kueue.x-k8s.io/queue-name`.

What they cannot say (2.17: directories of the node, a priority class, a service account of one stage) goes as JSON into
one annotation of the box's pod, `eyrie.dev/pod`:

    {"host_paths": [{"path": "/models", "mount_path": "/models", "read_only": true}],
     "priority_class": "batch", "service_account": "eyrie-train"}

Kubeflow passes annotations on, and does nothing with this one: on a real cluster an admission policy has to turn it
into the pod's fields. The test double reads it itself. Other resources than CPU, memory and GPUs are refused.

With `train_launcher: trainjob` the train box is small and orders a TrainJob (`trainjob`).

A run's service account is the run's (`KubeflowSpec.service_account`). Secrets appear by their names only.

The image's Python: kfp starts a box by `python3` in a shell. The compiled command names the profile's instead, and is
made an `exec`, so that the box and not the shell is told when its pod is to end.
"""

import json
import shlex
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler, kubernetes

from eyrie_api.errors import InvalidInput
from eyrie_api.submission.placement import place_stage
from eyrie_api.v1alpha1.cluster import ClusterProfile
from eyrie_api.v1alpha1.placement import Placement, S3Work, VolumeWork
from eyrie_api.v1alpha1.requests import JobPlacement
from eyrie_api.v1alpha1.stages import StageName
from eyrie_pipelines.drafter import define
from eyrie_pipelines.trainjob import ORDER_VARIABLE, Order
from eyrie_pipelines.work_area import CREDENTIALS_DIR, pod_variables

POD_ANNOTATION = "eyrie.dev/pod"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PART_LABEL = ("app.kubernetes.io/part-of", "eyrie")
"""By which the chart's NetworkPolicy lets pods reach the bundled store."""

_SMALL = {"cpu": "100m", "memory": "512Mi"}
"""Of the boxes between stages: they read manifests."""

_RETRIES = 5
"""Pods of a box that were taken away (spot nodes, memory, drained nodes): the next goes on from what the last one put
into the work area. A stage that failed for good fails again at once; its run is ended before that (`kubeflow`)."""

_RETRY_WITHIN = "2592000s"
"""30 days. Argo takes kfp's `backoff_max_duration` for a bound on all attempts together, from the first pod's start on:
that long after it nothing is tried again, and what is being tried again is killed. kfp's own default is an hour."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STARTS_BOX = "_KFP_RUNTIME=true python3 -m kfp.dsl.executor_main"


def compile_for(profile: ClusterProfile, wanted: JobPlacement, *, together: bool = False) -> dict[str, Any]:
    """The pipeline with every box in its place, as the KFP API takes it: `pipeline_spec` and `platform_spec`.

    together   whether one box trains all candidates, where a training is placed, and those of the candidates have
               little; otherwise there is no such box, for it would wait for a GPU to do nothing.

    Raises InvalidInput for what Kubeflow cannot do.
    """
    made: dict[str, Any] = json.loads(_compiled(profile.model_dump_json(), wanted.model_dump_json(), together))
    return made


@lru_cache(maxsize=64)
def _compiled(profile_text: str, wanted_text: str, together: bool) -> str:
    """As JSON. It takes a tenth of a second, and most jobs ask for the same."""
    profile = ClusterProfile.model_validate_json(profile_text)
    wanted = JobPlacement.model_validate_json(wanted_text)

    def placed(task: Any, stage: StageName | None) -> Any:
        if stage is None:
            return place(task, small(profile.stages), profile)
        given = place_stage(profile, wanted, stage)
        if stage != "train" or wanted.train_launcher == "pod":
            return place(task, given, profile)
        order = Order(nodes=wanted.train_nodes, placement=given, home=profile.home, sync_s=profile.sync_s,
                      python=profile.python)
        return place(task, small(given), profile).set_env_variable(ORDER_VARIABLE, order.model_dump_json())

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "pipeline.yaml"
        compiler.Compiler().compile(define(placed, trainings=None, together=together), str(path))
        documents = list(yaml.load_all(path.read_text(), _LOADER))
    for executor in documents[0]["deploymentSpec"]["executors"].values():
        command = executor["container"]["command"]
        assert _STARTS_BOX in command[2], "kfp starts boxes in another way than it did"
        command[2] = command[2].replace(
            _STARTS_BOX, f"exec env _KFP_RUNTIME=true {shlex.join(profile.python)} -m kfp.dsl.executor_main")
    return json.dumps({"pipeline_spec": documents[0], "platform_spec": documents[1]})


def small(given: Placement) -> Placement:
    """Where the boxes between stages run: as stages do, with little of everything."""
    return given.model_copy(update={"num_gpus": 0, "gpu_type": None, "requests": _SMALL, "limits": {},
                                    "shared_memory": None, "secret_variables": ()})


def place(task: Any, placement: Placement, profile: ClusterProfile) -> Any:
    """Put one task in its place. Raises InvalidInput for amounts kfp cannot express."""
    task.set_container_image(placement.image)
    task.set_retry(_RETRIES, backoff_duration="10s", backoff_factor=2.0, backoff_max_duration=_RETRY_WITHIN)
    for name, value in pod_variables(placement, profile.home, profile.sync_s).items():
        task.set_env_variable(name, value)
    kubernetes.set_image_pull_policy(task, placement.image_pull_policy)
    kubernetes.add_pod_label(task, *PART_LABEL)
    if placement.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(placement.image_pull_secrets))
    _give_resources(task, placement)
    _choose_nodes(task, placement)
    _give_work_area(task, placement, profile)
    if placement.shared_memory is not None:
        kubernetes.empty_dir_mount(task, "shared-memory", "/dev/shm", medium="Memory",
                                   size_limit=placement.shared_memory)
    for one in placement.secret_variables:
        kubernetes.use_secret_as_env(task, one.secret, {one.key: one.variable})
    beyond = _beyond_kfp(placement)
    if beyond:
        kubernetes.add_pod_annotation(task, POD_ANNOTATION, json.dumps(beyond, sort_keys=True))
    return task


def _give_resources(task: Any, placement: Placement) -> None:
    setters = {("requests", "cpu"): task.set_cpu_request, ("requests", "memory"): task.set_memory_request,
               ("limits", "cpu"): task.set_cpu_limit, ("limits", "memory"): task.set_memory_limit}
    for side in ("requests", "limits"):
        for name, amount in getattr(placement, side).items():
            if (side, name) not in setters:
                raise InvalidInput(f"placement.{side} names {name}: Kubeflow Pipelines gives cpu, memory and GPUs",
                                   f"leave {name} out")
            try:
                setters[side, name](amount)
            except ValueError as error:
                raise InvalidInput(f"placement.{side}.{name} = {amount}: {error}",
                                   "write cpu as 500m or 4, and memory as whole Ki, Mi, Gi, K, M, G") from None
    if placement.num_gpus:
        task.set_accelerator_type(placement.gpu_resource).set_accelerator_limit(placement.num_gpus)


def _choose_nodes(task: Any, placement: Placement) -> None:
    chosen = dict(placement.node_selector)
    if placement.gpu_type is not None:
        chosen[placement.gpu_type_label] = placement.gpu_type
    for key, value in chosen.items():
        kubernetes.add_node_selector(task, key, value)
    for one in placement.tolerations:
        kubernetes.add_toleration(task, key=one.key or "", operator=one.operator, value=one.value,
                                  effect=one.effect)
    if placement.queue is not None:
        kubernetes.add_pod_label(task, QUEUE_LABEL, placement.queue)


def _give_work_area(task: Any, placement: Placement, profile: ClusterProfile) -> None:
    work = placement.work
    if isinstance(work, VolumeWork):
        kubernetes.mount_pvc(task, work.claim, work.mount_path, work.sub_path or "")
    elif isinstance(work, S3Work):
        kubernetes.empty_dir_mount(task, "work", profile.home, size_limit=work.scratch_size)
        if work.credentials_secret is not None:
            kubernetes.use_secret_as_volume(task, work.credentials_secret, CREDENTIALS_DIR)


def _beyond_kfp(placement: Placement) -> dict[str, Any]:
    """See the module's essay."""
    beyond: dict[str, Any] = {}
    if placement.host_paths:
        beyond["host_paths"] = [one.model_dump(mode="json") for one in placement.host_paths]
    if placement.priority_class is not None:
        beyond["priority_class"] = placement.priority_class
    if placement.service_account is not None:
        beyond["service_account"] = placement.service_account
    return beyond
