"""The state of an endpoint on a cluster: read from its objects, observed for the plan, changed by the plan. Pure.

`plan_endpoint` returns actions: start this engine, route there, retire that one. On one machine each is executed. On a
cluster they change the desired state, which is rendered and applied as a whole:

    objects -> observe_endpoint -> plan_endpoint -> apply_plan -> render_endpoint -> apply
                                                                  obsolete_objects -> delete

The objects are the only state: `current_state` reads back what `render_endpoint` wrote, so that a restarted operator
continues. Actions that only record a decision (Activate, Reject, RollBack, CloseWindow, ReportDrift, ProposeNoDrafter)
change rows, not objects; their effect comes with the next plan.

Retiring an engine deletes its workload: the pod leaves the Services, drains and ends within its grace period, without a
further step. A dead engine is restarted by its kubelet; StartEngine for an existing workload changes nothing.

A kubelet restarts containers that end, so one end does not make an engine dead: it is dead once it has ended several
times and its kubelet backs off (CrashLoopBackOff). Other causes (an image that cannot be pulled, no node with a GPU, a
missing Secret) may be removed from outside; the engine is `starting` until the promotion's health timeout, and
`message` names the cause for the status. `wait` has the cause of a pod without a node.

A revision that serves is healthy while one replica is available. One that is to take over needs all replicas: it gets
all requests as soon as its canary has passed.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from eyrie_api.contract.promotion import CanarySpec
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_operator.endpoints import plan as act
from eyrie_operator.endpoints.plan import EndpointPlan, ObservedCanary, ObservedEndpoint, ObservedEngine, ServePolicy
from eyrie_operator.manifests.deployment import (
    ENDPOINT_LABEL,
    ENTRY,
    GROUP,
    REVISION_LABEL,
    ROLE_LABEL,
    EndpointDeployment,
    Manifest,
)
from eyrie_operator.unscheduled import why_waiting

CANARY_REVISION, CANARY_SHARE, CANARY_SINCE = (f"{GROUP}/trial-{what}" for what in ("revision", "share", "since"))
"""Annotations of the stable Service."""

NO_REVISION = "none"
"""A revision label that no pod has: selected by the stable Service before the first engine is healthy."""

WORKLOAD = "Deployment"
KINDS = (WORKLOAD, "ConfigMap", "Service", "PodDisruptionBudget", "HTTPRoute", "PodMonitor", "PrometheusRule",
         "ScaledObject")
"""Everything `render_endpoint` may render: the kinds to list for the current state."""

DRAFTER_PROGRAMS = ("fetch-drafter", "verify-drafter")
"""Init containers that end with the exit code of what is wrong with a drafter."""

CRASHES = 3
"""Restarts until an engine counts as dead. One may be caused by its node; three are caused by the engine."""

_LONGEST = 500
"""Of a message, in characters."""

_Object = Mapping[str, Any]


@dataclass(frozen=True)
class RolloutState:
    """The state of an endpoint's objects, desired or current."""

    open: bool = False
    """The stable Service exists."""

    engines: tuple[int, ...] = ()
    """Revisions that have a workload, ascending."""

    serving: int | None = None
    """The revision that the stable Service selects."""

    canary: ObservedCanary | None = None
    """The revision that has a share of the requests."""


def apply_plan(before: RolloutState, plan: EndpointPlan, now: datetime) -> RolloutState:
    """The desired state: `before` changed by the actions of a plan."""
    wanted = before
    for action in plan.actions:
        match action:
            case act.StartGateway():
                wanted = replace(wanted, open=True)
            case act.StopGateway():
                wanted = replace(wanted, open=False, serving=None, canary=None)
            case act.StartEngine(revision=revision):
                wanted = replace(wanted, engines=tuple(sorted({*wanted.engines, revision})))
            case act.Route(revision=revision):
                wanted = replace(wanted, serving=revision, canary=None)
            case act.ShareRoute(revision=revision, serving=serving, share=share):
                wanted = replace(wanted, serving=serving, canary=ObservedCanary(revision, share, now))
            case act.EndEngine():
                wanted = replace(wanted, engines=tuple(number for number in wanted.engines
                                                       if number != action.revision))
            case _:
                pass  # recorded in the database; no object changes
    # A revision without a workload gets no requests.
    canary = wanted.canary if wanted.canary is not None and wanted.canary.revision in wanted.engines else None
    return replace(wanted, serving=wanted.serving if wanted.serving in wanted.engines else None, canary=canary)


def policy_on_cluster(policy: ServePolicy, deployment: EndpointDeployment) -> ServePolicy:
    """The promotion's limits on this cluster: without an HTTPRoute traffic switches at once, since a Service cannot
    split it.

    The health timeout is at least the startup probe's, which decides when a new revision's pods have failed.
    """
    canary = policy.canary if deployment.route_api is not None else CanarySpec(shares=())
    return replace(policy, canary=canary, counts_drafted=deployment.counts_drafted,
                   health_timeout_s=max(policy.health_timeout_s, deployment.cluster.startup_timeout_s))


def current_state(objects: Collection[_Object]) -> RolloutState:
    """The state read back from the endpoint's objects."""
    engines = tuple(sorted(_revision_of(each) for each in objects if each["kind"] == WORKLOAD))
    entry = next((each for each in objects if each["kind"] == "Service"
                  and each["metadata"]["labels"].get(ROLE_LABEL) == ENTRY), None)
    if entry is None:
        return RolloutState(engines=engines)
    selected, notes = entry["spec"]["selector"][REVISION_LABEL], entry["metadata"].get("annotations", {})
    canary = ObservedCanary(int(notes[CANARY_REVISION]), float(notes[CANARY_SHARE]),
                            datetime.fromisoformat(notes[CANARY_SINCE])) if CANARY_REVISION in notes else None
    return RolloutState(True, engines, None if selected == NO_REVISION else int(selected), canary)


def obsolete_objects(endpoint: str, objects: Iterable[Mapping[str, Any]],
                     manifests: Iterable[Manifest]) -> tuple[_Object, ...]:
    """Objects of the endpoint that are not rendered any more, to be deleted.

    Objects created by controllers from ours (pods, ReplicaSets, an autoscaler) are garbage-collected with their owner.
    """
    rendered = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    return tuple(each for each in objects
                 if each["metadata"].get("labels", {}).get(ENDPOINT_LABEL) == endpoint and each["kind"] in KINDS
                 and (each["kind"], each["metadata"]["name"]) not in rendered)


def observe_endpoint(objects: Collection[_Object], *, replicas: int) -> ObservedEndpoint:
    """The observation for the plan, without what metrics say, which the caller adds: acceptance windows, and the
    canary's answers, without which it advances by time alone.

    objects   everything that carries the endpoint's label: what `rollout.KINDS` names, and pods
    replicas  replicas that a candidate must have
    """
    current = current_state(objects)
    engines = [_engine(each, objects, needed=1 if _revision_of(each) == current.serving else replicas)
               for each in objects if each["kind"] == WORKLOAD]
    return ObservedEndpoint(gateway_alive=current.open, routed=current.serving, canary=current.canary,
                            engines=tuple(sorted(engines, key=lambda engine: engine.revision)))


def _revision_of(workload: _Object) -> int:
    return int(workload["metadata"]["labels"][REVISION_LABEL])


def _pods_of(objects: Iterable[_Object], revision: int) -> list[_Object]:
    """Those of a revision that are not being deleted."""
    return [each for each in objects if each["kind"] == "Pod"
            and each["metadata"]["labels"].get(REVISION_LABEL) == str(revision)
            and "deletionTimestamp" not in each["metadata"]]


def _engine(workload: _Object, objects: Iterable[_Object], *, needed: int) -> ObservedEngine:
    status, pods = workload.get("status", {}), _pods_of(objects, _revision_of(workload))
    statuses = [container for pod in pods for container in (*pod.get("status", {}).get("initContainerStatuses", ()),
                                                            *pod.get("status", {}).get("containerStatuses", ()))]
    up_to_date = status.get("observedGeneration", 0) >= workload["metadata"].get("generation", 0)
    available = status.get("availableReplicas", 0)
    state: Literal["starting", "healthy", "dead"] = "starting"
    if up_to_date and available >= needed:
        state = "healthy"
    elif not available and any(
            (container.get("state", {}).get("waiting") or {}).get("reason") == "CrashLoopBackOff"
            and container.get("restartCount", 0) >= CRASHES for container in statuses):
        state = "dead"
    message = _message(statuses)
    wait = None if message else next(filter(None, map(why_waiting, pods)), None)
    healthy = state == "healthy"
    return ObservedEngine(
        revision=_revision_of(workload), state=state,
        started_at=datetime.fromisoformat(workload["metadata"]["creationTimestamp"]),
        starts=0 if healthy else 1 + max((container.get("restartCount", 0) for container in statuses), default=0),
        unready_since=None if healthy else min(filter(None, map(_unready_since, pods)), default=None),
        message="" if healthy else message or (wait.message if wait else ""), wait=None if healthy else wait)


def drafter_failure(objects: Iterable[_Object], revision: int) -> str:
    """Why the pods of a revision could not get its drafter, by the exit code of the program that fetches or compares
    it; empty if they could. Pure."""
    for container in (one for pod in _pods_of(objects, revision)
                      for one in pod.get("status", {}).get("initContainerStatuses", ())):
        states = (container.get(state, {}).get("terminated") or {} for state in ("state", "lastState"))
        if container["name"] in DRAFTER_PROGRAMS and any(
                ended.get("exitCode") in (ArtifactMissing.exit_code, ArtifactCorrupt.exit_code) for ended in states):
            return _message([container])
    return ""


def _unready_since(pod: _Object) -> datetime | None:
    """When a pod lost its readiness, or was created if it never had any; None for one that is ready."""
    conditions = pod.get("status", {}).get("conditions", ())
    ready: _Object = next((condition for condition in conditions if condition["type"] == "Ready"), {})
    if ready.get("status") == "True":
        return None
    since = ready.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp")
    return datetime.fromisoformat(since) if since else None


def _message(statuses: list[_Object]) -> str:
    """Why the engine is not available: a container's last exit, or its waiting reason."""
    for container in statuses:
        ended = container.get("lastState", {}).get("terminated") or container.get("state", {}).get("terminated") or {}
        if ended and ended.get("exitCode") != 0:
            detail = " ".join(str(ended.get("message") or ended.get("reason") or "").split())
            return f"{container['name']} ended with exit code {ended['exitCode']}: {detail}"[:_LONGEST]
    for container in statuses:
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            detail = f"{waiting['reason']} {waiting.get('message', '')}".strip()
            return f"{container['name']} is waiting: {detail}"[:_LONGEST]
    return ""
