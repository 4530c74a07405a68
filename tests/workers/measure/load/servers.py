"""Real servers for the load generator's tests: the stub server, and one that replies with given bytes."""

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyrie_workers.data.suites import Prompt
from tests.servers.stub_openai_server import Timing, serve
from tests.waiting import wait_for

GENEROUS_S = 60.0


@contextlib.contextmanager
def in_thread(work: "asyncio._CoroutineLike[None]") -> Iterator[None]:
    """Run a server's coroutine on an event loop of its own until the block ends."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)  # type: ignore[arg-type]

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(GENEROUS_S)
        assert not thread.is_alive()


@contextlib.contextmanager
def responding(directory: Path, pace: Timing | None = None) -> Iterator[str]:
    """A stub server in a thread; yields its URL."""
    ready = directory / "ready.json"
    ready.unlink(missing_ok=True)
    with in_thread(serve(pace or Timing(), 0, ready, None)):
        wait_for(ready.exists, "the server answers", GENEROUS_S)
        yield json.loads(ready.read_text())["url"]


@contextlib.contextmanager
def replying(*connections: list[bytes], closes: bool = True) -> Iterator[tuple[str, list[int]]]:
    """A server that replies to the requests of its n-th connection with these bytes, then closes it or stays silent.

    Yields its URL and the number of requests per connection.
    """
    num_requests: list[int] = []
    address: list[str] = []
    up = threading.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(num_requests)
        num_requests.append(0)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for answer in connections[min(number, len(connections) - 1)]:
                await reader.readuntil(b"\r\n\r\n")
                num_requests[number] += 1
                writer.write(answer)
                await writer.drain()
            if not closes:
                await reader.read()
        writer.close()

    async def work() -> None:
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
            up.set()
            await asyncio.Event().wait()

    with in_thread(work()):
        assert up.wait(GENEROUS_S)
        yield address[0], num_requests


def certified(directory: Path, name: str) -> tuple[Path, ssl.SSLContext]:
    """A self-signed certificate for a name (`DNS:...`, `IP:...`), and a server's TLS context with it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl command to make a certificate with")
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    subprocess.run([openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=test", "-addext",
                    f"subjectAltName={name}"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context


def prompts(num: int, categories: str = "ab") -> list[Prompt]:
    """Prompts of several categories in turn."""
    return [Prompt(f"p{i}", categories[i % len(categories)], ({"role": "user", "content": f"question {i}"},))
            for i in range(num)]


def fault(kind: str) -> Prompt:
    """A prompt the responder meets with this trouble."""
    return Prompt(kind, "fault", ({"role": "user", "content": f"fault: {kind}"},))
