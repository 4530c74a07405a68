"""HTTP/1.1 for many slow streams at once: send a request, keep every piece of the answer with the time it came.

Why not the HTTP library we already have: a stream of a hundred pieces, 20 ms apart, costs httpx 10 to 12 ms of
processor time (AMD EPYC, 2026), JSON included; 256 of them take more than a core, and then the generator measures
itself. Here it is 0.7 to 1.5 ms. A piece costs one read into a shared buffer, one clock reading and the bookkeeping of
its frame; nothing is decoded until the answer has ended (`events` does that), so that what other streams wait for is as
short as possible. asyncio's own protocol interface does this with what Python brings along.

Understood: chunked and counted bodies, bodies that end with the connection, keep-alive, TLS, limits on head, chunk line
and body, a deadline per exchange, a proxy where one is given. Not wanted here: redirects, compression (none is asked
for), HTTP/2.

A connection that the server closed while it lay idle is not the server's failure: the request is sent once more on a
fresh one. Everything else that goes wrong is an `RequestFailed` with a reason that can be counted.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eyrie_api.errors import InvalidInput
from eyrie_workers.load.endpoint_url import EndpointUrl, RequestFailed
from eyrie_workers.load.proxy import ProxyTunnel, proxy_authorization_header

MAX_HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
_CONNECT_TIMEOUT_S = 30.0
# One buffer for all connections: the event loop reads into it and hands it over before it reads the next socket.
_BUFFER = memoryview(bytearray(256 * 1024))


class _WentStale(Exception):
    """A kept connection was closed before it carried anything: try a fresh one."""


@dataclass
class HttpResponse:
    """An answer as it came. Times are `time.perf_counter()`."""

    status: int
    headers: Mapping[str, str]
    pieces: list[tuple[float, bytes]]
    """Body bytes, frames taken off, with the time each arrived."""

    sent_at: float
    ended_at: float

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)


class BodyDecoder:
    """Takes a body out of its frames as it comes. `feed` appends payload to `pieces` and says when it is whole."""

    def __init__(self, length: int | None, chunked: bool) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.until_close = length is None and not chunked
        self._chunked = chunked
        self._left = length or 0
        self._state: Literal["size", "data", "end", "trailer"] = "size"
        self._line = b""
        self._size = 0

    def feed(self, now: float, data: bytes) -> bool:
        """Whether the body is whole. Raises RequestFailed for broken frames or too large a body."""
        if self._chunked:
            return self._feed_chunks(now, data)
        if not self.until_close:
            if len(data) > self._left:
                raise RequestFailed("Malformed", "the server sent more than the Content-Length it announced")
            self._left -= len(data)
        if data:
            self._keep(now, data)
        return not self.until_close and self._left == 0

    def _keep(self, now: float, payload: bytes) -> None:
        self._size += len(payload)
        if self._size > MAX_BODY_BYTES:
            raise RequestFailed("Oversized", f"the answer is larger than {MAX_BODY_BYTES >> 20} MiB")
        self.pieces.append((now, payload))

    def _feed_chunks(self, now: float, data: bytes) -> bool:
        at = 0
        while at < len(data):
            if self._state == "data":
                payload = data[at:at + self._left]
                self._keep(now, payload)
                self._left -= len(payload)
                at += len(payload)
                if self._left == 0:
                    self._state = "end"
                continue
            stop = data.find(b"\n", at)
            piece = data[at:] if stop < 0 else data[at:stop + 1]
            self._line += piece
            at += len(piece)
            if len(self._line) > MAX_LINE_BYTES:
                raise RequestFailed("Malformed", "a chunk's size line is too long")
            if stop < 0:
                break
            line, self._line = self._line.strip(), b""
            if self._take_line(line):
                if at < len(data):
                    raise RequestFailed("Malformed", "the server sent bytes after the end of its answer")
                return True
        return False

    def _take_line(self, line: bytes) -> bool:
        """One line between payloads; True after the last."""
        if self._state == "end":
            if line:
                raise RequestFailed("Malformed", "a chunk is longer than its size line says")
            self._state = "size"
        elif self._state == "trailer":
            return not line
        else:
            digits = line.partition(b";")[0].strip()
            try:
                self._left = int(digits, 16)
            except ValueError:
                self._left = -1
            if self._left < 0 or not digits.isalnum():
                raise RequestFailed("Malformed", f"{line[:40]!r} is not the size of a chunk")
            self._state = "data" if self._left else "trailer"
        return False


class Connection(asyncio.BufferedProtocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self.open = False
        self.kept = False
        """It lay idle: the server may have closed it meanwhile."""

        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpResponse] | None = None
        self._head = bytearray()
        self._frames: BodyDecoder | None = None
        self._status = 0
        self._headers: dict[str, str] = {}
        self._sent_at = 0.0
        self._keep_alive = True

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the loop may read to."""
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        now = time.perf_counter()
        if self._answer is None or self._answer.done():
            self.abort()  # nobody asked: never reuse what follows
            return
        try:
            self._take(now, bytes(_BUFFER[:nbytes]))
        except RequestFailed as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by either side."""
        self.open = False
        if self._answer is None or self._answer.done():
            return
        if self._frames is not None and self._frames.until_close and exc is None:
            self._finish(time.perf_counter())
        elif self._frames is None and not self._head and self.kept:
            self._answer.set_exception(_WentStale())
        elif exc is not None:
            self._answer.set_exception(RequestFailed("Reset", f"the connection broke: {exc}"))
        else:
            where = "before it answered" if self._frames is None else "in the middle of its answer"
            self._answer.set_exception(RequestFailed("CutShort", f"the server closed the connection {where}"))

    # Our side

    async def exchange(self, request: bytes, timeout_s: float) -> HttpResponse:
        """Send a whole request, wait for the whole answer. Raises RequestFailed; a failed connection is closed."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        self._head.clear()
        self._frames = None
        if not self.open:
            raise _WentStale
        late = loop.call_later(timeout_s, self._fail,
                               RequestFailed("Timeout", f"no whole answer within {timeout_s:g} s"))
        try:
            self._sent_at = time.perf_counter()
            self._transport.write(request)
            reply = await self._answer
        except BaseException:
            self.abort()
            raise
        finally:
            late.cancel()
        if not self._keep_alive:
            self.abort()
        return reply

    def abort(self) -> None:
        """Close at once."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: RequestFailed) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()

    def _take(self, now: float, data: bytes) -> None:
        if self._frames is None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > MAX_HEAD_BYTES:
                    raise RequestFailed("Malformed", f"the answer's head is larger than {MAX_HEAD_BYTES >> 10} KiB")
                return
            data = bytes(self._head[end + 4:])
            self._read_head(bytes(self._head[:end]))
            if 100 <= self._status < 200:  # "go on" and "early hints" come before the answer
                self._head.clear()
                self._frames = None
                if data:
                    self._take(now, data)
                return
        assert self._frames is not None
        if self._frames.feed(now, data):
            self._finish(now)

    def _finish(self, now: float) -> None:
        assert self._answer is not None
        assert self._frames is not None
        self._answer.set_result(HttpResponse(self._status, self._headers, self._frames.pieces, self._sent_at, now))

    def _read_head(self, head: bytes) -> None:
        self._status, self._headers, minor = read_head(head)
        chunked = self._headers.get("transfer-encoding", "").lower().endswith("chunked")
        length: int | None = None
        if not chunked and "content-length" in self._headers:
            if not self._headers["content-length"].isdigit():
                raise RequestFailed("Malformed", "Content-Length is not a number")
            length = int(self._headers["content-length"])
        if self._status in (204, 304):
            length = 0
        self._frames = BodyDecoder(length, chunked)
        wish = self._headers.get("connection", "").lower()
        self._keep_alive = ("keep-alive" in wish or (minor >= 1 and "close" not in wish)) \
            and not self._frames.until_close


def read_head(head: bytes) -> tuple[int, dict[str, str], int]:
    """Status, headers by lower-case name, and the minor HTTP version. Raises RequestFailed."""
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        raise RequestFailed("Malformed", f"{first[:60]!r} is not the beginning of an HTTP/1 answer")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise RequestFailed("Malformed", f"{line[:60]!r} is not a header")
        headers[name.strip().lower()] = value.strip()
    return int(parts[1]), headers, 0 if parts[0] == "HTTP/1.0" else 1


class ConnectionPool:
    """Connections to one origin, kept alive between requests."""

    def __init__(self, origin: EndpointUrl, headers: Mapping[str, str], proxy: EndpointUrl | None = None) -> None:
        self._origin, self._proxy = origin, proxy
        self._tls = ssl.create_default_context() if origin.scheme == "https" else None
        self._idle: list[Connection] = []
        said = {"Host": origin.host_header, **headers}
        if origin.basic is not None:
            said.setdefault("Authorization", origin.basic)
        for name, value in said.items():
            if not value.isascii() or not value.isprintable():
                raise InvalidInput(f"the {name} header holds characters that HTTP does not allow",
                                   "look for a line break or a non-ASCII letter in the key")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
        self._path = origin.path
        if proxy is not None and self._tls is None:  # without TLS the proxy reads the request: whole address, own name
            self._path = origin.url
            self._head += proxy_authorization_header(proxy)

    def render(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
        sized = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{sized}\r\n".encode() + body

    async def exchange(self, request: bytes, timeout_s: float) -> HttpResponse:
        """Send a rendered request and wait for the whole answer. Raises RequestFailed."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.open:
                continue
            try:
                return await self._use(connection, request, timeout_s)
            except _WentStale:
                continue
        try:
            return await self._use(await self._connect(min(timeout_s, _CONNECT_TIMEOUT_S)), request, timeout_s)
        except _WentStale:
            raise RequestFailed("Reset", "the server closed a fresh connection") from None

    async def prepare(self, num: int) -> None:
        """Have at least so many idle connections, as far as the server grants them."""
        self._idle = [connection for connection in self._idle if connection.open]
        missing = range(num - len(self._idle))
        made = await asyncio.gather(*(self._connect(_CONNECT_TIMEOUT_S) for _ in missing), return_exceptions=True)
        for connection in made:
            if isinstance(connection, Connection):
                self._keep(connection)

    def close(self) -> None:
        """Close what is idle. Exchanges under way close theirs when they are cancelled."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _use(self, connection: Connection, request: bytes, timeout_s: float) -> HttpResponse:
        reply = await connection.exchange(request, timeout_s)
        if connection.open:
            self._keep(connection)
        return reply

    def _keep(self, connection: Connection) -> None:
        connection.kept = True
        self._idle.append(connection)

    async def _connect(self, timeout_s: float) -> Connection:
        through = self._proxy or self._origin
        try:
            async with asyncio.timeout(timeout_s):
                if self._proxy is not None and self._tls is not None:
                    return await self._through_tunnel(self._proxy, self._tls)
                return await self._straight(through)
        except TimeoutError:
            raise RequestFailed("Timeout", f"{through.url} took no connection within {timeout_s:g} s") from None
        except ssl.SSLError as error:
            raise RequestFailed("Tls", f"{self._origin.url}: TLS failed: {error}") from error
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise RequestFailed("Unreachable", f"{through.url} is not reachable: {why}") from error

    async def _straight(self, to: EndpointUrl) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, to.host, to.port, ssl=self._tls, server_hostname=to.host if self._tls else None)
        return connection

    async def _through_tunnel(self, proxy: EndpointUrl, tls: ssl.SSLContext) -> Connection:
        loop, connection = asyncio.get_running_loop(), Connection()
        transport, tunnel = await loop.create_connection(ProxyTunnel, proxy.host, proxy.port)
        try:
            await tunnel.granted(transport, proxy, self._origin)
            inner = await loop.start_tls(transport, connection, tls, server_hostname=self._origin.host)
        except BaseException:
            transport.abort()
            raise
        if inner is None:  # what typeshed allows: the connection was lost meanwhile
            raise ConnectionResetError("the connection was lost while TLS began")
        connection.connection_made(inner)
        return connection
