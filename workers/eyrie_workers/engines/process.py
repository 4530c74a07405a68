"""Engines as child processes: start, readiness, stop; and the command line of the embedded engine.

Does not import torch, so that the control plane, a test or a load generator can run an engine without loading a model.
SGLang's part is in `sglang.process`.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.targets import Dtype
from eyrie_api.contract.tuning import DrafterUse, Method, OperatingMap
from eyrie_api.errors import EyrieError, Transient
from eyrie_api.processes import last_lines
from eyrie_workers.engines.parent_death_signal import reap, with_parent_death_signal

READY_FILE = "ready.json"  # next to the log
_POLL_S = 0.05
_OFF = DrafterUse()
TreesByBatchSize = dict[int, DraftTreeShape | None]
"""Number of running requests -> the tree from that number on, None for no drafting."""


def batch_size_schedule(operating_map: OperatingMap) -> tuple[Method, TreesByBatchSize] | None:
    """The drafting method and the trees of a map that one engine can apply while it serves.

    None when the map needs two methods, because an engine has one, and when one setting is best at every load, because
    then the setting never changes.
    """
    methods = {point.setting.method for point in operating_map.points} - {"off"}
    if len(methods) != 1 or len({point.setting for point in operating_map.points}) == 1:
        return None
    return methods.pop(), {point.concurrency: point.setting.tree for point in operating_map.points}


@dataclass(frozen=True)
class EngineCommand:
    """The command line of an engine server. With `port` 0 the system selects a port and the ready file contains it."""

    target: Path | str
    """Hugging Face directory, Hub id, or quickstart."""

    model: str
    use: DrafterUse = _OFF
    host: str = "127.0.0.1"
    port: int = 0
    max_concurrency: int = 8
    dtype: Dtype = "float32"
    threads: int | None = None
    drain_s: float | None = None
    """Time to finish running responses after SIGTERM; default: the server's."""

    def argv(self, ready_file: Path | None = None) -> list[str]:
        argv = [sys.executable, "-m", "eyrie_workers.engines.server", "--target", str(self.target),
                "--model", self.model, "--host", self.host, "--port", str(self.port),
                "--max-concurrency", str(self.max_concurrency), "--dtype", self.dtype]
        if self.use != _OFF:
            argv += ["--use", self.use.model_dump_json(exclude_defaults=True)]
        if self.threads is not None:
            argv += ["--threads", str(self.threads)]
        if self.drain_s is not None:
            argv += ["--drain-s", f"{self.drain_s:g}"]
        if ready_file is not None:
            argv += ["--ready-file", str(ready_file)]
        return argv


class EngineFailed(EyrieError):
    """The engine process ended, or did not become ready in time."""

    http_status = 502
    exit_code = 70


@dataclass
class ServerProcess(ABC):
    """A server of either engine as a child process: its own session, killed as a group."""

    process: subprocess.Popen[bytes]
    log_file: Path
    command: tuple[str, ...] = ()
    url: str = ""
    """Base URL, without /v1. The server may not listen yet, see `wait_ready`."""

    name: ClassVar[str]

    @abstractmethod
    def ready(self) -> bool:
        """Whether it accepts requests."""

    @abstractmethod
    def phase(self) -> str:
        """How far it has come while it starts."""

    @abstractmethod
    def flush(self) -> None:
        """Forget earlier requests: cached prefixes and the texts of n-gram look-up. Raises EngineFailed."""

    def last_error(self) -> str:
        """From the log, once it has ended."""
        return last_lines(self.log_file)

    def check(self) -> None:
        """Raises EngineFailed, with its last error, when the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise EngineFailed(f"{self.name} ended with exit code {code}: {self.last_error()}",
                               f"read {self.log_file}; the command was: {shlex.join(self.command)}")

    def wait_ready(self, timeout_s: float = 1800.0) -> str:
        """Wait until it is ready; return `url`. Raises EngineFailed when it ends, Transient after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check()
            if self.ready():
                return self.url
            time.sleep(_POLL_S)
        raise Transient(f"{self.name} was not ready after {timeout_s:g} s", f"read {self.log_file}, or wait longer")

    def memory_bytes(self) -> int:
        """Main memory of its processes, pages that several share counted once."""
        kib = 0
        for pid in group_ticks(self.process.pid):
            with contextlib.suppress(OSError):  # a process that ends meanwhile
                kib += int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0])
        return kib * 1024

    def stop(self, timeout_s: float = 15.0) -> int:
        """Stop it: SIGTERM, on which it finishes running requests, then SIGKILL to the rest of its process group.

        Returns the exit code. With `timeout_s` 0 it is killed at once.
        """
        if self.process.poll() is None and timeout_s > 0:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        children = group_ticks(self.process.pid).keys() - {self.process.pid}
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # also children whose parent has ended
        code = self.process.wait()
        reap(children)
        return code


def group_ticks(leader: int) -> dict[int, int]:
    """Clock ticks that each process of a group has computed, by process id."""
    ticks = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that ends meanwhile
            # After the name in parentheses: state, parent, process group, ...; user and system time are 11 and 12.
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == leader:
                ticks[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
    return ticks


StartProcess = Callable[[Sequence[str], Path, Mapping[str, str] | None], subprocess.Popen[bytes]]
"""`start_process`, or the same in the keeper of servers (`server_keeper`)."""


def start_process(command: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None,
                  directory: str | None = None) -> subprocess.Popen[bytes]:
    """Start a server, its output in `log_file`; `directory` is that it works in, this process's by default. It is
    killed when this process ends, even by SIGKILL."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as log:
        return subprocess.Popen(with_parent_death_signal(command), stdout=log, stderr=subprocess.STDOUT, cwd=directory,
                                stdin=subprocess.DEVNULL, start_new_session=True, env=environment)


class EngineProcess(ServerProcess):
    name = "the engine"

    def ready(self) -> bool:
        """Whether the ready file exists; sets `url` from it."""
        ready_file = self.log_file.with_name(READY_FILE)
        if not self.url and ready_file.exists():
            self.url = str(json.loads(ready_file.read_text())["url"])
        return bool(self.url)

    def phase(self) -> str:
        """A small model: the engine logs no phases of its start."""
        return "ready" if self.ready() else "loading"

    def flush(self) -> None:
        """Nothing to do: the engine shares no prefixes, and its n-gram look-up reads the text of the request alone."""


def start_engine(command: EngineCommand, directory: Path, start: StartProcess = start_process) -> EngineProcess:
    """Start an engine, with log and ready file in `directory`; does not wait until it is ready."""
    ready_file, log_file = directory / READY_FILE, directory / "engine.log"
    ready_file.unlink(missing_ok=True)  # of an earlier engine in this directory: it would be taken for this one's
    argv = tuple(command.argv(ready_file))
    return EngineProcess(start(argv, log_file, None), log_file, argv)
