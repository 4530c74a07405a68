"""Servers as processes of the test session: started on a free port, waited for, killed, started again.

A session has one directory (`EYRIE_TEST_SERVERS`), made by the process that the developer started and inherited by the
workers of pytest-xdist. What is dear to start is started once by whichever worker needs it first, under a file lock,
and shared; it ends with the session (see `keeper`).
"""

import fcntl
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eyrie_api.processes import free_port

SESSION = "EYRIE_TEST_SERVERS"
_TRIES = 5
START_S = 240.0
"""A server that is not up by then on a loaded machine never will be."""


class Unavailable(Exception):
    """This machine cannot run the server; the text says why and what to install."""


class Session:
    """The directory and the lifeline of everything the tests start."""

    def __init__(self) -> None:
        sweep_killed_sessions()
        self.directory = Path(tempfile.mkdtemp(prefix="eyrie-servers-"))
        self.directory.chmod(0o711)  # PostgreSQL runs as another user and must reach its data through here
        lifeline = self.directory / "lifeline"
        os.mkfifo(lifeline)
        self._held = os.open(lifeline, os.O_RDWR | os.O_NONBLOCK)
        os.environ[SESSION] = str(self.directory)

    def end(self) -> None:
        """Let go: every server is killed, and its files are removed."""
        os.close(self._held)
        os.environ.pop(SESSION, None)
        shutil.rmtree(self.directory, ignore_errors=True)


def sweep_killed_sessions() -> None:
    """Remove the files of sessions that ended without doing so: nobody holds their lifelines. A cluster is 40 MB."""
    for directory in Path(tempfile.gettempdir()).glob("eyrie-servers-*"):
        try:
            if time.time() - directory.stat().st_mtime < START_S:
                continue  # perhaps just being made
            descriptor = os.open(directory / "lifeline", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            abandoned = os.read(descriptor, 1) == b""
        except BlockingIOError:
            abandoned = False
        os.close(descriptor)
        if abandoned:
            shutil.rmtree(directory, ignore_errors=True)


def session_dir() -> Path:
    """Where this session's servers keep their files."""
    return Path(os.environ[SESSION])


def private_dir() -> Path:
    """A new directory there that another user may enter, for a server of one test's own."""
    made = Path(tempfile.mkdtemp(dir=session_dir()))
    made.chmod(0o711)
    return made


def shared(name: str, start: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What `start` returned to the first worker of this session that asked. Raises Unavailable to all of them alike."""
    result = session_dir() / f"{name}.json"
    with result.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            directory = session_dir() / name
            directory.mkdir()
            try:
                value = start(directory)
            except Unavailable as reason:
                value = {"unavailable": str(reason)}
            result.write_text(json.dumps(value))
    value = json.loads(result.read_text())
    if "unavailable" in value:
        raise Unavailable(value["unavailable"])
    return dict(value)


class Server:
    """One server process. `argv` is given the port; it stays the same when the server is started again."""

    def __init__(self, argv: Callable[[int], list[str]], log: Path, *, user: str = "",
                 env: Mapping[str, str] | None = None, ready: Callable[[int], bool] | None = None) -> None:
        self._argv, self._log, self._user, self._env = argv, log, user, {**os.environ, **(env or {})}
        self._ready = ready or answers
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it answers. Raises Unavailable with the end of its log when it does not.

        A server that ends at once is tried again: what a killed one left may need a moment to go.
        """
        for _ in range(_TRIES):
            if self._comes_up():
                return
            time.sleep(0.5)
        raise Unavailable(f"{self._argv(self.port)[0]} did not start: {self._log.read_text()[-500:]}")

    def _comes_up(self) -> bool:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                kept(self._argv(self.port), self._user),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, cwd="/", start_new_session=True)
        deadline = time.monotonic() + START_S
        while not self._ready(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                return False
            time.sleep(0.02)
        return True

    @property
    def pid(self) -> int:
        """Of the process that keeps it; the server is its child."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)
            self._process.wait(30)
        self._process = None


def kept(argv: list[str], user: str = "") -> list[str]:
    """The command line that runs another as long as the session lasts, and ends as it ends."""
    keeper = str(Path(__file__).with_name("keeper.py"))
    return [sys.executable, "-I", "-S", keeper, str(session_dir() / "lifeline"), user, "--", *argv]


def answers(port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def unprivileged_user() -> str:
    """Whom to become where we are root; empty where we are not."""
    if os.geteuid() != 0:
        return ""
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
