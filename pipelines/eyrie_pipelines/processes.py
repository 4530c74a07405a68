"""Who is running: processes named so that a reused number cannot be mistaken for the old one, and their groups.

Linux gives a dead process's number to a stranger sooner or later. A process is therefore named by three things: the
boot, the number, and the start time the kernel keeps in /proc. A control plane that was killed finds its children
again by that name, and never signals a stranger.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from eyrie_api.v1alpha1.model import Frozen

_PROC = Path("/proc")
_POLL_S = 0.05


class ProcessName(Frozen):
    """One process of one boot of this machine."""

    pid: int
    started_ticks: int
    """Clock ticks after boot (field 22 of /proc/<pid>/stat)."""

    boot: str


def boot_id() -> str:
    """The kernel's name for this boot."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third on (state first), or None when there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in brackets and may itself hold spaces and brackets: cut after the last one.
    return text[text.rindex(")") + 2:].split()


def name_of(pid: int) -> ProcessName | None:
    """The full name of a living process; None when it is gone or only its exit status is left."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return ProcessName(pid=pid, started_ticks=int(fields[19]), boot=boot_id())


def is_alive(process: ProcessName) -> bool:
    """Whether that very process still runs."""
    return name_of(process.pid) == process


def group_members(pgid: int) -> list[int]:
    """Living processes of a group (zombies left out)."""
    members = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None and fields[0] not in "ZX" and int(fields[2]) == pgid:
                members.append(int(entry.name))
    return members


def stop_group(leader: ProcessName, grace_s: float) -> None:
    """SIGTERM to the group `leader` leads or led, SIGKILL to what is left after `grace_s`; return when it is empty.

    The leader may be dead already: a group's number stays taken while it has members, so it is still ours, except on
    another boot, where nothing of it can be left.
    """
    if leader.boot != boot_id():
        return
    current = name_of(leader.pid)
    if current is not None and current != leader:
        return  # the number was given to a stranger, which the kernel does only after the group had emptied
    signal_group(leader.pid, signal.SIGTERM)
    if not wait_until(lambda: not group_members(leader.pid), grace_s):
        signal_group(leader.pid, signal.SIGKILL)
        wait_until(lambda: not group_members(leader.pid), grace_s)


def signal_group(pgid: int, number: int) -> None:
    """Signal a group; an empty one is no error."""
    if group_members(pgid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pgid, number)


def wait_until(true: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until `true()` or the time is over; the last answer."""
    deadline = time.monotonic() + timeout_s
    while not (answer := true()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return answer

