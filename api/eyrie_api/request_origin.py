"""Refuses requests that a web page makes of a server on the reader's machine or network. Pure.

A browser lets any page send requests to any address; only the response is withheld from the page. Servers without a
password (the control plane on loopback, the gateway, the embedded engine) therefore check what a browser cannot forge:

- `Origin` and `Sec-Fetch-Site`: a request of a page from elsewhere is refused, with and without a body. Programs that
  are not browsers send neither header. A link that is followed (a navigation with GET) is allowed.
- `Host`, on a loopback bind: a DNS name of the page's owner that resolves to 127.0.0.1 makes the page same-origin
  (DNS rebinding), but the header still has that name.
- `Content-Type`: browsers send other types than JSON across origins without asking the server first.

Fetch Metadata: https://www.w3.org/TR/fetch-metadata/; Origin: RFC 6454.
"""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from eyrie_api.errors import Forbidden, UnsupportedMediaType

_ELSEWHERE = ("cross-site", "same-site")
"""Values of Sec-Fetch-Site of pages with another origin; `none` is a user's own action."""


def is_loopback_host(host: str) -> bool:
    """Whether `host` is a loopback address or `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_host(headers: Mapping[str, str]) -> None:
    """Raises Forbidden when the Host header does not name this machine; for servers bound to loopback."""
    host = headers.get("host", "")
    try:
        name = urlsplit("//" + host).hostname or ""
    except ValueError:  # an unclosed bracket
        name = ""
    if not is_loopback_host(name):
        raise Forbidden(f"Host {host[:100]!r} is not this machine, and no token is required here",
                        "use 127.0.0.1 or localhost, or start the server with EYRIE_TOKEN")


def check_origin(method: str, headers: Mapping[str, str]) -> None:
    """Raises Forbidden for a request of a web page with another origin than this server. `headers` by lower-case
    name."""
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and origin.lower().partition("://")[2] != host.lower():
        raise Forbidden(f"Origin {origin[:100]!r} is not this server",
                        "web pages of another origin may not use this server: call it from a program, or through a "
                        "proxy with the page's own origin")
    site = headers.get("sec-fetch-site", "")
    followed_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    if site in _ELSEWHERE and not followed_link:
        raise Forbidden(f"Sec-Fetch-Site is {site!r}: the request comes from a web page of another origin",
                        "call this server from a program")


def check_json(method: str, headers: Mapping[str, str]) -> None:
    """Raises UnsupportedMediaType for a body that is not declared as JSON."""
    length = headers.get("content-length", "")
    has_body = length not in ("", "0") or "transfer-encoding" in headers
    if method not in ("POST", "PUT", "PATCH") or not has_body:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(f"content-type {kind[:100] or 'is missing'!r}",
                                   "send the body as Content-Type: application/json")
