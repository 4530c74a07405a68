"""A control plane in the background of this machine: lock its home, start and stop it.

It is found by its lock on `<home>/plane.json` (`eyrie_api.cli.verbs`).
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from eyrie_api.cli.verbs import PLANE_FILE, RunningPlane, running_plane
from eyrie_api.errors import Conflict, Permanent, PortInUse
from eyrie_api.processes import bind, last_lines
from eyrie_api.settings import Settings

PLANE_LOG = "plane.log"
_START_S = 120.0
# Runs get SIGTERM and save their state; a training step or a verify round takes well under a second here.
_STOP_S = 30.0
_POLL_S = 0.1
_CLAIM_S = 10.0


class PlaneFailed(Permanent):
    """The control plane did not start or stop."""


@contextlib.contextmanager
def claim(home: Path, url: str) -> Iterator[None]:
    """Lock a home for this process's control plane. Raises Conflict when another process holds it."""
    home.mkdir(parents=True, exist_ok=True)
    # Race: opened for appending, so that a process that fails to get the lock does not truncate the file. Python does
    # not pass the descriptor to child processes, which would keep the lock.
    with (home / PLANE_FILE).open("a+") as file:
        until = time.monotonic() + _CLAIM_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Without a record of the holder, a call of `running_plane` has the lock, or a killed process is ending.
                other = running_plane(home)
                if other is not None or time.monotonic() > until:
                    raise Conflict(f"a control plane already runs on {home}" + (f" at {other.url}" if other else ""),
                                   "use it, stop it with `eyrie down`, or choose another --home") from None
                time.sleep(_POLL_S)
        file.seek(0)
        file.truncate()
        file.write(json.dumps({"pid": os.getpid(), "url": url}) + "\n")
        file.flush()
        yield


def start_detached(settings: Settings) -> RunningPlane:
    """Start a control plane in the background and return when it is ready. Raises PlaneFailed or PortInUse."""
    already = running_plane(settings.home)
    if already is not None:
        return already
    check_port(settings.host, settings.port)
    settings.home.mkdir(parents=True, exist_ok=True)
    log_file = settings.home / PLANE_LOG
    argv = [sys.executable, "-m", "eyrie_operator.command", "up", "--home", str(settings.home),
            "--host", settings.host, "--port", str(settings.port)]
    with log_file.open("ab") as log:
        child = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                 start_new_session=True)
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise PlaneFailed(f"the control plane ended with exit code {child.returncode}: {last_lines(log_file)}",
                              f"read {log_file}")
        plane = running_plane(settings.home)
        if plane is not None and is_ready(f"{plane.url}/readyz"):
            return plane
        time.sleep(_POLL_S)
    child.terminate()
    raise PlaneFailed(f"the control plane was not ready after {_START_S:g} s", f"read {log_file}")


def check_port(host: str, port: int) -> None:
    """Raises PortInUse when a process listens there: before the start, so that the error is not only in a log."""
    try:
        bind(host, port).close()
    except PortInUse as error:
        raise PortInUse(error.message, "eyrie up --port <another>, or stop the process there (if it is ours: eyrie "
                        "down)") from None


def is_ready(url: str) -> bool:
    """Whether it answers 200."""
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def stop_plane(plane: RunningPlane) -> None:
    """Stop a control plane: SIGTERM, then SIGKILL. Returns when it has ended."""
    for number, timeout_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(plane.pid, number)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if running_plane(plane.home) is None:
                return  # the lock file stays: another process may be about to lock it
            time.sleep(_POLL_S)
    raise PlaneFailed(f"the control plane (pid {plane.pid}) did not end", f"read {plane.home / PLANE_LOG}")
