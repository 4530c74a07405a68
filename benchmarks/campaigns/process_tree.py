"""The processes of one control plane by what they do, with memory, descriptors and threads, from /proc."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_ROLES = {"eyrie_operator.embedded.gateway": "gateway", "eyrie_workers.engines": "engine"}
"""A part of the command line, and what such a process is."""


@dataclass(frozen=True)
class ProcessSample:
    """One process at one time."""

    pid: int
    role: str
    """plane, gateway, engine; `run` for whatever else descends from the plane, `zombie` for what nobody waited for."""

    memory_mib: float
    """Proportional set size: shared pages count once, divided among those who share them."""

    descriptors: int
    threads: int


def sample_tree(root: int) -> list[ProcessSample]:
    """`root`, the control plane, and its descendants; those that end meanwhile are left out."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1]), fields[0]
    tree, added = {root}, {root}
    while added:
        added = {pid for pid, (parent, _state) in parents.items() if parent in added} - tree
        tree |= added
    found = []
    for pid in sorted(tree & parents.keys()):
        with contextlib.suppress(OSError):
            found.append(_sample(pid, pid == root, parents[pid][1]))
    return found


def _sample(pid: int, is_plane: bool, state: str) -> ProcessSample:
    if state in "ZX":
        return ProcessSample(pid, "zombie", 0.0, 0, 0)
    directory = _PROC / str(pid)
    line = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    role = "plane" if is_plane else next((role for part, role in _ROLES.items() if part in line), "run")
    status = dict(one.split(":", 1) for one in (directory / "status").read_text().splitlines() if ":" in one)
    rollup = (directory / "smaps_rollup").read_text().splitlines()
    proportional = next(int(one.split()[1]) for one in rollup if one.startswith("Pss:"))
    return ProcessSample(pid, role, proportional / 1024, len(list((directory / "fd").iterdir())),
                         int(status["Threads"]))
