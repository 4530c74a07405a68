"""What stands of the endpoints in the serving namespace, listed for all of them at once.

A list per kind every few seconds, whatever the number of endpoints: a hundred idle ones cost as much as one. What was
listed is believed until something of that endpoint is written; then it is listed anew, for that endpoint alone, so that
no plan is ever made from before our own last deed. What others do shows within one sweep.

Kinds of APIs the server lacks are not asked for. Where the server has one and the operator's role has no right to it
(the chart grants what was there when it was installed), it counts as lacking, and that is said once.
"""

import itertools
import logging
import threading
from collections.abc import Iterable

from eyrie_operator.cluster.apply import Cluster, ClusterRejected, Object
from eyrie_operator.manifests.deployment import LWS_API
from eyrie_operator.manifests.names import ENDPOINT_LABEL

log = logging.getLogger(__name__)

_APIS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("v1",), ("ConfigMap", "Service", "Pod")), (("apps/v1",), ("Deployment",)), ((LWS_API,), ("LeaderWorkerSet",)),
    (("policy/v1", "policy/v1beta1"), ("PodDisruptionBudget",)),
    (("gateway.networking.k8s.io/v1", "gateway.networking.k8s.io/v1beta1"), ("HTTPRoute",)),
    (("monitoring.coreos.com/v1",), ("PodMonitor", "PrometheusRule")), (("keda.sh/v1alpha1",), ("ScaledObject",)))
"""Versions in order of preference, and kinds: `rollout.KINDS`, and pods."""

_ALWAYS = ("v1", "apps/v1")


class ObjectCache:
    """One namespace. Safe between threads."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self.served: frozenset[str] = frozenset()
        """`group/version` of the server's APIs, without those we have no right to. Empty before the first sweep."""

        self._swept = False
        self._kinds: tuple[tuple[str, str], ...] = ()
        self._denied: set[str] = set()
        self._lock, self._order = threading.Lock(), itertools.count()
        self._objects: dict[str, tuple[Object, ...]] = {}
        self._touched: dict[str, int] = {}
        """When it was last written, on the order of sweeps; absent when what is known is newer."""

    def discover(self) -> None:
        """Ask what APIs there are. Raises ClusterUnavailable."""
        offered = self._cluster.list_apis()
        kinds: list[tuple[str, str]] = []
        for versions, named in _APIS:
            api = next((one for one in versions if one in offered), None)
            if api is not None and (api in _ALWAYS or self._may_list(api, named[0])):
                kinds += [(api, kind) for kind in named]
        self._kinds = tuple(kinds)
        lacking = {one for versions, _ in _APIS for one in versions} - {api for api, _ in kinds}
        self.served = offered - lacking

    def sweep(self) -> None:
        """List everything. Raises ClusterUnavailable."""
        if not self.served:
            self.discover()
        began = next(self._order)
        found = _by_endpoint(self._list(ENDPOINT_LABEL))
        with self._lock:
            self._objects, self._swept = found, True
            self._touched = {name: at for name, at in self._touched.items() if at > began}

    def of(self, endpoint: str) -> tuple[Object, ...]:
        """Everything that carries the endpoint's label. Raises ClusterUnavailable."""
        if not self._swept:
            self.sweep()
        with self._lock:
            if endpoint not in self._touched:
                return self._objects.get(endpoint, ())
            began = next(self._order)
        listed = tuple(self._list(f"{ENDPOINT_LABEL}={endpoint}"))
        with self._lock:
            if self._touched.get(endpoint, -1) < began:
                self._objects[endpoint] = listed
                self._touched.pop(endpoint, None)
        return listed

    def invalidate(self, endpoint: str) -> None:
        """Something of it has been written, or is about to be."""
        with self._lock:
            self._touched[endpoint] = next(self._order)

    def has_objects(self, endpoint: str) -> bool:
        """Whether anything of it is there, pods that are ending left out."""
        with self._lock:
            return not self._swept or endpoint in self._touched or any(
                one["kind"] != "Pod" for one in self._objects.get(endpoint, ()))

    def owned_by(self, endpoint: str, uid: str) -> bool:
        """Whether the garbage collector would take anything of it with that object."""
        with self._lock:
            return not self._swept or endpoint in self._touched or any(
                owner["uid"] == uid for one in self._objects.get(endpoint, ())
                for owner in one["metadata"].get("ownerReferences", ()))

    def versions(self) -> dict[str, tuple[str, ...]]:
        """By endpoint, what changes when any of its objects does."""
        with self._lock:
            return {name: tuple(f"{one['metadata']['uid']}/{one['metadata']['resourceVersion']}" for one in objects)
                    for name, objects in self._objects.items()}

    def _may_list(self, api: str, kind: str) -> bool:
        try:
            self._cluster.list_all(api, kind, self._namespace, labelled=ENDPOINT_LABEL)
        except ClusterRejected as refused:
            if api not in self._denied:
                log.warning("%s is here and this operator may not use it, so it does without: %s", api, refused)
            self._denied.add(api)
            return False
        return True

    def _list(self, labelled: str) -> Iterable[Object]:
        for api, kind in self._kinds:
            for one in self._cluster.list_all(api, kind, self._namespace, labelled=labelled):
                yield {**one, "apiVersion": api, "kind": kind}  # items of a list say neither


def _by_endpoint(objects: Iterable[Object]) -> dict[str, tuple[Object, ...]]:
    found: dict[str, list[Object]] = {}
    for one in objects:
        found.setdefault(one["metadata"]["labels"][ENDPOINT_LABEL], []).append(one)
    return {name: tuple(each) for name, each in found.items()}
