"""Servers that outlive a stage: on one machine the next stage of the same run takes over those that it would start.

A server takes half a minute to minutes to start, and consecutive stages need equal ones: that without a drafter in
every benchmark, in tuning and in the proof, and that of the setting which tuning chose. So the runner of one machine
(`eyrie_pipelines.local`) runs this program, the keeper, next to the pipeline of a job with `engine: sglang`. While a
stage measures (`measure.benchmark.session.measuring`) it is connected, and its servers are the keeper's children:

    take    what the measurement before has kept: servers, and the machine's measuring lock. `ServerPool` continues with
            servers of equal keys, flushed, and stops the others before it starts any; the stage warms all of them up
    start   a command, with the server's key: a digest of all that its answers and speed depend on (`sglang.servers`)
    keep    the measurement has ended well: running servers stay, and with them the lock

Whatever ends, no server is left. One process is served at a time; when it ends and has not kept its servers they are
killed, because a request may still run in them. The keeper ends with the runner, which stops it before it writes the
run's result, and its servers end with it (`engines.parent_death_signal`). Benchmark and tune keep; the proof stops its
servers. Capture and training, which need the memory, come before and never find a kept server.

The lock passes on as open descriptors (a flock belongs to the open file): another measurement that began between two
stages would find the memory taken. CPU time of the keeper's servers counts as the stage's own (`cpu_seconds`), and
their processes on a GPU are not other work. Two things differ from servers of the stage's own: the noise of sampled
answers goes on where it was, which no figure depends on, and a server may be older than the one it is compared with.

In a pod, on a share of the GPUs, in a program started by hand, and when the keeper was killed, servers are children of
the stage. A message is one packet: a JSON object, with descriptors. Only the same user is answered. Linux only.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from eyrie_workers.catalog import KEEPER_VARIABLE
from eyrie_workers.engines.parent_death_signal import adopt_orphans, die_with_parent, reap
from eyrie_workers.engines.process import group_ticks, start_process

_POLL_S = 0.05


class KeptProcess(subprocess.Popen[bytes]):
    """A server's process, which is a child of the keeper: what `ServerProcess` uses of Popen."""

    def __init__(self, pid: int, key: str, command: Sequence[str], log: str) -> None:
        self._child_created = False  # nothing to reap here
        self.pid, self.returncode = pid, None
        self.key, self.command, self.log_file = key, tuple(command), Path(log)

    def poll(self) -> int | None:
        """Without its keeper it was killed."""
        if self.returncode is None:
            self.returncode = keeper().ask("poll", pid=self.pid)[0].get("code", -signal.SIGKILL)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + (timeout or 0.0)
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.command, timeout)
            time.sleep(_POLL_S)
        return code


class Keeper:
    """This process's connection to the keeper, from the first `take` on, if there is one."""

    def __init__(self) -> None:
        self.pid = 0
        self.connection: socket.socket | None = None
        self.taken: list[KeptProcess] = []
        """From the measurement before: a `ServerPool` uses or stops them."""

    def ask(self, request: str, descriptors: Sequence[int] = (), **fields: Any) -> tuple[dict[str, Any], list[int]]:
        """The answer, with descriptors; empty without a keeper."""
        if self.connection is not None:
            with contextlib.suppress(OSError):
                socket.send_fds(self.connection, [json.dumps({"request": request} | fields).encode()], descriptors)
                answer, received = _receive(self.connection)
                if answer:
                    return answer, received
            self.connection = None
        return {}, []

    def take(self) -> list[int]:
        """Take over what was kept: servers, as `taken`; returns the lock's descriptors."""
        pid, _, name = os.environ.get(KEEPER_VARIABLE, "").partition(" ")
        if name and self.connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.suppress(OSError):  # it was killed
                connection.connect(f"\0{name}")
                self.pid, self.connection = int(pid), connection if _is_own(connection) else None
        answer, lock = self.ask("take")
        self.taken = [KeptProcess(*server) for server in answer.get("servers", ())]
        return lock

    def start(self, key: str, command: Sequence[str], log_file: Path,
              environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """As `start_process`, and that without a keeper."""
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log_file.write_bytes(b"")  # a full disk is this process's error
        log, command = str(log_file.absolute()), list(command)
        answer, _ = self.ask("start", key=key, command=command, log=log, directory=os.getcwd(),
                             environment=dict(environment or os.environ))
        return KeptProcess(answer["pid"], key, command, log) if answer else start_process(
            command, log_file, environment)

    def keep(self, lock: Sequence[int]) -> None:
        """Keep the servers that run, and the lock."""
        self.ask("keep", lock)

    def cpu_seconds(self) -> float:
        """CPU time of the keeper and its servers since it began."""
        return float(self.ask("cpu")[0].get("seconds", 0.0))


@cache
def keeper() -> Keeper:
    return Keeper()


def _is_own(connection: socket.socket) -> bool:
    """Whether the other side is a process of this user: any process can reach an abstract socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Empty when the other side has closed the connection."""
    message, received, _, _ = socket.recv_fds(connection, 2**18, 64, socket.MSG_CMSG_CLOEXEC)
    return json.loads(message or b"{}"), received


# The keeper's process.


class _State:
    def __init__(self) -> None:
        self.servers: dict[int, tuple[subprocess.Popen[bytes], dict[str, Any]]] = {}
        """With the message that started it, by process id."""

        self.is_kept, self.lock = False, list[int]()

    def serve(self, client: socket.socket) -> None:
        """Answer one process until it ends; then kill what it has not kept."""
        with client, contextlib.suppress(OSError):  # it was killed
            while (received := _receive(client))[0]:
                answer = self.answer(*received)
                passed_on = self.lock if "servers" in answer else []
                socket.send_fds(client, [json.dumps(answer).encode()], passed_on)
                while passed_on:
                    os.close(passed_on.pop())
        if not self.is_kept:
            self.kill(*self.servers)

    def answer(self, message: dict[str, Any], received: list[int]) -> dict[str, Any]:
        match message["request"]:
            case "start":
                process = start_process(message["command"], Path(message["log"]), message["environment"],
                                        message["directory"])
                self.servers[process.pid] = process, message
                return {"pid": process.pid}
            case "poll":
                pid = message["pid"]
                code = self.servers[pid][0].poll() if pid in self.servers else -signal.SIGKILL
                if pid in self.servers and code is not None:
                    self.kill(pid)  # the rest of its group
                return {"code": code}
            case "take":
                self.is_kept = False
                return {"servers": [(pid, started["key"], started["command"], started["log"])
                                    for pid, (_, started) in self.servers.items()]}
            case "keep":
                self.is_kept = bool(self.servers)
                self.lock = received if self.is_kept else []
                for descriptor in received if not self.is_kept else ():
                    os.close(descriptor)
        # Of processes that have ended too: orphans of the servers become this process's children.
        ticks = sum(sum(group_ticks(pid).values()) for pid in self.servers)
        return {"seconds": sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")}

    def kill(self, *pids: int) -> None:
        for pid in pids:
            others = group_ticks(pid).keys() - {pid}
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self.servers.pop(pid)[0].wait()
            reap(others)  # then their CPU time is this process's


def main() -> None:
    """`python -m eyrie_workers.engines.server_keeper PARENT_PID LISTENER`: serve until SIGTERM or the parent's end."""
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent process has ended")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    adopt_orphans()
    state, listener = _State(), socket.socket(fileno=int(sys.argv[2]))
    try:
        while True:
            client, _ = listener.accept()
            if _is_own(client):
                state.serve(client)
    finally:
        state.kill(*state.servers)


if __name__ == "__main__":
    main()
