"""Command line, environment and files of one revision's engine. Pure.

SGLang's command line is rendered by `launch_arguments` with the paths inside the pod: of the mounted or downloaded
drafter, the adaptive map and the key file. It is complete when the Deployment is rendered; nothing is computed in the
pod.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from eyrie_api.v1alpha1.status import Revision
from eyrie_operator.manifests.deployment import (
    DrafterFiles,
    EmbeddedEngine,
    EndpointDeployment,
    StoredDrafter,
    Undeployable,
    fetched,
)
from eyrie_workers.engines.sglang.launch import GUARDED_MODULE, adaptive_config, launch_arguments, launch_environment

ADAPTIVE_DIR, ADAPTIVE_FILE = "/etc/eyrie/adaptive", "adaptive.json"
KEY_DIR = "/etc/eyrie/key"
DRAFTER_DIR = "/var/lib/eyrie-drafter"
"""The directory to which an init container downloads the drafter."""

PLUGIN_DIR = "/var/lib/eyrie-plugin"
"""The directory to which an init container copies the package that SGLang imports."""

MEETING_PORT = 20000
"""Rendezvous port of the nodes of one engine (--dist-init-addr)."""

ANY_HOST = "0.0.0.0"  # the pod's own address is not known before it runs


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
    plugin: bool = False
    """Whether SGLang imports our package from PLUGIN_DIR."""


def engine_line(endpoint_model: str, revision: Revision, deployment: EndpointDeployment) -> EngineLine:
    """The command line of one revision's engine. Raises Undeployable or Unlaunchable."""
    drafter = _drafter(revision, deployment)
    stored = fetched(drafter, deployment.placement) if drafter is not None else None
    directory = None if drafter is None else DRAFTER_DIR if stored is not None else drafter.facts.directory
    if isinstance(deployment.engine, EmbeddedEngine):
        use = revision.use.model_copy(update={"drafter_dir": directory})
        return EngineLine(command=literal(deployment.engine.argv(use, deployment.port)), ready_path="/health",
                          drafter=drafter, fetch=stored)
    shared = deployment.engine.plan
    plan = replace(
        shared, served_model_name=endpoint_model, setting=revision.use.setting, map=revision.use.map, host=ANY_HOST,
        port=deployment.port, adaptive_path=f"{ADAPTIVE_DIR}/{ADAPTIVE_FILE}",
        drafter=None if drafter is None or directory is None else replace(drafter.facts, directory=directory),
        context_length=revision.use.context_length or shared.context_length,
        key_file=None if deployment.api_key is None else f"{KEY_DIR}/{deployment.api_key.key}",
        plugin_root=None if deployment.fetch_image is None else PLUGIN_DIR)  # else the engine's image has it
    line = (*deployment.python, "-m", GUARDED_MODULE, *launch_arguments(plan))
    environment = dict(zip(names := launch_environment(plan), literal(names.values()), strict=True))
    if plan.plugin_root is not None:
        environment["PYTHONPATH"] = plan.plugin_root
    return EngineLine(command=(*literal(line), *_nodes(deployment)), ready_path="/ready", environment=environment,
                      adaptive=adaptive_config(plan), drafter=drafter, fetch=stored,
                      plugin=plan.plugin_root is not None)


def literal(arguments: Iterable[str]) -> tuple[str, ...]:
    """Arguments of which the kubelet expands nothing. It replaces `$(NAME)` in commands and variables by the value of a
    variable of the container, secrets included, and `$$` by `$`; a target's name may hold either."""
    return tuple(one.replace("$", "$$") for one in arguments)


def _nodes(deployment: EndpointDeployment) -> tuple[str, ...]:
    """Arguments of a multi-node engine. LeaderWorkerSet sets the variables in each pod; the kubelet expands $(...)."""
    if deployment.num_nodes == 1:
        return ()
    return ("--nnodes", str(deployment.num_nodes), "--node-rank", "$(LWS_WORKER_INDEX)",
            "--dist-init-addr", f"$(LWS_LEADER_ADDRESS):{MEETING_PORT}")


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
