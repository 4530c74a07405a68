"""HTTP requests to URLs that users gave (webhooks, data, endpoints that regenerate), protected against server-side
request forgery (SSRF).

The server and its stages can reach networks that their users cannot, so a URL could make them send requests there for
them. Hence:

- only http and https, no user name in the URL;
- the host is resolved once, all its addresses must be allowed, and the connection uses the address that was checked: a
  second DNS response with another address (DNS rebinding) has no effect;
- only public addresses. An IPv4 address inside an IPv6 one (mapped, 6to4, NAT64) is checked as that IPv4 address.
  `allow_private` allows private and loopback addresses, never link-local ones nor the metadata services of clouds;
- a redirect is followed within host, port and scheme alone, and only where a file is read.

`post` sends webhooks: no proxy is used, little of the response is read, and a deadline ends the request. `WebFile`
reads files of data. Clients with a loop of their own (`eyrie_workers.regeneration`) ask `require_allowed_for_job` for
the addresses of each connection. Where the environment names a proxy for data and endpoints, that resolves the host and
decides what may be reached; an address that is known here is checked nevertheless. Jobs whose submitter has a role in
all projects may connect to any address.
"""

import base64
import http.client
import io
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.data_files import RangedFile
from eyrie_api.errors import InvalidInput

DEADLINE_S = 10.0
_CONNECT_TIMEOUT_S = 10.0
_READ_BYTES = 1024
_MAX_REDIRECTS = 5
_BLOCK_BYTES = 5 << 20
"""Of a file that is read at any place: read ahead, and the largest that is taken whole from a server without ranges."""

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SHARED = ipaddress.ip_network("100.64.0.0/10")  # of carriers, and of virtual private networks
# The metadata services that are not link-local: Azure's wire server (in a public range), Amazon's of IPv6 (in a private
# one) and Alibaba's (in the shared one). They serve credentials.
_NEVER = frozenset(ipaddress.ip_address(text) for text in ("168.63.129.16", "fd00:ec2::254", "100.100.100.200"))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], list[str]]


class AddressRefused(InvalidInput):
    """An address to which requests for users are not allowed."""

    reason = "InvalidInput"


@dataclass(frozen=True)
class ParsedUrl:
    parts: SplitResult
    host: str
    port: int


def parse_url(url: str) -> ParsedUrl:
    """Parse and check a URL, without resolving its host. Raises InvalidInput."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as the resolver does: an empty label, or one of more than 63 characters
    except ValueError:
        raise InvalidInput("url is not a URL", "write https://host/path") from None
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidInput("url is not an http or https URL", "write https://host/path")
    if parts.username is not None or parts.password is not None:
        raise InvalidInput("url contains a user name or a password", "remove it: deliveries are signed")
    return ParsedUrl(parts, host, port or (443 if parts.scheme == "https" else 80))


def is_allowed(address: str, *, allow_private: bool) -> bool:
    ip: Address = ipaddress.ip_address(address.partition("%")[0])
    while isinstance(ip, ipaddress.IPv6Address):  # an IPv4 address may be embedded in it
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else (
            ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None))
        if inner is None:
            break
        ip = inner
    if ip in _NEVER or ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        return False
    if allow_private and (ip.is_private or ip.is_loopback or ip in _SHARED):
        return not ip.is_reserved or ip.is_loopback
    return ip.is_global


def resolve_allowed(url: ParsedUrl, *, allow_private: bool, resolve: Resolve | None = None) -> str:
    """The address to connect to. Raises AddressRefused, or OSError when the host has none."""
    return require_allowed(url.host, (resolve or resolve_host)(url.host, url.port), allow_private=allow_private)


def require_allowed(host: str, addresses: Sequence[str], *, allow_private: bool) -> str:
    """The first of a host's addresses. Raises AddressRefused where any may not be connected to."""
    if not addresses or not all(is_allowed(address, allow_private=allow_private) for address in addresses):
        raise AddressRefused(f"{host} resolves to an address that is not public",
                             "give a public host; an administrator allows private addresses with "
                             "EYRIE_WEBHOOKS_ALLOW_PRIVATE, and jobs a host of EYRIE_CREDENTIAL_HOSTS")
    return addresses[0]


def require_allowed_for_job(host: str, addresses: Sequence[str], rules: ReadRules | None) -> None:
    """Raises AddressRefused where a job with these rules may not connect to any of a host's addresses."""
    if rules is not None:
        named = host.lower().rstrip(".") in rules.private_hosts
        require_allowed(host, addresses, allow_private=rules.allow_private or named)


def addresses_for_job(host: str, port: int, rules: ReadRules | None, resolve: Resolve | None = None) -> list[str]:
    """The addresses of a host that a job connects to, in the order of preference. Raises AddressRefused; OSError, or
    ValueError for what cannot be a host, where there is none."""
    addresses = list(dict.fromkeys((resolve or resolve_host)(host, port)))
    require_allowed_for_job(host, addresses, rules)
    return addresses


def check_known_address(host: str, port: int, rules: ReadRules | None, resolve: Resolve | None = None) -> None:
    """Check the addresses of a job's host as far as they are known here: a proxy may know more. Raises
    AddressRefused."""
    with suppress(OSError, ValueError):  # ValueError: a name that the resolver does not take
        addresses_for_job(host, port, rules, resolve)


def environment_proxy(scheme: str, host: str, netloc: str) -> str | None:
    """The URL of the proxy that the environment names for requests to a host. Loopback addresses have none, whether or
    not NO_PROXY contains them."""
    named = getproxies().get(scheme) or getproxies().get("all")
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not named or proxy_bypass(netloc) or is_loopback:
        return None
    return named if "://" in named else f"http://{named}"


def resolve_host(host: str, port: int) -> list[str]:
    """The addresses of a host. Raises OSError, ValueError for what cannot be a host."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def post(url: str, body: bytes, headers: Mapping[str, str], *, allow_private: bool, resolve: Resolve | None = None,
         deadline_s: float = DEADLINE_S) -> int:
    """Post the body; return the status. Raises InvalidInput (AddressRefused), or OSError and HTTPException for network
    errors."""
    parsed = parse_url(url)
    address = resolve_allowed(parsed, allow_private=allow_private, resolve=resolve)
    connection = _PinnedConnection(parsed, [address], timeout=deadline_s / 2)
    # A receiver that sends its response byte by byte never exceeds the timeout of a single read.
    watchdog = threading.Timer(deadline_s, connection.abort)
    watchdog.daemon = True
    watchdog.start()
    try:
        path = (parsed.parts.path or "/") + (f"?{parsed.parts.query}" if parsed.parts.query else "")
        connection.request("POST", path, body, dict(headers))
        answer = connection.getresponse()
        answer.read(_READ_BYTES)
        return answer.status
    finally:
        watchdog.cancel()
        connection.close()


class WebStatus(OSError):
    """A response that is not the file: `status` is its HTTP status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status


class WebFile(io.RawIOBase):
    """A file of a web server as a stream. Errors of the network are OSError."""

    def __init__(self, url: str, rules: ReadRules | None, *, timeout_s: float, first_byte: int | None = None,
                 last_byte: int | None = None, resolve: Resolve | None = None) -> None:
        """Request the file, or a range of its bytes, from the address that was checked.

        rules       of the job whose URL it is
        timeout_s   of each read

        Raises InvalidInput (AddressRefused) for an address or a redirect that is not followed, WebStatus, OSError.
        """
        self._to_close = ExitStack()
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna").decode()
        netloc = (f"[{host}]" if ":" in host else host) + ("" if parts.port is None else f":{parts.port}")
        parsed = parse_url(parts._replace(netloc=netloc, path=quote(parts.path, safe="/%!$&'()*+,;=:@~")).geturl())
        proxy = environment_proxy(parsed.parts.scheme, parsed.host, netloc)
        if proxy is None:
            addresses = addresses_for_job(parsed.host, parsed.port, rules, resolve)
            connection = _PinnedConnection(parsed, addresses, timeout=_CONNECT_TIMEOUT_S)
        else:
            check_known_address(parsed.host, parsed.port, rules, resolve)
            connection = _through(proxy, parsed)
        self._to_close.callback(connection.close)
        wanted = {} if first_byte is None else {"Range": f"bytes={first_byte}-{last_byte}"}
        try:
            self._response = _answer(connection, parsed, wanted, timeout_s)
        except BaseException as error:
            self.close()
            if isinstance(error, http.client.HTTPException):
                raise ConnectionError(f"{type(error).__name__}: {error}") from error
            raise
        self._to_close.callback(self._response.close)
        self.range = _CONTENT_RANGE.fullmatch(self._response.headers.get("Content-Range", ""))
        """First and last byte, and size of the file, as the server sends them with a range; None: the whole file."""

        if self._response.status == 206 and self.range is None:
            self.close()
            raise ConnectionError("the server answered a part of the file without its place and size")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises OSError where the connection ends before the file does."""
        try:
            size = self._response.readinto(buffer)
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        # http.client reports the end of a connection as the end of the body.
        if not size and len(buffer) and self._response.length:
            raise ConnectionError(f"the connection ended {self._response.length} bytes before the file")
        return size

    def close(self) -> None:
        self._to_close.close()
        super().close()


def _answer(connection: "_PinnedConnection", url: ParsedUrl, headers: Mapping[str, str],
            timeout_s: float) -> http.client.HTTPResponse:
    """The response with the file, redirects within its server followed. Raises as `WebFile`, and HTTPException."""
    path = url.parts.path or "/"
    for _ in range(_MAX_REDIRECTS + 1):
        connection.connect()
        connection.sock.settimeout(timeout_s)
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        if not 300 <= response.status < 400:
            is_part = response.status == 206 and "Range" in headers
            if response.status != 200 and not is_part:
                raise WebStatus(response.status)
            return response
        to = urlsplit(urljoin(url.parts._replace(path=path).geturl(), response.headers.get("Location", "")))
        port = to.port or (443 if to.scheme == "https" else 80)
        if (to.scheme, to.hostname, port) != (url.parts.scheme, url.host, url.port):
            raise InvalidInput(f"{url.parts.geturl()} redirects to {to.scheme}://{to.hostname}, and a redirect to "
                               "another host, port or scheme is not followed",
                               "give the address that the file itself has, or a Hub id")
        path = (to.path or "/") + (f"?{to.query}" if to.query else "")
        connection.close()
    raise InvalidInput(f"{url.parts.geturl()} redirects more than {_MAX_REDIRECTS} times",
                       "give the address that the file itself has")


def open_at_any_place(url: str, rules: ReadRules | None, *, timeout_s: float,
                      resolve: Resolve | None = None) -> io.BufferedIOBase:
    """A file of a web server that seeks: what is read is requested by ranges. Raises as `WebFile`, and ValueError for a
    large file of a server without ranges."""
    def ranged(first: int, last: int) -> WebFile:
        return WebFile(url, rules, timeout_s=timeout_s, first_byte=first, last_byte=last, resolve=resolve)

    def read(start: int, length: int) -> bytes:
        with ranged(start, start + length - 1) as part:
            if part.range is None or int(part.range[1]) != start:
                raise ConnectionError("the server answered another range")
            return io.BufferedReader(part).read(length)

    with ranged(0, 0) as start:
        if start.range is not None:
            return io.BufferedReader(RangedFile(read, int(start.range[3])), _BLOCK_BYTES)
        whole = io.BufferedReader(start).read(_BLOCK_BYTES + 1)
    if len(whole) > _BLOCK_BYTES:
        raise ValueError("the server does not answer ranges")
    return io.BytesIO(whole)


def _through(proxy: str, url: ParsedUrl) -> "_PinnedConnection":
    """A connection through a proxy by CONNECT. Raises InvalidInput for a kind of proxy that is not used."""
    parts = urlsplit(proxy)
    if parts.scheme != "http" or parts.hostname is None:
        raise InvalidInput(f"{url.parts.scheme.upper()}_PROXY names a proxy with the scheme {parts.scheme}",
                           f"use one like http://proxy:3128, or add {url.host} to NO_PROXY")
    connection = _PinnedConnection(url, [parts.hostname], parts.port or 80, timeout=_CONNECT_TIMEOUT_S)
    login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    headers = {} if parts.username is None else {
        "Proxy-Authorization": "Basic " + base64.b64encode(login.encode()).decode()}
    connection.set_tunnel(url.host, url.port, headers)
    return connection


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to the first of the addresses that answers, which were checked before or are a proxy's, under the
    host name of the URL."""

    def __init__(self, url: ParsedUrl, addresses: Sequence[str], port: int | None = None, *, timeout: float) -> None:
        super().__init__(url.host, url.port, timeout=timeout)
        self._url, self._addresses, self._port = url, addresses, url.port if port is None else port

    def connect(self) -> None:
        connection: Any = None
        for number, address in enumerate(self._addresses, start=1):
            try:
                connection = socket.create_connection((address, self._port), self.timeout)
                break
            except OSError:
                if number == len(self._addresses):
                    raise
        if self._tunnel_host:  # type: ignore[attr-defined]
            self.sock = connection
            self._tunnel()  # type: ignore[attr-defined]
        if self._url.parts.scheme == "https":
            connection = ssl.create_default_context().wrap_socket(connection, server_hostname=self._url.host)
        self.sock = connection

    def abort(self) -> None:
        """End the connection, from another thread."""
        if self.sock is not None:
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # already closed
