"""The one door through which a URL that a user gave is called: webhooks, and nothing else.

The server stands inside a network its users do not, so an address is a way to make it knock on doors for them (SSRF).
Hence:

- http and https alone, no user name in the URL;
- the name is resolved once, every address it has must be allowed, and the connection goes to the very address that was
  looked at: a name that answers differently the second time (DNS rebinding) gains nothing;
- only public addresses, judged by what they lead to: an IPv4 address inside an IPv6 one (mapped, 6to4, NAT64) is judged
  as that IPv4 address. `allow_private` lets private and loopback ones through, never link-local ones nor those under
  which clouds hand out credentials;
- no redirect is followed, no proxy asked, little of the answer is read, and all of it ends by a deadline.
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
# Of Azure's wire server and Amazon's IPv6 metadata: public and private by their ranges, credentials by what they serve.
_NEVER = frozenset(ipaddress.ip_address(text) for text in ("168.63.129.16", "fd00:ec2::254"))

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], list[str]]


class AddressRefused(InvalidInput):
    """An address this server does not call for its users."""


@dataclass(frozen=True)
class Place:
    """A URL taken apart and found in order."""

    parts: SplitResult
    host: str
    port: int


def place_of(url: str) -> Place:
    """The URL, looked at without asking anybody. Raises InvalidInput."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InvalidInput("url is not a URL", "write https://host/path") from None
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidInput("url is not an http or https one", "write https://host/path")
    if parts.username is not None or parts.password is not None:
        raise InvalidInput("url holds a user name or a password", "leave it out: deliveries are signed")
    return Place(parts, host, port or (443 if parts.scheme == "https" else 80))


def is_allowed(address: str, *, allow_private: bool) -> bool:
    """Whether a connection may go there."""
    found: Address = ipaddress.ip_address(address.partition("%")[0])
    while isinstance(found, ipaddress.IPv6Address) and (inner := _inner(found)) is not None:
        found = inner
    if found in _NEVER or found.is_link_local or found.is_multicast or found.is_unspecified:
        return False
    if allow_private and (found.is_private or found.is_loopback):
        return not found.is_reserved or found.is_loopback
    return found.is_global


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one leads to, if it does."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)


def resolved(place: Place, *, allow_private: bool, resolve: Resolve | None = None) -> str:
    """The address to connect to. Raises AddressRefused, or OSError when the name has none."""
    found = (resolve or _resolve)(place.host, place.port)
    refused = [one for one in found if not is_allowed(one, allow_private=allow_private)]
    if refused or not found:
        raise AddressRefused(f"{place.host} leads to an address that is not public",
                             "give a public one, or set EYRIE_WEBHOOKS_ALLOW_PRIVATE for receivers in your own network")
    return found[0]


def _resolve(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def post(url: str, body: bytes, headers: Mapping[str, str], *, allow_private: bool, resolve: Resolve | None = None,
         deadline_s: float = DEADLINE_S) -> int:
    """Post the body; return the status. Raises InvalidInput (AddressRefused), or OSError and HTTPException for what the
    network does."""
    place = place_of(url)
    address = resolved(place, allow_private=allow_private, resolve=resolve)
    connection = _Pinned(place, address, timeout=deadline_s / 2)
    # A receiver that drips its answer byte by byte outlasts every timeout of a single read.
    watchdog = threading.Timer(deadline_s, connection.cut)
    watchdog.daemon = True
    watchdog.start()
    try:
        path = (place.parts.path or "/") + (f"?{place.parts.query}" if place.parts.query else "")
        connection.request("POST", path, body, dict(headers))
        answer = connection.getresponse()
        answer.read(_READ_BYTES)
        return answer.status
    finally:
        watchdog.cancel()
        connection.close()


class _Pinned(http.client.HTTPConnection):
    """A connection to an address chosen before, under the name that was asked for."""

    def __init__(self, place: Place, address: str, timeout: float) -> None:
        super().__init__(place.host, place.port, timeout=timeout)
        self._place, self._address = place, address

    def connect(self) -> None:
        """Connect, and speak TLS where the URL says so."""
        made: Any = socket.create_connection((self._address, self._place.port), self.timeout)
        if self._place.parts.scheme == "https":
            made = ssl.create_default_context().wrap_socket(made, server_hostname=self._place.host)
        self.sock = made

    def cut(self) -> None:
        """End it from another thread."""
        if self.sock is not None:
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it has ended by itself
