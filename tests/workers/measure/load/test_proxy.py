"""Requests through a proxy: a small proxy on a real socket that forwards `model.internal`."""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from eyrie_api.errors import InvalidInput
from eyrie_workers.measure.load.http_client import ConnectionPool, HttpResponse, RequestFailed, parse_url, proxy_for
from tests.workers.measure.load.servers import GENEROUS_S, certified

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
SECRET = "Basic bWU6c2VzYW1l"  # me:sesame
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


class Proxy:
    """Forwards all requests to one port and records their heads."""

    def __init__(self, port: int) -> None:
        self.port, self.heads = port, list[str]()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head.decode())
            if SECRET not in self.heads[-1]:
                writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                writer.close()
                return
            beyond = await asyncio.open_connection("127.0.0.1", self.port)
            if head.startswith(b"CONNECT "):
                writer.write(b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n")
            else:
                beyond[1].write(head)
            await asyncio.gather(carry(reader, beyond[1]), carry(beyond[0], writer))


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


def through(scheme: str, directory: Path, monkeypatch: pytest.MonkeyPatch, credentials: str = "me:sesame@",
            times: int = 1) -> tuple[list[HttpResponse], Proxy, list[str]]:
    """Send requests to `model.internal` through the proxy; returns responses, the proxy and received heads."""
    seen: list[str] = []
    tls = None
    if scheme == "https":
        certificate, tls = certified(directory, "DNS:model.internal")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
                writer.write(OK)
        writer.close()

    async def work() -> tuple[list[HttpResponse], Proxy]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as model:
            proxy = Proxy(model.sockets[0].getsockname()[1])
            async with await asyncio.start_server(proxy.connected, "127.0.0.1", 0) as proxy_server:
                port = proxy_server.sockets[0].getsockname()[1]
                monkeypatch.setenv(f"{scheme.upper()}_PROXY", f"http://{credentials}127.0.0.1:{port}")
                origin = parse_url(f"{scheme}://model.internal/v1")
                pool = ConnectionPool(origin, {}, proxy_for(origin))
                try:
                    return [await pool.send("GET", "/x", timeout_s=GENEROUS_S) for _ in range(times)], proxy
                finally:
                    await pool.close()

    return *asyncio.run(work()), seen


def test_plain_requests_are_sent_to_the_proxy_with_absolute_urls_over_one_connection(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies, proxy, seen = through("http", tmp_path, monkeypatch, times=3)
    assert [reply.body for reply in replies] == [b"ok"] * 3
    assert len(proxy.heads) == 1
    assert all(head.startswith("GET http://model.internal/v1/x HTTP/1.1") for head in seen)
    assert all("Host: model.internal\r\n" in head for head in seen)


def test_tls_uses_a_tunnel_that_the_proxy_cannot_read(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies, proxy, seen = through("https", tmp_path, monkeypatch, times=3)
    assert [reply.body for reply in replies] == [b"ok"] * 3
    assert [head.partition("\r\n")[0] for head in proxy.heads] == ["CONNECT model.internal:443 HTTP/1.1"]
    assert all(head.startswith("GET /v1/x HTTP/1.1") for head in seen)
    assert not any("Proxy-Authorization" in head for head in seen), "proxy credentials must not reach the server"


def test_a_refused_tunnel_is_reported_without_credentials(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestFailed) as caught:
        through("https", tmp_path, monkeypatch, credentials="me:wrong@")
    assert caught.value.reason == "Proxy"
    assert "407 Proxy Authentication Required" in str(caught.value)
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize(("environment", "url", "proxy"), [
    ({}, "http://model.internal/v1", None),
    ({"HTTP_PROXY": "http://proxy:3128"}, "http://model.internal/v1", "http://proxy:3128"),
    ({"http_proxy": "proxy:3128"}, "http://model.internal/v1", "http://proxy:3128"),
    ({"HTTP_PROXY": "http://proxy:3128"}, "https://model.internal/v1", None),
    ({"ALL_PROXY": "http://proxy:3128"}, "https://model.internal/v1", "http://proxy:3128"),
    ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".internal"}, "https://model.internal/v1", None),
    ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "*"}, "https://model.internal/v1", None),
    ({"HTTP_PROXY": "http://proxy:3128"}, "http://127.0.0.1:30000/v1", None),
    ({"HTTP_PROXY": "http://proxy:3128"}, "http://[::1]:30000/v1", None),
    ({"HTTP_PROXY": "http://proxy:3128"}, "http://localhost:30000/v1", None),
])
def test_the_environment_names_the_proxy_and_its_exceptions(
        environment: Mapping[str, str], url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found_proxy = proxy_for(parse_url(url))
    assert (found_proxy.url if found_proxy else None) == proxy


@pytest.mark.parametrize("named", ["https://proxy:3128", "socks5://me:sesame@proxy:1080"])
def test_an_unsupported_kind_of_proxy_is_rejected(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", named)
    with pytest.raises(InvalidInput) as caught:
        proxy_for(parse_url("https://model.internal/v1"))
    assert "sesame" not in str(caught.value)
