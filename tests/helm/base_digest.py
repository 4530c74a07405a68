"""The digest that a registry has for an image's tag now: what a base image is pinned by.

    python -m tests.helm.base_digest docker.io/lmsysorg/sglang:v0.5.23    # prints the reference with @sha256:...

`make image-sglang` builds on what this prints; for the other images it finds a newer digest to write into their
Dockerfiles. A reference with a digest is printed as it is. Only registries that anybody may read are asked, by the
protocol of OCI's distribution specification (a token first, where the registry wants one).
"""

import json
import re
import sys
import urllib.request
from email.message import Message
from urllib.error import HTTPError
from urllib.parse import urlencode

_REFERENCE = re.compile(r"(?:(?P<host>localhost|[^/]*[.:][^/]*)/)?(?P<name>[a-z0-9._/-]+):(?P<tag>[\w.-]+)")
_INDEXES = ("application/vnd.oci.image.index.v1+json",
            "application/vnd.docker.distribution.manifest.list.v2+json",
            "application/vnd.oci.image.manifest.v1+json",
            "application/vnd.docker.distribution.manifest.v2+json")
"""Indexes first: the digest of an index is the same for every platform."""

_HUB, _HUB_API = "docker.io", "registry-1.docker.io"
_TIMEOUT_S = 30.0


def pinned(reference: str) -> str:
    """`reference` with the digest of its tag. Raises ValueError for what is not `[host/]name:tag`, and OSError where
    the registry does not say."""
    if re.search(r"@sha256:[0-9a-f]{64}$", reference):
        return reference
    parts = _REFERENCE.fullmatch(reference)
    if parts is None:
        raise ValueError(f"{reference!r} is not [host/]name:tag")
    host, name = parts["host"] or _HUB, parts["name"]
    if host == _HUB:
        host, name = _HUB_API, name if "/" in name else f"library/{name}"
    scheme = "http" if host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    digest = _headers(f"{scheme}://{host}/v2/{name}/manifests/{parts['tag']}", {})["Docker-Content-Digest"]
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest or ""):
        raise OSError(f"{host} names no digest of {reference}")
    return f"{reference}@{digest}"


def _headers(url: str, authorization: dict[str, str]) -> Message:
    request = urllib.request.Request(url, method="HEAD", headers={"Accept": ", ".join(_INDEXES), **authorization})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            headers: Message = answer.headers
            return headers
    except HTTPError as refused:
        if refused.code != 401 or authorization:
            raise
        fields = dict(re.findall(r'(\w+)="([^"]*)"', refused.headers.get("WWW-Authenticate", "")))
    realm = fields.pop("realm", "")
    with urllib.request.urlopen(f"{realm}?{urlencode(fields)}", timeout=_TIMEOUT_S) as answer:
        given = json.load(answer)
    token = given.get("token") or given.get("access_token")  # the second by OAuth 2.0
    if not token:
        raise OSError(f"{realm} gives no token for reading")
    return _headers(url, {"Authorization": f"Bearer {token}"})


def main() -> None:
    """Print one reference with its digest."""
    try:
        print(pinned(*sys.argv[1:2] or [""]))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}\nhint: give the digest too, name:tag@sha256:..., which your registry shows")


if __name__ == "__main__":
    main()
