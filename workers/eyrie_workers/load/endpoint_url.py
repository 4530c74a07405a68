"""Endpoint URLs, parsed so that credentials do not reach messages, and the error of a failed request."""

import base64
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote, urlsplit

from eyrie_api.errors import InvalidInput


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

    @property
    def host_header(self) -> str:
        """The Host header's value."""
        return self.url.split("//", 1)[1].split("/", 1)[0]


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
