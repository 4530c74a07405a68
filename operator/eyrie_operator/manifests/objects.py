"""Renders an endpoint as Kubernetes objects, in plain dicts. Pure.

Each revision has a workload of its own, so that the serving one is not changed during a rollout: blue and green are two
Deployments, each with a Service. One more Service, with a stable name, selects the serving revision. Without a Gateway
this is blue/green, switched in one write. With one, an HTTPRoute splits external requests between the revisions' own
Services; clients inside the cluster that use the stable Service reach the serving revision. The route matches /v1 only:
metrics and SGLang's administration are not exposed.

Equal input gives equal manifests in the same order. The ConfigMap of a pod comes before its workload; Services and
routes come after it.
"""

import math

from eyrie_api.contract.status import Endpoint, Revision
from eyrie_operator.manifests.deployment import (
    ENTRY,
    REVISION_LABEL,
    SERVER,
    EndpointDeployment,
    Manifest,
    described,
    digest,
    labels,
    object_name,
    selector,
    service_name,
)
from eyrie_operator.manifests.monitoring import render_monitoring
from eyrie_operator.manifests.pods import ADAPTIVE_FILE, EngineLine, engine_line, pod_spec
from eyrie_operator.manifests.rollout import CANARY_REVISION, CANARY_SHARE, CANARY_SINCE, NO_REVISION, RolloutState

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def render_endpoint(endpoint: Endpoint, deployment: EndpointDeployment, wanted: RolloutState) -> tuple[Manifest, ...]:
    """Every object of an endpoint in this state (`rollout.apply_plan`). Raises Undeployable or Unlaunchable, naming
    what is wrong."""
    rendered: list[Manifest] = []
    for revision in endpoint.revisions:
        if revision.number in wanted.engines:
            rendered += _render_revision(endpoint, revision, deployment)
    if wanted.open:
        rendered += _render_traffic(endpoint, deployment, wanted)
    return (*rendered, *render_monitoring(endpoint, deployment, wanted))


def base_url(endpoint: str, namespace: str, revision: int | None = None) -> str:
    """OpenAI-compatible base URL for clients in the cluster: of the stable Service, or of a revision's own, which
    exists while the revision has an engine."""
    name = object_name(endpoint) if revision is None else service_name(endpoint, revision)
    return f"http://{name}.{namespace}.svc/v1"


def _render_revision(endpoint: Endpoint, revision: Revision, deployment: EndpointDeployment) -> list[Manifest]:
    """Workload, ConfigMap, Service and PodDisruptionBudget."""
    line = engine_line(endpoint.model, revision, deployment)
    number, pods = revision.number, selector(endpoint.name, revision.number)
    adaptive_map = object_name(endpoint.name, number, "adaptive") if line.adaptive is not None else None
    rendered: list[Manifest] = []
    if adaptive_map is not None and line.adaptive is not None:
        rendered.append(described("v1", "ConfigMap", adaptive_map, endpoint, deployment, number)
                        | {"data": {ADAPTIVE_FILE: line.adaptive}})
    rendered.append(_workload(endpoint, revision, deployment, line, adaptive_map))
    rendered.append(described("v1", "Service", service_name(endpoint.name, number), endpoint, deployment, number)
                    | {"spec": _service_spec(pods)})
    budget_api = deployment.has("policy/v1", "policy/v1beta1")
    if budget_api is not None:
        # maxUnavailable, not minAvailable: with a single replica minAvailable 1 would block draining of its node for
        # ever.
        rendered.append(described(budget_api, "PodDisruptionBudget", object_name(endpoint.name, number), endpoint,
                                  deployment, number)
                        | {"spec": {"maxUnavailable": 1, "selector": {"matchLabels": pods}}})
    return rendered


def _workload(endpoint: Endpoint, revision: Revision, deployment: EndpointDeployment, line: EngineLine,
              adaptive_map: str | None) -> Manifest:
    number, given, pods = revision.number, deployment.cluster, selector(endpoint.name, revision.number)
    # Digests of what the pod reads but its spec does not show: when one changes, the pods are replaced.
    annotations = {"kubectl.kubernetes.io/default-container": "engine"}
    if line.adaptive is not None:
        annotations["eyrie.dev/adaptive-digest"] = digest(line.adaptive)
    if line.drafter is not None and line.drafter.digest is not None:
        annotations["eyrie.dev/drafter-digest"] = line.drafter.digest
    template: Manifest = {
        "metadata": {"labels": labels(endpoint.name, number, SERVER), "annotations": annotations},
        "spec": pod_spec(deployment, line, adaptive_map) | {"topologySpreadConstraints": [{
            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": pods}}]}}
    workload = described("apps/v1", "Deployment", object_name(endpoint.name, number), endpoint, deployment, number)
    if deployment.placement.queue is not None:
        workload["metadata"]["labels"][QUEUE_LABEL] = deployment.placement.queue
    workload["metadata"]["annotations"] = {
        "eyrie.dev/setting": revision.use.setting.label(), "eyrie.dev/checkpoint": revision.checkpoint or "",
        "eyrie.dev/job": revision.job_id or ""}
    step = {"maxSurge": 1, "maxUnavailable": 0} if given.surge else {"maxSurge": 0, "maxUnavailable": 1}
    # Replicas are not set where a scaler exists: two writers of the same field would overwrite each other.
    workload["spec"] = ({} if deployment.scaled else {"replicas": deployment.replicas}) | {
        "revisionHistoryLimit": 2, "progressDeadlineSeconds": math.ceil(given.startup_timeout_s) + 120,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": step},
        "selector": {"matchLabels": pods}, "template": template}
    return workload


def _service_spec(pods: dict[str, str]) -> Manifest:
    """A Service on port 80 for the HTTP port of the pods with these labels."""
    return {"type": "ClusterIP", "selector": pods,
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}]}


def _render_traffic(endpoint: Endpoint, deployment: EndpointDeployment, wanted: RolloutState) -> list[Manifest]:
    """The stable Service, and the route where a gateway is configured."""
    name = object_name(endpoint.name)
    entry = described("v1", "Service", name, endpoint, deployment, role=ENTRY)
    serving = NO_REVISION if wanted.serving is None else str(wanted.serving)
    entry["spec"] = _service_spec(selector(endpoint.name) | {REVISION_LABEL: serving})
    if wanted.canary is not None:
        entry["metadata"]["annotations"] = {
            CANARY_REVISION: str(wanted.canary.revision), CANARY_SHARE: repr(wanted.canary.share),
            CANARY_SINCE: wanted.canary.since.isoformat()}
    api, gateway = deployment.route_api, deployment.cluster.gateway
    if api is None or gateway is None:
        return [entry]
    parent = {"name": gateway.name, "namespace": gateway.namespace, "sectionName": gateway.section}
    # No revision serves: the backend is the stable Service, which has no pods, so the gateway responds with 503.
    shares = {service_name(endpoint.name, revision): weight for revision, weight in weights(wanted).items()}
    rule: Manifest = {"matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                      "backendRefs": [{"name": service, "port": 80, "weight": weight}
                                      for service, weight in (shares or {name: 100}).items()]}
    if gateway.request_timeout_s is not None:
        rule["timeouts"] = {"request": f"{math.ceil(gateway.request_timeout_s)}s"}
    route = described(api, "HTTPRoute", name, endpoint, deployment)
    route["spec"] = {"parentRefs": [{key: value for key, value in parent.items() if value is not None}],
                     "rules": [rule]}
    if gateway.hostnames:
        route["spec"]["hostnames"] = list(gateway.hostnames)
    return [entry, route]


def weights(wanted: RolloutState) -> dict[int, int]:
    """Hundredths of the requests by revision; they sum to 100, or are empty when no revision serves. A canary gets at
    least 1 and at most 99, so that it has some requests and never all."""
    if wanted.serving is None:
        return {}
    canary = wanted.canary
    if canary is None or canary.revision == wanted.serving:
        return {wanted.serving: 100}
    share = min(99, max(1, round(100 * canary.share)))
    return {wanted.serving: 100 - share, canary.revision: share}
