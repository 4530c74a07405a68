"""The endpoints' objects in the serving namespace: a cache of them, and their comparison with the manifests.

The cache is filled by one list request per kind, repeated every few seconds, whatever the number of endpoints: a
hundred idle ones cost as much as one. A write invalidates its endpoint, whose objects are then listed separately: no
plan is based on a state before our own last write. Changes by others appear within one sweep.

Kinds of APIs that the server lacks are not listed. An API that the operator's role may not use (the chart grants those
that existed when it was installed) counts as absent, which is logged once.

Nothing is written when nothing has changed. Two checks are needed. The digest of the last applied manifest, in an
annotation, detects changes of the manifest, removed fields included. Comparing the manifest with the object detects
changes of our fields by others. Fields added by the server or by others are ignored; quantities are compared as
numbers, since the server writes `1000m` as `1`.
"""

import itertools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eyrie_api.quantities import amount
from eyrie_operator.cluster.client import Cluster, ClusterRejected, Object
from eyrie_operator.manifests.deployment import ENDPOINT_LABEL, GROUP, Manifest, digest

log = logging.getLogger(__name__)

_APIS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("v1",), ("ConfigMap", "Service", "Pod")), (("apps/v1",), ("Deployment",)),
    (("policy/v1", "policy/v1beta1"), ("PodDisruptionBudget",)),
    (("gateway.networking.k8s.io/v1", "gateway.networking.k8s.io/v1beta1"), ("HTTPRoute",)),
    (("monitoring.coreos.com/v1",), ("PodMonitor", "PrometheusRule")), (("keda.sh/v1alpha1",), ("ScaledObject",)))
"""Versions in order of preference, and kinds: those of `rollout.KINDS`, and pods."""

_ALWAYS = ("v1", "apps/v1")


class ObjectCache:
    """Objects of one namespace. Thread-safe."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self.served: frozenset[str] = frozenset()
        """`group/version` of the server's APIs, without those that the role may not use. Empty before the first
        sweep."""

        self._swept = False
        self._kinds: tuple[tuple[str, str], ...] = ()
        self._denied: set[str] = set()
        self._lock, self._order = threading.Lock(), itertools.count()
        self._objects: dict[str, tuple[Object, ...]] = {}
        self._invalidated: dict[str, int] = {}
        """By endpoint, the sequence number of its last write; absent when the cache is newer."""

        self._listed: dict[str, int] = {}
        """By endpoint, when its own list began that is cached; absent where a sweep is newer."""

    def discover(self) -> None:
        """Read the server's APIs. Raises ClusterUnavailable."""
        offered = self._cluster.list_apis()
        kinds: list[tuple[str, str]] = []
        for versions, named in _APIS:
            api = next((version for version in versions if version in offered), None)
            if api is None:
                continue
            if api not in _ALWAYS:
                try:
                    self._cluster.list_all(api, named[0], self._namespace, labelled=ENDPOINT_LABEL)
                except ClusterRejected as refused:
                    if api not in self._denied:
                        log.warning("%s is installed, but this operator has no permission to use it: %s", api, refused)
                    self._denied.add(api)
                    continue
            kinds += [(api, kind) for kind in named]
        self._kinds = tuple(kinds)
        lacking = {version for versions, _ in _APIS for version in versions} - {api for api, _ in kinds}
        self.served = offered - lacking

    def sweep(self) -> None:
        """List all objects. Raises ClusterUnavailable."""
        if not self.served:
            self.discover()
        began = next(self._order)
        swept: dict[str, tuple[Object, ...]] = {}
        for each in self._list(ENDPOINT_LABEL):
            name = each["metadata"]["labels"][ENDPOINT_LABEL]
            swept[name] = (*swept.get(name, ()), each)
        with self._lock:
            # Race: a write during the list may be missing in it. Writes after `began` stay invalidated, and endpoints
            # that were listed after one stay as they are.
            self._listed = {name: at for name, at in self._listed.items() if at > began}
            self._objects, self._swept = swept | {name: self._objects[name] for name in self._listed}, True
            self._invalidated = {name: at for name, at in self._invalidated.items() if at > began}

    def of(self, endpoint: str) -> tuple[Object, ...]:
        """Everything that carries the endpoint's label. Raises ClusterUnavailable."""
        if not self._swept:
            self.sweep()
        with self._lock:
            if endpoint not in self._invalidated:
                return self._objects.get(endpoint, ())
            began = next(self._order)
        listed = tuple(self._list(f"{ENDPOINT_LABEL}={endpoint}"))
        with self._lock:
            # Race: another write after `began` makes this list stale; it is returned, but not cached.
            if self._invalidated.get(endpoint, -1) < began:
                self._objects[endpoint], self._listed[endpoint] = listed, began
                self._invalidated.pop(endpoint, None)
        return listed

    def invalidate(self, endpoint: str) -> None:
        """Call before and after writes to an endpoint's objects: the cached ones are not used again."""
        with self._lock:
            self._invalidated[endpoint] = next(self._order)

    def known(self, endpoint: str) -> tuple[Object, ...] | None:
        """The endpoint's objects as they were last listed; None when they have changed since."""
        with self._lock:
            is_known = self._swept and endpoint not in self._invalidated
            return self._objects.get(endpoint, ()) if is_known else None

    def versions(self) -> dict[str, tuple[str, ...]]:
        """By endpoint, uid and resourceVersion of each object."""
        with self._lock:
            return {name: tuple(f"{each['metadata']['uid']}/{each['metadata']['resourceVersion']}" for each in objects)
                    for name, objects in self._objects.items()}

    def _list(self, labelled: str) -> Iterable[Object]:
        for api, kind in self._kinds:
            for item in self._cluster.list_all(api, kind, self._namespace, labelled=labelled):
                yield {**item, "apiVersion": api, "kind": kind}  # items of a list omit both


APPLIED = f"{GROUP}/applied"
"""Annotation: digest of the applied manifest."""


def with_digest(manifest: Manifest) -> Manifest:
    """The manifest with its own digest as an annotation."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def is_applied(manifest: Manifest, existing: Mapping[str, Any]) -> bool:
    """Whether this with_digest manifest was the last one applied to the object."""
    annotations = existing["metadata"].get("annotations") or {}
    return bool(annotations.get(APPLIED) == manifest["metadata"]["annotations"][APPLIED])


def difference(wanted: Any, existing: Any, path: str = "") -> str | None:
    """Path of the first field that differs from the manifest; None when none does. Additional fields are ignored."""
    if isinstance(wanted, Mapping):
        have = existing if isinstance(existing, Mapping) else {}
        inside = (difference(value, have.get(key), f"{path}.{key}") for key, value in wanted.items())
    elif isinstance(wanted, Sequence) and not isinstance(wanted, str):
        items = existing if isinstance(existing, Sequence) else ()
        if all(isinstance(item, Mapping) and "name" in item for item in wanted):  # others may have added items
            named = {item["name"]: item for item in items if isinstance(item, Mapping) and "name" in item}
            inside = (difference(item, named.get(item["name"]), f"{path}[{item['name']}]") for item in wanted)
        elif len(wanted) != len(items):
            return path
        else:
            inside = (difference(item, other, f"{path}[{at}]")
                      for at, (item, other) in enumerate(zip(wanted, items, strict=True)))
    else:
        is_same = wanted == existing or (not wanted and existing is None)
        return None if is_same or (amount(wanted) is not None and amount(wanted) == amount(existing)) else path
    return next((differing for differing in inside if differing is not None), None)
