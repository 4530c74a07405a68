"""An HTTP/1.1 client for many slow streams at once, which keeps every chunk of a body with its arrival time.

Kept instead of aiohttp because of the CPU time per event of a stream: with 64 streams of 200 events, one event per
30 ms and stream, medians (min..max) of five alternating runs were 21.9 (21.7..37.3) us here and 51.9 (49.3..58.4) us
with aiohttp 3.14 and its C parser, on two busy cores in November 2026. Repeated on busier cores the ratio was 1.8 to
2.7; with 256 streams in lockstep, where one poll returns many sockets, 1.5 to 2.1 (`tests.benchmarks.http_clients`). A
chunk costs one read into a shared buffer, one clock reading and the decoding of its chunk header; JSON is parsed after
the response has ended (`completion_stream`), so that the other streams wait as little as possible.

Supported: chunked and counted bodies, bodies that end with the connection, keep-alive, TLS, limits on head, chunk
header and body, a deadline per request, a proxy. Not supported: redirects, compression (never requested), HTTP/2.

A keep-alive connection that the server closed while it was idle is not a failure: the request is sent again on a new
connection. Every other failure is a `RequestFailed` with a reason that can be counted.
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
from eyrie_workers.load.proxy import ProxyTunnel, proxy_authorization

MAX_HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
_CONNECT_TIMEOUT_S = 30.0
# One buffer for all connections: the event loop calls `buffer_updated` before it reads the next socket.
_BUFFER = memoryview(bytearray(256 * 1024))


class _StaleConnection(Exception):
    """The server closed an idle connection before it sent anything: use a new connection."""


@dataclass
class HttpResponse:
    """A response. Times are `time.perf_counter()`."""

    status: int
    headers: Mapping[str, str]
    chunks: list[tuple[float, bytes]]
    """Pieces of the decoded body, each with its arrival time."""

    sent_at: float
    ended_at: float

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(chunk for _, chunk in self.chunks)


class BodyDecoder:
    """Decodes a body incrementally. `feed` appends payload to `chunks` and returns whether the body is complete."""

    def __init__(self, length: int | None, chunked: bool) -> None:
        self.chunks: list[tuple[float, bytes]] = []
        self.until_close = length is None and not chunked
        self._chunked = chunked
        self._left = length or 0
        self._state: Literal["size", "data", "end", "trailer"] = "size"
        self._line = b""
        self._size = 0

    def feed(self, now: float, data: bytes) -> bool:
        """Decode more bytes. Raises RequestFailed for a malformed or too large body."""
        if self._chunked:
            return self._decode_chunks(now, data)
        if not self.until_close:
            if len(data) > self._left:
                raise RequestFailed("Malformed", "the body is longer than its Content-Length")
            self._left -= len(data)
        if data:
            self._append(now, data)
        return not self.until_close and self._left == 0

    def _append(self, now: float, payload: bytes) -> None:
        self._size += len(payload)
        if self._size > MAX_BODY_BYTES:
            raise RequestFailed("Oversized", f"the response is larger than {MAX_BODY_BYTES >> 20} MiB")
        self.chunks.append((now, payload))

    def _decode_chunks(self, now: float, data: bytes) -> bool:
        at = 0
        while at < len(data):
            if self._state == "data":
                payload = data[at:at + self._left]
                self._append(now, payload)
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
                raise RequestFailed("Malformed", "a chunk header is too long")
            if stop < 0:
                break
            line, self._line = self._line.strip(), b""
            if self._read_line(line):
                if at < len(data):
                    raise RequestFailed("Malformed", "the server sent bytes after the end of its response")
                return True
        return False

    def _read_line(self, line: bytes) -> bool:
        """Process a line between payloads; True after the last one."""
        if self._state == "end":
            if line:
                raise RequestFailed("Malformed", "a chunk is longer than its header states")
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
                raise RequestFailed("Malformed", f"{line[:40]!r} is not a chunk size")
            self._state = "data" if self._left else "trailer"
        return False


class Connection(asyncio.BufferedProtocol):
    """One connection, for one request at a time."""

    def __init__(self) -> None:
        self.open = False
        self.reused = False
        """Whether it was idle before: the server may have closed it in the meantime."""

        self._transport: asyncio.Transport | None = None
        self._response: asyncio.Future[HttpResponse] | None = None
        self._head = bytearray()
        self._body: BodyDecoder | None = None
        self._status = 0
        self._headers: dict[str, str] = {}
        self._sent_at = 0.0
        self._keep_alive = True

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is established."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer for the next read."""
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        """Process received bytes."""
        now = time.perf_counter()
        if self._response is None or self._response.done():
            # Bytes outside of a request belong to no response: the connection cannot be used again.
            self.abort()
            return
        try:
            self._receive(now, bytes(_BUFFER[:nbytes]))
        except RequestFailed as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed by either side."""
        self.open = False
        if self._response is None or self._response.done():
            return
        if self._body is not None and self._body.until_close and exc is None:
            self._finish(time.perf_counter())
        elif self._body is None and not self._head and self.reused:
            # Race: the server closed the idle connection while the request was being written. Nothing was received,
            # so the request can be sent again.
            self._response.set_exception(_StaleConnection())
        elif exc is not None:
            self._response.set_exception(RequestFailed("Reset", f"the connection broke: {exc}"))
        else:
            where = "before its response" if self._body is None else "in the middle of its response"
            self._response.set_exception(RequestFailed("CutShort", f"the server closed the connection {where}"))

    # Called by the pool

    async def exchange(self, request: bytes, timeout_s: float) -> HttpResponse:
        """Send a request and wait for the end of the response. Raises RequestFailed; a failed connection is closed."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._response = loop.create_future()
        self._head.clear()
        self._body = None
        if not self.open:
            raise _StaleConnection
        deadline = loop.call_later(timeout_s, self._fail,
                               RequestFailed("Timeout", f"no complete response within {timeout_s:g} s"))
        try:
            self._sent_at = time.perf_counter()
            self._transport.write(request)
            reply = await self._response
        except BaseException:
            # Cancellation too: the rest of the response would be read as the response to the next request.
            self.abort()
            raise
        finally:
            deadline.cancel()
        if not self._keep_alive:
            self.abort()
        return reply

    def abort(self) -> None:
        """Close at once."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: RequestFailed) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(error)
        self.abort()

    def _receive(self, now: float, data: bytes) -> None:
        if self._body is None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > MAX_HEAD_BYTES:
                    raise RequestFailed("Malformed", f"the response's head is larger than {MAX_HEAD_BYTES >> 10} KiB")
                return
            data = bytes(self._head[end + 4:])
            self._read_head(bytes(self._head[:end]))
            if 100 <= self._status < 200:  # 100 Continue and 103 Early Hints precede the response
                self._head.clear()
                self._body = None
                if data:
                    self._receive(now, data)
                return
        assert self._body is not None
        if self._body.feed(now, data):
            self._finish(now)

    def _finish(self, now: float) -> None:
        assert self._response is not None
        assert self._body is not None
        self._response.set_result(HttpResponse(self._status, self._headers, self._body.chunks, self._sent_at, now))

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
        self._body = BodyDecoder(length, chunked)
        connection_header = self._headers.get("connection", "").lower()
        self._keep_alive = ("keep-alive" in connection_header or (minor >= 1 and "close" not in connection_header)) \
            and not self._body.until_close


def read_head(head: bytes) -> tuple[int, dict[str, str], int]:
    """Status, headers by lower-case name, and the minor HTTP version. Raises RequestFailed."""
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        raise RequestFailed("Malformed", f"{first[:60]!r} is not an HTTP/1 status line")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise RequestFailed("Malformed", f"{line[:60]!r} is not a header line")
        headers[name.strip().lower()] = value.strip()
    return int(parts[1]), headers, 0 if parts[0] == "HTTP/1.0" else 1


class ConnectionPool:
    """Keep-alive connections to one endpoint."""

    def __init__(self, url: EndpointUrl, headers: Mapping[str, str], proxy: EndpointUrl | None = None) -> None:
        self._url, self._proxy = url, proxy
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._idle: list[Connection] = []
        fields = {"Host": url.host_header, **headers}
        if url.basic is not None:
            fields.setdefault("Authorization", url.basic)
        for name, value in fields.items():
            if not value.isascii() or not value.isprintable():
                raise InvalidInput(f"the {name} header contains characters that HTTP does not allow",
                                   "look for a line break or a non-ASCII letter in the key")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._path = url.path
        if proxy is not None and self._tls is None:
            # Without TLS the proxy reads the request: it needs the absolute URL and its own credentials.
            self._path = url.url
            self._head += proxy_authorization(proxy)

    def build_request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
        sized = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        return f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{sized}\r\n".encode() + body

    async def send(self, request: bytes, timeout_s: float) -> HttpResponse:
        """Send a built request and wait for the end of the response. Raises RequestFailed."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.open:
                continue
            try:
                return await self._use(connection, request, timeout_s)
            except _StaleConnection:
                continue
        try:
            return await self._use(await self._connect(min(timeout_s, _CONNECT_TIMEOUT_S)), request, timeout_s)
        except _StaleConnection:
            raise RequestFailed("Reset", "the server closed a new connection") from None

    async def open_connections(self, num: int) -> None:
        """Open connections until `num` are idle, or the server accepts no more."""
        self._idle = [connection for connection in self._idle if connection.open]
        missing = range(num - len(self._idle))
        opened = await asyncio.gather(*(self._connect(_CONNECT_TIMEOUT_S) for _ in missing), return_exceptions=True)
        for connection in opened:
            if isinstance(connection, Connection):
                self._keep(connection)

    def close(self) -> None:
        """Close idle connections. Running requests close theirs when they are cancelled."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _use(self, connection: Connection, request: bytes, timeout_s: float) -> HttpResponse:
        reply = await connection.exchange(request, timeout_s)
        if connection.open:
            self._keep(connection)
        return reply

    def _keep(self, connection: Connection) -> None:
        connection.reused = True
        self._idle.append(connection)

    async def _connect(self, timeout_s: float) -> Connection:
        address = self._proxy or self._url
        try:
            async with asyncio.timeout(timeout_s):
                if self._proxy is not None and self._tls is not None:
                    return await self._through_tunnel(self._proxy, self._tls)
                return await self._direct(address)
        except TimeoutError:
            raise RequestFailed("Timeout", f"{address.url} accepted no connection within {timeout_s:g} s") from None
        except ssl.SSLError as error:
            raise RequestFailed("Tls", f"{self._url.url}: TLS failed: {error}") from error
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise RequestFailed("Unreachable", f"{address.url} is not reachable: {why}") from error

    async def _direct(self, address: EndpointUrl) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, address.host, address.port, ssl=self._tls, server_hostname=address.host if self._tls else None)
        return connection

    async def _through_tunnel(self, proxy: EndpointUrl, tls: ssl.SSLContext) -> Connection:
        loop, connection = asyncio.get_running_loop(), Connection()
        transport, tunnel = await loop.create_connection(ProxyTunnel, proxy.host, proxy.port)
        try:
            await tunnel.establish(transport, proxy, self._url)
            inner = await loop.start_tls(transport, connection, tls, server_hostname=self._url.host)
        except BaseException:
            transport.abort()
            raise
        if inner is None:  # possible by its type: the connection was lost in the meantime
            raise ConnectionResetError("the connection was lost during the TLS handshake")
        connection.connection_made(inner)
        return connection
