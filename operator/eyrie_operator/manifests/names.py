"""Names, labels and digests of an endpoint's objects. Pure.

Every name begins with a letter, because a Service's must, and an endpoint's may begin with a digit. Names stay within
52 characters: the controllers of Deployments and LeaderWorkerSets append to them what has to fit into a label of 63.
A longer one keeps its head and ends in a digest of the whole, so that two long endpoints never meet.
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
"""Roles: a pod that answers requests; a further node of one engine; the stable way in."""

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
    """The Service of one revision. Not its workload's name: LeaderWorkerSet takes that one for a Service of its own."""
    return object_name(endpoint, revision, "http")


def selector(endpoint: str, revision: int | None = None, role: str | None = SERVER) -> dict[str, str]:
    """Labels that pods are found by. They never change over the life of an object: selectors are immutable."""
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
