"""An engine as a child process: the command line, the start, the question whether it is healthy, the end.

Torch-free, so that a control plane, a test or a load generator can hold an engine without loading a model. The child
gets its own process group: an engine is ended whole, SIGTERM first so that answers under way can finish.
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
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.targets import Dtype
from eyrie_api.v1alpha1.tuning import OperatingMap, Setting
from eyrie_workers.engines.parent_death_signal import with_parent_death_signal

_POLL_S = 0.05


@dataclass(frozen=True)
class BatchSizeSchedule:
    """A map that one engine can follow: its drafter, and the shapes as the server's --by-load takes them."""

    method: str
    text: str
    """`rows=num_steps/top_k/num_draft_tokens` or `rows=off`, by comma; each holds from that many rows on."""


def batch_size_schedule(chart: OperatingMap) -> BatchSizeSchedule | None:
    """How an engine follows this map: an engine has one drafter, so None when the map changes between two.

    None too when one setting is best at every load: then there is nothing to follow.
    """
    methods = {point.setting.method for point in chart.points} - {"off"}
    if len(methods) != 1 or len({point.setting for point in chart.points}) == 1:
        return None
    text = ",".join(f"{point.concurrency}={point.setting.tree.label() if point.setting.tree else 'off'}"
                    for point in chart.points)
    return BatchSizeSchedule(methods.pop(), text)


@dataclass(frozen=True)
class EngineCommand:
    """What to serve, and how. `port` 0 lets the system choose; the ready file then says which."""

    target: Path | str
    """Hugging Face directory, Hub id, or quickstart."""

    model: str
    drafter: Path | None = None
    tree: DraftTreeShape | None = None
    """Of the drafter. Short for `setting` with method drafter."""

    setting: Setting | None = None
    """How to decode; goes before `tree`. n-gram and off leave `drafter` unread."""

    map: OperatingMap | None = None
    """Follow the load by these points instead of one shape, where `batch_size_schedule` says that one drafter can."""

    host: str = "127.0.0.1"
    port: int = 0
    max_concurrency: int = 8
    dtype: Dtype = "float32"
    threads: int | None = None

    def argv(self, ready_file: Path | None = None) -> list[str]:
        """The command line of the engine server."""
        argv = [sys.executable, "-m", "eyrie_workers.engines.server", "--target", str(self.target),
                "--model", self.model, "--host", self.host, "--port", str(self.port),
                "--max-concurrency", str(self.max_concurrency), "--dtype", self.dtype]
        by_load = batch_size_schedule(self.map) if self.map is not None else None
        method = by_load.method if by_load is not None else self.setting.method if self.setting is not None else None
        tree = self.setting.tree if self.setting is not None else self.tree
        if method is not None:
            argv += ["--method", method]
        if self.drafter is not None and method in (None, "drafter"):
            argv += ["--drafter", str(self.drafter)]
        if by_load is not None:
            argv += ["--by-load", by_load.text]
        elif tree is not None:
            argv += ["--num-steps", str(tree.num_steps), "--top-k", str(tree.top_k),
                     "--num-draft-tokens", str(tree.num_draft_tokens)]
        if self.threads is not None:
            argv += ["--threads", str(self.threads)]
        if ready_file is not None:
            argv += ["--ready-file", str(ready_file)]
        return argv


class EngineFailed(EyrieError):
    """The engine process ended, or did not become healthy in time."""

    http_status = 502
    exit_code = 70
    reason = "EngineFailed"


class StartupProbe(Protocol):
    """A server that is coming up, whatever engine it is."""

    @property
    def log_file(self) -> Path: ...

    def check(self) -> None:
        """Raises EngineFailed when it has ended."""

    def ready(self) -> bool:
        """Whether it answers now."""


def wait_until_ready(server: StartupProbe, name: str, timeout_s: float, poll_s: float) -> None:
    """Wait until it answers. Raises EngineFailed when it ended, Transient when time is up."""
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
        """Wait until the engine answers; return its base URL (without /v1). Raises EngineFailed or Transient."""
        wait_until_ready(self, "the engine", timeout_s, _POLL_S)
        return self.url

    def check(self) -> None:
        """Raises EngineFailed, with its last words, when the engine has ended."""
        code = self.process.poll()
        if code is not None:
            raise EngineFailed(f"the engine ended with exit code {code}: {last_lines(self.log_file)}",
                               f"read {self.log_file}")

    def ready(self) -> bool:
        """Whether it has said by now that it answers, and at which `url`."""
        if not self.url and self.ready_file.exists():
            self.url = str(json.loads(self.ready_file.read_text())["url"])
        return bool(self.url)

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether /health answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=timeout_s) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, timeout_s: float = 15.0) -> int:
        """End it: SIGTERM, then SIGKILL to the whole group. Returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def start_engine(command: EngineCommand, directory: Path, *, leash: bool = False) -> EngineProcess:
    """Start an engine; its log and ready file go to `directory`. Does not wait.

    On a leash it dies with this process, however that ends.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ready_file, log_file = directory / "ready.json", directory / "engine.log"
    ready_file.unlink(missing_ok=True)
    argv = command.argv(ready_file)
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            with_parent_death_signal(argv) if leash else argv,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return EngineProcess(process, ready_file, log_file)
