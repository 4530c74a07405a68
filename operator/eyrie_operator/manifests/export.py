"""A decision as the documents of people who serve by themselves: launch lines, Kubernetes, KServe, llm-d. Pure.

SGLang's line is the one that endpoints are started with (`eyrie_workers.sglang.launch`), with SGLang's own launcher
instead of the guarded one, which needs this package. vLLM's has the same target, limits and depth; what vLLM does not
serve, or serves otherwise than it was measured, is in the notes.

The objects are few and without this operator: a Deployment with a Service, an InferenceService of KServe with a
container of its own, and values of the chart llm-d-modelservice with a custom command. Ids of the Hub stay as they are,
and the pod downloads them; a directory becomes a claim that holds its files, named in the notes.
"""

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from eyrie_api.contract.model import Frozen
from eyrie_api.contract.targets import is_hub_id
from eyrie_api.planning.sglang_attention import Platform
from eyrie_api.planning.sglang_support import Unlaunchable
from eyrie_operator.manifests.deployment import Manifest, object_name
from eyrie_operator.manifests.pods import ADAPTIVE_DIR, ADAPTIVE_FILE, ANY_HOST, literal
from eyrie_workers.sglang.launch import (
    LaunchPlan,
    adaptive_config,
    adaptive_slots,
    launch_arguments,
    launch_environment,
)

ServingEngine = Literal["sglang", "vllm"]

IMAGES: dict[ServingEngine, str] = {
    "sglang": "docker.io/lmsysorg/sglang:v0.5.23", "vllm": "docker.io/vllm/vllm-openai:v0.32.0"}
"""For CUDA. The versions whose flags are rendered."""

PORT = 30000
_TARGET_DIR, _DRAFTER_DIR = "/models/target", "/models/drafter"
_GPUS: dict[Platform, str] = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
_ACCELERATORS: dict[Platform, str] = {"cuda": "nvidia", "rocm": "amd", "cpu": "cpu"}
"""`accelerator.type` of llm-d-modelservice."""

_STARTUP_S = 3600
_STARTUP_PERIOD_S = 10


@dataclass(frozen=True)
class ServedDecision:
    name: str
    """Of the objects; `object_name` shortens it."""

    plan: LaunchPlan
    """Address and adaptive file are those of each document."""

    is_mtp: bool = False
    """The drafter is the target's own MTP layers."""


class EngineLaunch(Frozen):
    """One engine's command."""

    engine: ServingEngine
    image: str
    refused: str = ""
    """Why the engine does not serve the decision; then there is no command."""

    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    adaptive: str | None = None
    """Content of the file that the command names, SGLang's adaptive speculation."""

    notes: tuple[str, ...] = ()


def sglang_launch(served: ServedDecision, host: str = "127.0.0.1", adaptive_path: str = ADAPTIVE_FILE) -> EngineLaunch:
    plan = replace(served.plan, host=host, port=PORT, adaptive_path=adaptive_path)
    notes = []
    if plan.map is not None and plan.machine.platform == "cpu":
        plan = replace(plan, map=None)  # the server would end with NotImplementedError
        notes.append("SGLang has no adaptive speculation on CPUs: one setting is served at every load")
    try:
        if plan.map is not None and adaptive_slots(plan) is None:
            notes.append("the operating map has no form that SGLang follows: one setting is served at every load")
        command = ("python3", "-m", "sglang.launch_server", *launch_arguments(plan))
    except Unlaunchable as error:
        return EngineLaunch(engine="sglang", image=IMAGES["sglang"], refused=str(error))
    environment = launch_environment(plan)
    if "SGLANG_EXTERNAL_MODEL_PACKAGE" in environment:
        notes.append("SGLang imports the target's class from the package eyrie: install it into SGLang's environment")
    return EngineLaunch(engine="sglang", image=IMAGES["sglang"], command=command, environment=environment,
                        adaptive=adaptive_config(plan), notes=(*notes, *_of_platform(plan)))


def vllm_launch(served: ServedDecision, host: str = "127.0.0.1") -> EngineLaunch:
    try:
        speculation, notes = _vllm_speculation(served)
    except Unlaunchable as error:
        return EngineLaunch(engine="vllm", image=IMAGES["vllm"], refused=str(error))
    plan = served.plan
    reaches = [part.context_length for part in (plan.target, plan.drafter) if part is not None]
    context = plan.context_length or min(reaches)
    command = ["vllm", "serve", plan.target.model, "--served-model-name", plan.served_model_name, "--host", host,
               "--port", str(PORT), "--dtype", plan.dtype, "--max-model-len", str(context),
               "--max-num-seqs", str(plan.max_running_requests), "--tensor-parallel-size", str(plan.engine.tp_size)]
    if plan.target.revision is not None:
        command += ["--revision", plan.target.revision]
    if speculation:
        command += ["--speculative-config", json.dumps(speculation)]
        notes.append("measured in another engine: eyrie certify --off URL --drafted URL certifies it in vLLM")
    return EngineLaunch(engine="vllm", image=IMAGES["vllm"], command=tuple(command),
                        notes=(*notes, *_of_platform(plan)))


def _vllm_speculation(served: ServedDecision) -> tuple[dict[str, Any], list[str]]:
    """vLLM's `--speculative-config`, empty without a drafter, and what is served otherwise than measured. Raises
    Unlaunchable."""
    setting, drafter, notes = served.plan.setting, served.plan.drafter, list[str]()
    if setting.tree is None:
        return {}, notes
    if setting.tree.top_k > 1:
        notes.append(f"vLLM verifies chains: {setting.label()} is served as a chain of {setting.tree.num_steps}")
    if served.plan.map is not None:
        notes.append(f"the operating map is not exported to vLLM: {setting.label()} is served at every load")
    config: dict[str, Any] = {"num_speculative_tokens": setting.tree.num_steps}
    if setting.method == "ngram":
        notes.append("vLLM looks n-grams up in a request's own text, with its own lengths")
        return {"method": "ngram", **config}, notes
    assert drafter is not None
    methods = {"EAGLE3": "eagle3", "STANDALONE": "draft_model"}
    if drafter.algorithm not in methods or served.is_mtp:
        why = ("its MTP layers are read by vLLM from the target itself (method mtp)" if served.is_mtp else
               f"vLLM 0.32.0 has no drafter of this form ({drafter.algorithm or 'a family that Eyrie alone serves'})")
        raise Unlaunchable(f"the drafter is not exported to vLLM: {why}", "serve it with SGLang or the embedded engine")
    if drafter.algorithm == "STANDALONE":
        notes.append("draft models of Eyrie were not run in vLLM")
    return {"method": methods[drafter.algorithm], "model": drafter.directory, **config}, notes


def _of_platform(plan: LaunchPlan) -> list[str]:
    return [] if plan.machine.platform == "cuda" else [
        f"the image is for CUDA, and {plan.machine.name} is not: take the engine's image for it"]


class Objects(Frozen):
    """What a cluster is given; empty where no engine serves the decision."""

    kubernetes: tuple[dict[str, Any], ...] = ()
    """ConfigMap of the adaptive file, if there is one; Deployment; Service."""

    kserve: tuple[dict[str, Any], ...] = ()
    """The same ConfigMap; InferenceService."""

    llm_d: dict[str, Any] = {}
    """Values of llm-d-modelservice."""

    notes: tuple[str, ...] = ()


def objects(served: ServedDecision, engine: ServingEngine) -> Objects:
    claims: dict[str, str] = {}
    notes = []
    name, plan = object_name(served.name), served.plan
    if not is_hub_id(plan.target.model):
        claims["target"] = _TARGET_DIR
        notes.append(f"the claim {name}-target holds the files of {plan.target.model}")
        plan = replace(plan, target=replace(plan.target, model=_TARGET_DIR))
    if plan.drafter is not None and not is_hub_id(plan.drafter.directory):
        claims["drafter"] = _DRAFTER_DIR
        notes.append(f"the claim {name}-drafter holds the files of {plan.drafter.directory}")
        plan = replace(plan, drafter=replace(plan.drafter, directory=_DRAFTER_DIR))
    placed = replace(served, plan=plan)
    launch = sglang_launch(placed, ANY_HOST, f"{ADAPTIVE_DIR}/{ADAPTIVE_FILE}") if engine == "sglang" else \
        vllm_launch(placed, ANY_HOST)
    if launch.refused:
        return Objects(notes=(launch.refused,))
    adaptive = f"{name}-adaptive"
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for part, path in claims.items():
        volumes.append({"name": part, "persistentVolumeClaim": {"claimName": f"{name}-{part}", "readOnly": True}})
        mounts.append({"name": part, "mountPath": path, "readOnly": True})
    configuration: list[Manifest] = []
    if launch.adaptive is not None:
        configuration.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": adaptive},
                              "data": {ADAPTIVE_FILE: launch.adaptive}})
        volumes.append({"name": "adaptive", "configMap": {"name": adaptive}})
        mounts.append({"name": "adaptive", "mountPath": ADAPTIVE_DIR, "readOnly": True})
    gpu = _GPUS.get(plan.machine.platform)
    container: Manifest = {
        "image": launch.image, "command": list(literal(launch.command)),
        "env": [{"name": variable, "value": value} for variable, value in sorted(launch.environment.items())],
        "ports": [{"containerPort": PORT, "protocol": "TCP"}], "volumeMounts": mounts}
    limits = {} if gpu is None else {"resources": {"limits": {gpu: str(plan.engine.tp_size)}}}
    return Objects(
        kubernetes=(*configuration, *_deployment(name, container | limits, volumes)),
        kserve=(*configuration, {
            "apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": {"name": name},
            "spec": {"predictor": {
                "minReplicas": 1, "volumes": volumes,
                "containers": [{"name": "kserve-container", **container, **limits, "readinessProbe": _probe(PORT, 5)}],
            }}}),
        llm_d=_llm_d(served.plan, container, volumes, configuration, f"{name}-target" if "target" in claims else None),
        notes=tuple(notes))


def _probe(port: int | str, period_s: int, failures: int = 3) -> Manifest:
    return {"httpGet": {"path": "/health", "port": port}, "periodSeconds": period_s, "timeoutSeconds": 30,
            "failureThreshold": failures}


def _deployment(name: str, container: Manifest, volumes: list[Manifest]) -> list[Manifest]:
    labels = {"app.kubernetes.io/name": name}
    named = container | {"name": "engine", "ports": [{"name": "http", **container["ports"][0]}]}
    probes = {"startupProbe": _probe("http", _STARTUP_PERIOD_S, _STARTUP_S // _STARTUP_PERIOD_S),
              "readinessProbe": _probe("http", 5), "livenessProbe": _probe("http", 30)}
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "labels": labels},
         "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": {
             "metadata": {"labels": labels},
             "spec": {"containers": [named | probes], "volumes": volumes, "enableServiceLinks": False,
                      "automountServiceAccountToken": False}}}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels},
         "spec": {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}}]


def _llm_d(plan: LaunchPlan, container: Manifest, volumes: list[Manifest], configuration: list[Manifest],
           target_claim: str | None) -> Manifest:
    """The chart asks for GPUs itself, by accelerator and parallelism, and its proxy is for separate prefill."""
    return {
        "modelArtifacts": {"name": plan.served_model_name,
                           "uri": f"hf://{plan.target.model}" if target_claim is None else
                           f"pvc://{target_claim}/"},
        "accelerator": {"type": _ACCELERATORS[plan.machine.platform]},
        "routing": {"servicePort": PORT, "proxy": {"enabled": False}},
        "decode": {"create": True, "replicas": 1, "parallelism": {"tensor": plan.engine.tp_size}, "volumes": volumes,
                   "containers": [{"name": "engine", "modelCommand": "custom", "mountModelVolume": False} | container]},
        "prefill": {"create": False},
        "extraObjects": configuration}
