"""Training on several nodes: the train box orders a TrainJob of Kubeflow Trainer v2 and waits for it.

With `placement.train_launcher: trainjob` the box itself is small. It makes one TrainJob (trainer.kubeflow.org/v1alpha1,
as of Trainer 2.2, which replaced podTemplateOverrides by runtimePatches) whose nodes run

    python -m eyrie_pipelines.trainjob --job-dir D --spec-digest X --candidate C

which is the train box without this order: it brings what the stage reads, starts the same stage program under torchrun,
and node 0 puts into the work area what comes out. Who the nodes are, Trainer's torch runtime says in PET_* variables,
which torchrun reads by itself: `torchrun_command` below is the one place where its arguments are made. The stage has to
know what to do in more than one process; one that does not refuses at its lock. How many processes a node has is said
twice, to the runtime (numProcPerNode) and to torchrun by its own argument: one for each GPU of the placement.

The name of a TrainJob follows from job, candidate and spec, so a box that was taken away finds it again. It is deleted
when the box is told to end, and when it is over; nodes that die are the runtime's to start again.

What a TrainJob cannot say (image pull policy, priority class) is the ClusterTrainingRuntime's. The box needs a service
account that may get, create and delete trainjobs in its namespace: give it as the train stage's `service_account` or
the run's. Only the API server is asked, by its token; no Kubernetes client is needed.
"""

import argparse
import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import httpx

from eyrie_api.errors import Permanent, Transient
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.placement import Placement, S3Work, VolumeWork
from eyrie_pipelines.work_area import CREDENTIALS_DIR, pod_variables
from eyrie_workers.catalog import command

ORDER_VARIABLE = "EYRIE_TRAINJOB"
API_VERSION = "trainer.kubeflow.org/v1alpha1"
MANAGER = "eyrie.dev/pipelines"
RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime that Trainer installs for torch."""

PROCESSES_VARIABLE = "EYRIE_TRAIN_PROCESSES"
"""Training processes of a node."""

_NODE = "node"
"""What Trainer's runtimes call the replicated job of a training, and its container."""

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_POLL_S = 5.0
_PATIENCE_S = 900.0
"""An API server that does not answer for so long is gone; the TrainJob goes on, and the box's next pod finds it."""
_TIMEOUT_S = 30.0


class TrainJobRefused(Permanent):
    """The API server will not take the TrainJob."""

    reason = "TrainJobRefused"


class TrainJobAway(Transient):
    """The API server does not answer, or the TrainJob was deleted."""

    reason = "TrainJobAway"


class Order(Frozen):
    """What the train box is told, in EYRIE_TRAINJOB: names of Secrets, never their values."""

    nodes: int
    placement: Placement
    home: str
    sync_s: float
    python: tuple[str, ...]


class Ended(Frozen):
    """How a TrainJob ended."""

    state: Literal["complete", "failed"]
    message: str = ""


def order_of_environment() -> Order | None:
    """The order this box was given, if it is to give one."""
    text = os.environ.get(ORDER_VARIABLE)
    return Order.model_validate_json(text) if text else None


def name_of(job_id: str, candidate: str, spec_digest: str) -> str:
    """At most 40 letters: JobSet makes longer names of it."""
    digest = hashlib.sha256(f"{job_id}/{candidate}/{spec_digest}".encode()).hexdigest()[:10]
    words = "".join(letter if letter.isalnum() else "-" for letter in job_id.lower())[:22].strip("-")
    return f"eyrie-{words}-{digest}"


def render(order: Order, name: str, namespace: str, arguments: list[str]) -> dict[str, Any]:
    """The TrainJob. Pure."""
    placed = order.placement
    processes = max(1, placed.num_gpus)
    told = pod_variables(placed, order.home, order.sync_s) | {PROCESSES_VARIABLE: str(processes)}
    variables: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in told.items()]
    variables += [{"name": one.variable, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
                  for one in placed.secret_variables]
    amounts = {side: dict(getattr(placed, side)) for side in ("requests", "limits")}
    if placed.num_gpus:
        amounts["limits"][placed.gpu_resource] = str(placed.num_gpus)
    return {
        "apiVersion": API_VERSION, "kind": "TrainJob",
        "metadata": {"name": name, "namespace": namespace,
                     "labels": {"kueue.x-k8s.io/queue-name": placed.queue} if placed.queue else {}},
        "spec": {
            "runtimeRef": {"name": RUNTIME, "apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime"},
            "trainer": {
                "image": placed.image, "command": [*order.python, "-m", "eyrie_pipelines.trainjob"], "args": arguments,
                "env": variables, "numNodes": order.nodes, "numProcPerNode": processes,
                "resourcesPerNode": {side: given for side, given in amounts.items() if given}},
            "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [
                {"name": _NODE, "template": {"spec": {"template": {"spec": _pod(placed, order.home)}}}}]}}}}],
        },
    }


def _pod(placed: Placement, home: str) -> dict[str, Any]:
    """What the runtime's pods are given beside the trainer: nodes, volumes, names of secrets."""
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
        mount("work", {"emptyDir": size}, home)
        if placed.work.credentials_secret is not None:
            mount("artifacts", {"secret": {"secretName": placed.work.credentials_secret}}, CREDENTIALS_DIR,
                  readOnly=True)
    if placed.shared_memory is not None:
        mount("shared-memory", {"emptyDir": {"medium": "Memory", "sizeLimit": placed.shared_memory}}, "/dev/shm")
    for number, one in enumerate(placed.host_paths):
        mount(f"host-{number}", {"hostPath": {"path": one.path}}, one.mount_path, readOnly=one.read_only)
    chosen = dict(placed.node_selector)
    if placed.gpu_type is not None:
        chosen[placed.gpu_type_label] = placed.gpu_type
    pod: dict[str, Any] = {
        "serviceAccountName": placed.service_account, "nodeSelector": chosen,
        "tolerations": [one.model_dump(mode="json", exclude_none=True) for one in placed.tolerations],
        "imagePullSecrets": [{"name": name} for name in placed.image_pull_secrets], "volumes": volumes,
        "containers": [{"name": _NODE, "volumeMounts": mounts}] if mounts else []}
    return {key: value for key, value in pod.items() if value}


class Trainer:
    """TrainJobs of one namespace."""

    def __init__(self, client: httpx.Client, namespace: str) -> None:
        self._client, self.namespace = client, namespace
        self._path = f"/apis/{API_VERSION}/namespaces/{namespace}/trainjobs"

    @classmethod
    def of_pod(cls) -> "Trainer":
        """As the pod's service account may. Raises TrainJobRefused in a pod that has none."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        token = _ACCOUNT / "token"
        if host is None or not token.is_file():
            raise TrainJobRefused("this pod has no service account's token, and so cannot order a TrainJob",
                                  "give the train stage, or the run, a service account that may")
        shown = f"[{host}]" if ":" in host else host
        client = httpx.Client(base_url=f"https://{shown}:{port}", verify=str(_ACCOUNT / "ca.crt"), timeout=_TIMEOUT_S,
                              event_hooks={"request": [_with_token]})
        return cls(client, (_ACCOUNT / "namespace").read_text().strip())

    def carry_out(self, trainjob: dict[str, Any], *, poll_s: float = _POLL_S) -> Ended:
        """Have it done: find it or make it, wait until it is over, delete it.

        Told to end meanwhile, delete it and leave with 143. Raises TrainJobAway, TrainJobRefused.
        """
        name = trainjob["metadata"]["name"]
        told = _Told()
        try:
            left = self.read(name)
            if left is not None and ended(left) is not None:  # of an attempt before: its end is not ours
                self.delete(name)
                while self.read(name) is not None:
                    told.pause(poll_s)
                left = None
            if left is None:
                self._ask("POST", self._path, trainjob)
            while True:
                seen = self._read_patiently(name, told, poll_s)
                if seen is None:
                    raise TrainJobAway(f"TrainJob {name} was deleted while it ran")
                end = ended(seen)
                if end is not None:
                    self.delete(name)
                    return end
                told.pause(poll_s)
        except SystemExit:
            self.delete(name)
            raise
        finally:
            told.no_more()

    def _read_patiently(self, name: str, told: "_Told", poll_s: float) -> dict[str, Any] | None:
        """`read` through an API server that is replaced: a training of days must not end with an answer of seconds."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self.read(name)
            except TrainJobAway:
                if time.monotonic() >= deadline:
                    raise
                told.pause(poll_s)

    def read(self, name: str) -> dict[str, Any] | None:
        """The TrainJob, if there is one."""
        return self._ask("GET", f"{self._path}/{name}")

    def delete(self, name: str) -> None:
        """Delete it with its pods; none there is fine."""
        self._ask("DELETE", f"{self._path}/{name}", {"propagationPolicy": "Background"})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
        try:
            answer = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise TrainJobAway(f"the API server does not answer ({type(error).__name__})") from None
        if answer.status_code == 404 and method != "POST":
            return None
        if answer.status_code == 429 or answer.status_code >= 500:
            raise TrainJobAway(f"the API server answered {answer.status_code}")
        if answer.status_code == 409 and method == "POST":
            return None  # made meanwhile, by this box's predecessor
        if answer.is_error:
            raise TrainJobRefused(
                f"the API server answered {answer.status_code} for {method} {path}: {answer.text[:500]}",
                "install Kubeflow Trainer 2.2 or newer, and let the train stage's service account get, create and "
                "delete trainjobs")
        found: dict[str, Any] = answer.json()
        return found


def ended(trainjob: dict[str, Any]) -> Ended | None:
    """How it ended; None while it has not. Suspended ones wait (Kueue holds them)."""
    for condition in trainjob.get("status", {}).get("conditions", ()):
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
            words = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
            return Ended(state="complete" if condition["type"] == "Complete" else "failed", message=words[:1000])
    return None


def _with_token(request: httpx.Request) -> None:
    """The token is rotated: read it for each request."""
    request.headers["Authorization"] = f"Bearer {(_ACCOUNT / 'token').read_text().strip()}"


class _Told:
    """Whether this box was told to end; pauses end at once then."""

    def __init__(self) -> None:
        self._asked = False
        self._before = signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True

    def pause(self, seconds: float) -> None:
        """Raises SystemExit when told to end."""
        deadline = time.monotonic() + seconds
        while not self._asked and time.monotonic() < deadline:
            time.sleep(min(0.2, seconds))
        if self._asked:
            raise SystemExit(143)

    def no_more(self) -> None:
        """As it was before."""
        signal.signal(signal.SIGTERM, self._before)


# From here on: on the nodes.


def is_node() -> bool:
    """Whether this process is one of a TrainJob's nodes."""
    return "PET_NNODES" in os.environ


def torchrun_command(directory: Path) -> list[str]:
    """The train stage's program under torchrun; where its peers are, torchrun reads in PET_*."""
    python, *program = command("train", directory)
    processes = os.environ.get(PROCESSES_VARIABLE, "1")
    return [python, "-m", "torch.distributed.run", "--nproc-per-node", processes, *program]


def main() -> None:
    """`python -m eyrie_pipelines.trainjob`: one node."""
    from eyrie_pipelines import run_stage

    parser = argparse.ArgumentParser(description="Be one node of a training.")
    parser.add_argument("--job-dir", required=True)
    parser.add_argument("--spec-digest", required=True)
    parser.add_argument("--candidate", required=True)
    told = parser.parse_args()
    try:
        run_stage.train(told.job_dir, told.spec_digest, "", told.candidate)
    except run_stage.StageFailed as failed:
        print(failed, file=sys.stderr)
        sys.exit(failed.exit_code)


if __name__ == "__main__":
    main()
