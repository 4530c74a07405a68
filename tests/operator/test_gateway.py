"""The stable URL, as a real process in front of real servers."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from benchmarks.campaigns.raw_http import send
from eyrie_api.artifacts import write_model
from eyrie_api.errors import InvalidInput, PortInUse
from eyrie_api.processes import bind
from eyrie_operator.embedded.gateway import create_gateway
from eyrie_operator.embedded.processes import read_port, start_gateway, stop_gateway
from eyrie_operator.embedded.routing import (
    COUNTERS_PATH,
    ROUTE_FILE,
    UNENDED_PATH,
    RouteRecord,
    RoutingTable,
    Share,
    UnendedAnswers,
    ignores_eos,
)
from eyrie_operator.endpoints.traffic_recording import (
    REDACT,
    SNAPSHOTS,
    TRAFFIC_FILE,
    Recording,
    TrafficRecorder,
    delete_older,
    redaction,
)
from eyrie_pipelines.processes import is_alive, wait_until
from tests.waiting import wait_for

JSON = {"content-type": "application/json"}


class Engine(ThreadingHTTPServer):
    """A server that says who it is, and can hold a stream open between two chunks."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        self.name, self.go_on, self.client_gone = name, threading.Event(), threading.Event()
        self.began = threading.Semaphore(0)
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    broken = False
    """After a 500 the connection is closed, as uvicorn does; here only when the next request is already on it."""

    def do_POST(self) -> None:
        assert isinstance(self.server, Engine)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/v1/long":  # generates until its client disconnects
            self.server.began.release()
            if self.connection.recv(1) == b"":
                self.server.client_gone.set()
            self.close_connection = True
            return
        if self.path in ("/v1/cut", "/v1/cut_stream", "/v1/killed", "/v1/killed_stream"):  # dies in its response
            self.send_response(200)
            self.send_header("content-type", "text/event-stream" if "stream" in self.path else "application/json")
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'data: {"a')
            if "killed" in self.path:
                self.server.began.release()
                self.server.go_on.wait()
            self.close_connection = True
            return
        if self.path == "/v1/slash/":
            self.send_response(307)
            self.send_header("location", f"{self.server.url}/v1/slash")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if self.path == "/v1/stream":
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for text in (self.server.name, "end"):
                data = f"data: {text}\n\n".encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()
                if text != "end":
                    self.server.go_on.wait()
            self.wfile.write(b"0\r\n\r\n")
            return
        answer = json.dumps({"engine": self.server.name, "path": self.path, "got": body.decode(),
                             "key": self.headers.get("authorization"),
                             "origin": self.headers.get("origin")}).encode()
        if self.broken or self.path == "/v1/fall":  # dies with the request in hand
            self.close_connection = True
            return
        self.send_response({"/v1/teapot": 418, "/v1/ill": 500}.get(self.path, 200))
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        self.broken = self.path == "/v1/ill"

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    pair = Engine("blue"), Engine("green")
    yield pair
    for one in pair:
        one.go_on.set()
        one.close()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    record = start_gateway(tmp_path, 0)
    yield tmp_path, f"http://127.0.0.1:{record.port}"
    stop_gateway(tmp_path)


def lead_to(directory: Path, engine: Engine, revision: int, *others: Share, record_prompts: int = 0) -> None:
    write_model(directory / ROUTE_FILE, RouteRecord(revision=revision, url=engine.url, since=datetime.now(UTC),
                                                    others=others, recording=Recording(latest=record_prompts)))


def ask(url: str, path: str = "/v1/chat/completions", body: str = "{}") -> httpx.Response:
    return httpx.post(url + path, content=body, headers=JSON, timeout=60)


def counted(url: str) -> dict[str, dict[str, int]]:
    """By revision."""
    found: dict[str, dict[str, int]] = httpx.get(url + COUNTERS_PATH, timeout=60).json()["revisions"]
    return found


def test_bytes_that_a_url_or_a_header_cannot_have_are_relayed_or_refused_and_never_an_error_of_the_gateway(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    lead_to(directory, engines[0], 1, record_prompts=10)
    port, chat = int(url.rpartition(":")[2]), b"/v1/chat/completions"
    declared = {"Content-Type": b"application/json"}
    for headers in ({"Cookie": b"\xff"}, {"Authorization": b"Bearer "}):
        assert send(port, "POST", chat, declared | headers, b"{}", 60).status == 200
    for method, target in (("GET", b"/v1/models/%00"), ("GET", b"/v1/models/%0d%0aX:1"), ("TRACE", b"/v1/models")):
        answer = send(port, method, target, {}, b"", 60)
        assert 400 <= answer.status < 500
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("size", [0, 100_000])
def test_values_that_sglang_answers_with_500_are_refused_before_any_engine_and_count_against_none(
        size: int, gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    lead_to(directory, engines[0], 1)
    padding = json.dumps("x" * size)
    for value in (r'"\ud800"', r'{"\udfff": 1}', "[" * 5000 + "]" * 5000, "[" * 100 + "]" * 100, "9" * 5000, "9" * 20,
                  "1e999", "NaN", '"' + chr(0xe9) + "'"):
        for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            body = f'{{"user": {padding}, "prompt": {value}}}'.encode("latin-1")
            answer = httpx.post(url + path, content=body, headers=JSON, timeout=60)
            assert answer.status_code == 400, value[:20]
            assert answer.json()["error"]["message"]
    refused = ask(url, body='{"messages": [{"content": "\\ud800"}]}')
    assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == (
        "messages.0.content", "invalid_value"), "as the embedded engine answers"
    assert ask(url, body="[]").status_code == 400
    called = {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a": ' + "[" * 600 + "]" * 600 + "}"}}]}
    assert ask(url, body=json.dumps({"user": "x" * size, "messages": [called]})).status_code == 400
    assert counted(url) == {}
    assert ask(url, body=f'{{"user": {padding}, "prompt": "\\ud83d\\ude00"}}').status_code == 200, "a whole pair"
    assert ask(url, body="").status_code == 200, "SGLang has POSTs without a body"


def test_a_share_of_the_requests_is_exact_over_few_of_them_and_counted(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    blue, green = engines
    lead_to(directory, blue, 1, Share(revision=2, url=green.url, share=0.2))
    for five in range(2):
        served = [ask(url).json()["engine"] for _ in range(5)]
        assert served == ["blue", "blue", "green", "blue", "blue"], five
    assert httpx.get(f"{url}/v1/models").json()["engine"] == "blue"  # only what costs a user something is shared
    assert counted(url) == {"1": {"answered": 8, "errors": 0}, "2": {"answered": 2, "errors": 0}}
    lead_to(directory, green, 2)
    assert counted(url) == {}
    assert ask(url).json()["engine"] == "green"
    assert counted(url) == {"2": {"answered": 1, "errors": 0}}


def test_a_request_that_names_a_revision_of_the_route_gets_it_and_leaves_the_shares_as_they_are(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    blue, green = engines
    lead_to(directory, blue, 1, Share(revision=2, url=green.url, share=0.2))

    def asked(revision: str) -> str:
        answer = httpx.post(f"{url}/v1/chat/completions", content="{}", headers=JSON | {"x-eyrie-revision": revision},
                            timeout=60)
        return f"{answer.json()['engine']} {answer.headers['x-eyrie-revision']}"

    assert [asked("2") for _ in range(2)] == ["green 2"] * 2
    assert [asked("1") for _ in range(3)] == ["blue 1"] * 3
    assert [ask(url).json()["engine"] for _ in range(5)] == ["blue", "blue", "green", "blue", "blue"]
    assert counted(url) == {"1": {"answered": 7, "errors": 0}, "2": {"answered": 3, "errors": 0}}
    assert [asked(gone) for gone in ("3", "two")] == ["blue 1"] * 2


def test_what_goes_wrong_on_trial_is_counted_against_the_engine_that_did_it(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    blue, green = engines
    lead_to(directory, blue, 1, Share(revision=2, url=green.url, share=0.6))
    assert ask(url, "/v1/ill").status_code == 500
    assert ask(url, "/v1/teapot").json()["engine"] == "blue"  # the client's own fault is no error of the engine's
    broken = ask(url, "/v1/fall")
    assert (broken.status_code, broken.json()["error"]["code"]) == (502, "engine_disconnected")
    assert counted(url) == {"1": {"answered": 1, "errors": 0}, "2": {"answered": 0, "errors": 2}}


def test_a_client_that_disconnects_ends_the_engine_s_request_and_counts_as_nothing(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    lead_to(directory, engines[0], 1)
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"POST /v1/long HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                       b"Content-Length: 2\r\n\r\n{}")
        assert engines[0].began.acquire(timeout=60)
    assert engines[0].client_gone.wait(60)
    assert counted(url) == {}


def test_an_engine_that_closes_its_connection_after_a_500_fails_no_later_request(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    lead_to(directory, engines[0], 1)
    assert [ask(url, path).status_code for path in ("/v1/ill", "/v1/fine") * 6] == [500, 200] * 6


def test_a_response_cut_by_the_engine_is_an_error_that_openai_clients_parse(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    lead_to(directory, engines[0], 1)
    whole = ask(url, "/v1/cut")
    assert (whole.status_code, whole.json()["error"]["code"]) == (502, "engine_disconnected")
    *_, error, end = [line for line in ask(url, "/v1/cut_stream").text.splitlines() if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_disconnected"
    assert end == "data: [DONE]"
    assert counted(url) == {"1": {"answered": 0, "errors": 2}}


@pytest.mark.parametrize("on_hold", [False, True], ids=["another engine serves", "its successor is starting"])
def test_a_response_cut_by_the_stop_of_a_replaced_engine_is_a_503_to_be_tried_again(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine], on_hold: bool) -> None:
    directory, url = gateway
    blue, green = engines
    answers: dict[str, httpx.Response] = {}

    def begin(path: str) -> threading.Thread:
        asking = threading.Thread(target=lambda: answers.update({path: ask(url, path)}))
        asking.start()
        return asking

    lead_to(directory, blue, 1)
    asking = [begin(path) for path in ("/v1/killed", "/v1/killed_stream")]
    assert all(blue.began.acquire(timeout=60) for _ in asking)
    if on_hold:
        held = RouteRecord(revision=1, url=blue.url, since=datetime.now(UTC), on_hold=True)
        write_model(directory / ROUTE_FILE, held)
    else:
        lead_to(directory, green, 2)
    blue.go_on.set()
    for one in asking:
        one.join(60)
    whole = answers["/v1/killed"]
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "replacing_engine")
    assert int(whole.headers["retry-after"]) > 0
    *_, error, end = [line for line in answers["/v1/killed_stream"].text.splitlines() if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replacing_engine"
    assert end == "data: [DONE]"


@pytest.mark.parametrize(("body", "noted"), [
    ('{"ignore_eos": true}', True), ('{"sampling_params": {"ignore_eos": true}}', True),
    ('{"sampling_params": [{}, {"ignore_eos": true}]}', True), ('{"ignore_eos": false}', False),
    ('{"messages": [{"role": "user", "content": "ignore_eos"}]}', False), ('["ignore_eos"]', False),
    ('{"ignore_eos', False), ("[" * 100_000 + '"ignore_eos"', False)])
def test_requests_that_generate_past_the_end_of_an_answer_are_recognized(body: str, noted: bool) -> None:
    assert ignores_eos(body.encode()) is noted


def test_requests_that_generate_past_the_end_of_an_answer_are_noted_until_they_end(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    lead_to(directory, engines[0], 7)
    assert ask(url).status_code == 200  # its record is written before it knows since when it notes
    began = datetime.now(UTC)

    def unended(since: datetime) -> bool:
        seen = httpx.get(url + UNENDED_PATH, timeout=60).text
        return UnendedAnswers.model_validate_json(seen).within(7, since)

    assert ask(url).status_code == 200
    assert not unended(began)
    assert unended(datetime(2020, 1, 1, tzinfo=UTC))  # before this gateway started: not known
    with httpx.stream("POST", f"{url}/v1/stream", content='{"ignore_eos": true}', headers=JSON) as stream:
        chunks = stream.iter_raw()
        next(chunks)  # the gateway has noted the start, and notes nothing more before the end
        middle = datetime.now(UTC)
        assert unended(began)
        assert not unended(middle)
        engines[0].go_on.set()
        list(chunks)
    assert wait_until(lambda: unended(middle), 60.0)


def test_headers_name_neither_the_engine_s_address_nor_anything_twice(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    lead_to(directory, engines[0], 1)
    answer = ask(url, "/v1/slash/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/v1/slash")
    assert len(answer.headers.get_list("date")) == len(answer.headers.get_list("server")) == 1


def test_an_engine_that_is_gone_on_trial_costs_no_user_an_answer(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    blue, green = engines
    lead_to(directory, blue, 1, Share(revision=2, url=green.url, share=0.5))
    green.close()
    assert [ask(url).json()["engine"] for _ in range(4)] == ["blue"] * 4
    assert counted(url) == {"1": {"answered": 4, "errors": 0}, "2": {"answered": 0, "errors": 2}}


def test_recent_chats_are_kept_on_request_alone_for_our_eyes_only_and_deleted_when_switched_off(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    kept = directory / TRAFFIC_FILE

    def say(words: str) -> None:
        messages = [{"role": "user", "content": words}]
        assert ask(url, body=json.dumps({"messages": messages, "user": "ada"})).status_code == 200

    lead_to(directory, engines[0], 1)
    say("not kept")
    assert not kept.exists()
    lead_to(directory, engines[0], 1, record_prompts=4)
    for number in range(6):  # 4 and a quarter more, then cut back
        say(str(number))
    ask(url, body="not json")
    ask(url, "/v1/completions", body='{"messages": [{}]}')
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [row["messages"] for row in rows] == [
        [{"role": "user", "content": str(number)}] for number in (2, 3, 4, 5)]
    assert {*rows[0]} == {"messages", "recorded_at"}  # no user, no key, no address
    assert kept.stat().st_mode & 0o777 == 0o600
    lead_to(directory, engines[0], 1)
    say("forgotten")
    assert not kept.exists()


def body_of(words: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": words}]}).encode()


def kept_words(directory: Path) -> list[str]:
    file = directory / TRAFFIC_FILE
    return [json.loads(row)["messages"][0]["content"] for row in file.read_text().splitlines()] if file.exists() else []


def test_a_share_of_the_requests_is_kept_and_with_consent_only_those_that_say_yes(tmp_path: Path) -> None:
    traffic = TrafficRecorder(tmp_path / TRAFFIC_FILE)
    for number in range(400):
        traffic.record(body_of(str(number)), Recording(latest=1000, share=0.25))
    assert 60 <= len(kept_words(tmp_path)) <= 150  # far beyond chance
    (tmp_path / TRAFFIC_FILE).unlink()
    for words, consent in (("silent", ""), ("no", "no"), ("yes", "Yes"), ("also", " yes ")):
        traffic.record(body_of(words), Recording(latest=1000, consented_only=True), consent)
    assert kept_words(tmp_path) == ["yes", "also"]


def test_the_administrators_function_decides_what_of_a_request_is_stored(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "our_redaction.py").write_text(
        "def redact(messages):\n"
        "    if messages[0]['content'] == 'fail': raise ValueError(messages)\n"
        "    if messages[0]['content'] == 'drop': return None\n"
        "    return [one | {'content': one['content'].replace('ada', '[name]')} for one in messages]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(REDACT, "our_redaction:redact")
    traffic = TrafficRecorder(tmp_path / TRAFFIC_FILE, redaction())
    for words in ("ada was here", "fail", "drop", "nobody"):
        traffic.record(body_of(words), Recording(latest=10))
    assert kept_words(tmp_path) == ["[name] was here", "nobody"]
    monkeypatch.setenv(REDACT, "our_redaction:missing")
    with pytest.raises(InvalidInput, match="our_redaction:missing"):
        redaction()


def test_messages_are_deleted_when_they_are_as_old_as_the_endpoint_keeps_them(tmp_path: Path) -> None:
    now = datetime(2026, 3, 31, tzinfo=UTC)
    rows = [json.dumps({"messages": [{"content": str(day)}], "recorded_at": datetime(
        2026, 3, day, tzinfo=UTC).isoformat()}) for day in (1, 15, 30)]
    (tmp_path / TRAFFIC_FILE).write_text("\n".join([json.dumps({"messages": [{"content": "before"}]}), *rows]) + "\n")
    copies = tmp_path / SNAPSHOTS
    copies.mkdir()
    for name, day in (("old", 1), ("new", 30)):
        (copies / f"{name}.jsonl").write_text("{}\n")
        moment = datetime(2026, 3, day, tzinfo=UTC).timestamp()
        os.utime(copies / f"{name}.jsonl", (moment, moment))
    delete_older(tmp_path, 20.0, now)
    assert kept_words(tmp_path) == ["15", "30"]
    assert [one.name for one in copies.iterdir()] == ["new.jsonl"]
    traffic = TrafficRecorder(tmp_path / TRAFFIC_FILE)
    traffic.record(body_of("31"), Recording(latest=2))
    traffic.record(body_of("32"), Recording(latest=2))  # counts what is left
    assert kept_words(tmp_path) == ["31", "32"]


def test_what_the_disk_does_not_take_is_not_kept_and_later_rows_are_whole(tmp_path: Path) -> None:
    directory = tmp_path / "endpoint"
    traffic = TrafficRecorder(directory / TRAFFIC_FILE)
    traffic.record(body_of("lost"), Recording(latest=10))  # no directory: what a full disk answers is an OSError too
    directory.mkdir()
    (directory / TRAFFIC_FILE).write_text('{"messages": [{"content": "cut o')
    for words in ("31", "32"):
        traffic.record(body_of(words), Recording(latest=10))
    cut, *rows = (directory / TRAFFIC_FILE).read_text().splitlines()
    assert cut.endswith("cut o")
    assert [json.loads(row)["messages"][0]["content"] for row in rows] == ["31", "32"]


def test_a_conversation_too_long_to_train_on_is_not_kept(tmp_path: Path) -> None:
    traffic = TrafficRecorder(tmp_path / TRAFFIC_FILE)
    traffic.record(json.dumps({"messages": [{"role": "user", "content": "x" * 300_000}]}).encode(),
                   Recording(latest=4))
    assert not (tmp_path / TRAFFIC_FILE).exists()


def test_requests_reach_the_routed_engine_whole_and_answers_come_back_whole(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    lead_to(directory, engines[0], 1)
    answer = httpx.post(f"{url}/v1/chat/completions?x=1%202", content=b'{"a": 1}',
                        headers={"authorization": "Bearer k", **JSON})
    assert answer.json() == {"engine": "blue", "path": "/v1/chat/completions?x=1%202", "got": '{"a": 1}',
                             "key": "Bearer k", "origin": None}
    assert answer.headers["x-eyrie-revision"] == "1"
    assert httpx.get(f"{url}/metrics").json()["path"] == "/metrics"
    assert httpx.post(f"{url}/v1/teapot").status_code == 418


def test_web_pages_and_paths_that_administer_an_engine_do_not_get_through(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    lead_to(directory, engines[0], 1)
    chat = f"{url}/v1/chat/completions"
    for refused in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}):
        assert httpx.post(chat, content="{}", headers={**JSON, **refused}).status_code == 403
    assert httpx.post(chat, content="{}", headers={"Content-Type": "text/plain"}).status_code == 415
    own = httpx.post(chat, json={}, headers={"Origin": url, "Sec-Fetch-Site": "same-origin"})
    assert (own.status_code, own.json()["origin"]) == (200, None)  # which is not the engine's own
    for path in ("/flush_cache", "/v1/%2e%2e/flush_cache"):
        assert httpx.post(url + path, json={}).status_code == 404
    assert counted(url)["1"] == {"answered": 1, "errors": 0}, "a refused request is no engine's failure"


def test_a_switch_sends_new_requests_to_the_new_engine_and_lets_the_old_one_finish_its_stream(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    blue, green = engines
    lead_to(directory, blue, 1)
    with httpx.stream("POST", f"{url}/v1/stream", timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "data: blue"  # the first chunk arrives although the engine has not finished
        lead_to(directory, green, 2)
        assert httpx.post(f"{url}/v1/models").json()["engine"] == "green"
        blue.go_on.set()
        assert [line for line in lines if line] == ["data: end"]


class RouteMovesMeanwhile(RoutingTable):
    """The routing file is replaced just after it was read for the first time."""

    def __init__(self, directory: Path, after: Engine) -> None:
        super().__init__(directory / ROUTE_FILE)
        self._directory, self._after, self.looks = directory, after, 0

    def current(self) -> RouteRecord | None:
        route = super().current()
        self.looks += 1
        lead_to(self._directory, self._after, 2)
        return route


def test_a_closed_door_is_tried_once_more_along_the_new_route(
        tmp_path: Path, engines: tuple[Engine, Engine]) -> None:
    blue, green = engines
    lead_to(tmp_path, blue, 1)
    blue.close()
    routes = RouteMovesMeanwhile(tmp_path, green)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_gateway(routes, TrafficRecorder(tmp_path / TRAFFIC_FILE)))
        async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
            return await client.post("/v1/models")

    assert asyncio.run(ask()).json()["engine"] == "green"
    assert routes.looks == 2


def test_in_an_announced_gap_requests_wait_for_the_successor(
        gateway: tuple[Path, str], engines: tuple[Engine, Engine]) -> None:
    directory, url = gateway
    blue, green = engines
    lead_to(directory, blue, 1)
    assert ask(url).json()["engine"] == "blue"
    write_model(directory / ROUTE_FILE, RouteRecord(revision=1, url=blue.url, since=datetime.now(UTC), on_hold=True))
    blue.close()
    answers: list[httpx.Response] = []
    waiting = [threading.Thread(target=lambda: answers.append(ask(url))) for _ in range(3)]
    for one in waiting:
        one.start()
    waiting[0].join(0.3)
    assert answers == []
    lead_to(directory, green, 2)
    for one in waiting:
        one.join(60)
    assert [(answer.status_code, answer.json()["engine"]) for answer in answers] == [(200, "green")] * 3


def test_a_request_held_for_too_long_gets_a_503_with_retry_after(tmp_path: Path) -> None:
    write_model(tmp_path / ROUTE_FILE, RouteRecord(
        revision=1, url="http://127.0.0.1:1", since=datetime.now(UTC), on_hold=True))
    app = create_gateway(RoutingTable(tmp_path / ROUTE_FILE), TrafficRecorder(tmp_path / TRAFFIC_FILE), hold_s=0.05)

    async def once() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.post("/v1/chat/completions", json={})

    answer = asyncio.run(once())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replacing_engine")
    assert int(answer.headers["retry-after"]) > 0


def test_without_an_engine_the_answer_is_a_503_in_openai_words(gateway: tuple[Path, str]) -> None:
    answer = httpx.post(f"{gateway[1]}/v1/chat/completions", json={})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_engine"
    assert answer.headers["retry-after"]


def test_the_port_stays_the_same_when_the_gateway_was_killed(tmp_path: Path) -> None:
    first = start_gateway(tmp_path, 0)
    os.kill(first.process.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(first.process), "the gateway has ended")
    second = start_gateway(tmp_path, 0)
    assert second.port == first.port == read_port(tmp_path)
    stop_gateway(tmp_path)
    assert not is_alive(second.process)


def test_a_port_in_use_is_reported_with_its_number_and_the_hint(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)) as result:
            bind("127.0.0.1", port)
        assert "serve.port" in result.value.hint
        with pytest.raises(PortInUse):
            start_gateway(tmp_path, port)
