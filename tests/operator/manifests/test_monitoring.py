"""Alerts name what is measured, thresholds come from what was proven, and scaling never takes capacity away."""

import json
import re
from typing import Any

from eyrie_api.contract.tuning import DrafterUse
from eyrie_operator.manifests.objects import render_endpoint
from eyrie_operator.manifests.rollout import RolloutState
from tests.operator.manifests.samples import (
    ADAPTIVE,
    CHAIN,
    EVERYTHING,
    autoscale,
    embedded,
    endpoint,
    one,
    pods,
    render,
    rich,
)


def rules(rendered: Any) -> list[dict[str, Any]]:
    [group] = one(rendered, "PrometheusRule")["spec"]["groups"]
    return list(group["rules"])


def test_a_collapse_is_measured_over_a_window_against_the_proven_tau() -> None:
    result = rich(monitoring=True, min_acceptance_ratio=0.5)
    [rule] = [each for each in rules(render(endpoint(active=2), result))
              if each["alert"] == "EyrieAcceptanceCollapsed"]
    assert "rate(sglang:generation_tokens_total{" in rule["expr"]
    assert "rate(sglang:spec_verify_calls_total{" in rule["expr"]
    assert " < 1.5 and " in rule["expr"]  # half of the proven 3.0
    assert 'eyrie_dev_revision="2"' in rule["expr"]
    assert rule["expr"].count("(") == rule["expr"].count(")")


def test_no_revision_is_accused_of_what_its_engine_cannot_count() -> None:
    adaptive = endpoint(active=3, use=DrafterUse(drafter_dir="/d", setting=CHAIN, map=ADAPTIVE))
    ours = embedded(monitoring=True, served=EVERYTHING)
    for found, result, accused in ((endpoint(active=1), rich(), False), (adaptive, rich(), False),
                                 (endpoint(active=1), ours, False), (adaptive, ours, True)):
        alerts = {each["alert"] for each in rules(render(found, result))}
        assert ("EyrieAcceptanceCollapsed" in alerts) == accused
        assert {"EyrieNoEngineUp", "EyrieRequestsFailing", "EyrieRequestsQueued"} <= alerts


def test_series_are_selected_by_labels_the_pods_carry_and_the_monitor_hands_on() -> None:
    rendered = render(endpoint(active=2), rich())
    monitor = one(rendered, "PodMonitor")["spec"]
    [pod] = pods(rendered)
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert set(monitor["podTargetLabels"]) <= pod["metadata"]["labels"].keys()
    [scraped] = monitor["podMetricsEndpoints"]
    assert scraped["port"] in [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
    handed_on = {re.sub(r"[^a-zA-Z0-9]", "_", name) for name in monitor["podTargetLabels"]}
    for rule in rules(rendered):
        used = set(re.findall(r"(eyrie_dev_\w+)", rule["expr"]))
        assert used
        assert used <= handed_on


def test_each_engine_is_watched_by_its_own_names() -> None:
    result = embedded(monitoring=True, served=EVERYTHING)
    text = json.dumps(render(endpoint(active=2), result))
    assert "eyrie_drafted_round_tokens_total" in text
    assert "sglang:" not in text


def test_the_dashboard_is_a_document_grafana_can_load() -> None:
    rendered = render(endpoint(), rich(monitoring=True, monitoring_labels={"release": "prometheus"}))
    config = one(rendered, "ConfigMap", "eyrie-chat-dashboard")
    [text] = config["data"].values()
    board = json.loads(text)
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert len(board["uid"]) <= 40
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) >= 6
    assert any(panel["targets"][0]["expr"].startswith("avg by (eyrie_dev_revision) (sglang:spec_num_steps{")
               for panel in board["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len(board["panels"])
    assert one(rendered, "PodMonitor")["metadata"]["labels"]["release"] == "prometheus"


def test_scaled_revisions_keep_their_least_number_and_nobody_else_sets_it() -> None:
    result = rich(replicas=3, autoscale=autoscale(6))
    rendered = render_endpoint(endpoint(active=1, candidate=2), result, RolloutState(True, (1, 2), 1))
    workloads = [each for each in rendered if each["kind"] == "Deployment"]
    scalers = [each for each in rendered if each["kind"] == "ScaledObject"]
    assert all("replicas" not in each["spec"] for each in workloads)
    assert [each["spec"]["scaleTargetRef"] for each in scalers] == [
        {"apiVersion": each["apiVersion"], "kind": each["kind"], "name": each["metadata"]["name"]}
        for each in workloads]
    assert {(each["spec"]["minReplicaCount"], each["spec"]["maxReplicaCount"]) for each in scalers} == {(3, 6)}
