"""A double of outside services: an OpenAI-compatible endpoint with files and batches, over real HTTP, with troubles.

It answers every chat completion with a text derived from the request alone, so that an answer's bytes tell whether the
right request was sent. `Troubles` makes it misbehave the way real services do.
"""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Troubles:
    """How the service misbehaves."""

    fail_first: dict[str, int] = field(default_factory=dict)
    """Last user message -> how many of its first attempts get `fail_status`."""

    fail_status: int = 503
    decline: dict[str, int] = field(default_factory=dict)
    """Last user message -> status it always gets."""

    everything: int | None = None
    """Status every request gets."""

    know_token_ids: bool = False
    forbid_token_ids: bool = False
    know_sglext: bool = False
    completion_tokens: int | None = None
    """What `usage` says, if anything."""

    finish_reason: str = "stop"
    message: dict[str, Any] | None = None
    expire_every: int = 0
    """Every n-th request of the first batch expires."""

    hold_batches: bool = False
    meeting: threading.Barrier | None = None
    """Chat completions wait until so many of them are there together."""

    api_key: str | None = None
    gate: threading.Event | None = None
    """Chat completions wait for it, but for the first ``before_gate``."""

    before_gate: int = 0


@dataclass
class Service:
    """The running double and what it saw."""

    url: str
    troubles: Troubles
    bodies: list[dict[str, Any]] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    at_once: int = 0
    at_gate: int = 0
    """Chat completions that came to the gate."""


def question(body: dict[str, Any]) -> str:
    return str([m["content"] for m in body["messages"] if m["role"] == "user"][-1])


def answer_text(body: dict[str, Any]) -> str:
    return f"You asked {question(body)} with seed {body['seed']}."


def token_ids(text: str) -> list[int]:
    """Ids no tokenizer would choose, to see that they are taken as they come."""
    return [5 + ord(c) % 50 for c in text]


def complete(service: Service, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    troubles, asked = service.troubles, question(body)
    with service.lock:
        service.bodies.append(body)
        service.attempts[asked] += 1
        attempt = service.attempts[asked]
    if troubles.everything is not None:
        return troubles.everything, {"error": {"message": "no service today"}}
    if troubles.forbid_token_ids and "return_token_ids" in body:
        return 400, {"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}
    if attempt <= troubles.fail_first.get(asked, 0):
        return troubles.fail_status, {"error": {"message": "overloaded"}}
    if asked in troubles.decline:
        return troubles.decline[asked], {"error": {"message": "this model's context is too short"}}
    text = answer_text(body)
    choice: dict[str, Any] = {"index": 0, "finish_reason": troubles.finish_reason,
                              "message": troubles.message or {"role": "assistant", "content": text}}
    reply: dict[str, Any] = {"object": "chat.completion", "choices": [choice]}
    if troubles.know_token_ids and body.get("return_token_ids"):
        choice["token_ids"] = token_ids(text)
        reply["prompt_token_ids"] = [7, 8, 9]
    if troubles.know_sglext and body.get("return_output_ids_in_sglext"):
        reply["sglext"] = {"output_ids": [token_ids(text)]}
    if troubles.completion_tokens is not None:
        reply["usage"] = {"completion_tokens": troubles.completion_tokens}
    return 200, reply


def run_batch(service: Service, batch: dict[str, Any]) -> None:
    done, failed = [], []
    for number, line in enumerate(service.files[batch["input_file_id"]].splitlines()):
        row = json.loads(line)
        expire = service.troubles.expire_every
        if expire and len(service.batches) == 1 and number % expire == 0:
            failed.append({"custom_id": row["custom_id"], "response": None,
                           "error": {"code": "batch_expired", "message": "not in time"}})
            continue
        status, reply = complete(service, row["body"])
        (done if status == 200 else failed).append(
            {"custom_id": row["custom_id"], "response": {"status_code": status, "body": reply}, "error": None})
    for key, rows in (("output_file_id", done), ("error_file_id", failed)):
        if rows:
            name = f"file-{batch['id']}-{key}"
            # Real services promise no order.
            service.files[name] = b"".join(json.dumps(row).encode() + b"\n" for row in reversed(rows))
            batch[key] = name
    batch["status"] = "expired" if service.troubles.expire_every and len(service.batches) == 1 else "completed"


class _Handler(BaseHTTPRequestHandler):
    service: Service
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _reply(self, status: int, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(ConnectionError):  # of a client that was killed or gave up
            self.wfile.write(data)

    def _refused(self) -> bool:
        key = self.service.troubles.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._reply(401, {"error": {"message": "bad key"}})
        return True

    def _goes_before_gate(self) -> bool:
        with self.service.lock:
            self.service.at_gate += 1
            return self.service.at_gate <= self.service.troubles.before_gate

    def do_POST(self) -> None:
        service = self.service
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self._refused():
            return
        with service.lock:
            service.at_once += 1
            service.most_at_once = max(service.most_at_once, service.at_once)
        try:
            if self.path == "/v1/chat/completions":
                if service.troubles.meeting is not None:
                    service.troubles.meeting.wait(120)
                if service.troubles.gate is not None and not self._goes_before_gate():
                    service.troubles.gate.wait(120)
                self._reply(*complete(service, json.loads(data)))
            elif self.path == "/v1/files":
                head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
                parts = {part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
                         for part in message_from_bytes(head + data).get_payload()}  # type: ignore[union-attr]
                assert parts["purpose"] == b"batch"
                name = f"file-{len(service.files)}"
                service.files[name] = parts["file"]  # type: ignore[assignment]
                self._reply(200, {"id": name, "object": "file"})
            elif self.path == "/v1/batches":
                body = json.loads(data)
                batch = {"id": f"batch-{len(service.batches)}", "status": "in_progress", **body}
                service.batches[batch["id"]] = batch
                self._reply(200, batch)
            else:
                self._reply(404, {})
        finally:
            with service.lock:
                service.at_once -= 1

    def do_GET(self) -> None:
        service, parts = self.service, self.path.split("?")[0].split("/")
        if self._refused():
            return
        if parts[2] == "batches" and len(parts) == 3:
            self._reply(200, {"data": list(service.batches.values())})
        elif parts[2] == "batches" and parts[3] in service.batches:
            batch = service.batches[parts[3]]
            if batch["status"] == "in_progress" and not service.troubles.hold_batches:
                run_batch(service, batch)
            self._reply(200, batch)
        elif parts[2] == "files" and parts[3] in service.files:
            self._reply(200, service.files[parts[3]])
        else:
            self._reply(404, {"error": {"message": "not found"}})


@contextmanager
def openai_double(troubles: Troubles | None = None) -> Iterator[Service]:
    """Run the double on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {}))
    service = Service(f"http://127.0.0.1:{server.server_address[1]}/v1", troubles or Troubles())
    server.RequestHandlerClass.service = service  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
