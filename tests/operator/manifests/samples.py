"""Endpoints and deployments to render, with plain values."""

from collections.abc import Iterable
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

from eyrie_api.contract.cluster import AutoscaleSpec, GatewaySpec, ModelCacheSpec, ServingSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.placement import Placement, S3Work, SecretVariable, VolumeWork
from eyrie_api.contract.status import Endpoint, Revision
from eyrie_api.contract.targets import JobTarget
from eyrie_api.contract.tuning import OFF, DrafterUse, OperatingMap, OperatingPoint, Setting
from eyrie_api.planning.sglang_attention import profile
from eyrie_operator.manifests.deployment import (
    CachedTarget,
    DrafterFiles,
    EndpointDeployment,
    Manifest,
    Owner,
    StoredDrafter,
)
from eyrie_operator.manifests.objects import render_endpoint
from eyrie_operator.manifests.rollout import RolloutState
from eyrie_workers.engines.process import EngineCommand
from eyrie_workers.sglang.checkpoints import DrafterCheckpoint, TargetCheckpoint
from eyrie_workers.sglang.launch import LaunchPlan

NOW = datetime(2026, 1, 2, tzinfo=UTC)
CHAIN = Setting(tree=DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6))
ADAPTIVE = OperatingMap(
    points=(OperatingPoint(concurrency=1, setting=CHAIN, speedup=2.0, tokens_per_s=100.0, measured=True),
            OperatingPoint(concurrency=16, setting=OFF, speedup=1.0, tokens_per_s=900.0, measured=True)),
    crossover=16, adaptive={"1": {"candidate_steps": [5]}, "16": {"candidate_steps": [0]}})
CORE = frozenset({"v1", "apps/v1", "policy/v1"})
EVERYTHING = CORE | {"gateway.networking.k8s.io/v1", "monitoring.coreos.com/v1", "keda.sh/v1alpha1"}
TARGET = TargetCheckpoint(model="org/model", architecture="LlamaForCausalLM", num_layers=32, context_length=8192)
PLAN = LaunchPlan(target=TARGET, machine=profile("h100"), served_model_name="model")
PLACEMENT = Placement(
    image="registry.example/sglang@sha256:" + "0" * 64, num_gpus=1, gpu_type="NVIDIA-H100-80GB-HBM3",
    shared_memory="16Gi", requests={"cpu": "8", "memory": "64Gi"}, work=VolumeWork(claim="work"),
    secret_variables=(SecretVariable(variable="HF_TOKEN", secret="hub", key="token"),))
S3 = S3Work(url="s3://bucket/eyrie", endpoint_url="http://s3:9000", credentials_secret="s3-key")


def revision(number: int, **changes: Any) -> Revision:
    """Revision 1 is the bare target, the others draft with a chain of depth 5."""
    drafter = f"/var/lib/eyrie/jobs/j{number}/c"
    use = DrafterUse() if number == 1 else DrafterUse(drafter_dir=drafter, setting=CHAIN)
    return Revision.model_validate({
        "number": number, "job_id": None if number == 1 else f"j{number}", "checkpoint": None if number == 1 else "c",
        "tree": None, "drafter_dir": use.drafter_dir, "use": use, "tau": None if number == 1 else 3.0,
        "created_at": NOW, "reason": "promoted"} | changes)


def endpoint(active: int | None = 1, candidate: int | None = None, *, name: str = "chat", num: int = 3,
             use: DrafterUse | None = None, **changes: Any) -> Endpoint:
    """`use` is of the latest revision."""
    revisions = [revision(number) for number in range(1, num + 1)]
    if use is not None:
        revisions[-1] = revision(num, use=use)
    return Endpoint.model_validate({
        "name": name, "target": "org/model", "url": None, "model": "model", "active_revision": active,
        "candidate_revision": candidate, "revisions": tuple(revisions), "updated_at": NOW} | changes)


def deployment(**changes: Any) -> EndpointDeployment:
    """SGLang on one H100 with a work volume, on a cluster that has nothing but Kubernetes. Changes are fields of the
    deployment, or of the administrator's settings."""
    files = {number: DrafterFiles(DrafterCheckpoint(f"/var/lib/eyrie/jobs/j{number}/c", 8192),
                                  StoredDrafter(f"jobs/j{number}/stages/train/a", "checkpoints/c"), f"sha256:{number}")
             for number in (2, 3)}
    ours = {field.name for field in fields(EndpointDeployment)}
    given = ServingSpec.model_validate({"namespace": "serving", "placement": PLACEMENT,
                                        **{name: value for name, value in changes.items() if name not in ours}})
    return replace(EndpointDeployment(given, PLACEMENT, PLAN, "eyrie:1", ("python3",), drafters=files, served=CORE),
                   **{name: value for name, value in changes.items() if name in ours})


def rich(**changes: Any) -> EndpointDeployment:
    """Everything that can be asked for, on a cluster that has it all."""
    return deployment(**({
        "served": EVERYTHING, "monitoring": True,
        "gateway": GatewaySpec(name="front", namespace="gateways", hostnames=("chat.example.com",)),
        "autoscale": autoscale(4), "replicas": 2, "owner": Owner("u-1", "chat"),
        "key_secret": "chat-key",
        "cached_target": CachedTarget(ModelCacheSpec(claim="models"), JobTarget(model="org/model", revision="v1")),
    } | changes))


def autoscale(most: int) -> AutoscaleSpec:
    return AutoscaleSpec(prometheus_url="http://prometheus:9090", max_replicas=most, target_requests=16.0)


def embedded(**changes: Any) -> EndpointDeployment:
    """The reference engine, without a GPU."""
    def argv(use: DrafterUse, port: int) -> list[str]:
        return ["python3", *EngineCommand(target="quickstart", model="q", use=use, host="0.0.0.0",
                                          port=port).argv()[1:]]

    return deployment(**({"engine": argv,
                          "placement": Placement(image="eyrie-workers:test")} | changes))


def steady_state(endpoint: Endpoint) -> RolloutState:
    """Without a rollout in progress: the active revision serves, a candidate runs without a share."""
    if endpoint.desired == "off":
        return RolloutState()
    numbers = {number for number in (endpoint.active_revision, endpoint.candidate_revision) if number is not None}
    return RolloutState(open=True, engines=tuple(sorted(numbers)), serving=endpoint.active_revision)


def render(endpoint: Endpoint, deployment: EndpointDeployment) -> tuple[Manifest, ...]:
    """Every object of an endpoint in its steady state."""
    return render_endpoint(endpoint, deployment, steady_state(endpoint))


def one(manifests: Iterable[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The only manifest of a kind (and name)."""
    [found] = [each for each in manifests
               if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


def pods(manifests: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every pod template."""
    return [each["spec"]["template"] for each in manifests if each["kind"] == "Deployment"]
