"""The interface of an artifact store, whatever holds the bytes (`open_store` opens one).

Keys are relative paths with forward slashes; no component begins with a dot (temporary names do). Every object carries
the SHA-256 of its bytes, computed before the upload and compared after a download, so that corruption on the way or in
the store is found. A ranged read cannot be compared, so formats that read ranges keep digests of their own blocks.

Manifests are written with `write_once`: of two writers with different bytes, the second is refused. A store that cannot
guarantee that (an S3 server that ignores If-None-Match overwrites silently) reports it in `check`. There the object is
read before and after the write, which leaves a race of milliseconds.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eyrie_api.errors import ArtifactCorrupt, Conflict, InvalidInput, Permanent, Transient

_KEY = re.compile(r"(?:[^./\\\x00-\x1f][^/\\\x00-\x1f]*)(?:/[^./\\\x00-\x1f][^/\\\x00-\x1f]*)*")

_PIECE_BYTES = 8 * 2**20


class StoreUnavailable(Transient):
    """The store does not respond, or throttles requests."""

    reason = "StoreUnavailable"


class StoreAccessDenied(Permanent):
    """Credentials rejected, or permission missing."""

    exit_code = 77  # EX_NOPERM
    reason = "StoreAccessDenied"


class AlreadyWritten(Conflict):
    """The object exists, with other bytes."""

    reason = "AlreadyWritten"


Sent = Callable[[int], None]


def ignore(_num_bytes: int) -> None:
    """For callers who do not follow an upload."""


@dataclass(frozen=True)
class StoredObject:
    """One object."""

    key: str
    size_bytes: int
    sha256: str | None = None
    """`sha256:<hex>` where known: always from `stat` of an object that Eyrie wrote, never from `list`."""


@dataclass(frozen=True)
class StoreCheck:
    """Capabilities of a store, as observed."""

    conditional_writes: bool
    """Whether `write_once` is atomic."""


class ArtifactStore(Protocol):
    """A place for artifacts.

    Every method raises StoreUnavailable for transient failures, StoreAccessDenied without permission, InvalidInput for
    an invalid key or bucket.
    """

    @property
    def url(self) -> str:
        """The URL of `open_store`, with an absolute path."""

    @property
    def parallel(self) -> int:
        """How many objects may be transferred at once."""

    def check(self) -> StoreCheck:
        """Write, write again, read and delete a small object: tests credentials, bucket and permissions."""

    def stat(self, key: str) -> StoredObject | None:
        """The object's metadata; None when there is no such object."""

    def read(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Bytes [start, start + length), fewer at the end; by default all of them, compared with their digest.

        Raises ArtifactMissing, ArtifactCorrupt.
        """

    def write(self, key: str, data: bytes) -> StoredObject:
        """Write or replace an object; readers see the old one or the new one."""

    def write_once(self, key: str, data: bytes) -> bool:
        """Create an object. False when it exists with the same bytes. Raises AlreadyWritten."""

    def upload(self, key: str, source: Path, sent: Sent = ignore) -> StoredObject:
        """Upload a file. After an interruption the next call resumes, where the store supports it.

        sent   called with the number of bytes whenever some more are in the store; from several threads
        """

    def write_stream(self, key: str, chunks: Iterable[bytes], *, size_bytes: int, sha256: str) -> StoredObject:
        """Write or replace an object whose bytes are made while they are sent; memory holds one part of it.

        Raises ArtifactCorrupt when the chunks have another size or digest: the object is then as it was before.
        """

    def download(self, key: str, target: Path, *, sha256: str | None = None) -> None:
        """Download an object into a file, atomically.

        sha256   the expected digest; by default the one it was written with. Raises ArtifactMissing, ArtifactCorrupt.
        """

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Objects below `prefix/`, in order of key; all of them by default."""

    def delete(self, key: str) -> None:
        """Delete an object; no error when there is none."""

    def delete_all(self, prefix: str) -> int:
        """Delete every object below `prefix/`; return their number."""

    def sweep_unfinished(self, prefix: str = "", *, older_than_s: float) -> int:
        """Abort interrupted uploads below `prefix/`, which readers never see; return their number."""


def checked_key(key: str) -> str:
    """The key, if it is valid. Raises InvalidInput."""
    if not _KEY.fullmatch(key):
        raise InvalidInput(f"{key!r} is not an artifact key",
                           "write a relative path with forward slashes in which no name begins with a dot")
    return key


def digest_stored(store: ArtifactStore, key: str, size_bytes: int) -> str:
    """`sha256:<hex>` of an object's bytes, which are read in pieces and not kept."""
    sha = hashlib.sha256()
    for start in range(0, size_bytes, _PIECE_BYTES):
        sha.update(store.read(key, start=start, length=min(_PIECE_BYTES, size_bytes - start)))
    return "sha256:" + sha.hexdigest()


def other_bytes(key: str) -> ArtifactCorrupt:
    """The error for chunks that do not have the size and the digest that they were announced with."""
    return ArtifactCorrupt(f"what was to be written as {key} has another digest than before", "retry the job")


def directory_prefix(prefix: str) -> str:
    """`prefix/`, or empty for the whole store. Raises InvalidInput."""
    prefix = prefix.rstrip("/")
    return checked_key(prefix) + "/" if prefix else ""
