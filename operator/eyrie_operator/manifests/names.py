"""Names, labels and digests of an endpoint's objects. Pure.

Every name begins with `eyrie-`: a Service's name must begin with a letter, and an endpoint's may begin with a digit.
Names have at most 52 characters, because the controllers of Deployments and LeaderWorkerSets append suffixes and the
result has to fit into a label of 63. A longer name is truncated and gets 8 hexadecimal digits of the SHA-256 of the
endpoint's name, so that two long endpoint names do not collide.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

GROUP = "eyrie.dev"
ENDPOINT_LABEL = f"{GROUP}/endpoint"
REVISION_LABEL = f"{GROUP}/revision"
ROLE_LABEL = f"{GROUP}/role"
MANAGER = "eyrie-operator"
"""Field manager of server-side apply, and value of app.kubernetes.io/managed-by."""

SERVER, WORKER, ENTRY = "server", "worker", "entry"
"""Roles: a pod that serves requests; another node of the same engine; the stable Service."""

_LONGEST = 52

Manifest = dict[str, Any]


def object_name(endpoint: str, revision: int | None = None, part: str = "") -> str:
    """`eyrie-<endpoint>[-r<revision>][-<part>]`, shortened to a DNS label of at most 52 characters."""
    tail = (f"-r{revision}" if revision is not None else "") + (f"-{part}" if part else "")
    head = f"eyrie-{endpoint}"
    if len(head) + len(tail) > _LONGEST:
        mark = hashlib.sha256(endpoint.encode()).hexdigest()[:8]
        head = f"{head[:_LONGEST - len(tail) - len(mark) - 1].rstrip('-')}-{mark}"
    return head + tail


def service_name(endpoint: str, revision: int) -> str:
    """Name of one revision's Service. Not the workload's name: LeaderWorkerSet creates a Service of that name."""
    return object_name(endpoint, revision, "http")


def selector(endpoint: str, revision: int | None = None, role: str | None = SERVER) -> dict[str, str]:
    """Labels of selectors. They never change during the life of an object, because selectors are immutable."""
    labels = {"app.kubernetes.io/name": "eyrie-engine", ENDPOINT_LABEL: endpoint}
    if revision is not None:
        labels[REVISION_LABEL] = str(revision)
    if role is not None:
        labels[ROLE_LABEL] = role
    return labels


def labels(endpoint: str, revision: int | None = None, role: str | None = None) -> dict[str, str]:
    """All labels of an object or a pod."""
    return selector(endpoint, revision, role) | {
        "app.kubernetes.io/instance": endpoint, "app.kubernetes.io/component": "endpoint",
        "app.kubernetes.io/part-of": "eyrie", "app.kubernetes.io/managed-by": MANAGER}


def digest(value: str | Mapping[str, Any]) -> str:
    """`sha256:<hex>` of a text or a JSON value."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
