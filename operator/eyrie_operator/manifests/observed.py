"""The observation of an endpoint's engines from their workloads and pods. Pure.

A kubelet restarts containers that end, so one end does not make an engine dead: it is dead once it has ended several
times and its kubelet backs off (CrashLoopBackOff). Other causes (an image that cannot be pulled, no node with a GPU, a
missing Secret) may be removed from outside; the engine is `starting` until the promotion's health timeout, and
`message` names the cause for the status. `wait` has the cause of a pod without a node.

A revision that serves is healthy while one replica is available. One that is to take over needs all replicas: it gets
all requests as soon as its canary has passed.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal

from eyrie_operator.endpoints.state import ObservedCanary, ObservedEndpoint, ObservedEngine
from eyrie_operator.manifests.names import ENDPOINT_LABEL, REVISION_LABEL
from eyrie_operator.manifests.rollout import WORKLOADS, current_state
from eyrie_operator.unscheduled import why_waiting

CRASHES = 3
"""Restarts until an engine counts as dead. One may be caused by its node; three are caused by the engine."""

_LONGEST = 500
"""Of a message, in characters."""

_Object = Mapping[str, Any]


def observe_endpoint(endpoint: str, objects: Iterable[_Object], *, replicas: int,
                     answers: tuple[int, int] = (0, 0)) -> ObservedEndpoint:
    """The observation for the plan, without acceptance windows, which the caller adds from metrics.

    objects   everything that carries the endpoint's label: what `rollout.KINDS` names, and pods
    answers   answered and failed requests of the canary since it has its share; without them a canary advances by
              time alone
    """
    listed = list(objects)
    current = current_state(endpoint, listed)
    canary = None if current.canary is None else ObservedCanary(
        current.canary.revision, current.canary.share, current.canary.since, answered=answers[0], errors=answers[1])
    return ObservedEndpoint(
        gateway_alive=current.open, routed=current.serving, canary=canary,
        engines=observe_engines(endpoint, listed, serving=current.serving, replicas=replicas))


def observe_engines(endpoint: str, objects: Iterable[_Object], *, serving: int | None,
                    replicas: int) -> tuple[ObservedEngine, ...]:
    """Every engine of the endpoint, by revision; acceptance windows are zero.

    objects   workloads and pods; others are ignored
    replicas  replicas that a candidate must have
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
    up_to_date = status.get("observedGeneration", 0) >= workload["metadata"].get("generation", 0)
    # A LeaderWorkerSet has no availableReplicas, and its readyReplicas are whole groups.
    available = status.get("availableReplicas", status.get("readyReplicas", 0))
    state: Literal["starting", "healthy", "dead"] = "starting"
    if up_to_date and available >= needed:
        state = "healthy"
    elif not available and any(_crashing(one) for one in statuses):
        state = "dead"
    message = _message(statuses)
    wait = None if message else next(filter(None, map(why_waiting, pods)), None)
    healthy = state == "healthy"
    return ObservedEngine(
        revision=revision, state=state, started_at=_moment(workload["metadata"]["creationTimestamp"]),
        starts=0 if healthy else 1 + max((one.get("restartCount", 0) for one in statuses), default=0),
        unready_since=None if healthy else min(filter(None, map(_unready_since, pods)), default=None),
        message="" if healthy else message or (wait.message if wait else ""), wait=None if healthy else wait)


def _unready_since(pod: _Object) -> datetime | None:
    """When a pod lost its readiness, or was created if it never had any; None for one that is ready."""
    conditions = pod.get("status", {}).get("conditions", ())
    ready: _Object = next((one for one in conditions if one["type"] == "Ready"), {})
    if ready.get("status") == "True":
        return None
    since = ready.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    return _moment(since) if since else None


def _crashing(container: _Object) -> bool:
    waiting = container.get("state", {}).get("waiting") or {}
    return waiting.get("reason") == "CrashLoopBackOff" and container.get("restartCount", 0) >= CRASHES


def _message(statuses: list[_Object]) -> str:
    """Why the engine is not available: a container's last exit, or its waiting reason."""
    for one in statuses:
        ended = (one.get("lastState", {}).get("terminated") or one.get("state", {}).get("terminated") or {})
        if ended and ended.get("exitCode") != 0:
            detail = " ".join(str(ended.get("message") or ended.get("reason") or "").split())
            return f"{one['name']} ended with exit code {ended['exitCode']}: {detail}"[:_LONGEST]
    for one in statuses:
        waiting = one.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return f"{one['name']} is waiting: {waiting['reason']} {waiting.get('message', '')}".strip()[:_LONGEST]
    return ""


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
