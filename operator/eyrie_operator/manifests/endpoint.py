"""Renders all manifests of an endpoint. Pure.

Equal input gives equal manifests in the same order. The ConfigMap of a pod comes before its workload; Services and
routes come after it.
"""

from eyrie_api.v1alpha1.status import Endpoint
from eyrie_operator.manifests.deployment import EndpointDeployment
from eyrie_operator.manifests.monitoring import render_monitoring
from eyrie_operator.manifests.names import Manifest
from eyrie_operator.manifests.rollout import RolloutState, steady_state
from eyrie_operator.manifests.traffic import render_traffic
from eyrie_operator.manifests.workloads import render_revision


def render_endpoint(endpoint: Endpoint, deployment: EndpointDeployment,
                    wanted: RolloutState | None = None) -> tuple[Manifest, ...]:
    """Every object of an endpoint. Raises Undeployable or Unlaunchable, naming what is wrong.

    wanted   the desired state, from `rollout.apply_plan`. Default: `steady_state`, where no canary has a share of the
             requests; callers that drive a rollout pass the state.
    """
    wanted = steady_state(endpoint) if wanted is None else wanted
    rendered: list[Manifest] = []
    for revision in endpoint.revisions:
        if revision.number in wanted.engines:
            rendered += render_revision(endpoint, revision, deployment)
    rendered += render_traffic(endpoint, deployment, wanted)
    rendered += render_monitoring(endpoint, deployment, wanted)
    return tuple(rendered)
