"""Metrics, alerts and dashboard of an endpoint, and autoscaling of its replicas. Pure.

Acceptance is watched as windowed tau, tokens over verify rounds: SGLang's own gauge covers the last 40 decode steps and
jumps. Its counters increase when a request ends, so a window must contain many requests; the alert needs as many rounds
as the operator (`plan.MIN_ROUNDS`), and exists only for revisions with a proven tau (`plan.proven_tau`). On a collapse
the operator rolls back by itself; the alert notifies.

Pods carry their endpoint and revision as labels, and the PodMonitor hands both to every series.
"""

import json
from dataclasses import dataclass
from typing import Any

from eyrie_api.contract.status import Endpoint
from eyrie_operator.endpoints.plan import MIN_ROUNDS, proven_tau
from eyrie_operator.manifests.deployment import (
    ENDPOINT_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    EndpointDeployment,
    Manifest,
    described,
    digest,
    object_name,
    selector,
)
from eyrie_operator.manifests.rollout import RolloutState

_WINDOW = "10m"
_MAX_QUEUED, _MAX_ERROR_RATIO = 32, 0.05
"""Queued requests of a replica, and failed requests of all, above which an alert fires."""

_COOLDOWN_S = 300


@dataclass(frozen=True)
class Series:
    """Names of an engine's metrics."""

    tokens: str
    rounds: str
    """Counter of verify rounds; `round_tokens` counts the tokens they produced."""

    round_tokens: str
    num_steps: str
    """Gauge of the draft depth in use; 0 where it does not draft."""

    running: str
    queued: str
    answered: str
    """Counter of responses. `client_labels` select those to clients, `failed_labels` the failed ones among these."""

    client_labels: str
    failed_labels: str
    first_token: str
    between_tokens: str


SGLANG = Series(
    tokens="sglang:generation_tokens_total", rounds="sglang:spec_verify_calls_total",
    round_tokens="sglang:generation_tokens_total", num_steps="sglang:spec_num_steps", running="sglang:num_running_reqs",
    queued="sglang:num_queue_reqs", answered="sglang:http_responses_total", client_labels=',endpoint=~"/v1/.+"',
    failed_labels=',status_code=~"5.."', first_token="sglang:time_to_first_token_seconds",
    between_tokens="sglang:inter_token_latency_seconds")
EMBEDDED = Series(
    tokens="eyrie_generated_tokens_total", rounds="eyrie_drafted_rounds_total",
    round_tokens="eyrie_drafted_round_tokens_total", num_steps="eyrie_num_steps", running="eyrie_running_requests",
    queued="eyrie_queued_requests",
    answered="eyrie_requests_total", client_labels="", failed_labels=',finish_reason="error"',
    first_token="eyrie_time_to_first_token_seconds", between_tokens="eyrie_inter_token_latency_seconds")


def render_monitoring(endpoint: Endpoint, deployment: EndpointDeployment, wanted: RolloutState) -> list[Manifest]:
    """PodMonitor, PrometheusRule and dashboard if configured and supported by the server; one scaler per revision."""
    series = EMBEDDED if deployment.counts_drafted else SGLANG
    rendered: list[Manifest] = []
    if deployment.cluster.monitoring and wanted.open:
        if deployment.has("monitoring.coreos.com/v1") is not None:
            name = object_name(endpoint.name)
            monitor = described("monitoring.coreos.com/v1", "PodMonitor", name, endpoint, deployment)
            monitor["metadata"]["labels"] |= deployment.cluster.monitoring_labels
            monitor["spec"] = {
                "selector": {"matchLabels": selector(endpoint.name)},
                "podTargetLabels": [ENDPOINT_LABEL, REVISION_LABEL, ROLE_LABEL],
                # SGLang labels its HTTP counters with `endpoint`, as the Prometheus operator does targets: keep it.
                "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s", "honorLabels": True}]}
            rendered += [monitor, _rules(endpoint, deployment, wanted, series)]
        rendered.append(_dashboard(endpoint, deployment, series))
    if deployment.scaled:
        numbers = {revision.number for revision in endpoint.revisions}
        rendered += [_scaler(endpoint, deployment, number, series) for number in wanted.engines if number in numbers]
    return rendered


def _rules(endpoint: Endpoint, deployment: EndpointDeployment, wanted: RolloutState, series: Series) -> Manifest:
    ours = _ours(endpoint, deployment)
    by = _label(REVISION_LABEL)
    rules = []
    for revision in endpoint.revisions:
        proven = proven_tau(revision, deployment.counts_drafted)
        if revision.number in wanted.engines and proven is not None:
            of_revision, least = _ours(endpoint, deployment, revision.number), deployment.min_acceptance_ratio * proven
            enough = f"sum(increase({series.rounds}{{{of_revision}}}[{_WINDOW}])) >= {MIN_ROUNDS}"
            rules.append(_rule(
                "EyrieAcceptanceCollapsed", f"({_tau(series, of_revision)}) < {least:.4g} and {enough}", "0m",
                "warning", endpoint, f"Acceptance length of revision {revision.number} is below {least:.2f} = "
                f"{deployment.min_acceptance_ratio:g} x the proven {proven:.2f}", revision=str(revision.number)))
    answered, failed = _answers(series, ours)
    rules += [
        _rule("EyrieRequestsFailing", f"sum(rate({failed}[{_WINDOW}])) / sum(rate({answered}[{_WINDOW}])) > "
              f"{_MAX_ERROR_RATIO:g}", "5m", "critical", endpoint,
              f"More than {_MAX_ERROR_RATIO:.0%} of requests fail"),
        _rule("EyrieRequestsQueued", f"max by ({by}) ({series.queued}{{{ours}}}) > {_MAX_QUEUED}", "10m",
              "warning", endpoint, f"A replica has more than {_MAX_QUEUED} queued requests"),
        _rule("EyrieNoEngineUp", f"absent(up{{{ours}}} == 1)", "5m", "critical", endpoint,
              "No engine is up"),
    ]
    rendered = described("monitoring.coreos.com/v1", "PrometheusRule", object_name(endpoint.name), endpoint, deployment)
    rendered["metadata"]["labels"] |= deployment.cluster.monitoring_labels
    rendered["spec"] = {"groups": [{"name": f"eyrie-{endpoint.name}", "rules": rules}]}
    return rendered


def _rule(alert: str, expression: str, lasting: str, severity: str, endpoint: Endpoint, summary: str,
          **labels: str) -> Manifest:
    return {"alert": alert, "expr": expression, "for": lasting,
            "labels": {"severity": severity, "endpoint": endpoint.name, **labels},
            "annotations": {"summary": f"{summary} (endpoint {endpoint.name})"}}


def _scaler(endpoint: Endpoint, deployment: EndpointDeployment, revision: int, series: Series) -> Manifest:
    """The ScaledObject of one revision: each has its own, since a canary must be able to take all requests."""
    scale = deployment.cluster.autoscale
    assert scale is not None
    ours = _ours(endpoint, deployment, revision)
    rendered = described("keda.sh/v1alpha1", "ScaledObject", object_name(endpoint.name, revision), endpoint, deployment,
                         revision)
    rendered["spec"] = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment",
                           "name": object_name(endpoint.name, revision)},
        "minReplicaCount": deployment.replicas, "maxReplicaCount": scale.max_replicas,
        "cooldownPeriod": _COOLDOWN_S,
        "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": {
            "serverAddress": scale.prometheus_url, "threshold": f"{scale.target_requests:g}",
            "query": f"sum({series.running}{{{ours}}}) + sum({series.queued}{{{ours}}})"}}]}
    return rendered


def _dashboard(endpoint: Endpoint, deployment: EndpointDeployment, series: Series) -> Manifest:
    """A ConfigMap that Grafana's sidecar picks up by its label."""
    ours, by = _ours(endpoint, deployment), _label(REVISION_LABEL)
    answered, failed = _answers(series, ours)

    def p99(histogram: str) -> str:
        return f"histogram_quantile(0.99, sum by (le, {by}) (rate({histogram}_bucket{{{ours}}}[5m])))"

    drawn = (
        ("Acceptance length (tau)", _tau(series, ours, by, "5m"), "short"),
        ("Tokens per second", f"sum by ({by}) (rate({series.tokens}{{{ours}}}[1m]))", "short"),
        ("Draft depth (num_steps), mean of replicas", f"avg by ({by}) ({series.num_steps}{{{ours}}})", "short"),
        ("Requests running", f"sum by ({by}) ({series.running}{{{ours}}})", "short"),
        ("Requests queued", f"sum by ({by}) ({series.queued}{{{ours}}})", "short"),
        ("Time to first token, p99", p99(series.first_token), "s"),
        ("Time between tokens, p99", p99(series.between_tokens), "s"),
        ("Responses per second", f"sum by ({by}) (rate({answered}[5m]))", "reqps"),
        ("Failed responses per second", f"sum by ({by}) (rate({failed}[5m]))", "reqps"),
    )
    panels = [{"id": number + 1, "type": "timeseries", "title": title,
               "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
               "datasource": {"type": "prometheus", "uid": "${datasource}"},
               "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
               "targets": [{"refId": "A", "expr": expression, "legendFormat": f"revision {{{{{by}}}}}"}]}
              for number, (title, expression, unit) in enumerate(drawn)]
    document: dict[str, Any] = {
        "uid": digest(f"{deployment.cluster.namespace}/{endpoint.name}")[7:47],  # Grafana allows 40 characters
        "title": f"Eyrie endpoint {endpoint.name}", "tags": ["eyrie"],
        "schemaVersion": 39, "time": {"from": "now-6h", "to": "now"}, "refresh": "30s", "panels": panels,
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]}}
    rendered = described("v1", "ConfigMap", object_name(endpoint.name, part="dashboard"), endpoint, deployment)
    rendered["metadata"]["labels"]["grafana_dashboard"] = "1"
    return rendered | {"data": {f"eyrie-{endpoint.name}.json": json.dumps(document, indent=1, sort_keys=True) + "\n"}}


def _tau(series: Series, ours: str, by: str | None = None, window: str = _WINDOW) -> str:
    total = "sum" if by is None else f"sum by ({by})"
    return (f"{total} (rate({series.round_tokens}{{{ours}}}[{window}])) / "
            f"{total} (rate({series.rounds}{{{ours}}}[{window}]))")


def _answers(series: Series, ours: str) -> tuple[str, str]:
    """Selectors of responses to clients, and of the failed ones among them."""
    matchers = f"{ours}{series.client_labels}"
    return f"{series.answered}{{{matchers}}}", f"{series.answered}{{{matchers}{series.failed_labels}}}"


def _ours(endpoint: Endpoint, deployment: EndpointDeployment, revision: int | None = None) -> str:
    """Label matchers of the endpoint's series."""
    matchers = f'namespace="{deployment.cluster.namespace}",{_label(ENDPOINT_LABEL)}="{endpoint.name}"'
    return matchers if revision is None else f'{matchers},{_label(REVISION_LABEL)}="{revision}"'


def _label(name: str) -> str:
    """The Prometheus label of a Kubernetes label."""
    return "".join(letter if letter.isalnum() else "_" for letter in name)
