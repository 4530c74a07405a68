"""The objects of one revision: workload, ConfigMap, Service, PodDisruptionBudget.

Pure. Each revision is a separate workload, so that the serving one is not changed during a rollout: blue and green are
two Deployments, and the stable Service selects one of them.
"""

import math

from eyrie_api.v1alpha1.status import Endpoint, Revision
from eyrie_operator.manifests.deployment import LWS_API, EndpointDeployment
from eyrie_operator.manifests.engines import ADAPTIVE_FILE, EngineLine, engine_line
from eyrie_operator.manifests.names import (
    SERVER,
    WORKER,
    Manifest,
    labels,
    object_name,
    selector,
    service_name,
)
from eyrie_operator.manifests.pods import pod_annotations, pod_spec

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def render_revision(endpoint: Endpoint, revision: Revision, deployment: EndpointDeployment) -> list[Manifest]:
    """All objects of one revision except traffic and monitoring. Raises Undeployable or Unlaunchable."""
    line = engine_line(endpoint.model, revision, deployment)
    name = object_name(endpoint.name, revision.number)
    adaptive_map = object_name(endpoint.name, revision.number, "adaptive") if line.adaptive is not None else None
    rendered: list[Manifest] = []
    if adaptive_map is not None and line.adaptive is not None:
        rendered.append(described("v1", "ConfigMap", adaptive_map, endpoint, deployment, revision.number)
                        | {"data": {ADAPTIVE_FILE: line.adaptive}})
    multi_node = deployment.num_nodes > 1
    rendered.append((_group if multi_node else _deployment)(endpoint, revision, deployment, line, adaptive_map))
    rendered.append(described("v1", "Service", service_name(endpoint.name, revision.number), endpoint, deployment,
                              revision.number)
                    | {"spec": service_spec(selector(endpoint.name, revision.number))})
    budget_api = deployment.has("policy/v1", "policy/v1beta1")
    if budget_api is not None:
        # maxUnavailable, not minAvailable: with a single replica minAvailable 1 would block draining of its node for
        # ever.
        rendered.append(described(budget_api, "PodDisruptionBudget", name, endpoint, deployment, revision.number) | {
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(endpoint.name, revision.number)}}})
    return rendered


def described(api_version: str, kind: str, name: str, endpoint: Endpoint, deployment: EndpointDeployment,
              revision: int | None = None, role: str | None = None) -> Manifest:
    """A manifest with apiVersion, kind and metadata (name, labels, owner), without a spec."""
    metadata: Manifest = {"name": name, "namespace": deployment.namespace,
                          "labels": labels(endpoint.name, revision, role)}
    owner = deployment.owner
    if owner is not None:
        metadata["ownerReferences"] = [{"apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name,
                                        "uid": owner.uid, "controller": True, "blockOwnerDeletion": True}]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def service_spec(found_by: dict[str, str]) -> Manifest:
    """A Service on port 80 for the pods' HTTP port."""
    return {"type": "ClusterIP", "selector": found_by,
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}]}


def workload_reference(endpoint: str, revision: int, deployment: EndpointDeployment) -> Manifest:
    """A scaler's reference to a revision's workload."""
    api_version, kind = (LWS_API, "LeaderWorkerSet") if deployment.num_nodes > 1 else ("apps/v1", "Deployment")
    return {"apiVersion": api_version, "kind": kind, "name": object_name(endpoint, revision)}


def _deployment(endpoint: Endpoint, revision: Revision, deployment: EndpointDeployment, line: EngineLine,
                adaptive_map: str | None) -> Manifest:
    template = _template(endpoint, revision, deployment, line, adaptive_map, SERVER)
    template["spec"]["topologySpreadConstraints"] = [{
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(endpoint.name, revision.number)}}]
    rendered = _headed("apps/v1", "Deployment", endpoint, revision, deployment)
    rendered["spec"] = _replicas(deployment) | {
        "revisionHistoryLimit": 2, "progressDeadlineSeconds": math.ceil(deployment.startup_timeout_s) + 120,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": _step(deployment)},
        "selector": {"matchLabels": selector(endpoint.name, revision.number)}, "template": template}
    return rendered


def _group(endpoint: Endpoint, revision: Revision, deployment: EndpointDeployment, line: EngineLine,
           adaptive_map: str | None) -> Manifest:
    """One engine on several nodes. When a pod dies its group is restarted: NCCL cannot repair a communicator."""
    rendered = _headed(LWS_API, "LeaderWorkerSet", endpoint, revision, deployment)
    rendered["spec"] = _replicas(deployment) | {
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": _step(deployment)},
        "leaderWorkerTemplate": {
            "size": deployment.num_nodes, "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": _template(endpoint, revision, deployment, line, adaptive_map, SERVER),
            "workerTemplate": _template(endpoint, revision, deployment, line, adaptive_map, WORKER)}}
    return rendered


def _headed(api_version: str, kind: str, endpoint: Endpoint, revision: Revision,
            deployment: EndpointDeployment) -> Manifest:
    name = object_name(endpoint.name, revision.number)
    rendered = described(api_version, kind, name, endpoint, deployment, revision.number)
    if deployment.placement.queue is not None:
        rendered["metadata"]["labels"][QUEUE_LABEL] = deployment.placement.queue
    rendered["metadata"]["annotations"] = {
        "eyrie.dev/setting": revision.use.setting.label(), "eyrie.dev/checkpoint": revision.checkpoint or "",
        "eyrie.dev/job": revision.job_id or ""}
    return rendered


def _template(endpoint: Endpoint, revision: Revision, deployment: EndpointDeployment, line: EngineLine,
              adaptive_map: str | None, role: str) -> Manifest:
    spec = pod_spec(deployment, line, adaptive_map, role)
    annotations = pod_annotations(deployment, line) | {"kubectl.kubernetes.io/default-container": "engine"}
    return {"metadata": {"labels": labels(endpoint.name, revision.number, role), "annotations": annotations},
            "spec": spec}


def _replicas(deployment: EndpointDeployment) -> Manifest:
    """Not set where a scaler exists: two writers of the same field would overwrite each other."""
    return {} if deployment.scaled else {"replicas": deployment.replicas}


def _step(deployment: EndpointDeployment) -> Manifest:
    return {"maxSurge": 1, "maxUnavailable": 0} if deployment.surge else {"maxSurge": 0, "maxUnavailable": 1}
