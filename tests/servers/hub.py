"""A double of the part of the Hub's API that downloads use: no Hub can be had without a network.

Written from the requests that huggingface_hub sends (`HfApi.model_info`, `snapshot_download`). Files whose names end in
`.safetensors` are LFS files, the others are git's.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c" * 40


@dataclass
class ServedHub:
    """One repository, `org/model`, with one commit."""

    files: dict[str, bytes]
    url: str = ""
    token: str | None = None
    """Needed, if there is one."""

    served: list[str] = field(default_factory=list)
    """Names of the files whose content was sent."""

    requests: int = 0
    bytes_per_s: float | None = None
    damage: set[str] = field(default_factory=set)
    """Names of files that are sent once with another first byte."""

    failures: int = 0
    """Requests that are still answered with 503."""


@contextmanager
def served_hub(files: dict[str, bytes]) -> Iterator[ServedHub]:
    """Serve it on a free port."""
    hub = ServedHub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            hub.requests += 1
            path = self.path.partition("?")[0]
            if hub.failures > 0 and "/org/model" in path:  # the client also asks for other things, once per process
                hub.failures -= 1
                return self._json(503, {"error": "busy"})
            if hub.token is not None and self.headers.get("authorization") != f"Bearer {hub.token}":
                return self._json(401, {"error": "Invalid credentials in Authorization header"}, GatedRepo="x")
            if path in ("/api/models/org/model", f"/api/models/org/model/revision/{COMMIT}",
                        "/api/models/org/model/revision/main"):
                return self._json(200, {"id": "org/model", "sha": COMMIT, "siblings": [
                    {"rfilename": name, "size": len(data), "blobId": _git(data)} | _lfs(name, data)
                    for name, data in hub.files.items()]})
            if path == f"/api/models/org/model/tree/{COMMIT}":
                return self._json(200, [{"type": "file", "path": name, "size": len(data), "oid": _git(data),
                                         **({"lfs": _lfs(name, data)["lfs"] | {"oid": _sha(data)}}
                                            if _is_large(name) else {})}
                                        for name, data in hub.files.items()])
            name = path.removeprefix(f"/org/model/resolve/{COMMIT}/")
            if name not in hub.files:
                return self._json(404, {"error": path}, error_code="RepoNotFound")
            return self._file(name, hub.files[name], body=body)

        def _file(self, name: str, data: bytes, *, body: bool) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.send_header("etag", f'"{_sha(data) if _is_large(name) else _git(data)}"')
            self.send_header("x-repo-commit", COMMIT)
            self.end_headers()
            if not body:
                return
            hub.served.append(name)
            if name in hub.damage:
                hub.damage.discard(name)
                data = bytes([data[0] ^ 1]) + data[1:]
            step = 65536
            for at in range(0, len(data), step):
                self.wfile.write(data[at:at + step])
                if hub.bytes_per_s is not None:
                    time.sleep(step / hub.bytes_per_s)

        def _json(self, status: int, document: Any, **headers: str) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            for name, value in headers.items():
                self.send_header(f"x-{name.replace('_', '-')}", value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Quiet: a killed client closes its connection."""

    server = Server(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _lfs(name: str, data: bytes) -> dict[str, Any]:
    return {"lfs": {"sha256": _sha(data), "size": len(data), "pointerSize": 130}} if _is_large(name) else {}
