"""Servers that outlive a stage: on one machine the next stage of the same run takes over those that it would start.

A server takes half a minute to minutes to start, and consecutive stages need equal ones: the server without a drafter
of every benchmark, of tuning and of the proof, and the drafted server that tuning chose. So the runner of one machine
(`eyrie_pipelines.local`) runs this program, the keeper, next to the pipeline of a job with `engine: sglang`. Stages
that measure connect to it by a socket (`connect`). While connected, their servers are children of the keeper.

    start   a command, with the server's key: a digest of all that its answers and speed depend on (`sglang.servers`)
    keep    the stage has ended well: its running servers stay, and with them the machine's measuring lock
    take    what the stage before has kept on these GPUs, lock included. `ServerPool` continues with servers of equal
            keys, flushed, stops the others before it starts any, and the stage warms them up as it does new ones

Whatever ends, no server is left: a connection that closes without `keep`, which is how a stage ends that failed or was
killed, has its servers killed, because a request may still run in them. The keeper ends with the runner, which stops it
before it writes the run's result, and servers are killed when the keeper ends (`engines.parent_death_signal`).
Benchmark and tune keep, and only a benchmark, tune or the proof follows them in a run. Capture and training, which need
the memory, never find a kept server.

The lock goes from stage to stage with the servers: another measurement that began between two stages would find their
memory taken. It is passed as open descriptors, because a flock belongs to the open file. Measurements on shares of the
GPUs run at the same time, each with servers and locks of its own share; a measurement of the whole machine ends those.

CPU time of kept servers counts as the stage's own (`cpu_seconds`), and their processes on a GPU are not other work.
Two things differ from a server of the stage's own: the noise of sampled answers goes on where it was, which no figure
depends on, and it may be older than the server that it is compared with, which both being warmed up makes up for.
In a pod, in a stage started by hand, and when the keeper has been killed, a stage's servers are its own children.

A message is one packet: a JSON object, with descriptors. Only processes of the same user are answered. Linux only, like
the parent-death signal.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyrie_workers.catalog import KEEPER_VARIABLE
from eyrie_workers.engines.parent_death_signal import adopt_orphans, die_with_parent, reap
from eyrie_workers.engines.process import Process, group_ticks, start_process

_PACKET_BYTES = 2**18
_MOST_DESCRIPTORS = 64
_POLL_S = 0.05


@dataclass
class KeptProcess:
    """A server's process, which is a child of the keeper."""

    pid: int
    key: str
    command: tuple[str, ...]
    log_file: Path
    keeper: "Keeper" = field(repr=False)

    def poll(self) -> int | None:
        """Its exit code once it has ended. Without a keeper it was killed."""
        try:
            code: int | None = self.keeper.ask("poll", pid=self.pid)[0]["code"]
        except OSError:
            return -signal.SIGKILL
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.command, timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        os.kill(self.pid, sig)


class Keeper:
    """A stage's connection to the keeper."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self.pid = connection, pid
        self.taken: list[KeptProcess] = []
        """From the stage before; a `ServerPool` uses or stops them."""

    def ask(self, request: str, descriptors: Sequence[int] = (), **fields: Any) -> tuple[dict[str, Any], list[int]]:
        """Raises OSError when the keeper has ended."""
        socket.send_fds(self._connection, [json.dumps({"request": request} | fields).encode()], list(descriptors))
        answer, received, _, _ = socket.recv_fds(self._connection, _PACKET_BYTES, _MOST_DESCRIPTORS,
                                                 socket.MSG_CMSG_CLOEXEC)
        if not answer:
            raise ConnectionResetError("the keeper of the servers has ended")
        return json.loads(answer), received

    def start(self, key: str, command: Sequence[str], log_file: Path,
              environment: Mapping[str, str] | None = None) -> Process:
        """As `start_process`, and that when the keeper has ended."""
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log_file.write_bytes(b"")  # a full disk is this process's error
        try:
            answer, _ = self.ask("start", key=key, command=list(command), log=str(log_file.absolute()),
                                 directory=os.getcwd(),
                                 environment=dict(os.environ if environment is None else environment))
        except OSError:
            return start_process(command, log_file, environment)
        return KeptProcess(answer["pid"], key, tuple(command), log_file, self)

    def take(self, gpus: Sequence[str]) -> list[int]:
        """Take over what was kept on these GPUs: the servers, as `taken`, and the descriptors of the lock."""
        try:
            answer, lock = self.ask("take", gpus=list(gpus))
        except OSError:
            return []
        self.taken = [KeptProcess(kept["pid"], kept["key"], tuple(kept["command"]), Path(kept["log"]), self)
                      for kept in answer["servers"]]
        return lock

    def keep(self, gpus: Sequence[str], lock: Sequence[int]) -> None:
        """Keep the servers that run, and the lock, for the next stage."""
        with contextlib.suppress(OSError):
            self.ask("keep", lock, gpus=list(gpus))

    def cpu_seconds(self) -> float:
        """CPU time of the servers and the keeper since it began."""
        try:
            return float(self.ask("cpu")[0]["seconds"])
        except OSError:
            return 0.0

    def close(self) -> None:
        self._connection.close()


def connect() -> Keeper | None:
    """The keeper of this run; None where there is none."""
    pid, _, name = os.environ.get(KEEPER_VARIABLE, "").partition(" ")
    if not name:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"\0{name}")
        if _is_own(connection):
            return Keeper(connection, int(pid))
    except OSError:
        pass
    connection.close()
    return None


def _is_own(connection: socket.socket) -> bool:
    """Whether the other side is a process of this user: any process can reach an abstract socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


# The keeper's process.


@dataclass
class _Server:
    process: subprocess.Popen[bytes]
    key: str
    command: list[str]
    log: str
    owner: socket.socket | None
    """The stage that uses it; None: kept."""

    gpus: tuple[str, ...] = ()
    """Those of the stage that kept it."""


@dataclass
class _State:
    servers: dict[int, _Server] = field(default_factory=dict)
    locks: dict[tuple[str, ...], list[int]] = field(default_factory=dict)
    """Descriptors of the measuring lock, by the GPUs of the stage that kept them."""

    def answer(self, client: socket.socket, message: dict[str, Any], received: list[int]) -> None:
        request, lock, answer = message["request"], list[int](), dict[str, Any]()
        gpus = tuple(message.get("gpus", ()))
        if request == "start":
            process = start_process(message["command"], Path(message["log"]), message["environment"],
                                    message["directory"])
            self.servers[process.pid] = _Server(process, message["key"], message["command"], message["log"], client)
            answer = {"pid": process.pid}
        elif request == "poll":
            server = self.servers.get(message["pid"])
            code = -signal.SIGKILL if server is None else server.process.poll()
            if server is not None and code is not None:
                self.kill([server])  # the rest of its group
            answer = {"code": code}
        elif request == "take":
            for other in [other for other in self.locks if other != gpus and (
                    not gpus or not other or not set(gpus).isdisjoint(other))]:
                self.release(other)
            lock = self.locks.pop(gpus, [])
            kept = [server for server in self.servers.values() if server.owner is None and server.gpus == gpus]
            for server in kept:
                server.owner = client
            answer = {"servers": [{"pid": server.process.pid, "key": server.key, "command": server.command,
                                   "log": server.log} for server in kept]}
        elif request == "keep":
            running = [server for server in self.owned_by(client) if server.process.poll() is None]
            for server in running:
                server.owner, server.gpus = None, gpus
            if running:
                self.locks[gpus] = received
            else:
                _close(received)
        elif request == "cpu":
            answer = {"seconds": self.cpu_seconds()}
        socket.send_fds(client, [json.dumps(answer).encode()], lock)
        _close(lock)

    def owned_by(self, client: socket.socket | None) -> list[_Server]:
        return [server for server in self.servers.values() if server.owner is client]

    def release(self, gpus: tuple[str, ...]) -> None:
        """Kill what is kept on these GPUs, then release its lock."""
        self.kill([server for server in self.owned_by(None) if server.gpus == gpus])
        _close(self.locks.pop(gpus, []))

    def kill(self, servers: Sequence[_Server]) -> None:
        members = [(server, group_ticks(server.process.pid).keys() - {server.process.pid}) for server in servers]
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
        for server, others in members:
            server.process.wait()
            reap(others)  # then `cpu_seconds` has theirs
            self.servers.pop(server.process.pid, None)

    def cpu_seconds(self) -> float:
        """Of processes that have ended too: orphans of the servers are this process's children."""
        spent, hz = os.times(), os.sysconf("SC_CLK_TCK")
        return (spent.user + spent.system + spent.children_user + spent.children_system
                + sum(sum(group_ticks(pid).values()) for pid in self.servers) / hz)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


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
                    accepted, _ = listener.accept()
                    if _is_own(accepted):
                        waiting.register(accepted, selectors.EVENT_READ)
                    else:
                        accepted.close()
                    continue
                try:
                    message, received, _, _ = socket.recv_fds(client, _PACKET_BYTES, _MOST_DESCRIPTORS,
                                                              socket.MSG_CMSG_CLOEXEC)
                    if message:
                        state.answer(client, json.loads(message), received)
                        continue
                except OSError:  # the client was killed
                    pass
                waiting.unregister(client)
                client.close()
                state.kill(state.owned_by(client))
    finally:
        state.kill(list(state.servers.values()))


if __name__ == "__main__":
    main()
