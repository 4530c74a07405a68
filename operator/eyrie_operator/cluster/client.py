"""The Kubernetes client: every read, watch and write of the cluster. The only module that imports `kubernetes`.

Plain dicts in and out, by the dynamic client's raw requests: the typed models differ between versions 30 and 37 of the
client, dicts do not. Paths follow from apiVersion and kind, so no discovery, and no permission for it, is needed.

- statuses and children are written by server-side apply under one field manager, so that others may own other fields of
  the same objects; a conflict is an error unless the caller owns the object (`force`);
- a status carries the resourceVersion it was computed for, and is rejected if the object has changed since;
- finalizers and annotations are merge patches: with server-side apply each would have to repeat all the others, or
  remove them;
- every write checks the fence first (`leases`) and is counted by kind and verb, so that excessive writes are visible.

`Cluster.watch` follows all objects of a kind: it lists them, then reads changes from the resourceVersion of the list. A
watch ends often (its time is over, the API server restarts) and continues from the last version that it has seen, which
bookmarks keep recent. Where the server no longer has that version (410 Gone), the objects are listed again, and those
that are missing in the new list are reported as deleted. So no change is lost, and an object's changes arrive in order.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError
from kubernetes.watch.watch import iter_resp_lines

from eyrie_api.contract.model import API_VERSION
from eyrie_api.errors import Conflict, EyrieError, NotFound, Permanent, Transient
from eyrie_operator.cluster.leases import LeaseRecord
from eyrie_operator.cluster.resources import Identity, KubernetesEvent

log = logging.getLogger(__name__)

FIELD_MANAGER = "eyrie-operator"
_APPLY, _MERGE, _JSON = "application/apply-patch+yaml", "application/merge-patch+json", "application/json"
_TIMEOUT_S = (3.05, 4.0)
"""Connect, read. A write must not outlive the lease it was begun under: see `leases.Terms`."""

_LIST_TIMEOUT_S = (3.05, 60.0)
_WATCH_S = 60
"""A watch is opened again after this time, and given up when the server has sent nothing for `_WATCH_TIMEOUT_S`: a
connection that a firewall has dropped is not noticed otherwise."""

_WATCH_TIMEOUT_S = (3.05, _WATCH_S + 15.0)
_WATCH_PAUSE_S, _WATCH_RETRY_S = 0.1, 2.0
"""Between two watches, and after an error."""

_PAGE = 250
_MICRO_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
Object = dict[str, Any]
Counted = Callable[[str, str], None]
"""Called with (verb, kind) of each write."""


class ClusterConflict(Conflict):
    """The object has changed, exists already, or a field belongs to another manager."""


class ClusterRejected(Permanent):
    """The API server rejects the request."""


class ClusterUnavailable(Transient):
    """The API server does not respond, or limits requests."""


class VersionGone(ClusterUnavailable):
    """The API server no longer has the changes since the resourceVersion of a watch."""

    reason = "ClusterUnavailable"


class Cluster:
    """One cluster, by the kubeconfig of the environment or the service account of the pod."""

    def __init__(self, check: Callable[[], None] | None = None, counted: Counted | None = None) -> None:
        in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
        try:  # not `load_config`, which warns in every pod that there is no kubeconfig
            (config.load_incluster_config if in_pod else config.load_kube_config)()
        except config.ConfigException as error:
            raise Permanent(f"no cluster: {error}", "set KUBECONFIG, or run in a pod with a service account") from error
        configuration = client.Configuration.get_default_copy()
        configuration.retries = False  # a request repeated by urllib3 would outlive its timeout, and the lease
        self._client = DynamicClient(client.ApiClient(configuration), discoverer=lambda _client, _cache: None)
        self.check, self._counted = check or (lambda: None), counted or (lambda _verb, _kind: None)
        """`check` raises NotLeader when the fence is closed; call it before writes to other systems."""

    # Reading.

    def get(self, api_version: str, kind: str, namespace: str, name: str) -> Object:
        """One object. Raises NotFound."""
        return self._request("GET", kind, path_of(api_version, kind, namespace, name))

    def list_all(self, api_version: str, kind: str, namespace: str | None = None, *,
                 labelled: str | None = None, fields: str | None = None) -> list[Object]:
        """All objects of a kind, page by page; `labelled` is a label selector, `fields` a field selector."""
        selectors = (("labelSelector", labelled), ("fieldSelector", fields))
        return self._list(kind, path_of(api_version, kind, namespace), [(name, text) for name, text in selectors if text
                                                                        ])[0]

    def _list(self, kind: str, path: str, selectors: list[tuple[str, Any]]) -> tuple[list[Object], str]:
        """All objects, and the resourceVersion of the list."""
        objects: list[Object] = []
        query = first = [("limit", _PAGE), *selectors]
        while True:
            page = self._request("GET", kind, path, query=query, timeout_s=_LIST_TIMEOUT_S)
            objects += page["items"]
            more = page["metadata"].get("continue")
            if not more:
                return objects, str(page["metadata"].get("resourceVersion", ""))
            query = [*first, ("continue", more)]

    def watch(self, api_version: str, kind: str, namespace: str | None, stopping: threading.Event,
              handle_event: Callable[[str, Object], None]) -> None:
        """Call `handle_event` with ADDED, MODIFIED or DELETED and the object: for all objects of a kind at first, then
        at each change, until `stopping`. Returns up to `_WATCH_S` after it was set."""
        path = path_of(api_version, kind, namespace)
        known: set[tuple[str, str]] = set()
        version = failure = ""
        while not stopping.is_set():
            try:
                if not version:
                    objects, version = self._list(kind, path, [])
                    before, known = known, {_key(raw) for raw in objects}
                    for raw in objects:
                        handle_event("ADDED", raw)
                    for place, name in before - known:  # deleted between two watches: no event reports it
                        handle_event("DELETED", {"metadata": {"namespace": place, "name": name}})
                for change in self._changes(kind, path, version):
                    event, raw = change["type"], change["object"]
                    # Set before it is handled: a watch that ends here continues behind this change.
                    version = raw["metadata"]["resourceVersion"]
                    if event != "BOOKMARK":
                        (known.discard if event == "DELETED" else known.add)(_key(raw))
                        handle_event(event, raw)
                failure = ""
                stopping.wait(_WATCH_PAUSE_S)
            except VersionGone:
                version = ""
            except EyrieError as error:
                if str(error) != failure:
                    log.warning("changes of %s are not seen, trying again: %s", kind, error)
                failure = str(error)
                stopping.wait(_WATCH_RETRY_S)

    def _changes(self, kind: str, path: str, version: str) -> Iterator[Object]:
        """The events of one watch. Raises VersionGone and ClusterUnavailable."""
        query: list[tuple[str, Any]] = [("watch", "true"), ("resourceVersion", version), ("timeoutSeconds", _WATCH_S),
                                        ("allowWatchBookmarks", "true")]
        with _translated(kind, path), contextlib.closing(self._client.request(
                "GET", path, query_params=query, serialize=False, _request_timeout=_WATCH_TIMEOUT_S)) as response:
            for line in iter_resp_lines(response):
                change: Object = json.loads(line)
                if change["type"] == "ERROR":
                    status = change["object"]
                    raise (VersionGone if status.get("code") == 410 else ClusterUnavailable)(
                        f"{kind}: {status.get('message', 'the watch failed')}")
                yield change

    def is_reachable(self) -> bool:
        try:
            self._request("GET", "version", "/version")
        except EyrieError:
            return False
        return True

    def list_apis(self) -> frozenset[str]:
        """`group/version` of the server's APIs, and `v1`. Every authenticated client may read them."""
        groups = self._request("GET", "APIGroupList", "/apis")["groups"]
        return frozenset({"v1", *(version["groupVersion"] for group in groups for version in group["versions"])})

    # Writing.

    def apply(self, manifest: Mapping[str, Any], *, force: bool = False) -> Object:
        """Server-side apply. Raises ClusterConflict when another manager holds a field, unless forced."""
        metadata = manifest["metadata"]
        path = path_of(manifest["apiVersion"], manifest["kind"], metadata.get("namespace"), metadata["name"])
        return self._write("PATCH", manifest["kind"], path, manifest, _APPLY, force=force)

    def create(self, manifest: Mapping[str, Any]) -> Object:
        """Create it. Raises ClusterConflict when it exists."""
        path = path_of(manifest["apiVersion"], manifest["kind"], manifest["metadata"].get("namespace"))
        return self._write("POST", manifest["kind"], path, manifest, _JSON)

    def merge(self, api_version: str, kind: str, namespace: str, name: str, body: Mapping[str, Any], *,
              field_manager: str = FIELD_MANAGER) -> Object:
        return self._write("PATCH", kind, path_of(api_version, kind, namespace, name), body, _MERGE, field_manager)

    def write_status(self, identity: Identity, status: Mapping[str, Any]) -> Object:
        """Apply the status of one of our resources, if the object has not changed since it was read."""
        manifest = {"apiVersion": API_VERSION, "kind": identity.kind, "status": status,
                    "metadata": {"name": identity.name, "namespace": identity.namespace,
                                 "resourceVersion": identity.resource_version}}
        path = path_of(API_VERSION, identity.kind, identity.namespace, identity.name) + "/status"
        return self._write("PATCH", identity.kind, path, manifest, _APPLY, force=True)

    def annotate(self, identity: Identity, name: str, value: str | None) -> Object:
        """Set or remove an annotation of one of our resources."""
        body = {"metadata": {"annotations": {name: value}}}
        return self.merge(API_VERSION, identity.kind, identity.namespace, identity.name, body)

    def set_finalizers(self, identity: Identity, finalizers: Sequence[str]) -> Object:
        """Replace the finalizers of one of our resources, if it has not changed since it was read."""
        body = {"metadata": {"finalizers": list(finalizers), "resourceVersion": identity.resource_version}}
        return self.merge(API_VERSION, identity.kind, identity.namespace, identity.name, body)

    def delete(self, api_version: str, kind: str, namespace: str, name: str, uid: str | None = None) -> None:
        """Delete it if it has this uid; succeeds when it does not exist."""
        body = {"preconditions": {"uid": uid}} if uid else {}
        with contextlib.suppress(NotFound):
            self._write("DELETE", kind, path_of(api_version, kind, namespace, name), body, _JSON)

    def post_event(self, identity: Identity, event: KubernetesEvent, now: datetime) -> None:
        """Post an Event about one of our resources. Its name is a digest of its content: a duplicate is rejected."""
        moment = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        manifest = {
            "apiVersion": "v1", "kind": "Event", "type": event.type, "reason": event.reason,
            "message": event.message, "count": 1, "firstTimestamp": moment, "lastTimestamp": moment,
            "metadata": {"name": event.name, "namespace": identity.namespace},
            "source": {"component": FIELD_MANAGER}, "reportingComponent": FIELD_MANAGER,
            "involvedObject": {"apiVersion": API_VERSION, "kind": identity.kind, "name": identity.name,
                               "namespace": identity.namespace, "uid": identity.uid},
        }
        with contextlib.suppress(ClusterConflict):
            self.create(manifest)

    # Requests.

    def _write(self, verb: str, kind: str, path: str, body: Mapping[str, Any], content_type: str,
               field_manager: str = FIELD_MANAGER, *, force: bool = False) -> Object:
        self.check()
        self._counted(verb, kind)
        query = [] if verb == "DELETE" else [("fieldManager", field_manager)]
        if content_type == _APPLY:
            query.append(("force", "true" if force else "false"))
        return self._request(verb, kind, path, body, content_type, query)

    def _request(self, verb: str, kind: str, path: str, body: Mapping[str, Any] | None = None,
                 content_type: str | None = None, query: list[tuple[str, Any]] | None = None,
                 timeout_s: tuple[float, float] = _TIMEOUT_S) -> Object:
        with _translated(kind, path):
            response = self._client.request(
                verb, path, body=body, content_type=content_type, query_params=query or [], serialize=False,
                header_params={"Accept": "application/json"}, _request_timeout=timeout_s)
            read: Object = json.loads(response.data)
            return read


class KubernetesLease:
    """A Lease in the cluster, for `leases.Elector`. Its writes bypass the fence, which they open."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name
        self._path = path_of("coordination.k8s.io/v1", "Lease", namespace)

    def read_lease(self) -> LeaseRecord | None:
        """The lease; None when it does not exist."""
        try:
            raw = self._cluster.get("coordination.k8s.io/v1", "Lease", self._namespace, self._name)
        except NotFound:
            return None
        return _read_lease(raw)

    def write_lease(self, record: LeaseRecord) -> LeaseRecord | None:
        """Create it, or update the version it names. None on a conflict with another candidate."""
        made = record.resource_version is None
        metadata = {"name": self._name, "namespace": self._namespace}
        body = {
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": metadata if made else {**metadata, "resourceVersion": record.resource_version},
            "spec": {"holderIdentity": record.holder, "leaseDurationSeconds": max(1, round(record.duration_s)),
                     "renewTime": record.renewed_at.astimezone(UTC).strftime(_MICRO_TIME),
                     "acquireTime": record.acquired_at.astimezone(UTC).strftime(_MICRO_TIME),
                     "leaseTransitions": record.transitions},
        }
        verb, path = ("POST", self._path) if made else ("PUT", f"{self._path}/{self._name}")
        try:
            return _read_lease(self._cluster._request(verb, "Lease", path, body, _JSON))
        except ClusterConflict:
            return None


def _read_lease(raw: Object) -> LeaseRecord:
    spec = raw["spec"]
    renewed = datetime.fromisoformat(spec["renewTime"])
    acquired = spec.get("acquireTime")
    return LeaseRecord(
        holder=spec.get("holderIdentity") or "", duration_s=float(spec.get("leaseDurationSeconds") or 15),
        renewed_at=renewed, acquired_at=datetime.fromisoformat(acquired) if acquired else renewed,
        transitions=int(spec.get("leaseTransitions") or 0), resource_version=raw["metadata"]["resourceVersion"])


def path_of(api_version: str, kind: str, namespace: str | None = None, name: str | None = None) -> str:
    lower = kind.lower()
    plural = lower[:-1] + "ies" if lower.endswith("cy") else lower + "s"
    root = "/api/v1" if api_version == "v1" else f"/apis/{api_version}"
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{place}/{plural}" + (f"/{name}" if name else "")


def _key(raw: Object) -> tuple[str, str]:
    return raw["metadata"].get("namespace", ""), raw["metadata"]["name"]


@contextlib.contextmanager
def _translated(kind: str, path: str) -> Iterator[None]:
    """Translate the client's errors into ours."""
    try:
        yield
    except DynamicApiError as error:
        try:
            said = str(json.loads(error.body)["message"])
        except (ValueError, KeyError, TypeError):
            said = str(error.reason)
        if error.status == 404:
            raise NotFound(f"{path}: {said}", "it may have been deleted") from None
        if error.status == 410:
            raise VersionGone(f"{kind}: {said}") from None
        if error.status == 409:
            raise ClusterConflict(f"{kind}: {said}", "read the object again") from None
        # Status 0: no answer. The client translates a connection that ends during the TLS handshake like this.
        if not error.status or error.status in (408, 425, 429) or error.status >= 500:
            raise ClusterUnavailable(f"{kind}: {error.status} {said}") from None
        hint = "grant the operator's role this permission" if error.status in (401, 403) else "correct the manifest"
        raise ClusterRejected(f"{path}: {error.status} {said}", hint) from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ClusterUnavailable(f"the API server cannot be reached: {type(error).__name__}") from None
