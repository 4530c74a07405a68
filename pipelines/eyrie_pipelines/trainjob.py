"""Training on several nodes: the train task creates a TrainJob of Kubeflow Trainer v2 and waits for it.

With `placement.train_launcher: trainjob` the train task itself is small. It creates one TrainJob
(trainer.kubeflow.org/v1alpha1, as of Trainer 2.2, which replaced podTemplateOverrides by runtimePatches) whose nodes
run

    python -m eyrie_pipelines.task_program train --job-dir D --spec-digest X --key C

which is the train task without EYRIE_TRAINJOB: it downloads the stage's inputs and starts the stage program under
torchrun (`several_gpus`); node 0 uploads the output to the work area. The number of processes per node is given twice,
to the runtime (numProcPerNode) and to torchrun by an argument: one for each GPU of the placement. A stage program that
does not support several processes refuses to start a second one at its lock.

The name of a TrainJob is derived from job, candidate and spec, so that a restarted task finds the TrainJob of the pod
before it. The TrainJob is deleted when the task gets SIGTERM, and when it has ended; the runtime restarts dead nodes.

What a TrainJob cannot express (image pull policy, priority class) belongs in the ClusterTrainingRuntime. The task needs
a service account that may get, create and delete trainjobs in its namespace: set it as the train stage's
`service_account` or the run's. Requests go to the API server with its token; no Kubernetes client is needed.
"""

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx

from eyrie_api.contract.cluster import MODEL_CACHE_DIR, ModelCacheSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.placement import Placement, S3Work, VolumeWork
from eyrie_api.errors import Permanent, Transient
from eyrie_pipelines.runner import RUN_LABEL, STAGE_LABEL
from eyrie_pipelines.several_gpus import PROCESSES_VARIABLE
from eyrie_pipelines.work_area import CREDENTIALS_DIR, pod_variables
from eyrie_workers.catalog import MODEL_CACHE_VARIABLE

RUN_VARIABLE = "EYRIE_RUN"
"""The id of the task's Kubeflow run, which its TrainJob's pods get as a label: set like EYRIE_TRAINJOB."""

API_VERSION = "trainer.kubeflow.org/v1alpha1"
MANAGER = "eyrie.dev/pipelines"
RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime that Trainer installs for torch."""

_NODE = "node"
"""Name of the replicated job and of its container in Trainer's runtimes."""

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_POLL_S = 5.0
_READ_RETRY_S = 900.0
"""How long reads are retried while the API server is unavailable. The TrainJob continues meanwhile; after this time the
task fails, and its next pod finds the TrainJob again."""

_TIMEOUT_S = 30.0


class TrainJobRejected(Permanent):
    """The API server rejects the TrainJob."""


class TrainJobUnavailable(Transient):
    """The API server does not answer, or the TrainJob was deleted."""


class TrainJobRequest(Frozen):
    """The value of EYRIE_TRAINJOB. Holds the names of Secrets, never their values."""

    nodes: int
    placement: Placement
    home: str
    sync_s: float
    python: tuple[str, ...]
    model_cache: ModelCacheSpec | None = None


class TrainJobResult(Frozen):
    state: Literal["complete", "failed"]
    message: str = ""


def name_of(job_id: str, candidate: str, spec_digest: str) -> str:
    """Name of the TrainJob. At most 40 characters: JobSet appends to it."""
    digest = hashlib.sha256(f"{job_id}/{candidate}/{spec_digest}".encode()).hexdigest()[:10]
    words = "".join(letter if letter.isalnum() else "-" for letter in job_id.lower())[:22].strip("-")
    return f"eyrie-{words}-{digest}"


def render(request: TrainJobRequest, name: str, namespace: str, arguments: list[str], run_id: str) -> dict[str, Any]:
    """The TrainJob; `run_id` is that of the Kubeflow run. Pure."""
    placed = request.placement
    processes = max(1, placed.num_gpus)
    values = pod_variables(placed, request.home, request.sync_s) | {PROCESSES_VARIABLE: str(processes)}
    if request.model_cache is not None:
        values[MODEL_CACHE_VARIABLE] = MODEL_CACHE_DIR
    variables: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in values.items()]
    variables += [{"name": secret.variable, "valueFrom": {"secretKeyRef": {"name": secret.secret, "key": secret.key}}}
                  for secret in placed.secret_variables]
    amounts = {side: dict(getattr(placed, side)) for side in ("requests", "limits")}
    if placed.num_gpus:
        amounts["limits"][placed.gpu_resource] = str(placed.num_gpus)
    # The labels by which the operator finds pods that no node has room for.
    labels = {"metadata": {"labels": {RUN_LABEL: run_id, STAGE_LABEL: "train"}}}
    return {
        "apiVersion": API_VERSION, "kind": "TrainJob",
        "metadata": {"name": name, "namespace": namespace,
                     "labels": {"kueue.x-k8s.io/queue-name": placed.queue} if placed.queue else {}},
        "spec": {
            "runtimeRef": {"name": RUNTIME, "apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime"},
            "trainer": {
                "image": placed.image, "command": [*request.python, "-m", "eyrie_pipelines.task_program"],
                "args": arguments,
                "env": variables, "numNodes": request.nodes, "numProcPerNode": processes,
                "resourcesPerNode": {side: given for side, given in amounts.items() if given}},
            "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [
                {"name": _NODE, "template": {"spec": {"template": {**labels, "spec": _pod(request)}}}}]}}}}],
        },
    }


def _pod(request: TrainJobRequest) -> dict[str, Any]:
    """The pod template's patch: node selection, volumes, names of secrets. The container is the TrainJob's trainer."""
    placed, cache = request.placement, request.model_cache
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []

    def mount(name: str, source: dict[str, Any], path: str, **more: object) -> None:
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": path, **more})

    if isinstance(placed.work, VolumeWork):
        more = {} if placed.work.sub_path is None else {"subPath": placed.work.sub_path}
        mount("work", {"persistentVolumeClaim": {"claimName": placed.work.claim}}, placed.work.mount_path, **more)
    elif isinstance(placed.work, S3Work):
        size = {} if placed.work.scratch_size is None else {"sizeLimit": placed.work.scratch_size}
        mount("work", {"emptyDir": size}, request.home)
        if placed.work.credentials_secret is not None:
            mount("artifacts", {"secret": {"secretName": placed.work.credentials_secret}}, CREDENTIALS_DIR,
                  readOnly=True)
    if cache is not None:
        mount("models", {"hostPath": {"path": cache.node_path}} if cache.claim is None else {
            "persistentVolumeClaim": {"claimName": cache.claim, "readOnly": True}}, MODEL_CACHE_DIR, readOnly=True)
    if placed.shared_memory is not None:
        mount("shared-memory", {"emptyDir": {"medium": "Memory", "sizeLimit": placed.shared_memory}}, "/dev/shm")
    for number, host in enumerate(placed.host_paths):
        mount(f"host-{number}", {"hostPath": {"path": host.path}}, host.mount_path, readOnly=host.read_only)
    pod: dict[str, Any] = {
        "serviceAccountName": placed.service_account, "nodeSelector": placed.node_labels,
        "tolerations": [toleration.model_dump(mode="json", exclude_none=True) for toleration in placed.tolerations],
        "imagePullSecrets": [{"name": name} for name in placed.image_pull_secrets], "volumes": volumes,
        "containers": [{"name": _NODE, "volumeMounts": mounts}] if mounts else []}
    return {key: value for key, value in pod.items() if value}


class TrainJobClient:
    """Creates, reads and deletes the TrainJobs of one namespace."""

    def __init__(self, client: httpx.Client, namespace: str) -> None:
        self._client, self.namespace = client, namespace
        self._path = f"/apis/{API_VERSION}/namespaces/{namespace}/trainjobs"

    @classmethod
    def in_cluster(cls) -> "TrainJobClient":
        """A client with the pod's service account. Raises TrainJobRejected in a pod without a token."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        token = _ACCOUNT / "token"
        if host is None or not token.is_file():
            raise TrainJobRejected("this pod has no service account token and cannot create a TrainJob",
                                   "give the train stage, or the run, a service account that may create trainjobs")
        shown = f"[{host}]" if ":" in host else host
        client = httpx.Client(base_url=f"https://{shown}:{port}", verify=str(_ACCOUNT / "ca.crt"), timeout=_TIMEOUT_S,
                              event_hooks={"request": [_with_token]})
        return cls(client, (_ACCOUNT / "namespace").read_text().strip())

    def run(self, trainjob: dict[str, Any], *, poll_s: float = _POLL_S) -> TrainJobResult:
        """Find or create the TrainJob, wait until it has ended, delete it.

        On SIGTERM it deletes the TrainJob and exits with 143. Raises TrainJobUnavailable, TrainJobRejected.
        """
        name = trainjob["metadata"]["name"]
        with _termination() as pause:
            try:
                existing = self.read(name)
                # Race: the pod before this one may have died between the end of its TrainJob and the deletion. That
                # result belongs to an earlier attempt. A TrainJob of the same name can be created once the old one is
                # gone.
                if existing is not None and result_of(existing) is not None:
                    self.delete(name)
                    while self.read(name) is not None:
                        pause(poll_s)
                    existing = None
                if existing is None:
                    self._request("POST", self._path, trainjob)
                while True:
                    current = self._read_with_retries(name, pause, poll_s)
                    if current is None:
                        raise TrainJobUnavailable(f"TrainJob {name} was deleted while it ran")
                    result = result_of(current)
                    if result is not None:
                        self.delete(name)
                        return result
                    pause(poll_s)
            except SystemExit:  # SIGTERM: without this task nothing would wait for the TrainJob, so its nodes end too
                self.delete(name)
                raise

    def _read_with_retries(self, name: str, pause: Callable[[float], None], poll_s: float) -> dict[str, Any] | None:
        """`read`, retried while the API server is unavailable: its restart takes seconds, and a training run days."""
        deadline = time.monotonic() + _READ_RETRY_S
        while True:
            try:
                return self.read(name)
            except TrainJobUnavailable:
                if time.monotonic() >= deadline:
                    raise
                pause(poll_s)

    def read(self, name: str) -> dict[str, Any] | None:
        """The TrainJob; None when there is none."""
        return self._request("GET", f"{self._path}/{name}")

    def delete(self, name: str) -> None:
        """Delete the TrainJob with its pods; succeeds when there is none."""
        self._request("DELETE", f"{self._path}/{name}", {"propagationPolicy": "Background"})

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise TrainJobUnavailable(f"the API server does not respond ({type(error).__name__})") from None
        if response.status_code == 404 and method != "POST":
            return None
        if response.status_code == 429 or response.status_code >= 500:
            raise TrainJobUnavailable(f"the API server answered {response.status_code}")
        if response.status_code == 409 and method == "POST":
            return None  # race: an earlier pod of this task created it between our read and our POST
        if response.is_error:
            raise TrainJobRejected(
                f"the API server answered {response.status_code} for {method} {path}: {response.text[:500]}",
                "install Kubeflow Trainer 2.2 or newer, and let the train stage's service account get, create and "
                "delete trainjobs")
        body_read: dict[str, Any] = response.json()
        return body_read


def result_of(trainjob: dict[str, Any]) -> TrainJobResult | None:
    """The result of a TrainJob that has ended, else None. A suspended one has not ended (Kueue queues it)."""
    for condition in trainjob.get("status", {}).get("conditions", ()):
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
            message = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
            return TrainJobResult(state="complete" if condition["type"] == "Complete" else "failed",
                                  message=message[:1000])
    return None


def _with_token(request: httpx.Request) -> None:
    """Read the token for each request: the kubelet rotates it."""
    request.headers["Authorization"] = f"Bearer {(_ACCOUNT / 'token').read_text().strip()}"


@contextlib.contextmanager
def _termination() -> Iterator[Callable[[float], None]]:
    """Yields a `sleep` that raises SystemExit after SIGTERM, so that no request to the API server is cut off
    half-way."""
    signals: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))

    def pause(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not signals and time.monotonic() < deadline:
            time.sleep(min(0.2, seconds))
        if signals:
            raise SystemExit(143)

    try:
        yield pause
    finally:
        signal.signal(signal.SIGTERM, previous)
