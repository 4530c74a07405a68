"""A SGLang server as a child process: start, readiness, the error that ended it, stop.

Does not import torch or SGLang: SGLang runs in its own interpreter, possibly with other versions of torch and
transformers, and is reached over HTTP. The program that starts it is configurable:

    EYRIE_SGLANG_PROGRAM   a command in shell syntax; default `python -m sglang.launch_server`

The arguments are rendered in `launch`. One server is several processes (HTTP, scheduler, detokenizer); it has its own
session so that all of them can be killed, and is killed when its parent ends (`engines.parent_death_signal`).

Start-up is import-bound: 20 to 60 s on two cores for a model of 50 MB, minutes for one of 50 GB. `/ready` returns 200
once the weights are loaded, the graphs captured and the warm-up request answered.
"""

import json
import os
import re
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from eyrie_api.contract.engine import SGLANG_PROGRAM
from eyrie_api.processes import last_lines, log_lines
from eyrie_workers.engines.process import EngineFailed, ServerProcess, StartProcess, group_ticks, start_process
from eyrie_workers.sglang.plugin_files import place_plugin

# `SomeError: text`, with or without SGLang's time stamp: the last match is the reason why a server ended.
_RAISED = re.compile(r"^(?:\[[^\]]*\]\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$")
# Messages of the parent process after a child has failed; the child's own error is logged before them.
_AFTERMATH = ("Received sigquit", "Rank 0 scheduler", "Scheduler or DataParallelController", "EOFError", "SystemExit")


def launcher_command() -> tuple[str, ...]:
    """The command that starts SGLang's launcher, without arguments."""
    return tuple(shlex.split(os.environ.get(SGLANG_PROGRAM, ""))) or ("python", "-m", "sglang.launch_server")


def merged_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment updated with `variables`; a PYTHONPATH is prepended to the existing one."""
    merged = {**os.environ, **variables}
    inherited = os.environ.get("PYTHONPATH")
    if inherited and "PYTHONPATH" in variables:
        merged["PYTHONPATH"] = f"{variables['PYTHONPATH']}{os.pathsep}{inherited}"
    return merged


def plugin_root(directory: Path) -> str:
    """A folder in `directory` with the package that SGLang imports (`plugin_files`), for PYTHONPATH."""
    root = directory.absolute() / "plugin"
    place_plugin(root)
    return str(root)


class SglangServer(ServerProcess):
    name = "SGLang"

    def ready(self, timeout_s: float = 5.0) -> bool:
        """Whether /ready returns 200."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=timeout_s) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def phase(self) -> str:
        return loading_phase(log_lines(self.log_file))

    def last_error(self) -> str:
        """The last exception in the log; its last lines when there is none."""
        raised = [match.group(1) for line in log_lines(self.log_file)
                  if (match := _RAISED.match(line)) and not any(phrase in line for phrase in _AFTERMATH)]
        return raised[-1] if raised else last_lines(self.log_file, without=_AFTERMATH)

    def version(self) -> str:
        """SGLang's version, as the ready server reports it. Raises EngineFailed."""
        try:
            return str(json.loads(self.request("/server_info", "GET", 60.0))["version"])
        except (ValueError, KeyError) as error:
            raise EngineFailed(f"{self.url}/server_info reports no version: {type(error).__name__} {error}",
                               f"read {self.log_file}") from error

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until no request runs, then forget cached prefixes and texts of n-gram lookup. Raises EngineFailed."""
        self.request(f"/flush_cache?timeout={timeout_s:g}", "POST", timeout_s + 30.0)

    def request(self, path: str, method: str, timeout_s: float, body: object = None) -> bytes:
        """The answer to a request, with `body` as JSON if there is one. Raises EngineFailed."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} if data else {},
                                         method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise EngineFailed(f"{self.url}{path} answered {error.code}: {error.read(300).decode(errors='replace')}",
                               f"read {self.log_file}") from error
        except (urllib.error.URLError, OSError) as error:
            raise EngineFailed(f"{self.url}{path} did not answer: {error}", f"read {self.log_file}") from error

    def cpu_seconds(self) -> float:
        """CPU time of its processes since they began."""
        return sum(group_ticks(self.process.pid).values()) / os.sysconf("SC_CLK_TCK")


def start_sglang(arguments: Sequence[str], directory: Path, *, environment: Mapping[str, str] | None = None,
                 prefix: Sequence[str] | None = None, start: StartProcess = start_process) -> SglangServer:
    """Start a server with these arguments (`launch.launch_arguments`), with its log in `directory`; does not wait.

    environment   variables in addition to this process's own (`launch.launch_environment`)
    prefix        the command to use instead of `launcher_command()`
    """
    log_file = directory / "sglang.log"
    command = (*(launcher_command() if prefix is None else prefix), *arguments)
    return as_server(start(command, log_file, merged_environment(environment or {})), log_file, command)


def as_server(process: subprocess.Popen[bytes], log_file: Path, command: tuple[str, ...]) -> SglangServer:
    """The server of a process that was started with this command."""
    given = {"--host": "127.0.0.1", "--port": "30000"} | {  # the defaults are SGLang's
        flag: word for flag, word in pairwise(command) if flag in ("--host", "--port")}
    return SglangServer(process, log_file, command, f"http://{given['--host']}:{given['--port']}")


_PHASES = (("Load weight begin", "loading weights"), ("Load weight end", "weights loaded"),
           ("KV Cache is allocated", "KV pool allocated"), ("Capture cuda graph begin", "capturing graphs"),
           ("Capture cuda graph end", "graphs captured"), ("Application startup complete", "warming up"))
"""Text of SGLang's log and what it says about a starting server; the target's weights come before the drafter's."""


def loading_phase(lines: Sequence[str]) -> str:
    """How far a starting server has come, from the lines of its log. Pure."""
    return next((phase for line in reversed(lines) for text, phase in _PHASES if text in line), "importing")
