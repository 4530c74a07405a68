"""Servers that outlive a stage: on one machine the next stage of the same run takes over those that it would start.

A server takes half a minute to minutes to start, and consecutive stages need equal ones: that without a drafter in
every benchmark, in tuning and in the proof, and that of the setting which tuning chose. So the runner of one machine
(`eyrie_pipelines.local`) runs this program, the keeper, next to the pipeline of a job with `engine: sglang`, and the
servers of stages are its children. A stage connects to it by a socket:

    start   a command, with the server's key: a digest of all that its answers and speed depend on (`sglang.servers`)
    keep    a measurement has ended well: its running servers stay, and with them the machine's measuring lock
    take    what the measurement before has kept, lock included. `ServerPool` continues with servers of equal keys,
            flushed, and stops the others before it starts any; the stage warms them up as it does new ones

Whatever ends, no server is left. When a connection closes, the servers that it started or took and did not keep are
killed: a request of a stage that was killed may still run in them. The keeper ends with the runner, which stops it
before it writes the run's result, and its servers end with it (`engines.parent_death_signal`). Benchmark and tune keep;
the proof stops its servers. Capture and training, which need the memory, come before and never find a kept server.

The lock passes from stage to stage with the servers, as open descriptors (a flock belongs to the open file): another
measurement that began in between would find the memory taken. A measurement on other GPUs than those of the one before
takes nothing over, and ends what was kept.

CPU time of the keeper's servers counts as the stage's own (`cpu_seconds`), and their processes on a GPU are not other
work. Two things differ from servers of the stage's own: the noise of sampled answers goes on where it was, which no
figure depends on, and a server may be older than the one it is compared with, so both are warmed up.

In a pod, in a program started by hand, and when the keeper was killed, servers are children of the stage. A message is
one packet: a JSON object, with descriptors. Only processes of the same user are answered. Linux only.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from eyrie_workers.catalog import KEEPER_VARIABLE
from eyrie_workers.engines.parent_death_signal import adopt_orphans, die_with_parent, reap
from eyrie_workers.engines.process import group_ticks, start_process

_PACKET_BYTES = 2**18
_MOST_DESCRIPTORS = 64
_POLL_S = 0.05


class KeptProcess(subprocess.Popen[bytes]):
    """A server's process, which is a child of the keeper: what `ServerProcess` uses of Popen."""

    def __init__(self, pid: int) -> None:
        self._child_created = False  # nothing to reap here
        self.pid, self.returncode = pid, None

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
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_POLL_S)
        return code


class Taken(NamedTuple):
    process: KeptProcess
    key: str
    command: tuple[str, ...]
    log_file: Path


class Keeper:
    """This process's connection to the keeper, if there is one."""

    def __init__(self) -> None:
        pid, _, name = os.environ.get(KEEPER_VARIABLE, "").partition(" ")
        self.pid, self.taken, self._connection = int(pid or 0), list[Taken](), None
        """`taken`: from the measurement before; a `ServerPool` uses or stops them."""

        if name:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.suppress(OSError):  # it was killed
                connection.connect(f"\0{name}")
                self._connection = connection if _is_own(connection) else None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def ask(self, request: str, descriptors: Sequence[int] = (), **fields: Any) -> tuple[dict[str, Any], list[int]]:
        """The answer, with descriptors; empty without a keeper."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                socket.send_fds(self._connection, [json.dumps({"request": request} | fields).encode()], descriptors)
                answer, received = _receive(self._connection)
                if answer:
                    return json.loads(answer), received
            self._connection = None
        return {}, []

    def start(self, key: str, command: Sequence[str], log_file: Path,
              environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """As `start_process`, and that without a keeper."""
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log_file.write_bytes(b"")  # a full disk is this process's error
        answer, _ = self.ask("start", key=key, command=list(command), log=str(log_file.absolute()),
                             directory=os.getcwd(), environment=dict(environment or os.environ))
        return KeptProcess(answer["pid"]) if answer else start_process(command, log_file, environment)

    def take(self, gpus: Sequence[str]) -> list[int]:
        """Take over what was kept by a measurement on these GPUs: servers, as `taken`; returns the lock's
        descriptors."""
        answer, lock = self.ask("take", gpus=list(gpus))
        self.taken = [Taken(KeptProcess(pid), key, tuple(command), Path(log))
                      for pid, key, command, log in answer.get("servers", ())]
        return lock

    def keep(self, gpus: Sequence[str], lock: Sequence[int]) -> None:
        """Keep the servers that run, and the lock."""
        self.ask("keep", lock, gpus=list(gpus))

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


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    message, received, _, _ = socket.recv_fds(connection, _PACKET_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    return message, received


# The keeper's process.


@dataclass
class _Server:
    process: subprocess.Popen[bytes]
    key: str
    command: list[str]
    log: str
    client: socket.socket | None
    """The stage that uses it; None: kept."""


@dataclass
class _State:
    servers: dict[int, _Server] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    """Of the measurement that has kept servers."""

    lock: list[int] = field(default_factory=list)

    def answer(self, client: socket.socket, message: dict[str, Any], received: list[int]) -> dict[str, Any]:
        request = message["request"]
        if request == "start":
            process = start_process(message["command"], Path(message["log"]), message["environment"],
                                    message["directory"])
            self.servers[process.pid] = _Server(process, message["key"], message["command"], message["log"], client)
            return {"pid": process.pid}
        if request == "poll":
            server = self.servers.get(message["pid"])
            code = -signal.SIGKILL if server is None else server.process.poll()
            if server is not None and code is not None:
                self.kill([server])  # the rest of its group
            return {"code": code}
        if request == "take":
            if self.gpus != message["gpus"]:
                self.release()
            for server in (kept := self.of(None)):
                server.client = client
            return {"servers": [(server.process.pid, server.key, server.command, server.log) for server in kept]}
        if request == "keep":
            self.release()  # what another measurement has kept
            for server in self.of(client):
                server.client = None
            self.gpus, self.lock = message["gpus"], received
            if not self.of(None):
                self.release()
        return {"seconds": self.cpu_seconds()}

    def release(self) -> None:
        """Kill what is kept, then release its lock."""
        self.kill(self.of(None))
        while self.lock:
            os.close(self.lock.pop())

    def of(self, client: socket.socket | None) -> list[_Server]:
        return [server for server in self.servers.values() if server.client is client]

    def kill(self, servers: Iterable[_Server]) -> None:
        for server in servers:
            pid = server.process.pid
            others = group_ticks(pid).keys() - {pid}
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            server.process.wait()
            reap(others)  # then `cpu_seconds` has theirs
            del self.servers[pid]

    def cpu_seconds(self) -> float:
        """Of processes that have ended too: orphans of the servers become this process's children."""
        spent, ticks = os.times(), sum(sum(group_ticks(pid).values()) for pid in self.servers)
        return sum(spent[:4]) + ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """`python -m eyrie_workers.engines.server_keeper PARENT_PID LISTENER`: serve until SIGTERM or the parent's end."""
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent process has ended")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    adopt_orphans()
    state, listener, waiting = _State(), socket.socket(fileno=int(sys.argv[2])), selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    try:
        while True:
            for ready, _ in waiting.select():
                client = ready.fileobj
                assert isinstance(client, socket.socket)
                if client is listener:
                    client, _ = listener.accept()
                    if _is_own(client):
                        waiting.register(client, selectors.EVENT_READ)
                    continue
                with contextlib.suppress(OSError):  # the client was killed
                    message, received = _receive(client)
                    if message:
                        answer = json.dumps(state.answer(client, content := json.loads(message), received)).encode()
                        passed_on = state.lock if content["request"] == "take" else []
                        socket.send_fds(client, [answer], passed_on)
                        while passed_on:
                            os.close(passed_on.pop())
                        continue
                waiting.unregister(client)
                client.close()
                state.kill(state.of(client))
    finally:
        state.kill(list(state.servers.values()))


if __name__ == "__main__":
    main()
