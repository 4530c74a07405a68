"""Where requests go: an address taken apart without showing its secrets, and the one way in which asking it fails."""

import base64
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote, urlsplit

from eyrie_api.errors import InvalidInput


class RequestFailed(Exception):
    """No whole answer came. `reason` is a word to count by, the message says more."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class EndpointUrl:
    """Where requests go. `path` is the part of the URL before the API's own paths."""

    scheme: Literal["http", "https"]
    host: str
    port: int
    path: str
    basic: str | None = field(default=None, repr=False)
    """Credentials of the URL, ready for an Authorization header; they stand in no message."""

    @property
    def url(self) -> str:
        """The address without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = self.port == (443 if self.scheme == "https" else 80)
        return f"{self.scheme}://{host}{'' if usual else f':{self.port}'}{self.path}"

    @property
    def host_header(self) -> str:
        """The Host header's value."""
        return self.url.split("//", 1)[1].split("/", 1)[0]


def parse_url(url: str) -> EndpointUrl:
    """An http(s) address. Raises InvalidInput, which quotes the address only as far as it holds no credentials."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    shown = url.rpartition("@")[2]
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or not url.isprintable():
        raise InvalidInput(f"{shown!r} is not an address", "write it like http://127.0.0.1:30000/v1")
    if parts.query or parts.fragment:
        raise InvalidInput(f"the address {shown.partition('?')[0]!r} has a query or a fragment",
                           "give the part up to and including /v1")
    basic = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        basic = "Basic " + base64.b64encode(pair.encode()).decode()
    scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
    port = port or (443 if scheme == "https" else 80)
    return EndpointUrl(scheme, parts.hostname, port, parts.path.rstrip("/"), basic)
