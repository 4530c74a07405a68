"""A receiver of webhooks on a real port, with configurable answers, which records what it receives."""

import base64
import hashlib
import hmac
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Receiver:
    """What came, and what to answer."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    """Statuses of the next answers; then 204."""

    location: str | None = None
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    """(headers, body)."""


def is_genuine(secret: str, headers: dict[str, str], body: bytes, now: float) -> bool:
    """The check of the Standard Webhooks specification, written without its library."""
    sent = {name.lower(): value for name, value in headers.items()}
    if abs(now - int(sent["webhook-timestamp"])) > 300:
        return False
    signed = f"{sent['webhook-id']}.{sent['webhook-timestamp']}.".encode() + body
    mac = hmac.new(base64.b64decode(secret.removeprefix("whsec_")), signed, hashlib.sha256).digest()
    return sent["webhook-signature"] == f"v1,{base64.b64encode(mac).decode()}"


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver, for as long as the context lasts."""
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.got.append((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(made.answers.pop(0) if made.answers else 204)
            if made.location is not None:
                self.send_header("Location", made.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join(10)
