"""Identify processes across restarts of this one, and signal process groups.

Linux reuses process ids. A process is therefore identified by three values: the boot id, the pid, and the start time in
/proc. A restarted control plane finds its earlier children by that identity, and never signals an unrelated process
that got the same pid.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from eyrie_api.contract.model import Frozen

_PROC = Path("/proc")
_POLL_S = 0.05
_KILLED_S = 30.0
"""What was killed ends once the kernel has freed its memory, which a busy machine delays."""


class ProcessId(Frozen):
    """One process of one boot of this machine."""

    pid: int
    started_ticks: int
    """Clock ticks after boot (field 22 of /proc/<pid>/stat)."""

    boot: str


def boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third on (state first), or None when there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses, which may contain spaces and parentheses: cut after the last one.
    return text[text.rindex(")") + 2:].split()


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process; None when it has ended (zombies included)."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return ProcessId(pid=pid, started_ticks=int(fields[19]), boot=boot_id())


def find_process(*wanted: str) -> ProcessId | None:
    """The leader of a session of this user whose command line has these arguments; None when there is none."""
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        arguments, fields = arguments_of(int(entry.name)), _stat(int(entry.name))
        if set(wanted) <= set(arguments) and fields is not None and fields[3] == entry.name:
            return identify(int(entry.name))
    return None


def arguments_of(pid: int) -> list[str]:
    """The command line of a process; empty when it has ended or is another user's."""
    try:
        return [os.fsdecode(argument) for argument in (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")]
    except OSError:
        return []


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def group_members(pgid: int) -> list[int]:
    """Running processes of a group, without zombies."""
    members = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None and fields[0] not in "ZX" and int(fields[2]) == pgid:
                members.append(int(entry.name))
    return members


def stop_group(leader: ProcessId, grace_s: float) -> None:
    """SIGTERM to the group of `leader`, SIGKILL to its remaining members after `grace_s`; returns when it is empty.

    The leader may have ended: the kernel does not reuse a group's id while it has members. After another boot no
    process of the group can exist.
    """
    if leader.boot != boot_id():
        return
    current = identify(leader.pid)
    if current is not None and current != leader:
        return  # the pid was reused, which the kernel does only after the group is empty
    signal_group(leader.pid, signal.SIGTERM)
    if not wait_until(lambda: not group_members(leader.pid), grace_s):
        signal_group(leader.pid, signal.SIGKILL)
        wait_until(lambda: not group_members(leader.pid), _KILLED_S)


def signal_group(pgid: int, number: int) -> None:
    """Signal a group; an empty group is not an error."""
    if group_members(pgid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pgid, number)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll `condition` until it is true or the time is over; returns its last value."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return result
