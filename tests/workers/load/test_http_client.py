"""The HTTP client on real sockets: frames, kept connections, limits, deadlines, and addresses with secrets."""

import asyncio
import random
from pathlib import Path

import pytest

from eyrie_api.errors import InvalidInput
from eyrie_workers.load.endpoint_url import RequestFailed, parse_url
from eyrie_workers.load.http_client import BodyDecoder, ConnectionPool, HttpResponse
from tests.workers.load.servers import GENEROUS_S, certified, saying

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def exchange(url: str, times: int = 1, timeout_s: float = GENEROUS_S, prepare: int = 0) -> list[HttpResponse]:
    async def work() -> list[HttpResponse]:
        pool = ConnectionPool(parse_url(url), {})
        try:
            await pool.prepare(prepare)
            return [await pool.exchange(pool.render("GET", "/x"), timeout_s) for _ in range(times)]
        finally:
            pool.close()

    return asyncio.run(work())


def failure(url: str, timeout_s: float = GENEROUS_S) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        exchange(url, timeout_s=timeout_s)
    return caught.value


def test_chunks_are_taken_out_of_their_frames_wherever_the_network_cut_them() -> None:
    framed = b"5\r\nhello\r\n1;name=value\r\n \r\nB\r\nconcurrency\r\n0\r\nTrailer: x\r\n\r\n"
    chance = random.Random(0)
    for _ in range(200):
        cuts = sorted(chance.sample(range(1, len(framed)), chance.randrange(1, 12)))
        frames = BodyDecoder(None, chunked=True)
        ends = [frames.feed(0.0, framed[a:b]) for a, b in zip([0, *cuts], [*cuts, len(framed)], strict=True)]
        assert b"".join(piece for _, piece in frames.pieces) == b"hello concurrency"
        assert ends == [False] * len(cuts) + [True]


@pytest.mark.parametrize("framed", [b"xyz\r\n", b"-5\r\n", b"3\r\nlong!\r\n", b"1" * 2000, b"0\r\n\r\nmore"])
def test_broken_frames_are_told_as_malformed(framed: bytes) -> None:
    with pytest.raises(RequestFailed) as caught:
        BodyDecoder(None, chunked=True).feed(0.0, framed)
    assert caught.value.reason == "Malformed"


def test_one_connection_carries_many_requests() -> None:
    with saying([OK] * 3) as (url, carried):
        assert [reply.body for reply in exchange(url, times=3)] == [b"ok"] * 3
    assert carried == [3]


def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_failure() -> None:
    with saying([OK], [OK]) as (url, carried):
        assert len(exchange(url, times=2)) == 2
    assert carried == [1, 1]


def test_a_prepared_connection_that_was_closed_before_its_first_request_is_replaced() -> None:
    with saying([], [OK]) as (url, _):
        assert exchange(url, prepare=1)[0].body == b"ok"


def test_a_server_that_closes_every_fresh_connection_is_a_failure() -> None:
    with saying([]) as (url, _):
        assert failure(url).reason in ("CutShort", "Reset")


def test_interim_answers_are_skipped_and_a_body_may_end_with_its_connection() -> None:
    with saying([b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.0 200 OK\r\n\r\nuntil the end"]) as (url, _):
        reply = exchange(url)[0]
    assert (reply.status, reply.body) == (200, b"until the end")


@pytest.mark.parametrize(("answer", "reason"), [
    (b"SSH-2.0-OpenSSH\r\n\r\n", "Malformed"),
    (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "Malformed"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "Malformed"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nthree", "Malformed"),
    (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "Malformed"),
    (CHUNKED + b"5\r\nhel", "CutShort"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "CutShort"),
    (b"HTTP/1.1 200 O", "CutShort"),
])
def test_what_is_no_whole_http_answer_fails_with_a_reason(answer: bytes, reason: str) -> None:
    with saying([answer]) as (url, _):
        assert failure(url).reason == reason


def test_an_answer_that_does_not_end_fails_at_its_deadline() -> None:
    with saying([CHUNKED + b"5\r\nhel"], closes=False) as (url, _):
        assert failure(url, timeout_s=0.2).reason == "Timeout"


def test_nobody_listening_is_told_with_the_address() -> None:
    error = failure("http://127.0.0.1:1/v1")
    assert error.reason == "Unreachable"
    assert "http://127.0.0.1:1/v1 is not reachable: Connection refused" in str(error)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http:///v1", "http://host:port/v1",
                                 "http://host/v1?key=hidden", "http://host\n/v1", "http://me:hidden@host/v1?x"])
def test_an_address_that_is_none_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_url(url)
    assert "hidden" not in str(caught.value)
    assert caught.value.hint


def test_credentials_of_an_address_are_sent_but_never_shown() -> None:
    origin = parse_url("https://me:p%40ss@host.example/v1/")
    assert origin.url == "https://host.example/v1"
    assert "ss" not in repr(origin)
    assert b"Authorization: Basic bWU6cEBzcw==" in ConnectionPool(origin, {}).render("GET", "/models")


def test_a_header_cannot_smuggle_another_one() -> None:
    with pytest.raises(InvalidInput) as caught:
        ConnectionPool(parse_url("http://host/v1"), {"Authorization": "Bearer hidden\r\nX: y"})
    assert "hidden" not in str(caught.value)


def test_https_is_spoken_and_an_unknown_certificate_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, context = certified(tmp_path, "IP:127.0.0.1")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"".join(b"2710\r\n" + b"x" * 10_000 + b"\r\n" for _ in range(50)) + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def work() -> tuple[bytes, str]:
        async with await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context) as server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            stranger = ConnectionPool(parse_url(url), {})
            with pytest.raises(RequestFailed) as caught:
                await stranger.exchange(stranger.render("GET", "/x"), GENEROUS_S)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            pool = ConnectionPool(parse_url(url), {})
            reply = await pool.exchange(pool.render("GET", "/x"), GENEROUS_S)
            pool.close()
            return reply.body, caught.value.reason

    body, reason = asyncio.run(work())
    assert body == b"x" * 500_000
    assert reason == "Tls"
