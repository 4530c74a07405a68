"""Marks on the processes of endpoints: how an engine or a gateway is found whose record is missing or damaged.

A control plane that is killed between a start and its record, or a damaged record, leaves a process that no file names.
Command lines do not identify it: the launcher of SGLang replaces its own. Each process therefore inherits a variable,
EYRIE_ENDPOINT_PROCESS, with the folder it belongs to and what its record needs, which /proc/<pid>/environ shows. Its
children inherit the mark, so that they are found when their parent has ended.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyrie_api.v1alpha1.model import Frozen
from eyrie_pipelines.processes import ProcessId, boot_id, identify, is_alive, stop_group

_PROC = Path("/proc")
_VARIABLE = "EYRIE_ENDPOINT_PROCESS"


class Mark(Frozen):
    """The value of EYRIE_ENDPOINT_PROCESS, in JSON."""

    folder: str
    """Absolute: the endpoint's for a gateway, the revision's for an engine."""

    port: int | None = None
    """A gateway's."""

    alone: bool = False
    """An engine for which the serving one was stopped."""

    def variables(self) -> dict[str, str]:
        """The environment of a marked process. SGLang names its processes with setproctitle, which writes over their
        environment unless SPT_NOENV is set."""
        return {_VARIABLE: self.model_dump_json(), "SPT_NOENV": "1"}


@dataclass(frozen=True)
class Marked:
    """A session whose processes have one mark."""

    mark: Mark
    leader: ProcessId
    """It may have ended while others of its session run."""


def marked_sessions(below: Path) -> list[Marked]:
    """Sessions of this user with running processes of `below` or of a folder in it."""
    below, found = below.absolute(), {}
    for pid, mark in _marks():
        if below == Path(mark.folder) or below in Path(mark.folder).parents:
            try:
                leader = os.getsid(pid)
            except ProcessLookupError:
                continue
            found[leader] = Marked(mark, identify(leader) or ProcessId(pid=leader, started_ticks=0, boot=boot_id()))
    return list(found.values())


def running_leaders(below: Path) -> list[Marked]:
    """Those of `marked_sessions` whose leader runs: engines and gateways."""
    return [one for one in marked_sessions(below) if is_alive(one.leader)]


def stop_marked(below: Path, grace_s: float) -> None:
    """Stop every process of `below` and the folders in it."""
    for one in marked_sessions(below):
        stop_group(one.leader, grace_s)


def _marks() -> Iterator[tuple[int, Mark]]:
    prefix = f"{_VARIABLE}=".encode()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != os.geteuid():
                continue
            variables = (entry / "environ").read_bytes().split(b"\0")
            value = next((one for one in variables if one.startswith(prefix)), None)
            if value is not None:
                yield int(entry.name), Mark.model_validate_json(value.removeprefix(prefix))
        except (OSError, ValueError):  # it ended, may not be read, or the variable is someone else's
            continue
