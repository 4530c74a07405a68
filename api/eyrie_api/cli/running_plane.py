"""The control plane that runs on a home directory of this machine, found by its lock.

A running control plane holds a lock on `<home>/plane.json`, which the kernel releases however the process ends. A stale
file is therefore never confused with a running plane, and a reused process id is never signalled. The file contains the
URL.
"""

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path

PLANE_FILE = "plane.json"


@dataclass(frozen=True)
class Plane:
    """A control plane running on this machine."""

    pid: int
    url: str
    home: Path


def running_plane(home: Path) -> Plane | None:
    """The control plane of a home; None when none is running."""
    file = home / PLANE_FILE
    try:
        with file.open() as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                content = json.loads(opened.read())
                return Plane(pid=content["pid"], url=content["url"], home=home)
    except (FileNotFoundError, ValueError):
        return None
    return None
