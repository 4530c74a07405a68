"""The plan that drives processes drives objects too: the serving revision stands until another has proved itself."""

import re
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.contract.cluster import GatewaySpec
from eyrie_api.contract.promotion import CanarySpec
from eyrie_api.contract.status import Endpoint
from eyrie_operator.endpoints.plan import CANARY_ERRORS, Activate, ObservedCanary, Reject, ServePolicy, plan_endpoint
from eyrie_operator.manifests.deployment import EndpointDeployment, Manifest
from eyrie_operator.manifests.objects import base_url, render_endpoint, weights
from eyrie_operator.manifests.rollout import (
    RolloutState,
    apply_plan,
    current_state,
    observe_endpoint,
    obsolete_objects,
    policy_on_cluster,
)
from tests.operator.manifests.samples import NOW, deployment, endpoint, one, render, rich, steady_state

TRIED = ServePolicy(canary=CanarySpec(shares=(0.2, 0.5), min_requests=5, max_step_s=10.0), health_timeout_s=60.0)
WANTED = st.builds(
    lambda engines, serving, trial: RolloutState(True, tuple(sorted(engines)), serving if serving in engines else None,
                                                 trial if trial is not None and trial.revision in engines else None),
    st.sets(st.integers(1, 3)), st.none() | st.integers(1, 3),
    st.none() | st.builds(ObservedCanary, st.integers(1, 3), st.floats(0.001, 0.999), st.just(NOW)))


@dataclass
class Cluster:
    """A cluster in memory: its objects, the engines that become ready, and the outcomes of the canary's requests."""

    spec: EndpointDeployment
    broken: frozenset[int] = frozenset()
    failing: frozenset[int] = frozenset()
    objects: tuple[Manifest, ...] = ()
    now: datetime = NOW
    born: dict[int, datetime] = field(default_factory=dict)

    def step(self, found: Endpoint) -> Endpoint:
        """Observe, plan, apply, record: one round of an operator that remembers nothing."""
        self.now += timedelta(seconds=15)
        before = current_state(self.objects)
        seen = observe_endpoint(self._reported(), replicas=self.spec.replicas)
        if seen.canary is not None:
            errors = CANARY_ERRORS if seen.canary.revision in self.failing else 0
            seen = replace(seen, canary=replace(seen.canary, answered=5, errors=errors))
        plan = plan_endpoint(found, policy_on_cluster(TRIED, self.spec), seen, self.now)
        wanted = apply_plan(before, plan, self.now)
        rendered = render_endpoint(found, self.spec, wanted)
        gone = obsolete_objects(found.name, self.objects, rendered)
        assert {(one["kind"], one["metadata"]["name"]) for one in (*self.objects, *rendered)} == (
            {(one["kind"], one["metadata"]["name"]) for one in (*gone, *rendered)})
        self.objects = rendered
        for action in plan.actions:
            if isinstance(action, Activate):
                found = found.model_copy(update={"active_revision": action.revision, "candidate_revision": None})
            elif isinstance(action, Reject):
                found = found.model_copy(update={"candidate_revision": None})
        return found

    def _reported(self) -> list[dict[str, Any]]:
        """The objects with the statuses a cluster would give them, and a pod of every broken engine."""
        reported: list[dict[str, Any]] = []
        for found in self.objects:
            if found["kind"] != "Deployment":
                reported.append(found)
                continue
            revision = int(found["metadata"]["labels"]["eyrie.dev/revision"])
            born = self.born.setdefault(revision, self.now)
            metadata = found["metadata"] | {"creationTimestamp": born.isoformat(), "generation": 1}
            broken = revision in self.broken
            reported.append(found | {"metadata": metadata, "status": {
                "observedGeneration": 1, "availableReplicas": 0 if broken else self.spec.replicas}})
            if broken:
                crashing = {"name": "engine", "restartCount": 5, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
                reported.append({"apiVersion": "v1", "kind": "Pod", "metadata": found["metadata"],
                                 "status": {"containerStatuses": [crashing]}})
        return reported

    @property
    def wanted(self) -> RolloutState:
        return current_state(self.objects)


def settled(cluster: Cluster, found: Endpoint, *, rounds: int = 12) -> tuple[Endpoint, list[RolloutState]]:
    """Rounds until nothing changes any more, and what stood after each."""
    history = []
    for _ in range(rounds):
        found = cluster.step(found)
        history.append(cluster.wanted)
    return found, history


def test_the_first_revision_is_led_to_only_when_it_is_healthy() -> None:
    found, history = settled(Cluster(deployment()), endpoint(active=None, candidate=1, num=1))
    assert found.active_revision == 1
    assert (history[0].engines, history[0].serving) == ((1,), None)
    assert history[-1] == steady_state(found)


@pytest.mark.parametrize("spec", [deployment(), rich()], ids=["by service", "by route"])
def test_the_old_revision_stands_and_serves_until_the_new_one_has_all_requests(spec: EndpointDeployment) -> None:
    cluster = Cluster(spec)
    found, _ = settled(cluster, endpoint(active=1, num=2))
    found, history = settled(cluster, found.model_copy(update={"candidate_revision": 2}))
    switched = next(place for place, wanted in enumerate(history) if wanted.serving == 2)
    assert switched > 0
    assert all(wanted.serving == 1 and 1 in wanted.engines for wanted in history[:switched])
    assert found.active_revision == 2
    assert history[-1] == RolloutState(True, (2,), 2)


def test_a_gateway_moves_traffic_in_steps_and_a_service_all_at_once() -> None:
    shares: dict[str, list[dict[int, int]]] = {}
    for name, spec in (("route", rich()), ("service", deployment())):
        cluster = Cluster(spec)
        found, _ = settled(cluster, endpoint(active=1, num=2))
        _, history = settled(cluster, found.model_copy(update={"candidate_revision": 2}))
        steps = [weights(wanted) for wanted in history]
        shares[name] = [step for place, step in enumerate(steps) if place == 0 or step != steps[place - 1]]
    assert shares["route"] == [{1: 100}, {1: 80, 2: 20}, {1: 50, 2: 50}, {2: 100}]
    assert shares["service"] == [{1: 100}, {2: 100}]


@pytest.mark.parametrize("fault", [{"broken": frozenset({2})}, {"failing": frozenset({2})}], ids=["dead", "failing"])
def test_a_candidate_that_fails_leaves_nothing_and_the_old_one_never_moved(fault: dict[str, Any]) -> None:
    cluster = Cluster(rich())
    found, _ = settled(cluster, endpoint(active=1, num=2))
    cluster = replace(cluster, **fault)
    found, history = settled(cluster, found.model_copy(update={"candidate_revision": 2}))
    assert (found.active_revision, found.candidate_revision) == (1, None)
    assert all(wanted.serving == 1 for wanted in history)
    assert history[-1] == RolloutState(True, (1,), 1)


def test_switching_off_removes_the_way_in_and_every_engine() -> None:
    cluster = Cluster(rich())
    found, _ = settled(cluster, endpoint(active=1, num=2))
    settled(cluster, found.model_copy(update={"desired": "off"}))
    assert cluster.objects == ()


@settings(max_examples=25)
@given(wanted=WANTED)
def test_what_was_rendered_is_read_back_and_its_weights_sum_to_a_hundred(wanted: RolloutState) -> None:
    rendered = render_endpoint(endpoint(), rich(), wanted)
    assert current_state(rendered) == wanted
    [rule] = one(rendered, "HTTPRoute")["spec"]["rules"]
    assert sum(backend["weight"] for backend in rule["backendRefs"]) == 100
    services = {each["metadata"]["name"] for each in rendered if each["kind"] == "Service"}
    assert {backend["name"] for backend in rule["backendRefs"]} <= services
    canary = wanted.canary
    if canary is not None and wanted.serving not in (None, canary.revision):
        assert 1 <= weights(wanted)[canary.revision] <= 99


@pytest.mark.parametrize("serving", [None, 1, 2])
def test_the_stable_service_keeps_its_name_and_leads_to_the_serving_revision_alone(serving: int | None) -> None:
    wanted = RolloutState(True, (1, 2), serving, ObservedCanary(2, 0.2, NOW))
    stable = one(render_endpoint(endpoint(), deployment(), wanted), "Service", "eyrie-chat")
    assert stable["spec"]["selector"]["eyrie.dev/revision"] == ("none" if serving is None else str(serving))
    assert base_url("chat", "serving") == "http://eyrie-chat.serving.svc/v1"


def test_the_route_carries_the_api_and_not_the_engines_administration() -> None:
    spec = one(render(endpoint(), rich()), "HTTPRoute")["spec"]
    assert spec["parentRefs"] == [{"name": "front", "namespace": "gateways"}]
    assert spec["hostnames"] == ["chat.example.com"]
    assert [match["path"]["value"] for match in spec["rules"][0]["matches"]] == ["/v1"]


@pytest.mark.parametrize(("timeout_s", "written"), [(0.0, "0s"), (600.0, "600s"), (1.5, "2s")])
def test_a_gateways_limit_is_written_as_its_api_takes_it(timeout_s: float, written: str) -> None:
    spec = rich(gateway=GatewaySpec(name="front", request_timeout_s=timeout_s))
    [rule] = one(render(endpoint(), spec), "HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": written}
    assert re.fullmatch(r"([0-9]{1,5}(h|m|s|ms)){1,4}", written)  # the pattern of Gateway API's Duration


def test_without_a_gateway_api_traffic_is_switched_by_service_and_that_is_said() -> None:
    spec = rich(served=deployment().served)
    kinds = {each["kind"] for each in render(endpoint(), spec)}
    assert not kinds & {"HTTPRoute", "PodMonitor", "PrometheusRule", "ScaledObject"}
    assert len(spec.left_out()) == 3
    assert policy_on_cluster(TRIED, spec).canary.shares == ()
    assert rich().left_out() == ()


def test_only_what_is_ours_and_superseded_is_named_for_deletion() -> None:
    before = render(endpoint(active=1, candidate=2), deployment())
    strangers: list[Manifest] = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "eyrie-chat-r1"}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "labels": {"eyrie.dev/endpoint": "chat"}}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s", "labels": {"eyrie.dev/endpoint": "other"}}}]
    after = render(endpoint(active=2), deployment())
    gone = obsolete_objects("chat", [*before, *strangers], after)
    assert {(one["kind"], one["metadata"]["name"]) for one in gone} == {
        ("Deployment", "eyrie-chat-r1"), ("Service", "eyrie-chat-r1-http"), ("PodDisruptionBudget", "eyrie-chat-r1")}
