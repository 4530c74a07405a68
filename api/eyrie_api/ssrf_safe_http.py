"""HTTP requests to URLs that users gave (webhooks), protected against server-side request forgery (SSRF).

The server can reach networks that its users cannot, so a URL could make it send requests there for them. Hence:

- only http and https, no user name in the URL;
- the host is resolved once, all its addresses must be allowed, and the connection uses the address that was checked: a
  second DNS response with another address (DNS rebinding) has no effect;
- only public addresses. An IPv4 address inside an IPv6 one (mapped, 6to4, NAT64) is checked as that IPv4 address.
  `allow_private` allows private and loopback addresses, never link-local ones nor the metadata services of clouds;
- redirects are not followed, proxies not used, little of the response is read, and a deadline ends the request.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from eyrie_api.errors import InvalidInput

DEADLINE_S = 10.0
_READ_BYTES = 1024
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Azure's wire server (in a public range) and Amazon's IPv6 metadata service (in a private one): both serve credentials.
_NEVER = frozenset(ipaddress.ip_address(text) for text in ("168.63.129.16", "fd00:ec2::254"))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], list[str]]


class AddressRefused(InvalidInput):
    """An address to which requests for users are not allowed."""

    reason = "InvalidInput"


@dataclass(frozen=True)
class ParsedUrl:
    """A valid URL and its parts."""

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
    """Whether a connection to the address is allowed."""
    ip: Address = ipaddress.ip_address(address.partition("%")[0])
    while isinstance(ip, ipaddress.IPv6Address):  # an IPv4 address may be embedded in it
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else (
            ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None))
        if inner is None:
            break
        ip = inner
    if ip in _NEVER or ip.is_link_local or ip.is_multicast or ip.is_unspecified:
        return False
    if allow_private and (ip.is_private or ip.is_loopback):
        return not ip.is_reserved or ip.is_loopback
    return ip.is_global


def resolve_allowed(url: ParsedUrl, *, allow_private: bool, resolve: Resolve | None = None) -> str:
    """The address to connect to. Raises AddressRefused, or OSError when the host has none."""
    addresses = (resolve or _resolve)(url.host, url.port)
    refused = [address for address in addresses if not is_allowed(address, allow_private=allow_private)]
    if refused or not addresses:
        raise AddressRefused(f"{url.host} resolves to an address that is not public",
                             "give a public host, or set EYRIE_WEBHOOKS_ALLOW_PRIVATE for private receivers")
    return addresses[0]


def _resolve(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def post(url: str, body: bytes, headers: Mapping[str, str], *, allow_private: bool, resolve: Resolve | None = None,
         deadline_s: float = DEADLINE_S) -> int:
    """Post the body; return the status. Raises InvalidInput (AddressRefused), or OSError and HTTPException for network
    errors."""
    parsed = parse_url(url)
    address = resolve_allowed(parsed, allow_private=allow_private, resolve=resolve)
    connection = _PinnedConnection(parsed, address, timeout=deadline_s / 2)
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


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to an address that was checked before, under the host name of the URL."""

    def __init__(self, url: ParsedUrl, address: str, timeout: float) -> None:
        super().__init__(url.host, url.port, timeout=timeout)
        self._url, self._address = url, address

    def connect(self) -> None:
        """Connect, with TLS for https."""
        connection: Any = socket.create_connection((self._address, self._url.port), self.timeout)
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
