"""The interface of an artifact store, whatever holds the bytes (`open_store` opens one).

Keys are relative paths with forward slashes; no component begins with a dot (what is written aside does). Every object
carries the SHA-256 of its bytes, computed before they leave and compared when they come back: what the network or the
server did to them in between does not matter. A ranged read cannot be compared, so formats that read ranges keep
digests of their own blocks.

`write_once` is what a manifest is written with: of two writers that disagree, the second is refused. A store that
cannot promise it (an S3 server that ignores If-None-Match overwrites silently) says so in `check`, and the second
writer is then caught by looking before and after, which leaves a gap of milliseconds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eyrie_api.errors import Conflict, InvalidInput, Permanent, Transient

_KEY = re.compile(r"(?:[^./\\\x00-\x1f][^/\\\x00-\x1f]*)(?:/[^./\\\x00-\x1f][^/\\\x00-\x1f]*)*")


class StoreAway(Transient):
    """The store does not answer, or asks to be left alone for a while."""

    reason = "StoreAway"


class StoreRefused(Permanent):
    """The store knows us not, or will not let us."""

    exit_code = 77  # EX_NOPERM
    reason = "StoreRefused"


class AlreadyWritten(Conflict):
    """Another writer was first, with other bytes."""

    reason = "AlreadyWritten"


@dataclass(frozen=True)
class StoredObject:
    """One object."""

    key: str
    size_bytes: int
    sha256: str | None = None
    """`sha256:<hex>` where it is known: always from `stat` of what Eyrie wrote, never from `list`."""


@dataclass(frozen=True)
class StoreCheck:
    """What a store was seen to do."""

    conditional_writes: bool
    """Whether `write_once` is atomic."""


class ArtifactStore(Protocol):
    """A place for artifacts.

    Every method raises StoreAway for trouble that may pass, StoreRefused where we may not, InvalidInput for a key or a
    bucket that cannot be.
    """

    @property
    def url(self) -> str:
        """What `open_store` was given, with the path made absolute."""

    @property
    def parallel(self) -> int:
        """How many objects may be moved at once."""

    def check(self) -> StoreCheck:
        """Write, write again, read and delete a small object of our own: credentials, bucket and rights are good."""

    def stat(self, key: str) -> StoredObject | None:
        """What is there; None when nothing is."""

    def read(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Bytes [start, start + length), fewer at the end; all of them, compared with their digest, by default.

        Raises ArtifactMissing, ArtifactCorrupt.
        """

    def write(self, key: str, data: bytes) -> StoredObject:
        """Put an object there, in place of what was; readers see the old one or the new."""

    def write_once(self, key: str, data: bytes) -> bool:
        """Put an object where none is. False when the same bytes are there already. Raises AlreadyWritten."""

    def upload(self, key: str, source: Path) -> StoredObject:
        """Put a file's bytes there. Interrupted, the next call goes on where the store allows it."""

    def download(self, key: str, target: Path, *, sha256: str | None = None) -> None:
        """Bring an object into a file, atomically.

        sha256   what it must be; the digest it was written with by default. Raises ArtifactMissing, ArtifactCorrupt.
        """

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Objects below `prefix/`, in order of key; all of them by default."""

    def delete(self, key: str) -> None:
        """Remove an object; none there is fine."""

    def delete_all(self, prefix: str) -> int:
        """Remove everything below `prefix/`; return how much it was."""

    def sweep_unfinished(self, prefix: str = "", *, older_than_s: float) -> int:
        """Remove what interrupted uploads below `prefix/` left and readers never see; return how many."""


def checked_key(key: str) -> str:
    """The key, if it is one. Raises InvalidInput."""
    if not _KEY.fullmatch(key):
        raise InvalidInput(f"{key!r} is not an artifact key",
                           "write a relative path with forward slashes in which no name begins with a dot")
    return key


def directory_prefix(prefix: str) -> str:
    """`prefix/`, or nothing for the whole store. Raises InvalidInput."""
    prefix = prefix.rstrip("/")
    return checked_key(prefix) + "/" if prefix else ""
