"""The embedded engine as a child process: command line, start, readiness, health, stop.

Does not import torch, so that the control plane, a test or a load generator can run an engine without loading a model.
The child has its own process group and is stopped as a group: SIGTERM first, so that running requests can finish.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from eyrie_api.errors import EyrieError, Transient
from eyrie_api.processes import last_lines
from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.targets import Dtype
from eyrie_api.v1alpha1.tuning import OperatingMap, Setting
from eyrie_workers.engines.parent_death_signal import with_parent_death_signal

_POLL_S = 0.05


@dataclass(frozen=True)
class BatchSizeSchedule:
    """An operating map that one engine can apply while it serves."""

    method: str
    trees: str
    """The value of --trees-by-batch-size: `batch_size=num_steps/top_k/num_draft_tokens` or `batch_size=off`, separated
    by commas; each slot applies from that number of running requests on."""


def batch_size_schedule(operating_map: OperatingMap) -> BatchSizeSchedule | None:
    """The schedule of a map; None when the map needs two drafting methods, because an engine has one.

    Also None when one setting is best at every load, because then the setting never changes.
    """
    methods = {point.setting.method for point in operating_map.points} - {"off"}
    if len(methods) != 1 or len({point.setting for point in operating_map.points}) == 1:
        return None
    trees = ",".join(f"{point.concurrency}={point.setting.tree.label() if point.setting.tree else 'off'}"
                     for point in operating_map.points)
    return BatchSizeSchedule(methods.pop(), trees)


@dataclass(frozen=True)
class EngineCommand:
    """The command line of an engine server. With `port` 0 the system selects a port and the ready file contains it."""

    target: Path | str
    """Hugging Face directory, Hub id, or quickstart."""

    model: str
    drafter: Path | None = None
    tree: DraftTreeShape | None = None
    """The draft tree: an abbreviation for `setting` with method drafter."""

    setting: Setting | None = None
    """Takes precedence over `tree`. The methods n-gram and off do not use `drafter`."""

    map: OperatingMap | None = None
    """Change the tree with the number of running requests, if `batch_size_schedule` supports the map."""

    host: str = "127.0.0.1"
    port: int = 0
    max_concurrency: int = 8
    dtype: Dtype = "float32"
    threads: int | None = None
    drain_s: float | None = None
    """Time to finish running responses after SIGTERM; default: the server's."""

    def argv(self, ready_file: Path | None = None) -> list[str]:
        """The command line of the engine server."""
        argv = [sys.executable, "-m", "eyrie_workers.engines.server", "--target", str(self.target),
                "--model", self.model, "--host", self.host, "--port", str(self.port),
                "--max-concurrency", str(self.max_concurrency), "--dtype", self.dtype]
        schedule = batch_size_schedule(self.map) if self.map is not None else None
        method = schedule.method if schedule is not None else self.setting.method if self.setting is not None else None
        tree = self.setting.tree if self.setting is not None else self.tree
        if method is not None:
            argv += ["--method", method]
        if self.drafter is not None and method in (None, "drafter"):
            argv += ["--drafter", str(self.drafter)]
        if schedule is not None:
            argv += ["--trees-by-batch-size", schedule.trees]
        elif tree is not None:
            argv += ["--num-steps", str(tree.num_steps), "--top-k", str(tree.top_k),
                     "--num-draft-tokens", str(tree.num_draft_tokens)]
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
    reason = "EngineFailed"


class StartupProbe(Protocol):
    """What `wait_until_ready` needs of a starting server."""

    @property
    def log_file(self) -> Path: ...

    def check(self) -> None:
        """Raises EngineFailed when the process has ended."""

    def ready(self) -> bool:
        """Whether it accepts requests."""


def wait_until_ready(server: StartupProbe, name: str, timeout_s: float, poll_s: float) -> None:
    """Poll until the server is ready. Raises EngineFailed when its process ends, Transient after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        server.check()
        if server.ready():
            return
        time.sleep(poll_s)
    raise Transient(f"{name} was not ready after {timeout_s:g} s", f"read {server.log_file}, or wait longer")


@dataclass
class EngineProcess:
    """A running engine server."""

    process: subprocess.Popen[bytes]
    ready_file: Path
    log_file: Path
    url: str = field(default="")

    def wait_ready(self, timeout_s: float = 60.0) -> str:
        """Wait until the engine is ready; return its base URL (without /v1). Raises EngineFailed or Transient."""
        wait_until_ready(self, "the engine", timeout_s, _POLL_S)
        return self.url

    def check(self) -> None:
        """Raises EngineFailed, with the last lines of the log, when the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise EngineFailed(f"the engine ended with exit code {code}: {last_lines(self.log_file)}",
                               f"read {self.log_file}")

    def ready(self) -> bool:
        """Whether the ready file exists; sets `url` from it."""
        if not self.url and self.ready_file.exists():
            self.url = str(json.loads(self.ready_file.read_text())["url"])
        return bool(self.url)

    def phase(self) -> str:
        """As for `SglangServer`. A small model: the engine logs no phases of its start."""
        return "ready" if self.ready() else "loading"

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether /health answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=timeout_s) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, timeout_s: float = 15.0) -> int:
        """Stop it: SIGTERM, after `timeout_s` SIGKILL to the process group. Returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def start_engine(command: EngineCommand, directory: Path, *, die_with_parent: bool = False) -> EngineProcess:
    """Start an engine, with log and ready file in `directory`; does not wait until it is ready.

    die_with_parent   the engine is killed when this process ends, even by SIGKILL (`parent_death_signal`)
    """
    directory.mkdir(parents=True, exist_ok=True)
    ready_file, log_file = directory / "ready.json", directory / "engine.log"
    ready_file.unlink(missing_ok=True)  # of an earlier engine in this directory: it would be taken for this one's
    argv = command.argv(ready_file)
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            with_parent_death_signal(argv) if die_with_parent else argv,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return EngineProcess(process, ready_file, log_file)
