"""Pods that do not start: why, what they ask for, and what a person can do. Pure.

The scheduler reports a pod without a node in the pod's condition PodScheduled: no node fits (labels, GPUs, taints, a
claim), or Kueue has not admitted the pod yet (a scheduling gate). The kubelet reports what a pod on a node lacks: in
the state of a container (an image, the Secret of a variable), or by the condition PodReadyToStartContainers alone
(volumes: a Secret or a claim that is not there; Kubernetes from 1.29 on). Nothing fails by it: a cluster's autoscaler
may add a node, which takes minutes, another job may free one, and a Secret may be created. It is shown as waiting,
after a grace, and the pod is waited for.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, get_args

from eyrie_api.contract.records import Wait, WaitingPod
from eyrie_api.contract.stages import StageName
from eyrie_pipelines.runner import PROFILE_LABEL, RUN_LABEL, STAGE_LABEL

WAITS = ("WaitingForNodes", "WaitingForQueue", "WaitingForContainers")
"""Reasons of a Wait."""

GRACE = timedelta(seconds=60)
"""A pod is not shown as waiting before: most have a node and their volumes within seconds."""

_LONGEST = 500
"""Of a message of the scheduler or the kubelet, in characters."""

_LACKING = ("CreateContainerConfigError", "CreateContainerError", "ErrImagePull", "ErrImageNeverPull",
            "ImagePullBackOff", "InvalidImageName")
"""Reasons of a container that the kubelet cannot create. It tries again by itself."""

_Object = Mapping[str, Any]


def why_waiting(pod: _Object) -> Wait | None:
    """Why the pod does not start; None when it does, has ended, is being deleted, or was not considered yet."""
    if "deletionTimestamp" in pod["metadata"] or pod.get("status", {}).get("phase", "Pending") != "Pending":
        return None
    return _why_not_created(pod) if pod.get("spec", {}).get("nodeName") else _why_unscheduled(pod)


def _condition(pod: _Object, kind: str, status: str) -> _Object | None:
    return next((condition for condition in pod.get("status", {}).get("conditions", ())
                 if condition["type"] == kind and condition["status"] == status), None)


def _since(pod: _Object, condition: _Object | None) -> datetime:
    return datetime.fromisoformat((condition or {}).get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])


def _why_not_created(pod: _Object) -> Wait | None:
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    since = _since(pod, _condition(pod, "PodScheduled", "True"))
    look = f"kubectl -n {pod['metadata'].get('namespace', 'NAMESPACE')} describe pod {name}"
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting") or {}
        if (reason := waiting.get("reason")) in _LACKING:
            words = " ".join(str(waiting.get("message") or "").split())[:_LONGEST]
            missing = ("the image, and the Secret to pull it with" if "Image" in reason else
                       "the Secret or ConfigMap that the message names, or its key")
            return Wait(reason="WaitingForContainers", since=since,
                        message=f"{container['name']} is waiting: {reason} {words}".strip(),
                        hint=f"provide {missing}, in the namespace of the pod: {look}; the pod then starts by itself")
    if _condition(pod, "PodReadyToStartContainers", "False") is None:
        return None
    named = "; ".join(filter(None, (
        "Secrets " + ", ".join(secrets) if (secrets := _mounted(pod, "secret", "secretName")) else "",
        "claims " + ", ".join(claims) if (claims := _mounted(pod, "persistentVolumeClaim", "claimName")) else "")))
    mounts = f" (it mounts {named})" if named else ""
    return Wait(reason="WaitingForContainers", since=since,
                message=f"on its node, the pod's volumes or network are not ready{mounts}",
                hint=f"create what is missing in the namespace of the pod: {look}; the pod then starts by itself")


def _mounted(pod: _Object, kind: str, key: str) -> list[str]:
    """Names of the Secrets or claims that have to be there."""
    sources = (volume.get(kind) or {} for volume in pod.get("spec", {}).get("volumes") or ())
    return sorted({str(source[key]) for source in sources if key in source and not source.get("optional")})


def _why_unscheduled(pod: _Object) -> Wait | None:
    condition = _condition(pod, "PodScheduled", "False")
    if condition is None:
        return None
    since = _since(pod, condition)
    words = " ".join(str(condition.get("message") or condition.get("reason") or "").split())[:_LONGEST]
    place = f"-n {pod['metadata'].get('namespace', 'NAMESPACE')}"
    labels, devices = dict(pod.get("spec", {}).get("nodeSelector") or {}), dict[str, int]()
    for container in pod.get("spec", {}).get("containers", ()):
        for name, amount in container.get("resources", {}).get("limits", {}).items():
            if "/" in name and str(amount).isdigit():  # GPUs and the like: their names have a domain
                devices[name] = devices.get(name, 0) + int(amount)
    if condition.get("reason") == "SchedulingGated":
        gates = ", ".join(gate["name"] for gate in pod.get("spec", {}).get("schedulingGates", ()))
        return Wait(reason="WaitingForQueue", since=since, message=f"not admitted yet: {words} ({gates})",
                    hint=f"wait for the queue's quota, or see what it lacks: kubectl {place} get workloads; "
                         "placement.queue names the queue")
    asked = "; ".join(filter(None, (
        "node labels " + ", ".join(f"{key}={value}" for key, value in labels.items()) if labels else "",
        ", ".join(f"{amount} {name}" for name, amount in devices.items()))))
    hints = [f"scale the pool up, or see what the scheduler finds: kubectl {place} describe pod "
             f"{pod['metadata']['name']}"]
    if labels:
        hints.append("check that nodes have these labels (placement.gpu_type and node_selector): kubectl get nodes "
                     f"-L {','.join(labels)}")
    if devices:
        hints.append("lower placement.num_gpus where no node has as many")
    return Wait(reason="WaitingForNodes", since=since, hint="; ".join(hints),
                message=f"no node fits: {words}" + (f" (asked for {asked})" if asked else ""))


def waiting_pods(pods: Iterable[_Object]) -> tuple[WaitingPod, ...]:
    """The pods of stages that do not start, by their labels: of each run, stage and profile the one that waits longest.
    """
    longest: dict[tuple[str, str, str], WaitingPod] = {}
    for pod in pods:
        labels = pod["metadata"].get("labels", {})
        wait = why_waiting(pod)
        if wait is None or RUN_LABEL not in labels or labels.get(STAGE_LABEL) not in get_args(StageName):
            continue
        waiting = WaitingPod(**wait.model_dump(), run_id=labels[RUN_LABEL], stage=labels[STAGE_LABEL],
                             key=labels.get(PROFILE_LABEL, ""))
        known = longest.get((waiting.run_id, waiting.stage, waiting.key))
        if known is None or waiting.since < known.since:
            longest[waiting.run_id, waiting.stage, waiting.key] = waiting
    return tuple(longest[key] for key in sorted(longest))


def is_due(wait: Wait | None, now: datetime) -> bool:
    """Whether a wait is to be shown."""
    return wait is not None and now - wait.since >= GRACE


def wait_of(stage: StageName, key: str, started_at: datetime | None, waits: Sequence[WaitingPod],
            now: datetime) -> WaitingPod | None:
    """The wait that holds up this member of a stage, if it is due.

    A member that has started is held up by a pod that lost its node after that (an evicted pod's successor): what the
    operator saw before the start is out of date.
    """
    return next((wait for wait in waits if wait.stage == stage and wait.key in ("", key) and is_due(wait, now)
                 and (started_at is None or started_at < wait.since)), None)
