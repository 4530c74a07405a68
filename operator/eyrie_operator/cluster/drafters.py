"""Reads a drafter's config.json and card, and locates its directory for an engine's pod.

A revision names its drafter by an absolute path below EYRIE_HOME, which is the same in every pod. On a work volume the
pod reads that path. In an artifact store the key is the path relative to the home: the stage's directory is the prefix,
the rest is the part.

The operator reads config.json and the card from the store, or from the path if it has the volume mounted. A finished
stage never changes, so drafters whose config was read are cached. Where the config cannot be read, the spec of the job
that trained the drafter is used; it suffices for a command line if it sets `drafter.max_position_embeddings` and trains
one family.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from eyrie_api.artifacts import MANIFEST, parse_manifest
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import StoreOptions
from eyrie_api.errors import ArtifactMissing
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.placement import S3Work, WorkArea
from eyrie_operator.manifests.deployment import DrafterFiles, StoredDrafter, Undeployable
from eyrie_operator.manifests.names import digest
from eyrie_pipelines.work_area import split_drafter
from eyrie_workers.engines.sglang.checkpoints import DrafterCheckpoint, family_algorithm, read_drafter

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
    """The drafters of one installation."""

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
                known = DrafterFound(_json(_bytes(Path(directory) / CONFIG)), _json(_bytes(Path(directory) / CARD)))
            if known.config is not None:
                self._known[directory] = known
        return known

    def files(self, directory: str, job: JobSpec | None, *, facts_needed: bool) -> DrafterFiles:
        """The drafter's files as input of the manifests. Raises Undeployable, Unlaunchable, ArtifactMissing,
        ArtifactCorrupt or StoreUnavailable.

        facts_needed  whether the command line depends on the drafter's config: SGLang's does, our engine reads the
                      directory itself
        """
        found = self.find(directory)
        if found.config is not None:
            facts = read_drafter(directory, found.config)
        elif not facts_needed:
            facts = DrafterCheckpoint(directory, context_length=1)  # not read
        elif job is not None and job.drafter.max_position_embeddings is not None and not job.sweep.families:
            facts = DrafterCheckpoint(directory, job.drafter.max_position_embeddings, job.drafter.sliding_window,
                                  algorithm=family_algorithm(job.drafter.family))
        else:
            raise Undeployable(f"{directory}/{CONFIG} cannot be read by the operator, and the drafter's job does not "
                               "say drafter.max_position_embeddings, or trains several families",
                               "mount the work volume into the operator's pod, or keep work in an artifact store")
        return DrafterFiles(facts, found.stored, found.digest)

    def _fetch(self, work: S3Work, stored: StoredDrafter) -> DrafterFound:
        options = self._options.model_copy(update={
            "url": work.url, "endpoint_url": work.endpoint_url, "region": work.region})
        store = open_store(work.url, options)
        name = f"{stored.prefix}/{MANIFEST}"
        manifest = parse_manifest(store.read(name), f"{name} in {store.url}")
        inside = {one.path: one.sha256 for one in manifest.files if one.path.startswith(f"{stored.part}/")}
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


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _json(data: bytes | None) -> Mapping[str, Any] | None:
    if data is None:
        return None
    try:
        read = json.loads(data)
    except ValueError:
        log.warning("a drafter's file is not JSON")
        return None
    return read if isinstance(read, dict) else None
