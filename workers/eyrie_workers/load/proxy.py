"""Proxies: which one the environment names for an endpoint, and a tunnel through it.

The variables are HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, in either case, as in other programs. A plain request
is sent to the proxy with its absolute URL; TLS uses a tunnel (CONNECT, RFC 9110 section 9.3.6), so that the proxy sees
only the host name. Proxies that are reached over TLS, and SOCKS, are rejected.

Only regeneration uses a proxy: a load test through a proxy would measure the proxy.
"""

import asyncio
from ipaddress import ip_address
from urllib.request import getproxies, proxy_bypass

from eyrie_api.errors import InvalidInput
from eyrie_workers.load.endpoint_url import EndpointUrl, RequestFailed, parse_url

_MAX_HEAD_BYTES = 64 * 1024


def proxy_for(url: EndpointUrl) -> EndpointUrl | None:
    """The environment's proxy for a URL; None without one. Raises InvalidInput for an unsupported kind of proxy."""
    proxies = getproxies()
    named = proxies.get(url.scheme) or proxies.get("all")
    if not named or proxy_bypass(url.host_header) or _is_loopback(url.host):
        return None
    variable = f"{url.scheme.upper()}_PROXY"
    proxy = parse_url(named if "://" in named else f"http://{named}")
    if proxy.scheme != "http":
        raise InvalidInput(f"{variable} names a proxy with the scheme {proxy.scheme}",
                           f"use one like http://proxy:3128, or add {url.host} to NO_PROXY")
    return proxy


def _is_loopback(host: str) -> bool:
    """Loopback addresses never use a proxy, whether or not NO_PROXY contains them."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ProxyTunnel(asyncio.Protocol):
    """A new connection to a proxy while it establishes a tunnel."""

    def __init__(self) -> None:
        self._head = b""
        self._response: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Part of the proxy's response."""
        self._head += data
        if not self._response.done() and (b"\r\n\r\n" in self._head or len(self._head) > _MAX_HEAD_BYTES):
            self._response.set_result(self._head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by the proxy. Without a response `establish` fails; after one the TLS handshake fails."""
        if not self._response.done():
            self._response.set_result(self._head)

    async def establish(self, transport: asyncio.Transport, proxy: EndpointUrl, url: EndpointUrl) -> None:
        """Send CONNECT and wait for the response. Raises RequestFailed."""
        where = f"[{url.host}]:{url.port}" if ":" in url.host else f"{url.host}:{url.port}"
        head = f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n{proxy_authorization(proxy)}\r\n"
        transport.write(head.encode())
        status_line = (await self._response).partition(b"\r\n")[0].decode("latin-1")
        version, _, status = status_line.partition(" ")
        if not version.startswith("HTTP/1.") or not status.startswith("2"):
            raise RequestFailed("Proxy", f"the proxy {proxy.url} refused a tunnel to {where}: "
                                          f"{status_line[:80] or 'it closed the connection'}")


def proxy_authorization(proxy: EndpointUrl) -> str:
    """The Proxy-Authorization header line; empty without credentials in the proxy's URL."""
    return f"Proxy-Authorization: {proxy.basic}\r\n" if proxy.basic else ""
