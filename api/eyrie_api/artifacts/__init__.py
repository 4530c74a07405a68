"""Artifacts: digests, atomic writes and manifests, and the stores that hold them.

A stage's output is a directory. Every file in it is written under a temporary name and renamed, and `manifest.json`
comes last: a directory without a manifest is unfinished, a directory with one is immutable. The functions for that are
in this file, since every program needs them. The modules transfer such directories:

    store            the interface of a store, and its location and access from EYRIE_ARTIFACTS_*
    open_store       the store of a URL
    local            a directory as a store
    s3               a bucket as a store; with s3_client, its requests, the only importer of boto3
    directories      upload and download of whole stage directories, manifest last; the finished stages of a job
    fetch            a program that downloads a part of a finished stage
    storage_usage    what jobs hold on disk, and what may be removed
"""

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel, ValidationError

from eyrie_api import client_left
from eyrie_api.contract.rules import first_problem
from eyrie_api.contract.stages import FileEntry, Manifest
from eyrie_api.errors import RUN_AGAIN, ArtifactCorrupt, ArtifactMissing

MANIFEST = "manifest.json"
_CHUNK = 1 << 20
_SEAL = "digest"
"""The member that `write_sealed` adds; no sealed value has a field of that name."""


ModelT = TypeVar("ModelT", bound=BaseModel)


def digest_bytes(data: bytes) -> str:
    """`sha256:<hex>` of the bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """`sha256:<hex>` of a file's bytes."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            client_left.check()
            sha.update(chunk)
    return "sha256:" + sha.hexdigest()


def digest_model(value: BaseModel) -> str:
    """Digest of a contract value's JSON with sorted keys, so that field order does not matter."""
    return digest_bytes(json.dumps(value.model_dump(mode="json"), sort_keys=True).encode())


def digest_directory(directory: Path) -> str:
    """Digest of a directory's file names and bytes, hidden files left out."""
    sha = hashlib.sha256()
    for path in sorted(p for p in directory.rglob("*") if p.is_file() and not p.name.startswith(".")):
        sha.update(f"{path.relative_to(directory).as_posix()}\0{digest_file(path)}\n".encode())
    return "sha256:" + sha.hexdigest()


@contextmanager
def temporary_file(path: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A file next to `path`, to be renamed to it when its content is complete; deleted at the end unless it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "r+b") as file:
            os.fchmod(handle, 0o644)
            yield file, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def write_to_disk(file: IO[bytes], data: bytes) -> None:
    """Write the last bytes of a file, and wait until the disk has all of them."""
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a temporary file next to `path`, fsync, rename: a reader sees the old file or the new one, never a part."""
    with temporary_file(path) as (file, temporary):
        write_to_disk(file, data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)


def write_model(path: Path, value: BaseModel) -> None:
    """Write a contract value as indented JSON, atomically."""
    write_atomically(path, value.model_dump_json(indent=2) + "\n")


def write_sealed(path: Path, value: BaseModel) -> None:
    """`write_model`, with the digest of the value as the last member: a flipped bit in a number would be valid JSON."""
    members = json.loads(value.model_dump_json())
    text = json.dumps(members | {_SEAL: _digest_members(members)}, indent=2, ensure_ascii=False)
    write_atomically(path, text + "\n")


def read_sealed(data: bytes, kind: type[ModelT]) -> ModelT:
    """The value that `write_sealed` or `write_model` wrote. The digest is of the members as they were written. Raises
    ValueError for another digest, or for what is no such value (pydantic's ValidationError)."""
    members = json.loads(data)
    seal = members.pop(_SEAL, None) if isinstance(members, dict) else None
    if seal is not None and seal != _digest_members(members):
        raise ValueError("its digest differs: the file was damaged after it was written")
    return kind.model_validate_json(json.dumps(members))


def _digest_members(members: dict[str, object]) -> str:
    return digest_bytes(json.dumps(members, sort_keys=True).encode())


def list_files(root: Path, paths: Iterable[Path]) -> tuple[FileEntry, ...]:
    """Manifest entries of `paths`, relative to `root`, in order of name."""
    return tuple(
        FileEntry(path=path.relative_to(root).as_posix(), size_bytes=path.stat().st_size, sha256=digest_file(path))
        for path in sorted(paths)
    )


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path` (a file, or the directory that holds it). Raises ArtifactMissing when there is none and
    ArtifactCorrupt when it cannot be read."""
    file = path / MANIFEST if path.is_dir() else path
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise ArtifactMissing(f"no manifest at {file}", "run the stage that writes it, or retry the job") from None
    return parse_manifest(data, str(file))


def read_report(path: Path, kind: type[ModelT]) -> ModelT:
    """The report in the manifest at `path`. As `read_manifest`; raises ArtifactCorrupt for a report of another kind."""
    manifest = read_manifest(path)
    if not isinstance(manifest.report, kind):
        raise ArtifactCorrupt(f"manifest {path / MANIFEST if path.is_dir() else path} is that of stage "
                              f"{manifest.stage!r}, and has no {kind.__name__}", RUN_AGAIN)
    return manifest.report


def parse_manifest(data: bytes, name: str) -> Manifest:
    """A manifest's bytes; `name` is for the error. Raises ArtifactCorrupt."""
    try:
        return read_sealed(data, Manifest)
    except ValueError as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise ArtifactCorrupt(f"manifest {name} is invalid: {reason}",
                              RUN_AGAIN) from error


def verify_files(manifest: Manifest, root: Path) -> None:
    """Compare every file of a manifest with its size and digest. Raises ArtifactMissing or ArtifactCorrupt."""
    for entry in manifest.files:
        path = root / entry.path
        if not path.is_file():
            raise ArtifactMissing(f"{path} is listed in the manifest of stage {manifest.stage!r} but does not exist",
                                  RUN_AGAIN)
        if path.stat().st_size != entry.size_bytes or digest_file(path) != entry.sha256:
            raise ArtifactCorrupt(f"{path} differs from the digest in its manifest", RUN_AGAIN)


def verify_part(path: Path, leave_out: Sequence[str] = ()) -> None:
    """Compare a file or directory below `.../stages/<stage>[/<key>]` with the manifest of that stage, which lists it.

    leave_out   paths of the manifest that are not here: their reader compares them

    Paths that are not in a finished stage's directory (published drafters, data of the user) have no digest and pass,
    except below a job's `stages/train`: nothing would show damage of such a drafter. Raises ArtifactMissing, and
    ArtifactCorrupt also where the manifest lists no such path.
    """
    path = path.absolute()
    for root in (path, *path.parents):
        if "stages" not in (root.parent.name, root.parent.parent.name) or not (root / MANIFEST).is_file():
            continue
        manifest = read_manifest(root)
        here = [entry for entry in manifest.files if (root / entry.path).is_relative_to(path)]
        if manifest.files and not here:
            raise ArtifactCorrupt(f"{root / MANIFEST} is that of stage {manifest.stage!r} and lists no {path.name}",
                                  RUN_AGAIN)
        listed = tuple(entry for entry in here if entry.path not in leave_out)
        verify_files(manifest.model_copy(update={"files": listed}), root)
        return
    for at, part in enumerate(path.parts):
        if part == "jobs" and path.parts[at + 2:at + 4] == ("stages", "train") and len(path.parts) > at + 4:
            raise ArtifactMissing(f"{path} is of a training stage that has no {MANIFEST}, whose digests would show "
                                  "damage", RUN_AGAIN)


def installed_version() -> str:
    """Version of the package; that of a checkout which runs by PYTHONPATH alone is not known."""
    try:
        return importlib.metadata.version("eyrie")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


@cache
def code_version() -> str:
    """Version and digest of Eyrie's source code, part of cache keys and reports."""
    sha = hashlib.sha256()
    home = Path(__file__).resolve().parents[3]
    roots = [home / name for name in ("api", "kernels", "operator", "pipelines", "workers")]
    if not all(root.is_dir() for root in roots):  # installed as a wheel: the packages are siblings
        roots = [p for p in Path(__file__).resolve().parents[2].glob("eyrie_*") if p.is_dir()]
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{installed_version()}+{sha.hexdigest()[:12]}"
