"""A double of the part of the Hub's API that `eyrie publish` uses: no Hub can be had without a network.

Written from the requests that huggingface_hub sends (`HfApi.create_repo`, `upload_folder`): it makes repositories,
takes every file within the commit (never by LFS), and refuses a wrong token.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_this_test"


@dataclass
class Hub:
    """What it was given."""

    url: str = ""
    repositories: dict[str, bool] = field(default_factory=dict)
    """Name -> private."""

    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@contextmanager
def hub_double() -> Iterator[Hub]:
    """Serve one on a free port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                self._answer(401, {"error": "Invalid username or password."})
            elif self.path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                hub.repositories[name] = asked.get("private", False) or asked.get("visibility") == "private"
                self._answer(200, {"url": f"{hub.url}/{name}"})
            elif self.path == "/api/validate-yaml":
                self._answer(200, {"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                self._answer(200, {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                                             for one in json.loads(body)["files"]]})
            elif "/commit/" in self.path:
                for line in map(json.loads, body.decode().splitlines()):
                    if line["key"] == "header":
                        hub.commits.append(line["value"]["summary"])
                    elif line["key"] == "file":
                        hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                name = "/".join(self.path.split("/")[3:5])
                self._answer(200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.url}/{name}/commit/0"})
            else:
                self._answer(404, {"error": self.path})

        def do_GET(self) -> None:
            self._answer(200, {"id": "org/name", "sha": "0" * 40, "siblings": []})

        def _answer(self, status: int, document: dict[str, Any]) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
