"""A TCP relay before a real server that makes trouble: cuts connections, or stops passing bytes on."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Relay:
    """The running relay; its fields may be changed while it runs."""

    port: int
    cut_after: list[int] = field(default_factory=list)
    """The next connections are cut after so many answered bytes, one each."""

    hold_at: bytes | None = None
    """A request with these bytes is not passed on, and nothing after it."""

    cut_at: bytes | None = None
    """A request with these bytes ends its connection."""

    cut_answers: int = 0
    """So many answers to requests with `answer_at` are not passed on, and end their connections."""

    answer_at: bytes = b""
    silent_at: bytes | None = None
    """Of requests with these bytes no answer is passed on, and their connections stay open."""

    asked: dict[socket.socket, bytes] = field(default_factory=dict)
    """The latest request of each connection."""

    sent: int = 0
    answered: int = 0
    held: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cut(self, asked: bytes) -> None:
        """End the connections whose latest request has these bytes."""
        for client, data in list(self.asked.items()):
            if asked in data:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)


@contextmanager
def relaying(port: int) -> Iterator[Relay]:
    """Relay connections to a local port."""
    listening = socket.create_server(("127.0.0.1", 0))
    relay = Relay(listening.getsockname()[1])
    sockets: list[socket.socket] = [listening]
    ended = threading.Event()

    def accept() -> None:
        while True:
            try:
                client, _ = listening.accept()
                server = socket.create_connection(("127.0.0.1", port))
            except OSError:
                return
            sockets.extend((client, server))
            with relay.lock:
                cut = relay.cut_after.pop(0) if relay.cut_after else None
            threading.Thread(target=up, args=(client, server), daemon=True).start()
            threading.Thread(target=down, args=(server, client, cut), daemon=True).start()

    def up(client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                relay.asked[client] = data
                with relay.lock:
                    relay.sent += len(data)
                if relay.hold_at is not None and relay.hold_at in data:
                    relay.held.set()
                    ended.wait()
                    return
                if relay.cut_at is not None and relay.cut_at in data:
                    client.shutdown(socket.SHUT_RDWR)
                    return
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)

    def down(server: socket.socket, client: socket.socket, cut: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := server.recv(1 << 16):
                if cut is not None and passed + len(data) > cut:
                    client.sendall(data[: cut - passed])
                    break
                if relay.cut_answers and relay.answer_at in relay.asked[client]:
                    relay.cut_answers -= 1
                    break
                if relay.silent_at is not None and relay.silent_at in relay.asked[client]:
                    continue
                client.sendall(data)
                passed += len(data)
                with relay.lock:
                    relay.answered += len(data)
        for end in (client, server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield relay
    finally:
        ended.set()
        for one in sockets:
            one.close()
