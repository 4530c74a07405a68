"""Pods without a node: why, what they ask for, and what a person can do. Pure.

The scheduler reports it in the pod's condition PodScheduled: no node fits (labels, GPUs, taints, a claim), or Kueue has
not admitted the pod yet (a scheduling gate). Nothing fails by it: a cluster's autoscaler may add a node, which takes
minutes, or another job may free one. It is shown as waiting, after a grace, and the pod is waited for.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, get_args

from eyrie_api.v1alpha1.records import Wait, WaitingPod
from eyrie_api.v1alpha1.stages import StageName
from eyrie_pipelines.runner import PROFILE_LABEL, RUN_LABEL, STAGE_LABEL

WAITS = ("WaitingForNodes", "WaitingForQueue")
"""Reasons of a Wait."""

GRACE = timedelta(seconds=60)
"""A pod without a node is not shown as waiting before: most get one within seconds."""

_LONGEST = 500
"""Of the scheduler's message, in characters."""

_Object = Mapping[str, Any]


def why_unscheduled(pod: _Object) -> Wait | None:
    """Why the pod has no node; None when it has one, has ended, is being deleted, or was not considered yet."""
    if pod.get("spec", {}).get("nodeName") or "deletionTimestamp" in pod["metadata"]:
        return None
    condition = next((one for one in pod.get("status", {}).get("conditions", ())
                      if one["type"] == "PodScheduled" and one["status"] == "False"), None)
    if condition is None or pod.get("status", {}).get("phase", "Pending") != "Pending":
        return None
    since = datetime.fromisoformat(condition.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])
    words = " ".join(str(condition.get("message") or condition.get("reason") or "").split())[:_LONGEST]
    place = f"-n {pod['metadata'].get('namespace', 'NAMESPACE')}"
    labels, devices = dict(pod.get("spec", {}).get("nodeSelector") or {}), _devices(pod)
    if condition.get("reason") == "SchedulingGated":
        gates = ", ".join(one["name"] for one in pod.get("spec", {}).get("schedulingGates", ()))
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


def _devices(pod: _Object) -> dict[str, int]:
    """GPUs and the like that the pod's containers ask for: resources whose names have a domain."""
    found: dict[str, int] = {}
    for container in pod.get("spec", {}).get("containers", ()):
        for name, amount in container.get("resources", {}).get("limits", {}).items():
            if "/" in name and str(amount).isdigit():
                found[name] = found.get(name, 0) + int(amount)
    return found


def waiting_pods(pods: Iterable[_Object]) -> tuple[WaitingPod, ...]:
    """The pods of stages that have no node, by their labels: of each run, stage and profile the one that waits longest.
    """
    found: dict[tuple[str, str, str], WaitingPod] = {}
    for pod in pods:
        labels = pod["metadata"].get("labels", {})
        wait = why_unscheduled(pod)
        if wait is None or RUN_LABEL not in labels or labels.get(STAGE_LABEL) not in get_args(StageName):
            continue
        one = WaitingPod(**wait.model_dump(), run_id=labels[RUN_LABEL], stage=labels[STAGE_LABEL],
                         key=labels.get(PROFILE_LABEL, ""))
        known = found.get((one.run_id, one.stage, one.key))
        if known is None or one.since < known.since:
            found[one.run_id, one.stage, one.key] = one
    return tuple(found[key] for key in sorted(found))


def is_due(wait: Wait | None, now: datetime) -> bool:
    """Whether a wait is to be shown."""
    return wait is not None and now - wait.since >= GRACE


def wait_of(stage: StageName, key: str, started_at: datetime | None, waits: Sequence[WaitingPod],
            now: datetime) -> WaitingPod | None:
    """The wait that holds up this member of a stage, if it is due.

    A member that has started is held up by a pod that lost its node after that (an evicted pod's successor): what the
    operator saw before the start is out of date.
    """
    return next((one for one in waits if one.stage == stage and one.key in ("", key) and is_due(one, now)
                 and (started_at is None or started_at < one.since)), None)
