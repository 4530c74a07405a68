"""The files of jobs that the API serves: from the job's directory, or from the store that is a cluster's work area.

On one machine, and where the work area is a shared volume, `<home>/jobs/<id>` holds everything. The API server of a
cluster whose work area is an artifact store has an empty home of its own: manifests are downloaded on request (they are
small, and all but prove's are immutable), logs and files are streamed from the store in pieces. Large files are never
kept here.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, digest_file, write_atomically
from eyrie_api.artifacts.directories import StageManifest, read_manifests
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.storage_usage import files_in_home, files_in_store, read_in_home
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.contract.cluster import ClusterProfile
from eyrie_api.contract.placement import S3Work
from eyrie_api.contract.stages import FileEntry
from eyrie_api.errors import RUN_AGAIN, ArtifactCorrupt, ArtifactMissing
from eyrie_api.planning.placement import read_profile
from eyrie_api.settings import Settings

PIECE_BYTES = 8 * 2**20


def work_store(profile: ClusterProfile, settings: Settings) -> ArtifactStore | None:
    """The store that is the jobs' work area; None where that is a volume. Its location comes from the cluster profile,
    as for the pods; everything else, credentials included, from EYRIE_ARTIFACTS_*."""
    work = profile.stages.work
    if not isinstance(work, S3Work):
        return None
    where = {"url": work.url, "endpoint_url": work.endpoint_url, "region": work.region}
    return open_store(options=settings.artifacts.model_copy(update=where))


class JobFiles:
    """Reads files of jobs. `store` is the work area; None where job directories are under the home."""

    def __init__(self, settings: Settings, store: ArtifactStore | None) -> None:
        self._settings, self.store = settings, store

    @classmethod
    def of(cls, settings: Settings) -> "JobFiles":
        """From the settings. Raises InvalidInput for a profile that cannot be read."""
        if settings.cluster_profile is None:
            return cls(settings, None)
        return cls(settings, work_store(read_profile(settings.cluster_profile), settings))

    def manifests(self, job_id: str) -> tuple[StageManifest, ...]:
        """Every finished stage. Raises StoreUnavailable."""
        if self.store is not None:
            for stored in self.store.list(f"jobs/{job_id}/stages"):
                path = self._settings.home.absolute() / stored.key
                # A later attempt may have run prove again; the manifests of the other stages are immutable.
                if path.name == MANIFEST and (path.parent.name == "prove" or not path.is_file()):
                    write_atomically(path, self.store.read(stored.key))
        return read_manifests(self._settings.job_dir(job_id))

    def all_files(self) -> Iterator[tuple[str, int]]:
        """Every file of every job with its size, in order of name. Raises StoreUnavailable, StoreAccessDenied,
        OSError."""
        return files_in_home(self._settings.home) if self.store is None else files_in_store(self.store)

    def record(self, place: str) -> bytes:
        """A small file by its path below the home. Raises ArtifactMissing, StoreUnavailable."""
        return read_in_home(self._settings.home, place) if self.store is None else self.store.read(place)

    def log(self, job_id: str, stage: str, key: str, offset: int, most: int) -> bytes | None:
        """A stage's log from `offset`, at most `most` bytes; None when there is none. Raises StoreUnavailable."""
        path = self._settings.stage_dir(job_id, stage, key) / "log.txt"
        if self.store is None:
            try:
                with path.open("rb") as file:
                    file.seek(offset)
                    return file.read(most)
            except FileNotFoundError:
                return None
        stored = self.store.stat(self._key(path))
        if stored is None:
            return None
        length = min(most, stored.size_bytes - offset)
        return self.store.read(self._key(path), start=offset, length=length) if length > 0 else b""

    def path(self, stage: StageManifest, entry: FileEntry) -> Path | None:
        """Path of a finished stage's file on this machine; None where `pieces` reads it from the store. Raises
        ArtifactCorrupt for a path that is not a file in the stage's directory, and for bytes that differ from the
        manifest's digest."""
        if self.store is not None:
            return None
        root, file = stage.directory.resolve(), (stage.directory / entry.path).resolve()
        if not file.is_relative_to(root) or not file.is_file():
            raise ArtifactCorrupt(f"{entry.path!r} is in the manifest but is not a file of its stage's directory",
                                  RUN_AGAIN)
        if file.stat().st_size != entry.size_bytes or digest_file(file) != entry.sha256:
            raise ArtifactCorrupt(f"{entry.path!r} differs from the digest in its manifest",
                                  RUN_AGAIN)
        return file

    def pieces(self, stage: StageManifest, entry: FileEntry) -> Iterator[bytes]:
        """A finished stage's file from the store. Raises ArtifactMissing before the first piece, StoreUnavailable, and
        ArtifactCorrupt in place of the last piece: the response is then shorter than announced, and clients fail."""
        assert self.store is not None
        key = self._key(stage.directory / entry.path)
        if self.store.stat(key) is None:
            raise ArtifactMissing(f"{entry.path!r} is in the manifest but not in the store",
                                  RUN_AGAIN)
        return self._read(key, entry)

    def _read(self, key: str, entry: FileEntry) -> Iterator[bytes]:
        assert self.store is not None
        sha = hashlib.sha256()
        for start in range(0, entry.size_bytes, PIECE_BYTES):
            piece = self.store.read(key, start=start, length=min(PIECE_BYTES, entry.size_bytes - start))
            sha.update(piece)
            if start + PIECE_BYTES >= entry.size_bytes and "sha256:" + sha.hexdigest() != entry.sha256:
                raise ArtifactCorrupt(f"{key} differs from the digest in its manifest", RUN_AGAIN)
            yield piece

    def _key(self, path: Path) -> str:
        return path.relative_to(self._settings.home.absolute()).as_posix()
