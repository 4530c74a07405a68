"""A directory as an artifact store: for one machine, a shared volume, and the tests.

Objects are written under a temporary name (`.name.random`) and renamed; `write_once` links the temporary file to its
name, which fails when the name exists. Digests are computed on request: a directory has no place to store them, and
they could be trusted only after reading the file anyway.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from eyrie_api.artifacts import digest_file, temporary_file, write_atomically, write_to_disk
from eyrie_api.artifacts.store import (
    AlreadyWritten,
    Sent,
    StoredObject,
    checked_key,
    directory_prefix,
    ignore,
    other_bytes,
)
from eyrie_api.errors import RUN_AGAIN, ArtifactCorrupt, ArtifactMissing

_CHUNK = 1 << 20


class LocalStore:
    """`ArtifactStore` in a directory, which is created by the first write."""

    def __init__(self, root: Path, *, parallel: int = 4) -> None:
        self._root = root.absolute()
        self.url, self.parallel = self._root.as_uri(), parallel

    def check(self) -> bool:
        self._root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._root, prefix=".check."):
            return True

    def stat(self, key: str) -> StoredObject | None:
        path = self._path(key)
        if not path.is_file():
            return None
        return StoredObject(key, path.stat().st_size, digest_file(path))

    def read(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        try:
            with self._path(key).open("rb") as file:
                file.seek(start)
                return file.read(-1 if length is None else length)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise self._missing(key) from None

    def write(self, key: str, data: bytes) -> None:
        write_atomically(self._path(key), data)

    def write_once(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with temporary_file(path) as (file, temporary):
            write_to_disk(file, data)
            try:
                os.link(temporary, path)
            except FileExistsError:
                if path.read_bytes() == data:
                    return False
                raise AlreadyWritten(f"{key} is in {self.url} already, with other bytes",
                                     "artifacts are immutable: write under another key") from None
        return True

    def upload(self, key: str, source: Path, sent: Sent = ignore) -> None:
        path = self._path(key)
        with temporary_file(path) as (file, temporary):
            size, _digest = _copy(source, file)
            os.replace(temporary, path)
        sent(size)

    def write_stream(self, key: str, chunks: Iterable[bytes], *, size_bytes: int, sha256: str) -> None:
        path = self._path(key)
        with temporary_file(path) as (file, temporary):
            sha, written = hashlib.sha256(), 0
            for chunk in chunks:
                sha.update(chunk)
                written += file.write(chunk)
            write_to_disk(file, b"")
            if (written, f"sha256:{sha.hexdigest()}") != (size_bytes, sha256):
                raise other_bytes(key)
            os.replace(temporary, path)

    def download(self, key: str, target: Path, *, sha256: str | None = None) -> None:
        """See `ArtifactStore`. Without `sha256` the bytes cannot be verified."""
        path = self._path(key)
        if not path.is_file():
            raise self._missing(key)
        with temporary_file(target) as (file, temporary):
            _size, digest = _copy(path, file)
            if sha256 not in (None, digest):
                raise ArtifactCorrupt(f"{key} in {self.url} is {digest}, not {sha256}", RUN_AGAIN)
            os.replace(temporary, target)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        root = self._root / directory_prefix(prefix)
        paths = [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else []
        keys = {path.relative_to(self._root).as_posix(): path for path in paths}
        for key in sorted(keys):
            if not any(part.startswith(".") for part in key.split("/")):
                with suppress(FileNotFoundError):  # deleted since
                    yield StoredObject(key, keys[key].stat().st_size)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def delete_all(self, prefix: str) -> None:
        """See `ArtifactStore`. Removes directories that become empty."""
        for stored in [*self.list(prefix)]:
            self.delete(stored.key)
        root = self._root / directory_prefix(prefix)
        for directory in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
            with suppress(OSError):  # not empty
                directory.rmdir()

    def sweep_unfinished(self, prefix: str = "", *, older_than_s: float) -> int:
        root, before = self._root / directory_prefix(prefix), time.time() - older_than_s
        paths = root.rglob(".*") if root.is_dir() else ()
        old = [path for path in paths if path.is_file() and path.stat().st_mtime < before]
        for path in old:
            path.unlink(missing_ok=True)
        return len(old)

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key)

    def _missing(self, key: str) -> ArtifactMissing:
        return ArtifactMissing(f"no {key} in {self.url}", "run the stage that writes it, or retry the job")


def _copy(source: Path, file: IO[bytes]) -> tuple[int, str]:
    """Copy a file's bytes; return their number and digest."""
    sha, size = hashlib.sha256(), 0
    with source.open("rb") as reading:
        while chunk := reading.read(_CHUNK):
            sha.update(chunk)
            size += file.write(chunk)
    write_to_disk(file, b"")
    return size, "sha256:" + sha.hexdigest()
