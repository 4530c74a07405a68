"""A SGLang server as a child process: start, the question whether it serves, its last words, the end.

Torch-free. SGLang is never imported: it lives in an interpreter of its own, with versions of torch and transformers
that need not be ours, and is reached over HTTP. Which program starts it is a prefix of its command line:

    EYRIE_SGLANG_PROGRAM   words as a shell would split them; default `python -m sglang.launch_server`

What stands behind the prefix is rendered in `launch`. One server is a family of processes (HTTP, scheduler,
detokenizer); it gets a session of its own so that it can be ended whole, and a leash (`engines.parent_death_signal`) so
that it does not outlive the program that measures it.

Start-up is import-bound: 20 to 60 s on two cores for a model of 50 MB, minutes for one of 50 GB. `/ready` answers 200
once the weights are loaded, the graphs captured and the warm-up request answered.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import eyrie_workers
from eyrie_api.processes import last_lines, log_lines
from eyrie_workers.engines.parent_death_signal import with_parent_death_signal
from eyrie_workers.engines.process import EngineFailed, wait_until_ready

PROGRAM = "EYRIE_SGLANG_PROGRAM"
_POLL_S = 0.25
# `SomeError: text`, also behind SGLang's time stamp: the last of them says why a server ended.
_RAISED = re.compile(r"^(?:\[[^\]]*\]\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$")
# What the parent says after a child ended; the child's own words stand above it.
_AFTERMATH = ("Received sigquit", "Rank 0 scheduler", "Scheduler or DataParallelController", "EOFError", "SystemExit")


def program() -> tuple[str, ...]:
    """The words that start SGLang's launcher in this environment."""
    return tuple(shlex.split(os.environ.get(PROGRAM, ""))) or ("python", "-m", "sglang.launch_server")


def merged_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `variables` over it; a PYTHONPATH comes before ours, and does not replace it."""
    found = {**os.environ, **variables}
    ours = os.environ.get("PYTHONPATH")
    if ours and "PYTHONPATH" in variables:
        found["PYTHONPATH"] = f"{variables['PYTHONPATH']}{os.pathsep}{ours}"
    return found


def plugin_root(directory: Path) -> str:
    """A folder in `directory` with our package and nothing else in it, for an interpreter that does not have Eyrie.

    A link, because the package may lie in site-packages: with those on its path SGLang would import our torch.
    """
    root = directory.absolute() / "plugin"
    root.mkdir(parents=True, exist_ok=True)
    link, package = root / "eyrie_workers", Path(eyrie_workers.__file__).parent
    if not link.exists():
        link.unlink(missing_ok=True)  # one that leads nowhere any more
        link.symlink_to(package, target_is_directory=True)
    return str(root)


@dataclass
class SglangServer:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    """Base URL, without /v1. Nobody may be listening yet: `wait_ready`."""

    log_file: Path
    command: tuple[str, ...] = field(default=())
    """Program and arguments, as they could be typed."""

    def wait_ready(self, timeout_s: float = 1800.0) -> str:
        """Wait until it serves; return `url`. Raises EngineFailed when it ended, Transient when time is up."""
        wait_until_ready(self, "SGLang", timeout_s, _POLL_S)
        return self.url

    def check(self) -> None:
        """Raises EngineFailed, with its last words, when the server has ended."""
        code = self.process.poll()
        if code is not None:
            raise EngineFailed(f"SGLang ended with exit code {code}: {last_error(self.log_file)}",
                               f"read {self.log_file}; the command was: {shlex.join(self.command)}")

    def ready(self, timeout_s: float = 5.0) -> bool:
        """Whether /ready answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=timeout_s) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, timeout_s: float = 30.0) -> int:
        """End it: SIGTERM, on which SGLang finishes its answers, then SIGKILL to all that is left of it.

        Returns the exit code. SGLang looks for the signal every five seconds, so a stop takes about that long; with
        `timeout_s` 0 nothing is waited for.
        """
        if self.process.poll() is None and timeout_s > 0:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # also children whose parent is gone
        return self.process.wait()


def start_sglang(arguments: Sequence[str], directory: Path, *, environment: Mapping[str, str] | None = None,
                 prefix: Sequence[str] | None = None) -> SglangServer:
    """Start a server with these arguments (`launch.launch_arguments`); its log goes to `directory`. Does not wait.

    environment   variables on top of this process's own (`launch.launch_environment`)
    prefix        the program instead of `program()`
    """
    directory.mkdir(parents=True, exist_ok=True)
    log_file = directory / "sglang.log"
    command = (*(program() if prefix is None else prefix), *arguments)
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            with_parent_death_signal(command),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=merged_environment(environment or {}),
        )
    return SglangServer(process, f"http://{_address(arguments)}", log_file, command)


def last_error(log_file: Path) -> str:
    """The last exception in the log; its last lines when there is none."""
    raised = [match.group(1) for line in log_lines(log_file)
              if (match := _RAISED.match(line)) and not any(phrase in line for phrase in _AFTERMATH)]
    return raised[-1] if raised else last_lines(log_file, without=_AFTERMATH)


def _address(arguments: Sequence[str]) -> str:
    """Where to reach a server with these arguments; SGLang's own defaults are 127.0.0.1 and 30000."""
    given = {flag: value for flag, value in pairwise(arguments) if flag in ("--host", "--port")}
    host = given.get("--host", "127.0.0.1")
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"[{host}]:{given.get('--port', '30000')}" if ":" in host else f"{host}:{given.get('--port', '30000')}"
