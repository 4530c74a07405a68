"""The way to an endpoint beyond a company's proxy: which one the environment names, and a tunnel through it.

Read as other programs read them: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, in either case. A plain request is
sent to the proxy with its whole address; TLS goes through a tunnel (CONNECT, RFC 9110 section 9.3.6), so that the proxy
sees a host's name and nothing else. Proxies that are themselves spoken to over TLS, and SOCKS, are refused by name.

Only regeneration asks this way. A load generator that measured a proxy would measure the wrong thing.
"""

import asyncio
from ipaddress import ip_address
from urllib.request import getproxies, proxy_bypass

from eyrie_api.errors import InvalidInput
from eyrie_workers.load.endpoint_url import EndpointUrl, RequestFailed, parse_url

_MAX_HEAD_BYTES = 64 * 1024


def proxy_for(origin: EndpointUrl) -> EndpointUrl | None:
    """The proxy that stands before an origin; None where there is none. Raises InvalidInput for one of another kind."""
    proxies = getproxies()
    named = proxies.get(origin.scheme) or proxies.get("all")
    if not named or proxy_bypass(origin.host_header) or _is_this_machine(origin.host):
        return None
    variable = f"{origin.scheme.upper()}_PROXY"
    proxy = parse_url(named if "://" in named else f"http://{named}")
    if proxy.scheme != "http":
        raise InvalidInput(f"{variable} names a proxy that is spoken to over {proxy.scheme}",
                           f"name one like http://proxy:3128, or put {origin.host} into NO_PROXY")
    return proxy


def _is_this_machine(host: str) -> bool:
    """No proxy for the wide world has to do with what runs beside us, whether or not NO_PROXY was thought of."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ProxyTunnel(asyncio.Protocol):
    """A fresh connection to a proxy that is being asked for a tunnel."""

    def __init__(self) -> None:
        self._head = b""
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Part of the proxy's answer."""
        self._head += data
        if not self._answer.done() and (b"\r\n\r\n" in self._head or len(self._head) > _MAX_HEAD_BYTES):
            self._answer.set_result(self._head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by the proxy: before it answered that is a failure, afterwards TLS will say so."""
        if not self._answer.done():
            self._answer.set_result(self._head)

    async def granted(self, transport: asyncio.Transport, proxy: EndpointUrl, origin: EndpointUrl) -> None:
        """Ask for a tunnel to an origin and wait until it stands. Raises RequestFailed."""
        where = f"[{origin.host}]:{origin.port}" if ":" in origin.host else f"{origin.host}:{origin.port}"
        head = f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n{proxy_authorization_header(proxy)}\r\n"
        transport.write(head.encode())
        said = (await self._answer).partition(b"\r\n")[0].decode("latin-1")
        version, _, status = said.partition(" ")
        if not version.startswith("HTTP/1.") or not status.startswith("2"):
            raise RequestFailed("Proxy", f"the proxy {proxy.url} gave no tunnel to {where}: "
                                          f"{said[:80] or 'it closed the connection'}")


def proxy_authorization_header(proxy: EndpointUrl) -> str:
    """The header that names us to the proxy; empty where its address holds no credentials."""
    return f"Proxy-Authorization: {proxy.basic}\r\n" if proxy.basic else ""
