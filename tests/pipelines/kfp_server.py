"""A stand-in for the KFP API server, so that the real client meets lost answers and refusals. It runs nothing.

Experiments and runs live in memory; tests set a run's state by hand. `tests.kubeflow` has the double that executes
pipelines.
"""

import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

ROOT = "/apis/v2beta1"


class KfpServer:
    """Answers on a port of its own until closed."""

    def __init__(self) -> None:
        self.experiments: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.asked: list[tuple[str, str, str | None]] = []
        """Method, path, Authorization of every request."""
        self.refusals: list[tuple[int, bool]] = []
        """Answers to come instead of 200: the status, and whether the request is carried out all the same."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                server.answer(self)

            do_POST = do_DELETE = do_GET

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: Any) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length)) if length else None
        parts = urlsplit(request.path)
        self.asked.append((request.command, parts.path, request.headers.get("Authorization")))
        status, carried_out = self.refusals.pop(0) if self.refusals else (200, True)
        document: Any = {"error": "no, because of the server", "code": 13}
        if carried_out:
            done = self._do(request.command, parts.path.removeprefix(ROOT), parse_qs(parts.query), body)
            status, document = (status, done) if done is not None or status != 200 else (404, document)
        data = json.dumps(document).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _do(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Any:
        if path == "/experiments":
            if method == "POST":
                self.experiments.append({**body, "experiment_id": str(uuid.uuid4())})
                return self.experiments[-1]
            return {"experiments": self._filtered(self.experiments, query)}
        if path == "/runs":
            if method == "POST":
                self.runs.append({**body, "run_id": str(uuid.uuid4()), "state": "PENDING"})
                return self.runs[-1]
            return self._page(self._filtered(self.runs, query), query)
        name = path.removeprefix("/runs/")
        found = next((run for run in self.runs if run["run_id"] == name.partition(":")[0]), None)
        if found is not None and name.endswith(":terminate"):
            found["state"] = "CANCELING"
            return {}
        return found

    def _page(self, found: list[dict[str, Any]], query: dict[str, list[str]]) -> Any:
        """Two to a page: clients have to turn it."""
        start = int(query.get("page_token", ["0"])[0] or 0)
        more = {"next_page_token": str(start + 2)} if len(found) > start + 2 else {}
        return {"runs": found[start:start + 2], **more}

    def _filtered(self, found: list[dict[str, Any]], query: dict[str, list[str]]) -> list[dict[str, Any]]:
        for predicate in json.loads(query["filter"][0])["predicates"]:
            key, value = predicate["key"], predicate["string_value"]
            if predicate["operation"] == 1:
                found = [one for one in found if one[key] == value]
            else:
                assert predicate["operation"] == 9, "the operations of filter.proto that are asked for"
                found = [one for one in found if value in one[key]]
        return found
