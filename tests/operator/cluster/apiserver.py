"""A double of the Kubernetes API server, as much of it as endpoints need: objects by HTTP, and no controllers.

What the real one does with the same requests is tested in tests/cluster. This one is for what a real one makes slow or
impossible to arrange: a hundred endpoints, an operator that dies at each of its writes, refusals. One field manager is
known: applying replaces what was applied before and leaves what was merged. Deployments do nothing by themselves: tests
say when they are available, with `run`. A watch gets the changes since its version at once, and ends.
"""

import itertools
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from eyrie_api.clock import utc_now
from eyrie_operator.cluster.client import Cluster

Object = dict[str, Any]
CORE = ("apps/v1", "policy/v1")
GATEWAY = "gateway.networking.k8s.io/v1"


class ApiServer:
    """The objects, by path."""

    def __init__(self, apis: tuple[str, ...] = CORE) -> None:
        self.apis = apis
        self.objects: dict[str, Object] = {}
        self.requests: Counter[str] = Counter()
        """By verb."""

        self.away = False
        """Answers nothing but 503."""

        self.refused: set[tuple[str, str]] = set()
        """Kinds and names that are not let in."""

        self.unlisted: set[str] = set()
        """Paths of kinds that may not be listed."""

        self.changes: list[tuple[int, str, Object]] = []
        """Version, path and event of each change that is still known to watches."""

        self.forgotten = 0
        """Versions up to this are gone."""

        self._merged: dict[str, dict[str, str]] = {}
        self._version = itertools.count(1)
        self._lock = threading.RLock()

    def answer(self, verb: str, path: str, query: dict[str, list[str]], body: Object) -> tuple[int, Object]:
        """Status and document of one request."""
        with self._lock:
            self.requests[verb] += 1
            if self.away:
                return 503, {"message": "the API server is being replaced"}
            if path == "/apis":
                return 200, {"groups": [{"versions": [{"groupVersion": one}]} for one in self.apis]}
            if verb == "GET" and path in self.objects:
                return 200, self.objects[path]
            if verb == "GET":
                phase = query.get("fieldSelector", [""])[0].removeprefix("status.phase=")
                return self._list(path, query.get("labelSelector", [""])[0], phase)
            if verb == "POST" and path.endswith("/events"):
                return 201, body
            if verb == "DELETE":
                if path not in self.objects:
                    return 404, {"message": "not found"}
                self._note("DELETED", path, self.objects[path], int(next(self._version)))
                return 200, self.objects.pop(path)
            if verb == "PATCH" and "force" in query:
                return self._apply(path, body)
            if verb == "PATCH" and path in self.objects:
                self._merged.setdefault(path, {}).update(body["metadata"].get("annotations", {}))
                one = self.objects[path]
                finalizers = {name: value for name, value in body["metadata"].items() if name == "finalizers"}
                return 200, self._store(path, {**one, "metadata": {**one["metadata"], **finalizers}})
            return 404, {"message": f"{verb} {path} is not answered"}

    def watched(self, path: str, since: int) -> list[Object] | None:
        """The events of a watch of this path; None while the server is away."""
        with self._lock:
            self.requests["WATCH"] += 1
            if self.away:
                return None
            if since < self.forgotten:
                return [{"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}]
            events = [event for version, where, event in self.changes if version > since
                      and path in (where.rpartition("/")[0], re.sub("/namespaces/[^/]+", "", where.rpartition("/")[0]))]
            version = str(next(self._version))
            return [*events, {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}]

    def forget(self) -> None:
        """The changes so far are gone: a watch from before them is refused."""
        with self._lock:
            self.changes, self.forgotten = [], next(self._version)

    def _note(self, event: str, path: str, raw: Object, version: int) -> None:
        metadata = {**raw["metadata"], "resourceVersion": str(version)}
        self.changes.append((version, path, {"type": event, "object": {**raw, "metadata": metadata}}))

    def _list(self, path: str, selector: str, phase: str) -> tuple[int, Object]:
        if path in self.unlisted:
            return 403, {"message": "pods is forbidden"}
        known = {"/api/v1", *(f"/apis/{one}" for one in self.apis)}
        if not any(path.startswith(one + "/") for one in known) or not path.rpartition("/")[2].endswith("s"):
            return 404, {"message": "not found"}
        wanted = [part.partition("=") for part in selector.split(",") if part]
        found = []
        for where, one in self.objects.items():
            labels = one["metadata"].get("labels", {})
            folder = where.rpartition("/")[0]
            everywhere = re.sub("/namespaces/[^/]+", "", folder)
            if (path in (folder, everywhere) and phase in ("", one.get("status", {}).get("phase"))
                    and all(key in labels and value in ("", labels[key]) for key, _, value in wanted)):
                found.append({name: part for name, part in one.items() if name not in ("apiVersion", "kind")})
        return 200, {"items": found, "metadata": {"resourceVersion": str(next(self._version))}}

    def _apply(self, path: str, manifest: Object) -> tuple[int, Object]:
        if (manifest["kind"], manifest["metadata"]["name"]) in self.refused:
            return 422, {"message": "admission webhook says no"}
        whole = path.removesuffix("/status")
        if whole != path and whole in self.objects:
            self.set_status(manifest["kind"], manifest["metadata"]["name"], manifest["status"])
            return 200, self.objects[whole]
        return 200, self._store(path, manifest)

    def _store(self, path: str, manifest: Object) -> Object:
        before = self.objects.get(path)
        system: Object = {"uid": f"uid-{next(self._version)}", "creationTimestamp": utc_now().isoformat(),
                          "generation": 1}
        if before is not None:
            system = {name: before["metadata"][name] for name in system}
        metadata = {**manifest["metadata"], **system}
        metadata["annotations"] = {**metadata.get("annotations", {}), **self._merged.get(path, {})}
        stored = {**manifest, "metadata": metadata}
        if before is not None:
            stored["status"] = before.get("status", {})
            if before == {**stored, "metadata": {**metadata, "resourceVersion": before["metadata"]["resourceVersion"]}}:
                return before
            if manifest.get("spec") != before.get("spec"):
                metadata["generation"] += 1
        metadata["resourceVersion"] = str(next(self._version))
        self.objects[path] = stored
        self._note("ADDED" if before is None else "MODIFIED", path, stored, int(metadata["resourceVersion"]))
        return stored

    # What the cluster's controllers would do.

    def of(self, kind: str) -> dict[str, Object]:
        """Objects of a kind, by name."""
        return {one["metadata"]["name"]: one for one in self.objects.values() if one["kind"] == kind}

    def put(self, path: str, stored: Object) -> None:
        """As somebody else would."""
        with self._lock:
            self._store(path, stored)

    def set_status(self, kind: str, name: str, status: Object) -> None:
        with self._lock:
            path, one = next((path, one) for path, one in self.objects.items()
                             if (one["kind"], one["metadata"]["name"]) == (kind, name))
            metadata = {**one["metadata"], "resourceVersion": str(next(self._version))}
            self.objects[path] = {**one, "metadata": metadata, "status": status}

    def run(self, deployment: str, available: int = 1) -> None:
        """Its pods answer."""
        generation = self.of("Deployment")[deployment]["metadata"]["generation"]
        self.set_status("Deployment", deployment, {"observedGeneration": generation, "availableReplicas": available})

    def num_writes(self) -> int:
        return self.requests["PATCH"] + self.requests["DELETE"] + self.requests["POST"]


@contextmanager
def serving(server: ApiServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The double behind a port, and KUBECONFIG that leads there."""
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 65536  # head and body in one packet: the second would wait 40 ms for the first to be acknowledged

        def handle_one(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            query = parse_qs(parts.query)
            if "watch" in query:
                events = server.watched(parts.path, int(query["resourceVersion"][0]))
                status = 503 if events is None else 200
                data = "".join(json.dumps(event) + "\n" for event in events or ()).encode()
            else:
                status, document = server.answer(self.command, parts.path, query, body or {})
                data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = do_DELETE = do_POST = handle_one

        def log_message(self, *_line: object) -> None:
            """Nobody reads it."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{listening.server_address[1]}"
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "here", "users": [{"name": "me", "user": {}}],
        "clusters": [{"name": "here", "cluster": {"server": address}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}]}))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    # The client reads it when it is imported, so it may have been imported with another.
    for place in ("kubernetes.config", "kubernetes.config.kube_config"):
        monkeypatch.setattr(f"{place}.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    # The double answers at once, but a machine may be held up for longer than a real API server may take.
    patient = tuple((60.0, 60.0) if isinstance(one, tuple) else one for one in Cluster._request.__defaults__ or ())
    monkeypatch.setattr(Cluster._request, "__defaults__", patient)
    try:
        yield
    finally:
        listening.shutdown()
        listening.server_close()
