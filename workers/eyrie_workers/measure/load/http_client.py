"""HTTP to endpoints: their URLs, the environment's proxy, and aiohttp for many slow streams at once.

URLs are parsed so that credentials do not reach messages.

Every piece of a body is kept with its arrival time. JSON is parsed after the response has ended (`completion_stream`),
so that other streams wait as little as possible. Redirects are not followed and compression is not requested. aiohttp
replaced a hand-written client, which needed 0.4 of its CPU time per event with 64 paced streams and 0.5 to 0.7 with 256
streams in lockstep, as a batching server sends them ("HTTP clients" in docs/results/load.md).

A keep-alive connection that the server closed while it was idle is not a failure: the request is sent again (aiohttp
itself does so for GET alone). Every other failure is a `RequestFailed` with a reason that can be counted. The time to
connect is no part of a response's times.

Proxies are named by HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, in either case, as in other programs. A plain
request is sent to the proxy with its absolute URL; TLS uses a tunnel (CONNECT, RFC 9110 section 9.3.6), so that the
proxy sees only the host name. Proxies that are reached over TLS, and SOCKS, are rejected. aiohttp's own `trust_env` is
not used: it ignores ALL_PROXY, and sends requests for loopback addresses to the proxy. Only regeneration uses a proxy:
a load test through a proxy would measure the proxy.
"""

import base64
import os
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.abc import ResolveResult
from yarl import URL

from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.errors import InvalidInput
from eyrie_api.ssrf_safe_http import check_known_address, environment_proxy, require_allowed_for_job

MAX_BODY_BYTES = 64 * 1024 * 1024
_CONNECT_TIMEOUT_S = 30.0
_DISCONNECTED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError)


class RequestFailed(Exception):
    """A request without a complete response. `reason` is a category to count by, the message has the details."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class EndpointUrl:
    """A parsed endpoint URL. `path` is the part before the API's own paths."""

    scheme: Literal["http", "https"]
    host: str
    port: int
    path: str
    basic: str | None = field(default=None, repr=False)
    """Credentials of the URL as the value of an Authorization header; not part of any message."""

    @property
    def url(self) -> str:
        """The URL without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default_port = self.port == (443 if self.scheme == "https" else 80)
        return f"{self.scheme}://{host}{'' if default_port else f':{self.port}'}{self.path}"


def parse_url(url: str) -> EndpointUrl:
    """Parse an http(s) URL. Raises InvalidInput, whose message omits credentials."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    shown = url.rpartition("@")[2]
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or not url.isprintable():
        raise InvalidInput(f"{shown!r} is not an endpoint URL", "write it like http://127.0.0.1:30000/v1")
    if parts.query or parts.fragment:
        raise InvalidInput(f"the endpoint URL {shown.partition('?')[0]!r} has a query or a fragment",
                           "give the part up to and including /v1")
    basic = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        basic = "Basic " + base64.b64encode(pair.encode()).decode()
    scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
    port = port or (443 if scheme == "https" else 80)
    return EndpointUrl(scheme, parts.hostname, port, parts.path.rstrip("/"), basic)


def proxy_for(url: EndpointUrl) -> EndpointUrl | None:
    """The environment's proxy for a URL; None without one. Raises InvalidInput for an unsupported kind of proxy."""
    named = environment_proxy(url.scheme, url.host, urlsplit(url.url).netloc)
    if named is None:
        return None
    variable = f"{url.scheme.upper()}_PROXY"
    proxy = parse_url(named)
    if proxy.scheme != "http":
        raise InvalidInput(f"{variable} names a proxy with the scheme {proxy.scheme}",
                           f"use one like http://proxy:3128, or add {url.host} to NO_PROXY")
    return proxy


@dataclass
class HttpResponse:
    """A response. Times are `time.perf_counter()`."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""

    chunks: list[tuple[float, bytes]]
    """Pieces of the decoded body, each with its arrival time."""

    sent_at: float
    ended_at: float

    @property
    def body(self) -> bytes:
        return b"".join(chunk for _, chunk in self.chunks)


@dataclass
class _Exchange:
    """What aiohttp reports of one request while it is sent."""

    reused: bool = False
    """Whether the connection was idle before: the server may have closed it in the meantime."""

    sent_at: float = 0.0


class CheckedResolver(aiohttp.ThreadedResolver):
    """Resolves host names for connections of a job's stage: aiohttp connects to the addresses that were checked."""

    def __init__(self, rules: ReadRules) -> None:
        """In the event loop that the connections are of."""
        super().__init__()
        self._rules = rules

    async def resolve(self, host: str, port: int = 0,
                      family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        """Raises AddressRefused for a host with an address that the job may not connect to, OSError without any."""
        found = await super().resolve(host, port, family)
        require_allowed_for_job(host, [result["host"] for result in found], self._rules)
        return found


def pool_of_job(url: str, headers: Mapping[str, str], rules: ReadRules | None) -> "ConnectionPool":
    """Connections to an endpoint that a job names, through the environment's proxy if there is one. Raises InvalidInput
    for an address that the job may not connect to, as far as it is known before the connection."""
    origin = parse_url(url)
    check_known_address(origin.host, origin.port, rules)
    proxy = proxy_for(origin)
    return ConnectionPool(origin, headers, proxy, rules if proxy is None else None)


class ConnectionPool:
    """Keep-alive connections to one endpoint. Used within one event loop, and closed there."""

    def __init__(self, url: EndpointUrl, headers: Mapping[str, str], proxy: EndpointUrl | None = None,
                 rules: ReadRules | None = None) -> None:
        """rules   of the job, for the addresses of the host

        Raises InvalidInput for a header value that HTTP does not allow, without quoting it."""
        self._url, self._proxy, self._rules = url, proxy, rules
        self.headers = dict(headers)
        """Sent with every request."""

        if url.basic is not None:
            self.headers.setdefault("Authorization", url.basic)
        for name, value in self.headers.items():
            if not value.isascii() or not value.isprintable():
                raise InvalidInput(f"the {name} header contains characters that HTTP does not allow",
                                   "look for a line break or a non-ASCII letter in the key")
        self._tls = ssl.create_default_context() if url.scheme == "https" else True
        self._session: aiohttp.ClientSession | None = None

    async def send(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> HttpResponse:
        """Send a request and wait for the end of the response. Raises RequestFailed."""
        while True:
            exchange = _Exchange()
            try:
                return await self._send_once(exchange, method, path, body, timeout_s)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                # Race: an idle connection may be closed by the server while the request is being written. No part of a
                # response was received, so it is sent again. Each try takes one idle connection from the pool: the
                # last one is made on a new connection, where the same error is the server's failure.
                if not (exchange.reused and isinstance(error, _DISCONNECTED)):
                    raise self._failure(error, timeout_s) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = None

    async def _send_once(self, exchange: _Exchange, method: str, path: str, body: bytes,
                         timeout_s: float) -> HttpResponse:
        if self._session is None:  # not in __init__: a session belongs to the running event loop
            resolver = None if self._rules is None else CheckedResolver(self._rules)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._tls, resolver=resolver), auto_decompress=False,
                trace_configs=[_tracing()], headers={"Content-Type": "application/json", **self.headers},
                cookie_jar=aiohttp.DummyCookieJar(), skip_auto_headers=("Accept-Encoding", "User-Agent"))
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        proxy: dict[str, Any] = {}
        if self._proxy is not None:
            credentials = {"Proxy-Authorization": self._proxy.basic} if self._proxy.basic else {}
            # Without TLS the proxy reads the request's own headers; with TLS only those of CONNECT, and the server must
            # not see its credentials.
            proxy = {"proxy": self._proxy.url,
                     "proxy_headers" if self._url.scheme == "https" else "headers": credentials}
        async with self._session.request(method, URL(self._url.url + path, encoded=True), data=body or None,
                                         timeout=timeout, allow_redirects=False, trace_request_ctx=exchange,
                                         **proxy) as response:
            try:
                chunks, size, read = list[tuple[float, bytes]](), 0, response.content.readany
                while chunk := await read():
                    chunks.append((time.perf_counter(), chunk))
                    size += len(chunk)
                    if size > MAX_BODY_BYTES:
                        response.close()  # the rest is not read: the connection cannot be used again
                        raise RequestFailed("Oversized", f"the response is larger than {MAX_BODY_BYTES >> 20} MiB")
            except _DISCONNECTED as error:
                raise self._failure(error, timeout_s) from error  # part of a response was received: not sent again
            headers = {name.lower(): value for name, value in response.headers.items()}
            return HttpResponse(response.status, headers, chunks, exchange.sent_at, time.perf_counter())

    def _failure(self, error: Exception, timeout_s: float) -> RequestFailed:
        """The failure as a reason to count by. Subclasses come before their base classes."""
        url = self._url.url
        match error:
            case TimeoutError():
                return RequestFailed("Timeout", f"{url}: no complete response within {timeout_s:g} s")
            case aiohttp.ClientHttpProxyError():
                return RequestFailed("Proxy", f"the proxy {self._proxy and self._proxy.url} refused a tunnel to "
                                              f"{self._url.host}: {error.status} {error.message}")
            case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientSSLError() | ssl.SSLError():
                return RequestFailed("Tls", f"{url}: TLS failed: {error}")
            case aiohttp.ClientConnectorError():
                why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.os_error)
                return RequestFailed("Unreachable", f"{(self._proxy or self._url).url} is not reachable: {why}")
            case aiohttp.ClientResponseError():
                return RequestFailed("Malformed", f"{url}: not an HTTP/1 response: {error.message.strip()[:200]}")
            case aiohttp.ServerDisconnectedError():
                return RequestFailed("CutShort", f"{url}: the server closed the connection before its response")
            case aiohttp.ClientPayloadError():
                return RequestFailed("CutShort", f"{url}: the body is incomplete or malformed: {str(error)[:200]}")
            case _:
                return RequestFailed("Reset", f"{url}: the connection broke: {error}")


def _tracing() -> aiohttp.TraceConfig:
    """Fills the `_Exchange` of each request."""
    async def reuse(_: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
        context.trace_request_ctx.reused = True

    async def headers_sent(_: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
        context.trace_request_ctx.sent_at = time.perf_counter()

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reuse)
    config.on_request_headers_sent.append(headers_sent)
    return config
