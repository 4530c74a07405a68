"""A minimal HTTP/1.1 client for the control plane's benchmark, on asyncio transports: client and server share the
processors, so the client must cost little.

It sends a POST on one of a pool of keep-alive connections, and a GET of an endless event stream. An answer to a POST is
read by its Content-Length. An event stream is read by lines: a server sends whole events, so the chunk-size lines
between them can be ignored.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable


class Exchange(asyncio.Protocol):
    """One keep-alive connection with one request in flight at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._read, self._awaited = b"", None  # type: tuple[bytes, asyncio.Future[tuple[int, bytes]] | None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def post(self, head_and_body: bytes) -> tuple[int, bytes]:
        """Send a request; return status and body. Raises ConnectionError when the connection is closed."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("closed while idle")
        self._awaited = asyncio.get_running_loop().create_future()
        self._transport.write(head_and_body)
        return await self._awaited

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, end, body = self._read.partition(b"\r\n\r\n")
        if not end:
            return
        if len(body) < _content_length(head):
            return
        self._read = b""
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result((int(head[9:12]), body))

    def connection_lost(self, reason: Exception | None) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(reason or ConnectionResetError("closed while answering"))


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    raise ValueError("an answer without Content-Length")


class Pool:
    """Connections to one server; a new one is opened whenever all are busy, so that no request waits."""

    def __init__(self, port: int) -> None:
        self.port, self.opened = port, 0
        self._free: deque[Exchange] = deque()

    async def post(self, path: str, body: bytes, headers: str = "") -> tuple[int, bytes]:
        """Send one request on a free or new connection."""
        if self._free:
            exchange = self._free.pop()
        else:
            self.opened += 1
            _, exchange = await asyncio.get_running_loop().create_connection(Exchange, "127.0.0.1", self.port)
        head = (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{headers}"
                f"Content-Length: {len(body)}\r\n\r\n")
        answer = await exchange.post(head.encode() + body)
        self._free.append(exchange)
        return answer


class Stream(asyncio.Protocol):
    """One event stream: `saw(data, at)` is called with each event's data and its arrival time."""

    def __init__(self, path: str, saw: Callable[[bytes, float], None]) -> None:
        self._path, self._saw, self._rest = path, saw, b""
        self.status, self.ended = 0, False
        self.begun = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(f"GET {self._path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n".encode())

    def data_received(self, data: bytes) -> None:
        at = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                self._saw(line[6:], at)
            elif not self.status and line.startswith(b"HTTP/1.1 "):
                self.status = int(line[9:12])
                self.begun.set()

    def connection_lost(self, reason: Exception | None) -> None:
        self.ended = True
        self.begun.set()
