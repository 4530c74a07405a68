"""Upload and download of whole stage directories: files first, several at once, the manifest last.

Upload: files that the store has already, by size and digest, are skipped, so that an interrupted upload resumes; so are
files that only the store has, where the stage itself has put them. The files of a finished directory are compared with
its manifest first, and `manifest.json` is written once: of two pods that ran the same stage with different results, the
second is refused.

Download: files that exist already, by size and digest, are skipped; every file is compared with the manifest.
A directory without a manifest is unfinished. With `unfinished=True` it is downloaded too, so that training resumes
from the checkpoint of a node that was removed.

Hidden files (temporary files, locks) are not transferred.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from eyrie_api.artifacts import MANIFEST, digest_file, parse_manifest, read_manifest, write_atomically
from eyrie_api.artifacts.store import ArtifactStore
from eyrie_api.contract.stages import STAGES, FileEntry, Manifest, StageName
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing


def upload_dir(store: ArtifactStore, directory: Path, prefix: str) -> None:
    """Upload a finished stage's directory below `prefix/`. Raises ArtifactMissing without a manifest or a file that it
    lists, ArtifactCorrupt when a file differs from it, AlreadyWritten when the store has another manifest."""
    listed = {entry.path: entry for entry in read_manifest(directory).files}

    def is_stored(name: str, size_bytes: int, sha256: str) -> bool:
        stored = store.stat(f"{prefix}/{name}")
        return stored is not None and (stored.size_bytes, stored.sha256) == (size_bytes, sha256)

    missing = sorted(path for path, entry in listed.items()
                     if not (directory / path).is_file() and not is_stored(path, entry.size_bytes, entry.sha256))
    if missing:
        raise ArtifactMissing(f"{directory / missing[0]} is listed in its manifest but does not exist",
                              "run the stage again")

    def send(name: str) -> None:
        path = directory / name
        size, digest = path.stat().st_size, digest_file(path)
        if name in listed and (listed[name].size_bytes, listed[name].sha256) != (size, digest):
            raise ArtifactCorrupt(f"{path} differs from the digest in its manifest", "run the stage again")
        if not is_stored(name, size, digest):
            store.upload(f"{prefix}/{name}", path)

    names = (path.relative_to(directory) for path in sorted(directory.rglob("*")) if path.is_file())
    visible = [name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)]
    _move(store.parallel, send, (name for name in visible if name != MANIFEST))
    store.write_once(f"{prefix}/{MANIFEST}", (directory / MANIFEST).read_bytes())


def download_dir(store: ArtifactStore, prefix: str, directory: Path, *, unfinished: bool = False,
                 leave_out: Sequence[str] = ()) -> None:
    """Download a stage's directory: the files its manifest lists, then the manifest.

    unfinished   allow a stage without a manifest; then everything below `prefix/` is downloaded
    leave_out    patterns of names that are not downloaded
    Raises ArtifactMissing without a manifest or a listed file, ArtifactCorrupt when a file differs.
    """
    def wanted(names: Iterable[str]) -> Iterator[str]:
        return (name for name in names if not any(fnmatch(name, pattern) for pattern in leave_out))

    if store.stat(f"{prefix}/{MANIFEST}") is None:
        if not unfinished:
            raise ArtifactMissing(f"no {prefix}/{MANIFEST} in {store.url}", "run the stage that writes it")
        names = (stored.key.removeprefix(f"{prefix}/") for stored in store.list(prefix))
        _move(store.parallel, lambda name: _fetch(store, prefix, directory, name, None), wanted(names))
        return
    text = store.read(f"{prefix}/{MANIFEST}")
    listed = {entry.path: entry for entry in parse_manifest(text, f"{prefix}/{MANIFEST} in {store.url}").files}
    _move(store.parallel, lambda name: _fetch(store, prefix, directory, name, listed[name]), wanted(listed))
    write_atomically(directory / MANIFEST, text)


def _fetch(store: ArtifactStore, prefix: str, directory: Path, name: str, entry: FileEntry | None) -> None:
    key, path = f"{prefix}/{name}", directory / name
    wanted = (entry.size_bytes, entry.sha256) if entry else None
    if wanted is None:
        stored = store.stat(key)
        wanted = (stored.size_bytes, stored.sha256) if stored and stored.sha256 else None
    if not path.is_file() or wanted != (path.stat().st_size, digest_file(path)):
        store.download(key, path, sha256=entry.sha256 if entry else None)


def _move(parallel: int, move: Callable[[str], None], names: Iterable[str]) -> None:
    """Transfer files, several at once."""
    with ThreadPoolExecutor(parallel, thread_name_prefix="eyrie-files") as pool:
        futures = [pool.submit(move, name) for name in names]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@dataclass(frozen=True)
class StageManifest:
    """One finished stage."""

    stage: StageName
    key: str
    directory: Path
    manifest: Manifest


def read_manifests(job_dir: Path) -> tuple[StageManifest, ...]:
    """Every finished stage of a job, in order of stage and key. A directory without a manifest is unfinished and is
    skipped."""
    finished = []
    for stage in STAGES:
        home = job_dir / "stages" / stage
        # Race: the files of a job that is being deleted vanish between a listing and a read.
        with suppress(FileNotFoundError, ArtifactMissing):
            for path in sorted((*home.glob(MANIFEST), *home.glob(f"*/{MANIFEST}"))):
                key = "" if path.parent == home else path.parent.name
                finished.append(StageManifest(stage, key, path.parent, read_manifest(path)))
    return tuple(finished)
