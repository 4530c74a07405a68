"""The model cache of a cluster, as its readers see it: where a target's files are, and their recorded digests.

The layout is that of the Hub's own cache, so an existing one may be given as it is. Beside what the Hub keeps:

    models--org--name/snapshots/<commit>/...     the files
    models--org--name/eyrie/<commit>.json        their sizes, times and digests, written after they were verified
    models--org--name/eyrie/@<revision>          link to the snapshot, written last: what it leads to is whole
    models--org--name/eyrie/lock                 held by the task that fills (`prefetch`)

A branch leads to the commit that it named when it was first used, for every later job: a job must not change its target
between two stages. A digest is taken from the record as long as the file's size and modification time are the recorded
ones, so that no stage reads 64 GB to find out which target it has.

Nothing here writes, imports torch or contacts the Hub: the operator uses the paths too.
"""

import os
from pathlib import Path, PurePath
from urllib.parse import quote

from eyrie_api.artifacts import read_sealed
from eyrie_api.contract.model import Digest, Frozen
from eyrie_api.contract.targets import JobTarget
from eyrie_workers.catalog import MODEL_CACHE_VARIABLE

WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")
"""The files of a model on the Hub that stages and engines read."""

DEFAULT_REVISION = "main"
_OURS = "eyrie"


class CachedFile(Frozen):
    """A file of a snapshot, as it was when its digest was computed."""

    path: str
    size_bytes: int
    mtime_ns: int
    sha256: Digest


class CachedModel(Frozen):
    """The record of a verified snapshot."""

    model: str
    commit: str
    files: tuple[CachedFile, ...]


def model_dir(cache: PurePath, model: str) -> PurePath:
    """The directory of a Hub id in the cache. Pure."""
    return cache / ("models--" + model.replace("/", "--"))


def revision_link(cache: PurePath, target: JobTarget) -> PurePath:
    """The path of a target in the cache, known before the cache is filled. Pure."""
    return model_dir(cache, target.model) / _OURS / f"@{quote(target.revision or DEFAULT_REVISION, safe='')}"


def record_path(snapshot: Path) -> Path:
    return snapshot.parents[1] / _OURS / f"{snapshot.name}.json"


def read_record(snapshot: Path) -> CachedModel | None:
    """The record of a snapshot; None where there is none, or none that can be read."""
    try:
        record = read_sealed(record_path(snapshot).read_bytes(), CachedModel)
    except (OSError, IndexError, ValueError):
        return None
    return record if record.commit == snapshot.name else None


def unchanged(snapshot: Path, file: CachedFile) -> bool:
    """Whether a file has the size and the modification time of its record."""
    try:
        stat = (snapshot / file.path).stat()
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (file.size_bytes, file.mtime_ns)


def recorded_digests(snapshot: Path) -> dict[str, Digest]:
    """Digests of the files of a directory that is a snapshot of a model cache and whose record they still match; empty
    for other directories."""
    record = read_record(snapshot)
    return {} if record is None else {file.path: file.sha256 for file in record.files if unchanged(snapshot, file)}


def cache_of_this_pod() -> Path | None:
    """The model cache that the environment names."""
    named = os.environ.get(MODEL_CACHE_VARIABLE)
    return Path(named) if named else None


def cached_snapshot(cache: Path, target: JobTarget) -> Path | None:
    """The directory of a verified target; None where the cache does not have it. Its files are not looked at."""
    link = Path(revision_link(cache, target))
    snapshot = link.resolve()
    return snapshot if snapshot.is_dir() and read_record(snapshot) is not None else None
