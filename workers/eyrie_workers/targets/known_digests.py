"""Digests of large files, kept for one user of a machine: stages and jobs do not each hash a target's weights.

A digest holds as long as the file has the device, inode, size, modification and change time of when it was computed.
The kernel sets the change time whenever a file is written, and programs cannot set it. What a disk loses without a
write is not noticed here. A model cache (`model_cache`) has records of its own.
"""

import contextlib
import os
import time
from pathlib import Path

from eyrie_api.artifacts import digest_bytes, digest_file, read_sealed, write_sealed
from eyrie_api.v1alpha1.model import Digest, Frozen

_LARGE = 64 << 20
"""Bytes. Smaller files are hashed in less than the time to look."""

_SETTLED_S = 2.0
"""A file that was changed so shortly ago may be changed again within the same tick of its file system's clock."""


class KnownDigest(Frozen):
    """A file as it was when its digest was computed."""

    path: str
    identity: tuple[int, int, int, int, int]
    """Device, inode, bytes, nanoseconds of the modification and of the change."""

    sha256: Digest


def known_digest(path: Path) -> Digest:
    """The digest of a file: the known one of a large file that has not changed, else computed."""
    file = path.resolve()
    before, directory = _identity(file), _directory()
    if before[2] < _LARGE or directory is None:
        return digest_file(file)
    record = directory / f"{digest_bytes(os.fsencode(file)).removeprefix('sha256:')}.json"
    with contextlib.suppress(OSError, ValueError):
        known = read_sealed(record.read_bytes(), KnownDigest)
        if (known.path, known.identity) == (str(file), before):
            return known.sha256
    sha256 = digest_file(file)
    if _identity(file) == before and time.time() - before[4] / 1e9 > _SETTLED_S:
        with contextlib.suppress(OSError):  # a home that cannot be written, as in a pod
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_sealed(record, KnownDigest(path=str(file), identity=before, sha256=sha256))
    return sha256


def _directory() -> Path | None:
    """None for a user without a home: a directory that others may write is none to believe."""
    home = os.environ.get("HOME")
    caches = os.environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    return Path(caches, "eyrie", "digests") if caches else None


def _identity(file: Path) -> tuple[int, int, int, int, int]:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
