"""Traffic of an endpoint: one Service with a stable name and, with a Gateway, weights between revisions.

Pure. The Service selects the serving revision. Without a Gateway this is blue/green, switched in one write. With one,
an HTTPRoute splits external requests between the revisions' own Services; clients inside the cluster that use the
stable Service reach the serving revision. The route matches /v1 only: metrics and SGLang's administration are not
exposed.

Weights are in hundredths. A canary gets at least 1 and at most 99, so that it has some requests and never all.
"""

import math

from eyrie_api.v1alpha1.status import Endpoint
from eyrie_operator.manifests.deployment import EndpointDeployment, GatewayRef
from eyrie_operator.manifests.names import ENTRY, REVISION_LABEL, Manifest, object_name, selector, service_name
from eyrie_operator.manifests.rollout import CANARY_REVISION, CANARY_SHARE, CANARY_SINCE, NO_REVISION, RolloutState
from eyrie_operator.manifests.workloads import described, service_spec


def render_traffic(endpoint: Endpoint, deployment: EndpointDeployment, wanted: RolloutState) -> list[Manifest]:
    """The stable Service and the route; nothing while the endpoint is closed."""
    if not wanted.open:
        return []
    name = object_name(endpoint.name)
    entry = described("v1", "Service", name, endpoint, deployment, role=ENTRY)
    serving = NO_REVISION if wanted.serving is None else str(wanted.serving)
    entry["spec"] = service_spec(selector(endpoint.name) | {REVISION_LABEL: serving})
    if wanted.canary is not None:
        entry["metadata"]["annotations"] = {
            CANARY_REVISION: str(wanted.canary.revision), CANARY_SHARE: repr(wanted.canary.share),
            CANARY_SINCE: wanted.canary.since.isoformat()}
    api, gateway = deployment.route_api, deployment.gateway
    if api is None or gateway is None:
        return [entry]
    route = described(api, "HTTPRoute", name, endpoint, deployment)
    route["spec"] = _route_spec(endpoint.name, gateway, wanted)
    return [entry, route]


def base_url(endpoint: str, namespace: str) -> str:
    """OpenAI-compatible base URL of the stable Service, for clients in the cluster."""
    return f"http://{object_name(endpoint)}.{namespace}.svc/v1"


def revision_base_url(endpoint: str, revision: int, namespace: str) -> str:
    """The same of a revision's own Service, which exists while the revision has an engine."""
    return f"http://{service_name(endpoint, revision)}.{namespace}.svc/v1"


def weights(wanted: RolloutState) -> dict[int, int]:
    """Hundredths of the requests by revision; they sum to 100, or are empty when no revision serves."""
    if wanted.serving is None:
        return {}
    canary = wanted.canary
    if canary is None or canary.revision == wanted.serving:
        return {wanted.serving: 100}
    share = min(99, max(1, round(100 * canary.share)))
    return {wanted.serving: 100 - share, canary.revision: share}


def _route_spec(endpoint: str, gateway: GatewayRef, wanted: RolloutState) -> Manifest:
    parent: Manifest = {"name": gateway.name}
    if gateway.namespace is not None:
        parent["namespace"] = gateway.namespace
    if gateway.section is not None:
        parent["sectionName"] = gateway.section
    # No revision serves: the backend is the stable Service, which has no pods, so the gateway responds with 503.
    backends = [{"name": service_name(endpoint, revision), "port": 80, "weight": weight}
                for revision, weight in weights(wanted).items()] or [
                    {"name": object_name(endpoint), "port": 80, "weight": 100}]
    rule: Manifest = {"matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}], "backendRefs": backends}
    if gateway.request_timeout_s is not None:
        rule["timeouts"] = {"request": f"{math.ceil(gateway.request_timeout_s)}s"}
    spec: Manifest = {"parentRefs": [parent], "rules": [rule]}
    if gateway.hostnames:
        spec["hostnames"] = list(gateway.hostnames)
    return spec
