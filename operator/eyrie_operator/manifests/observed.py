"""What the workloads and pods of an endpoint say of its engines, in the words of the plan. Pure.

A kubelet restarts what ends, so one end is not death: an engine counts as dead once it has ended several times and its
kubelet waits before it tries again (CrashLoopBackOff). Everything else that keeps it from answering, an image that
cannot be pulled, a GPU nobody has, a Secret that is missing, may be mended from outside and is waited for until the
promotion's time to become healthy is over; `message` says what it is, for the status meanwhile.

A revision that already serves is healthy while one replica answers. One that is to take over must have all of them: it
is given all requests the moment it has proved itself.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal

from eyrie_operator.endpoints.state import ObservedCanary, ObservedEndpoint, ObservedEngine
from eyrie_operator.manifests.names import ENDPOINT_LABEL, REVISION_LABEL
from eyrie_operator.manifests.rollout import WORKLOADS, current_state

CRASHES = 3
"""Ends in a row until an engine is given up. The first may be a node's; three are its own."""

_LONGEST = 500
"""Of a message, in characters."""

_Object = Mapping[str, Any]


def observe_endpoint(endpoint: str, objects: Iterable[_Object], *, replicas: int,
                     answers: tuple[int, int] = (0, 0)) -> ObservedEndpoint:
    """What the plan is asked with; windows of acceptance are for whoever reads metrics to fill in.

    objects   everything that carries the endpoint's label: what `rollout.KINDS` names, and pods
    answers   answered and failed requests of the revision on trial since it has its share; without them a trial goes
              on by time alone
    """
    listed = list(objects)
    stands = current_state(endpoint, listed)
    canary = None if stands.canary is None else ObservedCanary(
        stands.canary.revision, stands.canary.share, stands.canary.since, answered=answers[0], errors=answers[1])
    return ObservedEndpoint(
        gateway_alive=stands.open, routed=stands.serving, canary=canary,
        engines=observe_engines(endpoint, listed, serving=stands.serving, replicas=replicas))


def observe_engines(endpoint: str, objects: Iterable[_Object], *, serving: int | None,
                    replicas: int) -> tuple[ObservedEngine, ...]:
    """Every engine of the endpoint, by revision; windows of acceptance are left at zero.

    objects   workloads and pods, others are passed over
    replicas  how many a revision on trial must have
    """
    ours = [one for one in objects if one["metadata"].get("labels", {}).get(ENDPOINT_LABEL) == endpoint]
    found = []
    for workload in ours:
        if workload["kind"] not in WORKLOADS:
            continue
        revision = int(workload["metadata"]["labels"][REVISION_LABEL])
        pods = [one for one in ours if one["kind"] == "Pod"
                and one["metadata"]["labels"].get(REVISION_LABEL) == str(revision)
                and "deletionTimestamp" not in one["metadata"]]
        found.append(_engine(workload, revision, pods, needed=1 if revision == serving else replicas))
    return tuple(sorted(found, key=lambda one: one.revision))


def _engine(workload: _Object, revision: int, pods: list[_Object], *, needed: int) -> ObservedEngine:
    status = workload.get("status", {})
    statuses = [one for pod in pods for one in (*pod.get("status", {}).get("initContainerStatuses", ()),
                                                *pod.get("status", {}).get("containerStatuses", ()))]
    current = status.get("observedGeneration", 0) >= workload["metadata"].get("generation", 0)
    # A LeaderWorkerSet has no availableReplicas, and its readyReplicas are whole groups.
    answering = status.get("availableReplicas", status.get("readyReplicas", 0))
    state: Literal["starting", "healthy", "dead"] = "starting"
    if current and answering >= needed:
        state = "healthy"
    elif not answering and any(_crashing(one) for one in statuses):
        state = "dead"
    return ObservedEngine(
        revision=revision, state=state, started_at=_moment(workload["metadata"]["creationTimestamp"]),
        starts=0 if state == "healthy" else 1 + max((one.get("restartCount", 0) for one in statuses), default=0),
        message="" if state == "healthy" else _message(pods, statuses))


def _crashing(container: _Object) -> bool:
    waiting = container.get("state", {}).get("waiting") or {}
    return waiting.get("reason") == "CrashLoopBackOff" and container.get("restartCount", 0) >= CRASHES


def _message(pods: list[_Object], statuses: list[_Object]) -> str:
    """Why it does not answer: a container's last end, what it waits for, or why it has no node."""
    for one in statuses:
        ended = (one.get("lastState", {}).get("terminated") or one.get("state", {}).get("terminated") or {})
        if ended and ended.get("exitCode") != 0:
            said = " ".join(str(ended.get("message") or ended.get("reason") or "").split())
            return f"{one['name']} ended with exit code {ended['exitCode']}: {said}"[:_LONGEST]
    for one in statuses:
        waiting = one.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return f"{one['name']} waits: {waiting['reason']} {waiting.get('message', '')}".strip()[:_LONGEST]
    for pod in pods:
        for condition in pod.get("status", {}).get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"no node takes it: {condition.get('message', '')}"[:_LONGEST]
    return ""


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
