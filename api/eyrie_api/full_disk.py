"""A disk without space: recognised in errors of the operating system and of libraries, and waited for.

Work that meets a full disk stops without losing anything, reports it where it can, and continues when there is space:
no job has to be retried. On a full disk no event, status or log can be written, so the control plane also measures the
free space when alerts are requested (`is_short`).
"""

import errno
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from eyrie_api.errors import DiskFull

MIN_FREE_BYTES = 64 << 20
"""Bytes that have to be free before something is started: logs, events and a database's journal."""

_POLL_S = 2.0
_PATIENCE_S = 600.0
"""After so long MIN_FREE_BYTES is enough. What was free is measured after the failure: space that was freed in between
counts as not enough, and twice of it may be more than the disk has."""

_WORDS = ("No space left on device", "Disk quota exceeded", "database or disk is full")


def is_full(error: BaseException) -> bool:
    """Whether an error means a disk without space; torch, safetensors and SQLite report it only in the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(words in str(error) for words in _WORDS)


def total_and_free_bytes(path: Path) -> tuple[int, int]:
    """Size and free bytes of the file system of `path`, which need not exist yet."""
    while not path.exists():
        path = path.parent
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


def free_bytes(path: Path) -> int:
    """Free bytes on the file system of `path`, which need not exist yet."""
    return total_and_free_bytes(path)[1]


def is_short(path: Path) -> bool:
    """Whether the file system of `path` has less than MIN_FREE_BYTES."""
    return free_bytes(path) < MIN_FREE_BYTES


def disk_full(directory: Path) -> DiskFull:
    return DiskFull(f"the disk of {directory} is full: {free_bytes(directory) / 1e6:.0f} MB are free",
                    "free space on it; the work continues by itself")


def wait_for_room(directory: Path, needed: int = MIN_FREE_BYTES, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until `needed` bytes are free, or after `_PATIENCE_S` until MIN_FREE_BYTES is; and say so, unless the log is
    on the full disk too."""
    until, is_reported = time.monotonic() + _PATIENCE_S, False
    while (free := free_bytes(directory)) < needed and (free < MIN_FREE_BYTES or time.monotonic() < until):
        if not is_reported:
            is_reported = True
            with suppress(OSError):
                print(f"{disk_full(directory)}; waiting for {needed / 1e6:.0f} MB", flush=True)
        sleep(_POLL_S)


def with_room(directory: Path, action: Callable[[], object]) -> None:
    """Call `action`, again whenever the disk of `directory` was full and has more space since. What it does is safe to
    repeat."""
    while True:
        try:
            action()
            return
        except Exception as error:
            if not is_full(error):
                raise
        wait_for_room(directory, max(MIN_FREE_BYTES, 2 * free_bytes(directory)))
