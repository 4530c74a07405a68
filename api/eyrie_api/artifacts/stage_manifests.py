"""The finished stages of a job, read from its directory.

A directory without a manifest is unfinished and is skipped; manifests are immutable, so reading them needs no
coordination with the process that runs the job.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, read_manifest
from eyrie_api.errors import ArtifactMissing
from eyrie_api.v1alpha1.stages import STAGES, Manifest, StageName


@dataclass(frozen=True)
class StageManifest:
    """One finished stage."""

    stage: StageName
    key: str
    directory: Path
    manifest: Manifest


def read_manifests(job_dir: Path) -> tuple[StageManifest, ...]:
    """Every finished stage of a job, in order of stage and key."""
    found = []
    for stage in STAGES:
        home = job_dir / "stages" / stage
        # Race: the files of a job that is being deleted vanish between a listing and a read.
        with suppress(FileNotFoundError, ArtifactMissing):
            for path in sorted((*home.glob(MANIFEST), *home.glob(f"*/{MANIFEST}"))):
                key = "" if path.parent == home else path.parent.name
                found.append(StageManifest(stage, key, path.parent, read_manifest(path)))
    return tuple(found)
