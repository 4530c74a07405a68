"""Builds the `EndpointDeployment` of an endpoint from the administrator's settings and the endpoint's own.

Drafters are added one revision at a time (`with_drafter`), so that an error of one drafter is distinguished from an
error of the endpoint.

SGLang's command line depends on the target's config.json. The operator reads it from a mounted directory or a Hub cache
(HF_HOME, HF_HUB_CACHE). Where it can read neither, it takes the target's architecture and number of layers from a
drafter's card, and the drafter's context length as the target's. This suffices for the architectures in
PLAIN_ATTENTION; for others it raises Undeployable with a hint.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path, PurePosixPath

from eyrie_api.database.endpoints import Serving
from eyrie_api.errors import EyrieError
from eyrie_api.settings import Settings
from eyrie_api.submission.facts import read_config, target_dir
from eyrie_api.submission.placement import merge_placement
from eyrie_api.v1alpha1.cluster import MODEL_CACHE_DIR, ClusterProfile, ServingSpec
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.placement import Placement
from eyrie_api.v1alpha1.serving import EMBEDDED_CONCURRENCY
from eyrie_api.v1alpha1.status import Endpoint, Revision
from eyrie_api.v1alpha1.targets import TargetSpec, is_hub_id
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_operator.cluster.drafters import Drafters
from eyrie_operator.manifests.deployment import (
    Autoscale,
    CachedTarget,
    EmbeddedEngine,
    EndpointDeployment,
    GatewayRef,
    KeySecret,
    Monitoring,
    Owner,
    SglangEngine,
    Undeployable,
)
from eyrie_operator.manifests.engines import ANY_HOST
from eyrie_workers.engines.process import EngineCommand
from eyrie_workers.engines.sglang.checkpoints import TargetCheckpoint, read_drafter, read_target
from eyrie_workers.engines.sglang.launch_plan import DEFAULT_RUNNING_REQUESTS, LaunchPlan
from eyrie_workers.engines.sglang.profiles import profile as machine_profile
from eyrie_workers.targets.model_cache import revision_link

PLAIN_ATTENTION = frozenset({
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MistralForCausalLM",
    "Olmo2ForCausalLM"})
"""Architectures with full attention in every layer whatever the config contains: no other field of it is needed."""


_ENDING_S = 10.0
"""Of an engine's time to end: its last answers get their errors within four seconds, then the process exits."""


def drain_within(drain_timeout_s: float, leave_delay_s: float) -> float:
    """Seconds that an engine has for its answers after SIGTERM; at least half of those before it is killed. Pure."""
    left = drain_timeout_s - leave_delay_s
    return max(left - _ENDING_S, left / 2.0)


class Deployments:
    """Builds the deployments of one installation."""

    def __init__(self, settings: Settings, profile: ClusterProfile, given: ServingSpec) -> None:
        self._given, self._profile = given, profile
        self._work = given.placement.work or profile.stages.work
        self._drafters = Drafters(PurePosixPath(profile.home), self._work, settings.artifacts)

    @property
    def namespace(self) -> str:
        """The namespace of the endpoints' objects."""
        return self._given.namespace

    def of(self, endpoint: Endpoint, serving: Serving, *, served: Collection[str],
           owner: Owner | None) -> EndpointDeployment:
        """The deployment without drafters. Raises InvalidInput for a configuration that cannot be deployed."""
        given, serve = self._given, serving.serve
        placement = merge_placement(given.placement, serve.placement)
        pull_secrets = dict.fromkeys((*placement.image_pull_secrets, *self._profile.stages.image_pull_secrets))
        placement = placement.model_copy(update={"work": self._work, "image_pull_secrets": tuple(pull_secrets)})
        replicas = serve.replicas or given.replicas
        engine = (self._embedded(endpoint, serving) if serve.engine.kind == "embedded" else
                  self._sglang(endpoint, serving, placement))
        gateway, scale = given.gateway, given.autoscale
        return EndpointDeployment(
            namespace=given.namespace, placement=placement, engine=engine, served=frozenset(served), replicas=replicas,
            port=given.port, startup_timeout_s=given.startup_timeout_s, drain_timeout_s=given.drain_timeout_s,
            leave_delay_s=given.leave_delay_s, surge=given.surge, run_as=given.run_as, python=given.python,
            fetch_image=self._profile.stages.image, fetch_python=self._profile.python,
            api_key=None if given.key_secret is None else KeySecret(given.key_secret),
            cached_target=self._cached(serving.target), owner=owner,
            gateway=None if gateway is None else GatewayRef(
                gateway.name, gateway.namespace, gateway.section,
                tuple(one.replace("{endpoint}", endpoint.name) for one in gateway.hostnames),
                gateway.request_timeout_s),
            autoscale=None if scale is None else Autoscale(
                scale.prometheus_url, scale.max_replicas, scale.target_requests),
            monitoring=Monitoring(labels=given.monitoring_labels, min_acceptance_ratio=serve.min_acceptance_ratio)
            if given.monitoring else None)

    def _cached(self, target: TargetSpec) -> CachedTarget | None:
        volume = self._profile.model_cache
        return None if volume is None or not is_hub_id(target.model) else CachedTarget(volume, target)

    def _path(self, target: TargetSpec) -> str:
        """The target as an engine is told it: a path in the model cache, else what the endpoint says."""
        if self._cached(target) is None:
            return target.model
        return str(revision_link(PurePosixPath(MODEL_CACHE_DIR), target))

    def with_drafter(self, deployment: EndpointDeployment, revision: Revision,
                     job: JobSpec | None) -> EndpointDeployment:
        """`deployment` with this revision's drafter added. Raises what `Drafters.files` raises."""
        directory = revision.use.drafter_dir
        if directory is None:
            return deployment
        files = self._drafters.files(directory, job, facts_needed=isinstance(deployment.engine, SglangEngine))
        return replace(deployment, drafters={**deployment.drafters, revision.number: files})

    def _embedded(self, endpoint: Endpoint, serving: Serving) -> EmbeddedEngine:
        target, serve = serving.target, serving.serve
        path = self._path(target)

        def argv(use: DrafterUse, port: int) -> tuple[str, ...]:
            command = EngineCommand(
                target=path, model=endpoint.model, drafter=Path(use.drafter_dir) if use.drafter_dir else None,
                setting=use.setting, map=use.map, host=ANY_HOST, port=port,
                max_concurrency=serve.max_concurrency or EMBEDDED_CONCURRENCY, dtype=target.dtype,
                drain_s=drain_within(self._given.drain_timeout_s, self._given.leave_delay_s))
            return (*self._given.python, *command.argv()[1:])  # the image's Python instead of this one

        return EmbeddedEngine(path, argv)

    def _sglang(self, endpoint: Endpoint, serving: Serving, placement: Placement) -> SglangEngine:
        machine = machine_profile(serving.serve.hardware_profile or self._given.hardware_profile)
        target = self._target(endpoint, serving)
        if self._cached(serving.target) is not None:
            target = replace(target, model=self._path(serving.target), revision=None)
        return SglangEngine(LaunchPlan(
            target=target, machine=machine, served_model_name=endpoint.model,
            dtype=serving.target.dtype, tp_size=max(serving.serve.engine.tp_size, placement.num_gpus),
            max_running_requests=serving.serve.max_concurrency or DEFAULT_RUNNING_REQUESTS))

    def _target(self, endpoint: Endpoint, serving: Serving) -> TargetCheckpoint:
        target = serving.target
        try:
            directory = target_dir(target)
        except EyrieError:  # a path that exists in the engines' pods only
            directory = None
        if directory is not None:
            return read_target(target.model, read_config(directory), target.revision)
        for revision in reversed(endpoint.revisions):
            if revision.use.drafter_dir is not None:
                from_card = self._checkpoint_from_card(target.model, target.revision, revision.use.drafter_dir)
                if from_card is not None:
                    return from_card
        raise Undeployable(
            f"target {target.model!r}: its config.json cannot be read by the operator, and no drafter's card says that "
            "it is of a plain kind", "mount the target's directory, or a Hub cache that has it (HF_HOME), into the "
            "operator's pod")

    def _checkpoint_from_card(self, model: str, commit: str | None, drafter_dir: str) -> TargetCheckpoint | None:
        try:
            found = self._drafters.find(drafter_dir)
            reach = read_drafter(drafter_dir, found.config).context_length if found.config is not None else None
        except EyrieError:
            return None
        about = (found.card or {}).get("target", {})
        if reach is None or about.get("architecture") not in PLAIN_ATTENTION:
            return None
        return TargetCheckpoint(model=model, revision=commit, architecture=about["architecture"],
                            num_layers=int(about["num_layers"]), context_length=reach)
