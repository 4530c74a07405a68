"""The proxy that the environment names for an endpoint.

The variables are HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, in either case, as in other programs. A plain request
is sent to the proxy with its absolute URL; TLS uses a tunnel (CONNECT, RFC 9110 section 9.3.6), so that the proxy sees
only the host name. Proxies that are reached over TLS, and SOCKS, are rejected. aiohttp's own `trust_env` is not
used: it ignores ALL_PROXY, and sends requests for loopback addresses to the proxy.

Only regeneration uses a proxy: a load test through a proxy would measure the proxy.
"""

from ipaddress import ip_address
from urllib.request import getproxies, proxy_bypass

from eyrie_api.errors import InvalidInput
from eyrie_workers.load.endpoint_url import EndpointUrl, parse_url


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
