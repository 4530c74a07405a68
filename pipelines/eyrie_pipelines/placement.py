"""Compile the pipeline for a cluster: a `Placement` applied to each kfp task.

kfp and kfp-kubernetes set what they support: image, pull policy and secrets, CPU, memory, GPUs, node selector,
tolerations, claims (with sub path), Secrets as files and variables, emptyDirs, labels. Kueue admits plain pods by the
label `kueue.x-k8s.io/queue-name`.

What they do not support (2.17: host paths, a priority class, a service account per stage) is written as JSON into one
annotation of the task's pod, `eyrie.dev/pod`:

    {"host_paths": [{"path": "/models", "mount_path": "/models", "read_only": true}],
     "priority_class": "batch", "service_account": "eyrie-train"}

Kubeflow copies the annotation to the pod and does not interpret it: on a real cluster an admission policy has to set
the pod's fields from it. The test double reads it itself. Resources other than CPU, memory and GPUs are refused.

With a model cache, stages have it at MODEL_CACHE_DIR and only read it; the prefetch task, which fills it, is small and
has the stages' secret variables (HF_TOKEN, HF_ENDPOINT). kfp mounts no claim read-only: the annotation asks for that.

    {"read_only": ["/var/cache/eyrie/models"]}

The service account of a run is `KubeflowSpec.service_account`. Secrets appear by name only.

kfp starts a task with `python3` in a shell. The compiled command names the profile's Python instead and uses `exec`, so
that SIGTERM reaches the task and not the shell.
"""

import json
import shlex
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler, kubernetes

from eyrie_api.contract.cluster import MODEL_CACHE_DIR, ClusterProfile
from eyrie_api.contract.placement import HostPath, Placement, S3Work, VolumeWork
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.targets import is_hub_id
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.placement import resolve_hardware_placement, resolve_stage_placement
from eyrie_pipelines.kfp_pipeline import TaskKind, define
from eyrie_pipelines.runner import PROFILE_LABEL, RUN_LABEL, STAGE_LABEL
from eyrie_pipelines.several_gpus import DIVIDED_STAGES, PROCESSES_VARIABLE, TRAINJOB_VARIABLE
from eyrie_pipelines.trainjob import RUN_VARIABLE, TrainJobRequest
from eyrie_pipelines.work_area import CREDENTIALS_DIR, pod_variables
from eyrie_workers.catalog import MODEL_CACHE_VARIABLE

POD_ANNOTATION = "eyrie.dev/pod"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PART_LABEL = ("app.kubernetes.io/part-of", "eyrie")
"""Selected by the chart's NetworkPolicy that lets pods reach the bundled store."""

_LEADS_TO: dict[str, StageName] = {"prefetch": "regenerate", "list-candidates": "train", "train": "train",
                                   "list-checkpoints": "benchmark", "list-drafters": "benchmark",
                                   "select": "tune"}
"""The stage that waits for a task which is no stage itself, by the task's name. `train` is one where a sweep task has
trained all candidates."""

_SMALL = {"cpu": "100m", "memory": "512Mi"}
"""Requests of the tasks between stages: they only read manifests."""

_FETCHING = {"cpu": "1", "memory": "4Gi"}
"""Requests of the task that downloads a target: several connections, and digests of what they bring."""

_RETRIES = 5
"""Retries of a task whose pod was evicted or killed (spot nodes, memory, drained nodes): the next pod resumes from what
the last one uploaded to the work area. A permanently failed stage fails again at once; `kubeflow` ends its run
before."""

_RETRY_WITHIN = "2592000s"
"""30 days. Argo applies kfp's `backoff_max_duration` to all attempts together, counted from the first pod's start:
after that time nothing is retried, and a running retry is killed. kfp's own default is an hour."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TASK_COMMAND = "_KFP_RUNTIME=true python3 -m kfp.dsl.executor_main"


def compile_for(profile: ClusterProfile, job: ResolvedJob) -> dict[str, Any]:
    """The job's pipeline with every task placed, as the KFP API takes it: `pipeline_spec` and `platform_spec`.

    A task that trains all candidates gets the training's placement, and the candidates' own tasks get small requests.
    Where the candidates are trained one by one there is no such task: it would wait for a GPU to do nothing.

    Raises InvalidInput for what Kubeflow cannot do.
    """
    requested, hardware = job.spec.placement, job.spec.prove.hardware
    pools = {pool.name: pool for pool in (() if hardware is None else hardware.profiles)}

    def placed(task: Any, kind: TaskKind, name: str) -> Any:
        kubernetes.add_pod_label(task, STAGE_LABEL,
                                 _LEADS_TO[task.name] if kind is None or kind == "prefetch" else kind)
        if kind is None:
            return place(task, small(profile.stages), profile)
        if kind == "prefetch":
            fetching = small(profile.stages).model_copy(update={
                "requests": _FETCHING, "secret_variables": profile.stages.secret_variables})
            return _mount_model_cache(place(task, fetching, profile), profile, read_only=False)
        if kind == "hardware":
            kubernetes.add_pod_label(task, PROFILE_LABEL, name)
            task.set_display_name(f"hardware {name}")
            return placed_stage(task, resolve_hardware_placement(profile, requested, pools[name]))
        given = resolve_stage_placement(profile, requested, kind)
        if kind not in DIVIDED_STAGES:
            return placed_stage(task, given)
        if kind != "train" or requested.train_launcher == "pod":
            return placed_stage(task, given).set_env_variable(PROCESSES_VARIABLE, str(max(1, given.num_gpus)))
        request = TrainJobRequest(nodes=requested.train_nodes, placement=given, home=profile.home,
                                  sync_s=profile.sync_s, python=profile.python, model_cache=profile.model_cache)
        kubernetes.use_field_path_as_env(task, RUN_VARIABLE, f"metadata.labels['{RUN_LABEL}']")
        return place(task, small(given), profile).set_env_variable(TRAINJOB_VARIABLE, request.model_dump_json())

    def placed_stage(task: Any, given: Placement) -> Any:
        return _mount_model_cache(place(task, given, profile), profile, read_only=True)

    # On CPUs, pods of one node would disturb each other's measurements.
    benchmarks = None if resolve_stage_placement(profile, requested, "benchmark").num_gpus else 1
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "pipeline.yaml"
        # In a thread, because kfp walks the whole call stack at every setting of a task (`inspect.stack`): below a web
        # server's or a test runner's stack it takes seconds, from an empty one a tenth of a second.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: compiler.Compiler().compile(
                define(placed, benchmarks=benchmarks, together=job.trains_together,
                       prefetched=profile.model_cache is not None and is_hub_id(job.spec.target.model),
                       profiles=tuple(pools), trains=job.spec.trains),
                str(path))).result()
        documents = list(yaml.load_all(path.read_text(), _LOADER))
    for executor in documents[0]["deploymentSpec"]["executors"].values():
        command = executor["container"]["command"]
        assert _TASK_COMMAND in command[2], "kfp's command to start a task has changed"
        command[2] = command[2].replace(
            _TASK_COMMAND, f"exec env _KFP_RUNTIME=true {shlex.join(profile.python)} -m kfp.dsl.executor_main")
    return {"pipeline_spec": documents[0], "platform_spec": documents[1]}


def small(given: Placement) -> Placement:
    """The placement of the tasks between stages: that of a stage, with small requests and no GPU."""
    return given.model_copy(update={"num_gpus": 0, "gpu_type": None, "requests": _SMALL, "limits": {},
                                    "shared_memory": None, "secret_variables": ()})


def place(task: Any, placement: Placement, profile: ClusterProfile) -> Any:
    """Apply a placement to one task. Raises InvalidInput for amounts kfp cannot express."""
    task.set_container_image(placement.image)
    task.set_retry(_RETRIES, backoff_duration="10s", backoff_factor=2.0, backoff_max_duration=_RETRY_WITHIN)
    for name, value in pod_variables(placement, profile.home, profile.sync_s).items():
        task.set_env_variable(name, value)
    kubernetes.set_image_pull_policy(task, placement.image_pull_policy)
    kubernetes.add_pod_label(task, *PART_LABEL)
    if placement.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(placement.image_pull_secrets))
    _set_resources(task, placement)
    for key, value in placement.node_labels.items():
        kubernetes.add_node_selector(task, key, value)
    for each in placement.tolerations:
        kubernetes.add_toleration(task, key=each.key or "", operator=each.operator, value=each.value,
                                  effect=each.effect)
    if placement.queue is not None:
        kubernetes.add_pod_label(task, QUEUE_LABEL, placement.queue)
    work = placement.work
    if isinstance(work, VolumeWork):
        kubernetes.mount_pvc(task, work.claim, work.mount_path, work.sub_path or "")
    elif isinstance(work, S3Work):
        kubernetes.empty_dir_mount(task, "work", profile.home, size_limit=work.scratch_size)
        if work.credentials_secret is not None:
            kubernetes.use_secret_as_volume(task, work.credentials_secret, CREDENTIALS_DIR)
    if placement.shared_memory is not None:
        kubernetes.empty_dir_mount(task, "shared-memory", "/dev/shm", medium="Memory",
                                   size_limit=placement.shared_memory)
    for secret in placement.secret_variables:
        kubernetes.use_secret_as_env(task, secret.secret, {secret.key: secret.variable})
    _annotate(task, {"host_paths": [path.model_dump(mode="json") for path in placement.host_paths],
                     "priority_class": placement.priority_class, "service_account": placement.service_account})
    return task


def _annotate(task: Any, beyond: dict[str, Any]) -> None:
    """Add what is not empty to the value of POD_ANNOTATION: see the module docstring."""
    known = task.platform_config.get("kubernetes", {}).get("podMetadata", {}).get("annotations", {})
    before = json.loads(known.get(POD_ANNOTATION, "{}"))
    beyond = {**before, **beyond, "host_paths": [*before.get("host_paths", ()), *beyond.get("host_paths", ())]}
    if any(beyond.values()):
        kubernetes.add_pod_annotation(task, POD_ANNOTATION, json.dumps(
            {name: value for name, value in beyond.items() if value}, sort_keys=True))


def _mount_model_cache(task: Any, profile: ClusterProfile, *, read_only: bool) -> Any:
    cache = profile.model_cache
    if cache is None:
        return task
    task.set_env_variable(MODEL_CACHE_VARIABLE, MODEL_CACHE_DIR)
    if cache.claim is not None:
        kubernetes.mount_pvc(task, cache.claim, MODEL_CACHE_DIR)
        _annotate(task, {"read_only": [MODEL_CACHE_DIR]} if read_only else {})
    else:
        assert cache.node_path is not None
        _annotate(task, {"host_paths": [HostPath(path=cache.node_path, mount_path=MODEL_CACHE_DIR,
                                                 read_only=read_only).model_dump(mode="json")]})
    return task


def _set_resources(task: Any, placement: Placement) -> None:
    setters = {("requests", "cpu"): task.set_cpu_request, ("requests", "memory"): task.set_memory_request,
               ("limits", "cpu"): task.set_cpu_limit, ("limits", "memory"): task.set_memory_limit}
    for side in ("requests", "limits"):
        for name, amount in getattr(placement, side).items():
            if (side, name) not in setters:
                raise InvalidInput(f"placement.{side} names {name}: Kubeflow Pipelines supports cpu, memory and GPUs",
                                   f"leave {name} out")
            try:
                setters[side, name](amount)
            except ValueError as error:
                raise InvalidInput(f"placement.{side}.{name} = {amount}: {error}",
                                   "write cpu as 500m or 4, and memory as whole Ki, Mi, Gi, K, M, G") from None
    if placement.num_gpus:
        task.set_accelerator_type(placement.gpu_resource).set_accelerator_limit(placement.num_gpus)
