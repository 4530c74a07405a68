"""What callers of the chaos campaign report, and what they take for an error that a client sends again."""

import itertools
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.campaigns.live_traffic import Callers
from benchmarks.campaigns.report import Campaign
from eyrie_api.artifacts import write_model
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_pipelines.processes import identify, wait_until

ERROR = json.dumps({"error": {"message": "the engine is replaced"}})
RETRY = {"Retry-After": "1"}


def whole(text: str) -> str:
    return json.dumps({"choices": [{"message": {"content": text}}]})


def streamed(text: str, *, ends: bool = True) -> str:
    choice = {"delta": {"content": text}, "finish_reason": "stop" if ends else None}
    return f"data: {json.dumps({'choices': [choice]})}\n\n" + ("data: [DONE]\n\n" if ends else "")


@contextmanager
def gateway(directory: Path, status: int, headers: dict[str, str], bodies: list[tuple[str, str]]) -> Iterator[None]:
    """One that answers with `bodies` in turn, (whole, streamed); the last one repeats."""
    answers = itertools.chain(bodies, itertools.repeat(bodies[-1]))  # two callers at once get one each

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_arguments: object) -> None:
            pass

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            data = next(answers)[asked["stream"]].encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    process = identify(os.getpid())
    assert process is not None
    write_model(directory / GATEWAY_FILE, GatewayRecord(process=process, host="127.0.0.1", port=server.server_port))
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def called(directory: Path, num: int) -> tuple[Campaign, Callers]:
    """After so many requests."""
    campaign = Campaign("test", 1, 60.0, None)
    callers = Callers(campaign, directory, "tiny")
    callers.start()
    wait_until(lambda: callers.seen.total() + campaign.found >= num, 120.0)
    callers.stop()
    return campaign, callers


RIGHT = (whole("yes"), streamed("yes"))


@pytest.mark.parametrize(("status", "headers", "bodies", "rule"), [
    (500, RETRY, [(ERROR, ERROR)], "a caller sees answers and errors to try again alone"),
    (503, {}, [(ERROR, ERROR)], "a caller sees answers and errors to try again alone"),
    (404, RETRY, [(ERROR, ERROR)], "a caller sees answers and errors to try again alone"),
    (200, {}, [(whole("yes"), streamed("yes", ends=False))], "a cut stream says so"),
    (200, {}, [RIGHT] * 4 + [(whole("no"), streamed("no"))], "an answer is the same before and after a kill")])
def test_what_a_client_may_not_see_is_reported(
        tmp_path: Path, status: int, headers: dict[str, str], bodies: list[tuple[str, str]], rule: str) -> None:
    with gateway(tmp_path, status, headers, bodies):
        campaign, _callers = called(tmp_path, 12)
    assert {one["rule"] for one in campaign.findings} == {rule}


@pytest.mark.parametrize(("status", "headers", "bodies", "kind"), [
    (200, {}, [RIGHT], "answered"),
    (503, RETRY, [(ERROR, ERROR)], "retryable"),
    (200, {}, [(RIGHT[0], f"data: {ERROR}\n\n")], "retryable")])
def test_answers_and_errors_to_try_again_are_counted_and_not_reported(
        tmp_path: Path, status: int, headers: dict[str, str], bodies: list[tuple[str, str]], kind: str) -> None:
    with gateway(tmp_path, status, headers, bodies):
        campaign, callers = called(tmp_path, 4)
    assert campaign.findings == []
    assert callers.seen[kind] > 0
