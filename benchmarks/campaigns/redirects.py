"""Files of a web server that redirects: within itself, in chains, in loops, to other servers, ports and schemes.

A reader of a stage (`eyrie_workers.data.readers.file_rows`) asks a server on loopback whose answers are redirects drawn
from the seed. Rules:

- the rows of the file are read where every redirect stays on the server and there are few of them;
- else the reader refuses with an error of ours, within the limit;
- no other server gets a request: one listens on another port, and counts;
- a job whose rules do not allow private addresses asks nothing.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from benchmarks.campaigns.report import Campaign
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.errors import EyrieError
from eyrie_workers.data.readers import RemoteFile, file_rows

_ROW = b'{"messages": [{"role": "user", "content": "Say hi"}]}\n'
_FOLLOWED = 5
_STATUSES = (301, 302, 303, 307, 308)


class _Redirecting(ThreadingHTTPServer):
    """Answers the redirects of `plan` in turn, by the number in the path, then the file."""

    daemon_threads = True
    plan: Sequence[tuple[int, str]] = ()
    asked = 0


class _Handler(BaseHTTPRequestHandler):
    server: _Redirecting

    def do_GET(self) -> None:
        self.server.asked += 1
        number = self.path.rpartition("/")[2]
        step = int(number) if number.isdecimal() and len(number) < 9 else 0
        if step < len(self.server.plan):
            status, to = self.server.plan[step]
            self.send_response(status)
            if to:
                self.send_header("Location", to)
            self.send_header("Content-Length", "0")
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(_ROW)))
        self.end_headers()
        if step >= len(self.server.plan):
            self.wfile.write(_ROW)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: there are thousands."""


@contextmanager
def _serving() -> Iterator[_Redirecting]:
    server = _Redirecting(("127.0.0.1", 0), _Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def draw_plan(rng: random.Random, port: int, other: int) -> tuple[list[tuple[int, str]], bool]:
    """Redirects, each a status and a Location, and whether the file is to be read in the end."""
    length = rng.choice((0, 1, 1, 2, _FOLLOWED, _FOLLOWED + 1, 30))
    here = (lambda step: f"/{step}", lambda step: f"http://127.0.0.1:{port}/{step}", lambda step: f"./{step}",
            lambda step: f"//127.0.0.1:{port}/{step}", lambda step: f"?/{step}")
    plan = [(rng.choice(_STATUSES), rng.choice(here)(step + 1)) for step in range(length)]
    if not plan or rng.random() < 0.4:
        return plan, length <= _FOLLOWED
    at = rng.randrange(length)
    evil = rng.choice((
        f"http://127.0.0.1:{other}/", f"http://localhost:{port}/", f"https://127.0.0.1:{port}/", f"//[::1]:{port}/",
        f"http://127.0.0.1.:{port}/", f"http://2130706433:{other}/", f"http://127.1:{other}/",
        f"http://user:password@127.0.0.1:{other}/", f"http://127.0.0.1:{port}@127.0.0.1:{other}/",
        f"http://127.0.0.1:{other}\\@127.0.0.1:{port}/", "http://169.254.169.254/latest/meta-data/",
        "http://[fd00:ec2::254]/", "http://metadata.google.internal/", "file:///etc/passwd", "ftp://127.0.0.1/",
        "gopher://127.0.0.1:6379/", "data:text/plain,x", "javascript:x", "http://[", "http://", "http:///x",
        "http://127.0.0.1:99999999/", "http://127.0.0.1:x/", "\x7f", "/" + "a" * 60_000, f"/{at}"))
    plan[at] = (rng.choice(_STATUSES), evil)
    return plan, False


def attack_redirects(campaign: Campaign, number: int, limit_s: float) -> dict[str, Any]:
    """Read `number` files, each behind redirects of its own."""
    rng, outcomes, slowest = random.Random(f"{campaign.seed}/redirects"), Counter[str](), 0.0
    with _serving() as server, _serving() as other:
        for _ in range(number):
            plan, is_read = draw_plan(rng, server.server_port, other.server_port)
            allow_private = rng.random() < 0.9
            server.plan, before, began = plan, server.asked, time.monotonic()
            rules = ReadRules(home="/nowhere", allow_private=allow_private)
            try:
                rows = list(file_rows(RemoteFile(f"http://127.0.0.1:{server.server_port}/0", rules), "source ", rules))
                outcome = f"{len(rows)} rows"
            except EyrieError as error:
                outcome = error.reason
            except Exception as error:  # noqa: BLE001 - a finding: it would end a stage with a traceback
                outcome = f"{type(error).__name__}: {error}"
            took = time.monotonic() - began
            slowest = max(slowest, took)
            outcomes[outcome if outcome in ("1 rows", "InvalidInput", "Transient") else "other"] += 1
            expected = ("1 rows",) if is_read and allow_private else ("InvalidInput", "Transient")
            asked_in_vain = server.asked - before if not allow_private else 0
            if outcome not in expected or took > limit_s or asked_in_vain or other.asked:
                campaign.add_finding("a redirect is followed within its server alone", plan=plan, outcome=outcome,
                                     expected=expected, seconds=round(took, 2), other_was_asked=other.asked,
                                     asked_in_vain=asked_in_vain)
                other.asked = 0
    return {"files": number, "outcomes": dict(sorted(outcomes.items())), "slowest_s": round(slowest, 2)}
