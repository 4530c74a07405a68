"""Whole stage directories to a store and back: files first, several at once, the manifest last.

Up: what the store already has, by size and digest, is not sent again; so a stage that was cut off anywhere uploads what
is missing. A finished directory's files are compared with its manifest before they leave, and `manifest.json` is
written once: of two pods that ran the same stage and made different bytes, the second is refused.

Down: what is here, by size and digest, is not fetched again; every file is compared with the manifest on arrival.
A directory without a manifest is unfinished. It may be brought up and down too (`unfinished=True`): so training goes on
from the checkpoint of a node that was taken away.

Hidden files (what is written aside, locks) stay where they are.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, digest_file, read_manifest, write_atomically
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_api.v1alpha1.stages import FileEntry


@dataclass(frozen=True)
class Moved:
    """What a copy did."""

    moved_files: int
    moved_bytes: int
    skipped_files: int


def upload_dir(store: ArtifactStore, directory: Path, prefix: str, *, unfinished: bool = False) -> Moved:
    """Bring a stage's directory into the store, below `prefix/`.

    unfinished   a manifest need not be there; files that have changed since the last time take the place of the old.
    Raises ArtifactMissing without a manifest, ArtifactCorrupt when a file differs from it, AlreadyWritten when another
    manifest is there.
    """
    finished = (directory / MANIFEST).is_file()
    if not finished and not unfinished:
        raise ArtifactMissing(f"no manifest in {directory}", "finish the stage first, or upload it as unfinished")
    listed = {entry.path: entry for entry in read_manifest(directory).files} if finished else {}
    gone = sorted(path for path in listed if not (directory / path).is_file())
    if gone:
        raise ArtifactMissing(f"{directory / gone[0]} is listed in its manifest but is gone", "run the stage again")

    def send(name: str) -> int | None:
        path = directory / name
        size, digest = path.stat().st_size, digest_file(path)
        if name in listed and (listed[name].size_bytes, listed[name].sha256) != (size, digest):
            raise ArtifactCorrupt(f"{path} differs from the digest in its manifest", "run the stage again")
        there = store.stat(f"{prefix}/{name}")
        if there is not None and (there.size_bytes, there.sha256) == (size, digest):
            return None
        store.upload(f"{prefix}/{name}", path)
        return size

    moved = _move(store.parallel, send, (name for name in _visible(directory) if name != MANIFEST))
    if finished:
        store.write_once(f"{prefix}/{MANIFEST}", (directory / MANIFEST).read_bytes())
    return moved


def download_dir(store: ArtifactStore, prefix: str, directory: Path, *, unfinished: bool = False) -> Moved:
    """Bring a stage's directory here: the files its manifest lists, then the manifest.

    unfinished   a manifest need not be there; everything below `prefix/` is fetched then.
    Raises ArtifactMissing without a manifest or with a file that is gone, ArtifactCorrupt when one differs.
    """
    if store.stat(f"{prefix}/{MANIFEST}") is None:
        if not unfinished:
            raise ArtifactMissing(f"no {prefix}/{MANIFEST} in {store.url}", "run the stage that writes it")
        return _move(store.parallel, lambda name: _fetch(store, prefix, directory, name, None),
                     (found.key.removeprefix(f"{prefix}/") for found in store.list(prefix)))
    text = store.read(f"{prefix}/{MANIFEST}")
    aside = directory / f".{MANIFEST}.fetched"
    write_atomically(aside, text)
    listed = {entry.path: entry for entry in read_manifest(aside).files}
    moved = _move(store.parallel, lambda name: _fetch(store, prefix, directory, name, listed[name]), listed)
    aside.replace(directory / MANIFEST)
    return moved


def _fetch(store: ArtifactStore, prefix: str, directory: Path, name: str, entry: FileEntry | None) -> int | None:
    key, path = f"{prefix}/{name}", directory / name
    wanted = (entry.size_bytes, entry.sha256) if entry else None
    if wanted is None:
        there = store.stat(key)
        wanted = (there.size_bytes, there.sha256) if there and there.sha256 else None
    if path.is_file() and wanted == (path.stat().st_size, digest_file(path)):
        return None
    store.download(key, path, sha256=entry.sha256 if entry else None)
    return path.stat().st_size


def _visible(directory: Path) -> list[str]:
    names = (path.relative_to(directory) for path in sorted(directory.rglob("*")) if path.is_file())
    return [name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)]


def _move(parallel: int, move: Callable[[str], int | None], names: Iterable[str]) -> Moved:
    """Move files, several at once; `move` returns bytes moved, or None for a file that need not be."""
    with ThreadPoolExecutor(parallel, thread_name_prefix="eyrie-files") as pool:
        futures = [pool.submit(move, name) for name in names]
        try:
            sizes = [future.result() for future in as_completed(futures)]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    sent = [size for size in sizes if size is not None]
    return Moved(len(sent), sum(sent), len(sizes) - len(sent))
