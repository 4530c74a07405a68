"""The pod of one revision's engine: command line, probes, drain, volumes, security. Pure.

SGLang's command line is rendered by `launch_arguments` with the paths inside the pod: of the mounted or downloaded
drafter, the adaptive map and the key file. It is complete when the Deployment is rendered; nothing is computed in the
pod.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from eyrie_api.contract.cluster import MODEL_CACHE_DIR
from eyrie_api.contract.placement import Placement, S3Work, VolumeWork
from eyrie_api.contract.status import Revision
from eyrie_operator.manifests.deployment import (
    CachedTarget,
    DrafterFiles,
    EndpointDeployment,
    Manifest,
    StoredDrafter,
    Undeployable,
    fetched,
)
from eyrie_workers.sglang.launch import (
    GUARDED_MODULE,
    LaunchPlan,
    adaptive_config,
    launch_arguments,
    launch_environment,
)

ADAPTIVE_DIR, ADAPTIVE_FILE = "/etc/eyrie/adaptive", "adaptive.json"
KEY_DIR, KEY_FILE = "/etc/eyrie/key", "engine.yaml"
"""The file of `cluster.key_secret`: SGLang's --config with the line `api-key: ...`, which it reads once."""

DRAFTER_DIR = "/var/lib/eyrie-drafter"
"""The directory to which an init container downloads the drafter."""

PLUGIN_DIR = "/var/lib/eyrie-plugin"
"""The directory to which an init container copies the package that SGLang imports."""

ANY_HOST = "0.0.0.0"  # the pod's own address is not known before it runs

CREDENTIALS_DIR = "/var/run/secrets/eyrie/artifacts"
SCRATCH_DIR = "/scratch"
HUB_DIR = f"{SCRATCH_DIR}/huggingface"
"""Of what the engine itself downloads from the Hub."""

_TERMINATION_POLICY = "FallbackToLogsOnError"
"""The end of the log becomes the container's termination message, which `observed` reports."""

_STARTUP_PERIOD_S = 10
_HEALTH_TIMEOUT_S = 30
"""Above the 20 s after which SGLang reports that its scheduler does not respond."""


@dataclass(frozen=True)
class EngineLine:
    """Command, readiness path, environment and files of a revision's engine container."""

    command: tuple[str, ...]
    ready_path: str
    """Path that responds with 200 only while new requests are accepted."""

    environment: Mapping[str, str] = field(default_factory=dict)
    adaptive: str | None = None
    """Content of ADAPTIVE_DIR/ADAPTIVE_FILE."""

    drafter: DrafterFiles | None = None
    fetch: StoredDrafter | None = None
    judged: tuple[str, ...] = ()
    """Arguments of the program that judges the files which the engine opens; empty: none are judged."""


def engine_line(endpoint_model: str, revision: Revision, deployment: EndpointDeployment) -> EngineLine:
    """The command line of one revision's engine. Raises Undeployable or Unlaunchable."""
    drafter = _drafter(revision, deployment)
    stored = fetched(drafter, deployment.placement) if drafter is not None else None
    directory = None if drafter is None else DRAFTER_DIR if stored is not None else drafter.facts.directory
    rules, judged = deployment.reads, tuple[str, ...]()
    opened = [path for path in (deployment.target_path, None if stored is not None else directory) if path is not None]
    if rules is not None and opened:
        judged = ("--rules", rules.with_job(revision.job_id).model_dump_json(), "--opened", *opened)
    shared = deployment.engine
    if not isinstance(shared, LaunchPlan):
        use = revision.use.model_copy(update={"drafter_dir": directory})
        return EngineLine(command=literal(shared(use, deployment.cluster.port)), ready_path="/health",
                          drafter=drafter, fetch=stored, judged=judged)
    plan = replace(
        shared, served_model_name=endpoint_model, setting=revision.use.setting, map=revision.use.map, host=ANY_HOST,
        port=deployment.cluster.port, adaptive_path=f"{ADAPTIVE_DIR}/{ADAPTIVE_FILE}",
        drafter=None if drafter is None or directory is None else replace(drafter.facts, directory=directory),
        context_length=revision.use.context_length or shared.context_length,
        key_file=None if deployment.cluster.key_secret is None else f"{KEY_DIR}/{KEY_FILE}",
        plugin_root=PLUGIN_DIR)
    line = (*deployment.cluster.python, "-m", GUARDED_MODULE, *launch_arguments(plan))
    environment = dict(zip(names := launch_environment(plan), literal(names.values()), strict=True))
    return EngineLine(command=literal(line), ready_path="/ready", environment=environment,
                      adaptive=adaptive_config(plan), drafter=drafter, fetch=stored, judged=judged)


def literal(arguments: Iterable[str]) -> tuple[str, ...]:
    """Arguments of which the kubelet expands nothing. It replaces `$(NAME)` in commands and variables by the value of a
    variable of the container, secrets included, and `$$` by `$`; a target's name may hold either."""
    return tuple(argument.replace("$", "$$") for argument in arguments)


def _drafter(revision: Revision, deployment: EndpointDeployment) -> DrafterFiles | None:
    """The revision's drafter files; None when no setting of the revision uses a drafter."""
    use = revision.use
    drafts = use.setting.method == "drafter" or (
        use.map is not None and any(point.setting.method == "drafter" for point in use.map.points))
    if not drafts:
        return None
    files = deployment.drafters.get(revision.number)
    if files is None:
        raise Undeployable(f"revision {revision.number} drafts with {use.drafter_dir!r}, of which nothing is known",
                           "read its config.json and give it in `drafters`")
    return files


def pod_spec(deployment: EndpointDeployment, line: EngineLine, adaptive_map: str | None) -> Manifest:
    """The spec of one pod. `adaptive_map` names the ConfigMap of the line's adaptive file."""
    placement, volumes = deployment.placement, _volumes(deployment, line, adaptive_map)
    mounts = [mount for _, mount in volumes if mount is not None]
    spec: Manifest = {
        "automountServiceAccountToken": False, "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(deployment.cluster.drain_timeout_s),
        "securityContext": {"runAsNonRoot": deployment.cluster.run_as > 0, "runAsUser": deployment.cluster.run_as,
                            "runAsGroup": deployment.cluster.run_as, "fsGroup": deployment.cluster.run_as,
                            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_engine(deployment, line, mounts)],
        "volumes": [volume for volume, _ in volumes],
    }
    first = [] if deployment.cached_target is None else [_prefetcher(deployment, deployment.cached_target)]
    if line.fetch is not None:
        first.append(_fetcher(deployment, line))
    elif line.drafter is not None and isinstance(placement.work, VolumeWork):
        # Compares the drafter's files on the work volume with the manifest of the stage that made them.
        first.append(_ours(deployment, "verify-drafter", _work_mounts(placement), "eyrie_api.artifacts.verify",
                           *literal(("--path", line.drafter.facts.directory))))
    if line.judged:
        # In the pod, whose volumes hold the files: a link may have been changed since the job was submitted.
        first.append(_ours(deployment, "judge-files", _work_mounts(placement), "eyrie_api.artifacts.verify",
                           *literal(line.judged)))
    if isinstance(deployment.engine, LaunchPlan):  # whose image need not have our package
        first.append(_ours(deployment, "bring-plugin", [{"name": "plugin", "mountPath": PLUGIN_DIR}],
                           "eyrie_workers.sglang.plugin_files", "--directory", PLUGIN_DIR))
    if first:
        spec["initContainers"] = first
    return spec | _scheduling(placement)


def _engine(deployment: EndpointDeployment, line: EngineLine, mounts: list[Manifest]) -> Manifest:
    placement = deployment.placement

    def probe(path: str, period_s: int, timeout_s: int, failures: int) -> Manifest:
        return {"httpGet": {"path": path, "port": "http"}, "periodSeconds": period_s, "timeoutSeconds": timeout_s,
                "failureThreshold": failures}

    gpus = {placement.gpu_resource: str(placement.num_gpus)} if placement.num_gpus else {}
    resources = {"requests": {**placement.requests, **gpus}, "limits": {**placement.limits, **gpus}}
    starts = math.ceil(deployment.cluster.startup_timeout_s / _STARTUP_PERIOD_S)
    home = {"HOME": SCRATCH_DIR, "HF_HOME": HUB_DIR, "PYTHONUNBUFFERED": "1"}
    if deployment.cached_target is not None:
        home["HF_HUB_OFFLINE"] = "1"
    return {
        "name": "engine", "image": placement.image, "imagePullPolicy": placement.image_pull_policy,
        "command": list(line.command),
        "env": [*({"name": name, "value": value} for name, value in sorted((home | dict(line.environment)).items())),
                *_secret_variables(placement)],
        "ports": [{"name": "http", "containerPort": deployment.cluster.port, "protocol": "TCP"}],
        "resources": {kind: amounts for kind, amounts in resources.items() if amounts},
        "securityContext": _confined(deployment),
        "terminationMessagePolicy": _TERMINATION_POLICY,
        "volumeMounts": mounts,
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", f"{deployment.cluster.leave_delay_s:g}"]}}},
        "startupProbe": probe("/health", _STARTUP_PERIOD_S, _HEALTH_TIMEOUT_S, starts),
        "readinessProbe": probe(line.ready_path, 5, 5, 2),
        "livenessProbe": probe("/health", 30, _HEALTH_TIMEOUT_S, 3),
    }


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


def _ours(deployment: EndpointDeployment, name: str, mounts: list[Manifest], module: str,
          *arguments: str) -> Manifest:
    """An init container that runs a module of Eyrie, from the image that contains it."""
    return {
        "name": name, "image": deployment.fetch_image,
        "imagePullPolicy": deployment.placement.image_pull_policy,
        "command": [*deployment.fetch_python, "-m", module, *arguments],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "terminationMessagePolicy": _TERMINATION_POLICY, "securityContext": _confined(deployment),
        "volumeMounts": mounts + _host_mounts(deployment.placement),
    }


def _secret_variables(placement: Placement) -> list[Manifest]:
    return [{"name": secret.variable, "valueFrom": {"secretKeyRef": {"name": secret.secret, "key": secret.key}}}
            for secret in placement.secret_variables]


def _confined(deployment: EndpointDeployment) -> Manifest:
    return {"allowPrivilegeEscalation": False, "runAsNonRoot": deployment.cluster.run_as > 0,
            "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}}


def _volumes(deployment: EndpointDeployment, line: EngineLine,
             adaptive_map: str | None) -> list[tuple[Manifest, Manifest | None]]:
    """The pod's volumes, each with its mount in the engine's container (None: only init containers mount it)."""
    placement, cached = deployment.placement, deployment.cached_target
    work = placement.work
    volumes: list[tuple[Manifest, Manifest | None]] = []

    def add(name: str, source: Manifest, path: str | None, *, read_only: bool = False) -> None:
        mount = None if path is None else {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})
        volumes.append(({"name": name, **source}, mount))

    limit = work.scratch_size if isinstance(work, S3Work) else None
    add("scratch", {"emptyDir": {} if limit is None else {"sizeLimit": limit}}, SCRATCH_DIR)
    add("tmp", {"emptyDir": {}}, "/tmp")
    add("models", {"emptyDir": {}}, HUB_DIR)
    if cached is not None:
        add("model-cache", {"persistentVolumeClaim": {"claimName": cached.volume.claim}}
            if cached.volume.claim is not None else
            {"hostPath": {"path": cached.volume.node_path, "type": "Directory"}}, MODEL_CACHE_DIR, read_only=True)
    if placement.shared_memory is not None:
        add("shm", {"emptyDir": {"medium": "Memory", "sizeLimit": placement.shared_memory}}, "/dev/shm")
    if isinstance(work, VolumeWork):
        [mount] = _work_mounts(placement)
        volumes.append(({"name": "work", "persistentVolumeClaim": {"claimName": work.claim, "readOnly": True}}, mount))
    if line.fetch is not None:
        add("drafter", {"emptyDir": {}}, DRAFTER_DIR, read_only=True)
        if isinstance(work, S3Work) and work.credentials_secret is not None:
            add("artifacts", {"secret": {"secretName": work.credentials_secret, "defaultMode": 0o440}}, None)
    if isinstance(deployment.engine, LaunchPlan):
        add("plugin", {"emptyDir": {}}, PLUGIN_DIR, read_only=True)
    if adaptive_map is not None:
        add("adaptive", {"configMap": {"name": adaptive_map}}, ADAPTIVE_DIR, read_only=True)
    if deployment.cluster.key_secret is not None:
        add("key", {"secret": {"secretName": deployment.cluster.key_secret, "defaultMode": 0o440,
                               "items": [{"key": KEY_FILE, "path": KEY_FILE}]}}, KEY_DIR, read_only=True)
    for mount, host in zip(_host_mounts(placement), placement.host_paths, strict=True):
        volumes.append(({"name": mount["name"], "hostPath": {"path": host.path, "type": "Directory"}}, mount))
    return volumes


def _work_mounts(placement: Placement) -> list[Manifest]:
    if not isinstance(placement.work, VolumeWork):
        return []
    sub = {} if placement.work.sub_path is None else {"subPath": placement.work.sub_path}
    return [{"name": "work", "mountPath": placement.work.mount_path, "readOnly": True, **sub}]


def _host_mounts(placement: Placement) -> list[Manifest]:
    return [{"name": f"host-{number}", "mountPath": host.mount_path, "readOnly": host.read_only}
            for number, host in enumerate(placement.host_paths)]


def _scheduling(placement: Placement) -> Manifest:
    wanted: Manifest = {
        "serviceAccountName": placement.service_account, "priorityClassName": placement.priority_class,
        "imagePullSecrets": [{"name": name} for name in placement.image_pull_secrets],
        "nodeSelector": placement.node_labels,
        "tolerations": [toleration.model_dump(exclude_none=True) for toleration in placement.tolerations],
    }
    return {name: value for name, value in wanted.items() if value}
