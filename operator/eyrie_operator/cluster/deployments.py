"""Builds the `EndpointDeployment` of an endpoint from administrator's settings, the endpoint's own, and its drafters.

Drafters are added one revision at a time (`with_drafter`), so that an error of one drafter is distinguished from an
error of the endpoint. A revision names its drafter by an absolute path below EYRIE_HOME, which is the same in every
pod. On a work volume the pod reads that path. In an artifact store the key is the path relative to the home: the
stage's directory is the prefix, the rest is the part. The operator reads config.json and the card from the store, or
from the path if it has the volume mounted. Where the config cannot be read, the spec of the job that trained the
drafter is used; it suffices for a command line if it sets `drafter.max_position_embeddings` and trains one family.

SGLang's command line depends on the target's config.json. The operator reads it from a mounted directory or a Hub cache
(HF_HOME, HF_HUB_CACHE). Where it can read neither, it takes the target's architecture and number of layers from a
drafter's card, and the drafter's context length as the target's. This suffices for the architectures in
PLAIN_ATTENTION; for others it raises Undeployable with a hint.
"""

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from eyrie_api.artifacts import MANIFEST, parse_manifest
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.contract.cluster import MODEL_CACHE_DIR, ClusterProfile, ServingSpec
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import Placement, S3Work, WorkArea
from eyrie_api.contract.serving import EMBEDDED_CONCURRENCY
from eyrie_api.contract.status import Endpoint, Revision
from eyrie_api.contract.targets import TargetSpec, is_hub_id
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.database.endpoints import Serving
from eyrie_api.errors import ArtifactMissing, EyrieError
from eyrie_api.planning.facts import read_config, target_dir
from eyrie_api.planning.placement import merge_placement
from eyrie_api.planning.sglang_attention import profile as machine_profile
from eyrie_api.settings import Settings
from eyrie_operator.manifests.deployment import (
    CachedTarget,
    DrafterFiles,
    EmbeddedLine,
    EndpointDeployment,
    Owner,
    StoredDrafter,
    Undeployable,
    digest,
)
from eyrie_operator.manifests.pods import ANY_HOST
from eyrie_pipelines.work_area import split_drafter
from eyrie_workers.engines.process import EngineCommand
from eyrie_workers.sglang.checkpoints import (
    DrafterCheckpoint,
    TargetCheckpoint,
    read_drafter,
    read_target,
)
from eyrie_workers.sglang.launch import DEFAULT_RUNNING_REQUESTS, LaunchPlan
from eyrie_workers.targets.model_cache import revision_link

log = logging.getLogger(__name__)

CONFIG, CARD = "config.json", "eyrie-card.json"
_TRAINING_DEPTH = 5
"""Number of path components of `jobs/<id>/stages/train/<candidate>`; the components below are the part."""


@dataclass(frozen=True)
class DrafterFound:
    """The readable content of a drafter's directory; None for what cannot be read."""

    config: Mapping[str, Any] | None = None
    card: Mapping[str, Any] | None = None
    stored: StoredDrafter | None = None
    digest: str | None = None


class Drafters:
    def __init__(self, home: PurePosixPath, work: WorkArea | None, options: StoreOptions) -> None:
        self._home, self._work, self._options = home, work, options
        self._known: dict[str, DrafterFound] = {}

    def find(self, directory: str) -> DrafterFound:
        """Config and card of a drafter. Raises ArtifactMissing, ArtifactCorrupt or StoreUnavailable."""
        known = self._known.get(directory)
        if known is None:
            stored = stored_at(directory, self._home)
            if isinstance(self._work, S3Work) and stored is not None:
                known = self._fetch(self._work, stored)
            else:
                known = DrafterFound(_read_file(Path(directory) / CONFIG), _read_file(Path(directory) / CARD))
            if known.config is not None:
                self._known[directory] = known
        return known

    def files(self, directory: str, job: JobSpec | None, *, facts_needed: bool) -> DrafterFiles:
        """The drafter's files as input of the manifests. Raises Undeployable, Unlaunchable, ArtifactMissing,
        ArtifactCorrupt or StoreUnavailable.

        facts_needed  whether the command line depends on the drafter's config: SGLang's does, our engine reads the
                      directory itself
        """
        content = self.find(directory)
        if content.config is not None:
            facts = read_drafter(directory, content.config)
        elif not facts_needed:
            facts = DrafterCheckpoint(directory, context_length=1)  # not read
        elif job is not None and job.drafter.max_position_embeddings is not None and not job.sweep.families:
            facts = DrafterCheckpoint(directory, job.drafter.max_position_embeddings, job.drafter.sliding_window,
                                  algorithm=FAMILIES[job.drafter.family].sglang_algorithm)
        else:
            raise Undeployable(f"{directory}/{CONFIG} cannot be read by the operator, and the drafter's job does not "
                               "say drafter.max_position_embeddings, or trains several families",
                               "mount the work volume into the operator's pod, or keep work in an artifact store")
        return DrafterFiles(facts, content.stored, content.digest)

    def _fetch(self, work: S3Work, stored: StoredDrafter) -> DrafterFound:
        options = self._options.model_copy(update={
            "url": work.url, "endpoint_url": work.endpoint_url, "region": work.region})
        store = open_store(work.url, options)
        name = f"{stored.prefix}/{MANIFEST}"
        manifest = parse_manifest(store.read(name), f"{name} in {store.url}")
        inside = {file.path: file.sha256 for file in manifest.files if file.path.startswith(f"{stored.part}/")}
        if f"{stored.part}/{CONFIG}" not in inside:
            raise ArtifactMissing(f"the manifest of {stored.prefix} in {store.url} lists no {stored.part}/{CONFIG}",
                                  "promote a drafter that is there")
        card = f"{stored.part}/{CARD}"
        return DrafterFound(
            _json(store.read(f"{stored.prefix}/{stored.part}/{CONFIG}")),
            _json(store.read(f"{stored.prefix}/{card}")) if card in inside else None, stored, digest(inside))


def stored_at(directory: str, home: PurePosixPath) -> StoredDrafter | None:
    """The location in the store of a path; None for a path outside the home or not of a training stage."""
    path = PurePosixPath(directory)
    if not path.is_relative_to(home):
        return None
    inside = path.relative_to(home)
    if len(inside.parts) <= _TRAINING_DEPTH or (inside.parts[0], *inside.parts[2:4]) != ("jobs", "stages", "train"):
        return None
    return StoredDrafter(*split_drafter(Path(inside)))


def _read_file(path: Path) -> Mapping[str, Any] | None:
    try:
        return _json(path.read_bytes())
    except OSError:
        return None


def _json(data: bytes) -> Mapping[str, Any] | None:
    try:
        read = json.loads(data)
    except ValueError:
        log.warning("a drafter's file is not JSON")
        return None
    return read if isinstance(read, dict) else None


PLAIN_ATTENTION = frozenset({
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MistralForCausalLM",
    "Olmo2ForCausalLM"})
"""Architectures with full attention in every layer whatever the config contains: no other field of it is needed."""


_ENDING_S = 10.0
"""Of an engine's time to end: its last answers get their errors within four seconds, then the process exits."""


class Deployments:
    def __init__(self, settings: Settings, profile: ClusterProfile, given: ServingSpec) -> None:
        self._given, self._profile = given, profile
        self._work = given.placement.work or profile.stages.work
        self._drafters = Drafters(PurePosixPath(profile.home), self._work, settings.artifacts)

    def of(self, endpoint: Endpoint, serving: Serving, *, served: Collection[str],
           owner: Owner | None) -> EndpointDeployment:
        """The deployment without drafters. Raises InvalidInput for a configuration that cannot be deployed."""
        given, serve = self._given, serving.serve
        placement = merge_placement(given.placement, serve.placement)
        pull_secrets = dict.fromkeys((*placement.image_pull_secrets, *self._profile.stages.image_pull_secrets))
        placement = placement.model_copy(update={"work": self._work, "image_pull_secrets": tuple(pull_secrets)})
        engine = (self._embedded(endpoint, serving) if serve.engine.kind == "embedded" else
                  self._sglang(endpoint, serving, placement))
        if given.gateway is not None:
            hostnames = tuple(name.replace("{endpoint}", endpoint.name) for name in given.gateway.hostnames)
            given = given.model_copy(update={"gateway": given.gateway.model_copy(update={"hostnames": hostnames})})
        return EndpointDeployment(
            given, placement, engine, served=frozenset(served), replicas=serve.replicas or given.replicas,
            min_acceptance_ratio=serve.min_acceptance_ratio, cached_target=self._cached(serving.target), owner=owner,
            target_path=serving.target.model if PurePosixPath(serving.target.model).is_absolute() else None,
            reads=serving.rules(Path(self._profile.home), None), fetch_image=self._profile.stages.image,
            fetch_python=self._profile.python)

    def _cached(self, target: TargetSpec) -> CachedTarget | None:
        volume = self._profile.model_cache
        return None if volume is None or not is_hub_id(target.model) else CachedTarget(volume, target)

    def _served_path(self, target: TargetSpec) -> str:
        """The target in an engine's command line: a path in the model cache, else what the endpoint says."""
        if self._cached(target) is None:
            return target.model
        return str(revision_link(PurePosixPath(MODEL_CACHE_DIR), target))

    def with_drafter(self, deployment: EndpointDeployment, revision: Revision,
                     job: JobSpec | None) -> EndpointDeployment:
        """`deployment` with this revision's drafter added. Raises what `Drafters.files` raises."""
        directory = revision.use.drafter_dir
        if directory is None:
            return deployment
        files = self._drafters.files(directory, job, facts_needed=isinstance(deployment.engine, LaunchPlan))
        return replace(deployment, drafters={**deployment.drafters, revision.number: files})

    def _embedded(self, endpoint: Endpoint, serving: Serving) -> EmbeddedLine:
        target, serve = serving.target, serving.serve
        path, left_s = self._served_path(target), self._given.drain_timeout_s - self._given.leave_delay_s

        def argv(use: DrafterUse, port: int) -> tuple[str, ...]:
            command = EngineCommand(
                target=path, model=endpoint.model, use=use, host=ANY_HOST, port=port,
                max_concurrency=serve.max_concurrency or EMBEDDED_CONCURRENCY, dtype=target.dtype,
                # What an engine has for its answers after SIGTERM; at least half of the time before it is killed.
                drain_s=max(left_s - _ENDING_S, left_s / 2.0))
            return (*self._given.python, *command.argv()[1:])  # the image's Python instead of this one

        return argv

    def _sglang(self, endpoint: Endpoint, serving: Serving, placement: Placement) -> LaunchPlan:
        engine = serving.serve.engine
        machine = replace(machine_profile(serving.serve.hardware_profile or self._given.hardware_profile),
                          given_fraction=engine.sglang_arguments.mem_fraction_static)
        target = self._target(endpoint, serving)
        if self._cached(serving.target) is not None:
            target = replace(target, model=self._served_path(serving.target), revision=None)
        return LaunchPlan(
            target=target, machine=machine, served_model_name=endpoint.model,
            dtype=serving.target.dtype,
            engine=engine.model_copy(update={"tp_size": max(engine.tp_size, placement.num_gpus)}),
            max_running_requests=serving.serve.max_concurrency or DEFAULT_RUNNING_REQUESTS)

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
            content = self._drafters.find(drafter_dir)
            reach = read_drafter(drafter_dir, content.config).context_length if content.config is not None else None
        except EyrieError:
            return None
        about = (content.card or {}).get("target", {})
        if reach is None or about.get("architecture") not in PLAIN_ATTENTION:
            return None
        return TargetCheckpoint(model=model, revision=commit, architecture=about["architecture"],
                            num_layers=int(about["num_layers"]), context_length=reach)
