"""Connections whose request does not arrive are closed; slow answers and idle connections are not."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from eyrie_api import web_server
from eyrie_api.web_server import TimedProtocol

POST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 400000\r\n\r\n"
GET = b"GET /slow HTTP/1.1\r\nHost: here\r\n\r\n"
LET_GO = threading.Event()


async def app(scope: object, receive: object, send: object) -> None:
    """Answers a POST with the size of its body, or at once on /refused, and a GET with three pieces, half a second
    apart; the last piece of /held comes when `LET_GO` is set."""
    if scope["type"] != "http":  # type: ignore[index]
        return
    request = Request(scope, receive)  # type: ignore[arg-type]

    async def pieces() -> "asyncio.AsyncIterator[bytes]":  # type: ignore[name-defined]
        for number in range(3):
            await asyncio.sleep(0.5)
            if number == 2 and request.url.path == "/held":
                await asyncio.to_thread(LET_GO.wait, 60.0)
            yield b"piece"

    if request.url.path == "/refused":
        await Response("too large", 413)(scope, receive, send)  # type: ignore[arg-type]
        return
    answer: Response = StreamingResponse(pieces()) if request.method == "GET" else Response(
        str(len(await request.body())))
    await answer(scope, receive, send)  # type: ignore[arg-type]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for name, value in (("HEADER_S", 0.4), ("BODY_S", 0.8), ("PACE_BYTES", 50_000)):
        monkeypatch.setattr(web_server, name, value)
    LET_GO.clear()
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=TimedProtocol, log_level="critical", lifespan="off",
                                           timeout_keep_alive=30))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1]
    LET_GO.set()
    server.should_exit = True
    thread.join(10)


def received_until_closed(port: int, *pieces: bytes, pause_s: float = 0.0) -> tuple[bytes, float]:
    """What the server answers before it closes the connection, and when it does."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(4096):
                found += data
    return found, time.monotonic() - began


@pytest.mark.parametrize("pieces", [
    (), (b"GET / HTT",), (POST[:-2], b"X: "), (POST,), (POST, *[b"x"] * 30),
], ids=["nothing", "half a line", "headers without end", "no body", "a byte at a time"])
def test_a_request_that_does_not_arrive_is_closed_without_an_answer(port: int, pieces: tuple[bytes, ...]) -> None:
    answer, seconds = received_until_closed(port, *pieces, pause_s=0.1)
    assert answer == b""
    assert seconds >= 0.3


def test_headers_that_stop_half_way_on_a_used_connection_are_closed_too(
        port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "HEADER_S", 3.0)  # so long may this thread wait before the first request
    answer, _ = received_until_closed(port, POST.replace(b"400000", b"2") + b"ok", b"GET / HT", pause_s=0.3)
    assert answer.endswith(b"2")


def test_a_body_that_makes_progress_and_an_answer_that_takes_time_are_not_cut(
        port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for a thread that is kept waiting between two pieces, and shorter than the whole body takes.
    for name, value in (("HEADER_S", 2.0), ("BODY_S", 4.0)):
        monkeypatch.setattr(web_server, name, value)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(POST)
        for _ in range(20):
            time.sleep(0.25)
            connection.sendall(b"x" * 20_000)
        assert connection.recv(4096).endswith(b"400000")
        time.sleep(2.5)  # idle, longer than headers may take
        connection.sendall(GET)
        found = b""
        while found.count(b"piece") < 3:
            data = connection.recv(4096)
            assert data, f"cut after {found!r}"
            found += data


@pytest.mark.parametrize("pieces", [1, 12], ids=["at once", "slowly"])
@pytest.mark.parametrize("wanted", ["close", "keep-alive"])
def test_an_answer_before_the_body_was_read_arrives_and_the_connection_is_not_reset(
        port: int, monkeypatch: pytest.MonkeyPatch, pieces: int, wanted: str) -> None:
    for name in ("HEADER_S", "BODY_S"):
        monkeypatch.setattr(web_server, name, 30.0)
    body = b"x" * (24 << 20)
    head = f"POST /refused HTTP/1.1\r\nHost: here\r\nConnection: {wanted}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(head.encode())
        for number in range(pieces):  # raises when the server has reset the connection
            connection.sendall(body[number * len(body) // pieces:(number + 1) * len(body) // pieces])
            time.sleep(0.05)
        answer = b""
        while not answer.endswith(b"too large"):
            data = connection.recv(4096)
            assert data, f"cut after {answer!r}"
            answer += data
        assert answer.startswith(b"HTTP/1.1 413")
        if wanted == "close":
            assert connection.recv(1) == b""
        else:
            connection.sendall(POST.replace(b"400000", b"2") + b"ok")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_body_of_which_the_rest_does_not_come_holds_its_connection_for_a_while_alone(
        port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "LINGER_IDLE_S", 0.2, raising=False)
    head = POST.replace(b"POST /", b"POST /refused").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    answer, _ = received_until_closed(port, head + b"x")
    assert answer.endswith(b"too large")


def answer_to(port: int, path: str) -> bytes:
    request = f"GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n".encode()
    return received_until_closed(port, request)[0]


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.1)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False


def test_above_the_limit_a_new_connection_takes_the_place_of_the_longest_idle_one(
        port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "HEADER_S", 60.0)
    monkeypatch.setattr(web_server, "most_connections", lambda: 3)
    with contextlib.ExitStack() as held:
        idle = []
        for _ in range(3):  # one after the other is accepted: looking at it takes a while
            idle.append(held.enter_context(socket.create_connection(("127.0.0.1", port))))
            assert not is_closed(idle[-1])
        assert answer_to(port, "/slow").count(b"piece") == 3
        assert [is_closed(one) for one in idle] == [True, False, False]


def test_with_all_connections_in_use_health_checks_alone_are_answered(
        port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "HEADER_S", 60.0)
    monkeypatch.setattr(web_server, "most_connections", lambda: 2)
    with contextlib.ExitStack() as held:
        busy = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2)]
        for one in busy:
            one.sendall(GET.replace(b"/slow", b"/held"))
            assert one.recv(4096).startswith(b"HTTP/1.1 200")
        refused = answer_to(port, "/slow")
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 5" in refused
        assert answer_to(port, "/healthz").startswith(b"HTTP/1.1 200")
        LET_GO.set()
        for one in busy:
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                piece = one.recv(4096)
                assert piece, "an answer under way was cut"
                answer += piece


def test_the_limit_leaves_descriptors_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server.resource, "getrlimit", lambda _kind: (1024, 4096))
    assert web_server.most_connections() == (1024 - 128) // 2
