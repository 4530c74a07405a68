"""The HTTP client on real sockets: kept connections, limits, deadlines, and addresses with secrets."""

import asyncio
import time
from pathlib import Path

import pytest

from eyrie_api.errors import InvalidInput
from eyrie_workers.measure.load.http_client import ConnectionPool, HttpResponse, RequestFailed, parse_url
from tests.workers.measure.load.servers import GENEROUS_S, certified, replying

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def send_requests(url: str, times: int = 1, timeout_s: float = GENEROUS_S) -> list[HttpResponse]:
    async def work() -> list[HttpResponse]:
        pool = ConnectionPool(parse_url(url), {})
        try:
            return [await pool.send("POST", "/x", timeout_s=timeout_s) for _ in range(times)]
        finally:
            await pool.close()

    return asyncio.run(work())


def failure(url: str, timeout_s: float = GENEROUS_S) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        send_requests(url, timeout_s=timeout_s)
    return caught.value


def test_one_connection_carries_many_requests() -> None:
    with replying([OK] * 3) as (url, carried):
        assert [response.body for response in send_requests(url, times=3)] == [b"ok"] * 3
    assert carried == [3]


def test_an_idle_connection_closed_by_the_server_is_replaced_without_a_failure() -> None:
    with replying([OK], [OK]) as (url, carried):
        assert len(send_requests(url, times=2)) == 2
    assert carried == [1, 1]


def test_a_new_connection_closed_before_the_response_is_a_failure_and_the_request_is_not_sent_twice() -> None:
    with replying([], [OK]) as (url, _):
        assert failure(url).reason in ("CutShort", "Reset")


def test_times_begin_when_the_request_is_sent_and_end_after_its_last_byte() -> None:
    with replying([OK]) as (url, _):
        before = time.perf_counter()
        response = send_requests(url)[0]
    assert before < response.sent_at <= response.chunks[0][0] <= response.ended_at


def test_a_server_that_closes_every_new_connection_is_a_failure() -> None:
    with replying([]) as (url, _):
        assert failure(url).reason in ("CutShort", "Reset")


def test_interim_responses_are_skipped_and_a_body_may_end_with_its_connection() -> None:
    with replying([b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.0 200 OK\r\n\r\nuntil the end"]) as (url, _):
        response = send_requests(url)[0]
    assert (response.status, response.body) == (200, b"until the end")


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
def test_an_incomplete_or_invalid_response_fails_with_a_reason(answer: bytes, reason: str) -> None:
    with replying([answer]) as (url, _):
        assert failure(url).reason == reason


def test_a_response_that_does_not_end_fails_at_its_deadline() -> None:
    with replying([CHUNKED + b"5\r\nhel"], closes=False) as (url, _):
        assert failure(url, timeout_s=0.2).reason == "Timeout"


def test_an_unreachable_endpoint_is_reported_with_its_url() -> None:
    error = failure("http://127.0.0.1:1/v1")
    assert error.reason == "Unreachable"
    assert "http://127.0.0.1:1/v1 is not reachable: Connection refused" in str(error)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http:///v1", "http://host:port/v1",
                                 "http://host/v1?key=hidden", "http://host\n/v1", "http://me:hidden@host/v1?x"])
def test_an_invalid_url_is_rejected_without_quoting_its_credentials(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_url(url)
    assert "hidden" not in str(caught.value)
    assert caught.value.hint


def test_credentials_of_a_url_are_sent_and_not_part_of_its_repr() -> None:
    origin = parse_url("https://me:p%40ss@host.example/v1/")
    assert origin.url == "https://host.example/v1"
    assert "ss" not in repr(origin)
    assert ConnectionPool(origin, {}).headers["Authorization"] == "Basic bWU6cEBzcw=="


def test_a_header_value_with_a_line_break_is_rejected() -> None:
    with pytest.raises(InvalidInput) as caught:
        ConnectionPool(parse_url("http://host/v1"), {"Authorization": "Bearer hidden\r\nX: y"})
    assert "hidden" not in str(caught.value)


def test_https_works_and_an_unknown_certificate_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, context = certified(tmp_path, "IP:127.0.0.1")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"".join(b"2710\r\n" + b"x" * 10_000 + b"\r\n" for _ in range(50)) + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def work() -> tuple[bytes, str]:
        async with await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context) as server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            untrusting_pool = ConnectionPool(parse_url(url), {})
            with pytest.raises(RequestFailed) as caught:
                await untrusting_pool.send("GET", "/x", timeout_s=GENEROUS_S)
            await untrusting_pool.close()
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            pool = ConnectionPool(parse_url(url), {})
            response = await pool.send("GET", "/x", timeout_s=GENEROUS_S)
            await pool.close()
            return response.body, caught.value.reason

    body, reason = asyncio.run(work())
    assert body == b"x" * 500_000
    assert reason == "Tls"
