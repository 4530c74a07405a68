"""The pod of one revision's engine: probes, drain, volumes, security. Pure.

Probes follow SGLang 0.5.23. /health generates a token when the engine is idle, takes a second or more, and is 503 while
starting, while draining, and 20 s after the scheduler stopped responding: a shorter probe timeout would restart an
engine that is only busy. /ready is 200 exactly while new requests are accepted. Both and /metrics need no API key.

Shutdown: the pod is removed from the Service first, `preStop` waits until proxies have seen that, then SIGTERM makes
the engine finish its requests; terminationGracePeriodSeconds is the only deadline.

The pod passes PodSecurity `restricted`, unless configured to run as root. Its root file system is writable: SGLang
compiles kernels at run time, and the caches of its libraries have not been tested with a real image. HOME and /tmp are
ephemeral volumes.
"""

import math
from typing import Any

from eyrie_api.v1alpha1.cluster import MODEL_CACHE_DIR
from eyrie_api.v1alpha1.placement import Placement, S3Work, VolumeWork
from eyrie_operator.manifests.deployment import CachedTarget, DrafterFiles, EndpointDeployment
from eyrie_operator.manifests.engines import ADAPTIVE_DIR, DRAFTER_DIR, KEY_DIR, PLUGIN_DIR, EngineLine, literal
from eyrie_operator.manifests.names import WORKER, Manifest, digest

CREDENTIALS_DIR = "/var/run/secrets/eyrie/artifacts"
SCRATCH_DIR = "/scratch"
HUB_DIR = f"{SCRATCH_DIR}/huggingface"
"""Of what the engine itself downloads from the Hub."""

_TERMINATION_POLICY = "FallbackToLogsOnError"
"""The end of the log becomes the container's termination message, which `observed` reports."""

_STARTUP_PERIOD_S = 10
_HEALTH_TIMEOUT_S = 30
"""Above the 20 s after which SGLang reports that its scheduler does not respond."""


def pod_spec(deployment: EndpointDeployment, line: EngineLine, adaptive_map: str | None, role: str) -> Manifest:
    """The spec of one pod. `adaptive_map` names the ConfigMap of the line's adaptive file."""
    placement = deployment.placement
    spec: Manifest = {
        "automountServiceAccountToken": False, "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(deployment.drain_timeout_s),
        "securityContext": {"runAsNonRoot": deployment.run_as > 0, "runAsUser": deployment.run_as,
                            "runAsGroup": deployment.run_as, "fsGroup": deployment.run_as,
                            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_engine(deployment, line, adaptive_map, role)],
        "volumes": _volumes(deployment, line, adaptive_map),
    }
    first = [] if deployment.cached_target is None else [_prefetcher(deployment, deployment.cached_target)]
    if line.fetch is not None:
        first.append(_fetcher(deployment, line))
    elif line.drafter is not None and deployment.fetch_image is not None and isinstance(placement.work, VolumeWork):
        first.append(_verifier(deployment, line.drafter))
    if line.plugin:
        first.append(_plugin_bringer(deployment))
    if first:
        spec["initContainers"] = first
    return spec | _scheduling(placement)


def pod_annotations(deployment: EndpointDeployment, line: EngineLine) -> dict[str, str]:
    """Digests of what the pod reads but its spec does not show: when one changes, the pods are replaced."""
    found: dict[str, str] = {}
    if line.adaptive is not None:
        found["eyrie.dev/adaptive-digest"] = digest(line.adaptive)
    if line.drafter is not None and line.drafter.digest is not None:
        found["eyrie.dev/drafter-digest"] = line.drafter.digest
    if deployment.api_key is not None and deployment.api_key.version:
        found["eyrie.dev/key-version"] = deployment.api_key.version
    return found


def _engine(deployment: EndpointDeployment, line: EngineLine, adaptive_map: str | None, role: str) -> Manifest:
    placement = deployment.placement
    home = {"HOME": SCRATCH_DIR, "HF_HOME": HUB_DIR, "PYTHONUNBUFFERED": "1"}
    if deployment.cached_target is not None:
        home["HF_HUB_OFFLINE"] = "1"
    container: Manifest = {
        "name": "engine", "image": placement.image, "imagePullPolicy": placement.image_pull_policy,
        "command": list(line.command),
        "env": [*({"name": name, "value": value} for name, value in sorted((home | dict(line.environment)).items())),
                *_secret_variables(placement)],
        "ports": [{"name": "http", "containerPort": deployment.port, "protocol": "TCP"}],
        "resources": _resources(placement), "securityContext": _confined(deployment),
        "terminationMessagePolicy": _TERMINATION_POLICY,
        "volumeMounts": _mounts(deployment, line, adaptive_map),
    }
    if role != WORKER:  # other nodes of an engine serve no requests, and end with their leader
        container |= _probes(deployment, line)
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", f"{deployment.leave_delay_s:g}"]}}}
    return container


def _probes(deployment: EndpointDeployment, line: EngineLine) -> Manifest:
    def ask(path: str, period_s: int, timeout_s: int, failures: int) -> Manifest:
        return {"httpGet": {"path": path, "port": "http"}, "periodSeconds": period_s, "timeoutSeconds": timeout_s,
                "failureThreshold": failures}

    tries = math.ceil(deployment.startup_timeout_s / _STARTUP_PERIOD_S)
    return {"startupProbe": ask("/health", _STARTUP_PERIOD_S, _HEALTH_TIMEOUT_S, tries),
            "readinessProbe": ask(line.ready_path, 5, 5, 2),
            "livenessProbe": ask("/health", 30, _HEALTH_TIMEOUT_S, 3)}


def _fetcher(deployment: EndpointDeployment, line: EngineLine) -> Manifest:
    work, stored = deployment.placement.work, line.fetch
    assert isinstance(work, S3Work)
    assert stored is not None
    variables = {"HOME": SCRATCH_DIR, "EYRIE_ARTIFACTS_URL": work.url, "EYRIE_ARTIFACTS_REGION": work.region}
    if work.endpoint_url is not None:
        variables["EYRIE_ARTIFACTS_ENDPOINT_URL"] = work.endpoint_url
    mounts: list[Manifest] = [{"name": "scratch", "mountPath": SCRATCH_DIR},
                              {"name": "drafter", "mountPath": DRAFTER_DIR}, {"name": "tmp", "mountPath": "/tmp"}]
    if work.credentials_secret is not None:
        variables["EYRIE_ARTIFACTS_CREDENTIALS_DIR"] = CREDENTIALS_DIR
        mounts.append({"name": "artifacts", "mountPath": CREDENTIALS_DIR, "readOnly": True})
    return _ours(deployment, "fetch-drafter", mounts, "eyrie_api.artifacts.fetch", *literal((
        "--prefix", stored.prefix, "--part", stored.part, "--directory", DRAFTER_DIR))) | {
        "env": [*({"name": name, "value": value} for name, value in sorted(variables.items())),
                *_secret_variables(deployment.placement)]}


def _verifier(deployment: EndpointDeployment, drafter: DrafterFiles) -> Manifest:
    """Compares the files of a drafter on the work volume with the manifest of the stage that made them."""
    return _ours(deployment, "verify-drafter", _work_mounts(deployment.placement), "eyrie_api.artifacts.verify",
                 *literal(("--path", drafter.facts.directory)))


def _prefetcher(deployment: EndpointDeployment, cached: CachedTarget) -> Manifest:
    """Fills the model cache. It is done at once where the cache has the target, and waits for another pod that fills it
    as long as that takes: the engine's startup timeout begins afterwards."""
    mounts: list[Manifest] = [{"name": "scratch", "mountPath": SCRATCH_DIR}, {"name": "tmp", "mountPath": "/tmp"},
                              {"name": "model-cache", "mountPath": MODEL_CACHE_DIR}]
    revision = () if cached.target.revision is None else ("--revision", cached.target.revision)
    container = _ours(deployment, "prefetch-target", mounts, "eyrie_workers.targets.prefetch", *literal((
        "--cache", MODEL_CACHE_DIR, "--model", cached.target.model, *revision)))
    return container | {
        "env": [{"name": "HF_HOME", "value": HUB_DIR}, {"name": "HOME", "value": SCRATCH_DIR},
                *_secret_variables(deployment.placement)],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}}


def _plugin_bringer(deployment: EndpointDeployment) -> Manifest:
    return _ours(deployment, "bring-plugin", [{"name": "plugin", "mountPath": PLUGIN_DIR}],
                 "eyrie_workers.engines.sglang.plugin_files", "--directory", PLUGIN_DIR)


def _ours(deployment: EndpointDeployment, name: str, mounts: list[Manifest], module: str,
          *arguments: str) -> Manifest:
    """An init container that runs a module of Eyrie, from the image that contains it."""
    return {
        "name": name, "image": deployment.fetch_image or deployment.placement.image,
        "imagePullPolicy": deployment.placement.image_pull_policy,
        "command": [*(deployment.fetch_python or deployment.python), "-m", module, *arguments],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "terminationMessagePolicy": _TERMINATION_POLICY, "securityContext": _confined(deployment),
        "volumeMounts": mounts + _host_mounts(deployment.placement),
    }


def _secret_variables(placement: Placement) -> list[Manifest]:
    return [{"name": one.variable, "valueFrom": {"secretKeyRef": {"name": one.secret, "key": one.key}}}
            for one in placement.secret_variables]


def _confined(deployment: EndpointDeployment) -> Manifest:
    return {"allowPrivilegeEscalation": False, "runAsNonRoot": deployment.run_as > 0, "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"}}


def _resources(placement: Placement) -> Manifest:
    gpus = {placement.gpu_resource: str(placement.num_gpus)} if placement.num_gpus else {}
    found = {"requests": {**placement.requests, **gpus}, "limits": {**placement.limits, **gpus}}
    return {kind: amounts for kind, amounts in found.items() if amounts}


def _mounts(deployment: EndpointDeployment, line: EngineLine, adaptive_map: str | None) -> list[Manifest]:
    placement = deployment.placement
    mounts: list[Manifest] = [{"name": "scratch", "mountPath": SCRATCH_DIR}, {"name": "tmp", "mountPath": "/tmp"},
                              {"name": "models", "mountPath": HUB_DIR}]
    if deployment.cached_target is not None:
        mounts.append({"name": "model-cache", "mountPath": MODEL_CACHE_DIR, "readOnly": True})
    if placement.shared_memory is not None:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    mounts += _work_mounts(placement)
    if line.fetch is not None:
        mounts.append({"name": "drafter", "mountPath": DRAFTER_DIR, "readOnly": True})
    if line.plugin:
        mounts.append({"name": "plugin", "mountPath": PLUGIN_DIR, "readOnly": True})
    if adaptive_map is not None:
        mounts.append({"name": "adaptive", "mountPath": ADAPTIVE_DIR, "readOnly": True})
    if deployment.api_key is not None:
        mounts.append({"name": "key", "mountPath": KEY_DIR, "readOnly": True})
    return mounts + _host_mounts(placement)


def _work_mounts(placement: Placement) -> list[Manifest]:
    if not isinstance(placement.work, VolumeWork):
        return []
    sub = {} if placement.work.sub_path is None else {"subPath": placement.work.sub_path}
    return [{"name": "work", "mountPath": placement.work.mount_path, "readOnly": True, **sub}]


def _host_mounts(placement: Placement) -> list[Manifest]:
    return [{"name": f"host-{number}", "mountPath": one.mount_path, "readOnly": one.read_only}
            for number, one in enumerate(placement.host_paths)]


def _volumes(deployment: EndpointDeployment, line: EngineLine, adaptive_map: str | None) -> list[Manifest]:
    placement, cached = deployment.placement, deployment.cached_target
    work = placement.work
    scratch_size = work.scratch_size if isinstance(work, S3Work) else None
    volumes: list[Manifest] = [{"name": "scratch", "emptyDir": _bounded(scratch_size)},
                               {"name": "tmp", "emptyDir": {}}, {"name": "models", "emptyDir": {}}]
    if cached is not None:
        volumes.append({"name": "model-cache", **(
            {"persistentVolumeClaim": {"claimName": cached.volume.claim}} if cached.volume.claim is not None else
            {"hostPath": {"path": cached.volume.node_path, "type": "Directory"}})})
    if placement.shared_memory is not None:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": placement.shared_memory}})
    if isinstance(work, VolumeWork):
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": work.claim, "readOnly": True}})
    if line.fetch is not None:
        volumes.append({"name": "drafter", "emptyDir": {}})
        if isinstance(work, S3Work) and work.credentials_secret is not None:
            volumes.append({"name": "artifacts", "secret": {"secretName": work.credentials_secret,
                                                            "defaultMode": 0o440}})
    if line.plugin:
        volumes.append({"name": "plugin", "emptyDir": {}})
    if adaptive_map is not None:
        volumes.append({"name": "adaptive", "configMap": {"name": adaptive_map}})
    if deployment.api_key is not None:
        key = deployment.api_key
        volumes.append({"name": "key", "secret": {"secretName": key.secret, "defaultMode": 0o440,
                                                  "items": [{"key": key.key, "path": key.key}]}})
    return volumes + [{"name": f"host-{number}", "hostPath": {"path": one.path, "type": "Directory"}}
                      for number, one in enumerate(placement.host_paths)]


def _bounded(size: str | None) -> dict[str, Any]:
    return {} if size is None else {"sizeLimit": size}


def _scheduling(placement: Placement) -> Manifest:
    wanted: Manifest = {
        "serviceAccountName": placement.service_account, "priorityClassName": placement.priority_class,
        "imagePullSecrets": [{"name": name} for name in placement.image_pull_secrets],
        "nodeSelector": dict(placement.node_selector),
        "tolerations": [one.model_dump(exclude_none=True) for one in placement.tolerations],
    }
    if placement.gpu_type is not None:
        wanted["nodeSelector"][placement.gpu_type_label] = placement.gpu_type
    return {name: value for name, value in wanted.items() if value}
