"""A file system of a given size in memory, for tests, campaigns and benchmarks of a full disk."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """A new directory `path` that holds `size_bytes`. Raises PermissionError where none can be mounted: root may."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        raise PermissionError("a small file system can be mounted by root alone")
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)], check=False,
                          capture_output=True)
    if done.returncode != 0:
        raise PermissionError(f"no small file system can be mounted: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)  # lazily: a process may still have its directory here
