"""The rollout state of an endpoint on a cluster, and how a plan changes it. Pure.

`plan_endpoint` returns actions: start this engine, route there, retire that one. On one machine each is executed. On a
cluster they change the desired state, which is rendered and applied as a whole:

    objects -> observe_endpoint -> plan_endpoint -> apply_plan -> render_endpoint -> apply
                                                                  obsolete_objects -> delete

The objects are the only state: `current_state` reads back what `render_endpoint` wrote, so that a restarted operator
continues. Actions that only record a decision (Activate, Reject, RollBack, CloseWindow, ReportDrift, ProposeNoDrafter)
change rows, not objects; their effect comes with the next plan.

Retiring an engine deletes its workload: the pod leaves the Services, drains and ends within its grace period, without a
further step. A dead engine is restarted by its kubelet; StartEngine for an existing workload changes nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from eyrie_api.v1alpha1.promotion import CanarySpec
from eyrie_api.v1alpha1.status import Endpoint
from eyrie_operator.endpoints.state import (
    DeleteEngine,
    EndpointPlan,
    KillEngine,
    RetireEngine,
    Route,
    ServePolicy,
    ShareRoute,
    StartEngine,
    StartGateway,
    StopGateway,
)
from eyrie_operator.manifests.deployment import EndpointDeployment
from eyrie_operator.manifests.names import ENDPOINT_LABEL, ENTRY, GROUP, REVISION_LABEL, ROLE_LABEL, Manifest

CANARY_REVISION, CANARY_SHARE, CANARY_SINCE = (f"{GROUP}/trial-{what}" for what in ("revision", "share", "since"))
"""Annotations of the stable Service."""

NO_REVISION = "none"
"""A revision label that no pod has: selected by the stable Service before the first engine is healthy."""

WORKLOADS = ("Deployment", "LeaderWorkerSet")
KINDS = (*WORKLOADS, "ConfigMap", "Service", "PodDisruptionBudget", "HTTPRoute", "PodMonitor", "PrometheusRule",
         "ScaledObject")
"""Everything `render_endpoint` may render: the kinds to list for the current state."""


@dataclass(frozen=True)
class CanaryShare:
    """A revision with a share of the requests, and the time since when it has it."""

    revision: int
    share: float
    since: datetime


@dataclass(frozen=True)
class RolloutState:
    """The state of an endpoint's objects, desired or current."""

    open: bool = False
    """The stable Service exists."""

    engines: tuple[int, ...] = ()
    """Revisions that have a workload, ascending."""

    serving: int | None = None
    """The revision that the stable Service selects."""

    canary: CanaryShare | None = None


@dataclass(frozen=True)
class ObjectRef:
    """One object in the endpoint's namespace."""

    api_version: str
    kind: str
    name: str


def steady_state(endpoint: Endpoint) -> RolloutState:
    """The state without a rollout in progress: the active revision serves, a candidate runs without a share."""
    if endpoint.desired == "off":
        return RolloutState()
    numbers = {one for one in (endpoint.active_revision, endpoint.candidate_revision) if one is not None}
    return RolloutState(open=True, engines=tuple(sorted(numbers)), serving=endpoint.active_revision)


def apply_plan(before: RolloutState, plan: EndpointPlan, now: datetime) -> RolloutState:
    """The desired state: `before` changed by the actions of a plan."""
    wanted = before
    for action in plan.actions:
        match action:
            case StartGateway():
                wanted = replace(wanted, open=True)
            case StopGateway():
                wanted = replace(wanted, open=False, serving=None, canary=None)
            case StartEngine(revision=revision):
                wanted = replace(wanted, engines=tuple(sorted({*wanted.engines, revision})))
            case Route(revision=revision):
                wanted = replace(wanted, serving=revision, canary=None)
            case ShareRoute(revision=revision, serving=serving, share=share):
                wanted = replace(wanted, serving=serving, canary=CanaryShare(revision, share, now))
            case RetireEngine(revision=revision) | KillEngine(revision=revision) | DeleteEngine(revision=revision):
                wanted = replace(wanted, engines=tuple(one for one in wanted.engines if one != revision))
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
    return replace(policy, canary=canary, health_timeout_s=max(policy.health_timeout_s, deployment.startup_timeout_s),
                   counts_drafted=deployment.counts_drafted)


def current_state(endpoint: str, objects: Iterable[Mapping[str, Any]]) -> RolloutState:
    """The state read back from the endpoint's objects; other objects are ignored."""
    engines: set[int] = set()
    entry: Mapping[str, Any] | None = None
    for one in objects:
        labels = one["metadata"].get("labels", {})
        if labels.get(ENDPOINT_LABEL) != endpoint:
            continue
        if one["kind"] in WORKLOADS:
            engines.add(int(labels[REVISION_LABEL]))
        elif one["kind"] == "Service" and labels.get(ROLE_LABEL) == ENTRY:
            entry = one
    wanted = RolloutState(engines=tuple(sorted(engines)))
    if entry is None:
        return wanted
    selected = entry["spec"]["selector"][REVISION_LABEL]
    return replace(wanted, open=True, serving=None if selected == NO_REVISION else int(selected), canary=_canary(entry))


def obsolete_objects(endpoint: str, objects: Iterable[Mapping[str, Any]],
                     manifests: Iterable[Manifest]) -> tuple[ObjectRef, ...]:
    """Objects of the endpoint that are not rendered any more, to be deleted.

    Objects created by controllers from ours (pods, ReplicaSets, an autoscaler) are garbage-collected with their owner.
    """
    kept = {(one["kind"], one["metadata"]["name"]) for one in manifests}
    return tuple(ObjectRef(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in objects
                 if one["metadata"].get("labels", {}).get(ENDPOINT_LABEL) == endpoint
                 and one["kind"] in KINDS
                 and (one["kind"], one["metadata"]["name"]) not in kept)


def _canary(entry: Mapping[str, Any]) -> CanaryShare | None:
    notes = entry["metadata"].get("annotations", {})
    if CANARY_REVISION not in notes:
        return None
    return CanaryShare(int(notes[CANARY_REVISION]), float(notes[CANARY_SHARE]),
                       datetime.fromisoformat(notes[CANARY_SINCE]))
