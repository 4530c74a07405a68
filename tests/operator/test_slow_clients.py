"""Every server of ours closes connections whose request does not arrive, and answers others meanwhile.

The servers are the real programs, each in a process of its own, with a shorter limit.
"""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eyrie_api import web_server
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.processes import free_port
from eyrie_api.settings import Settings
from eyrie_operator.cluster.program import serve_probes
from eyrie_pipelines.processes import wait_until

LIMIT_S = 180.0
HEADER_S = 0.5
SHORTER = f"from eyrie_api import web_server; web_server.HEADER_S = {HEADER_S}; "\
          "web_server.BODY_S = 600.0; import sys; "
PROGRAMS = {
    "control plane": "from pathlib import Path; from eyrie_api.settings import Settings; "
                     "from eyrie_operator.control_plane import run; "
                     "run(Settings(home=Path(sys.argv[1]), port=int(sys.argv[2])))",
    "API server": "from pathlib import Path; from eyrie_api.settings import Settings; "
                  "from eyrie_api.http.replica import serve; "
                  "serve(Settings(home=Path(sys.argv[1]), port=int(sys.argv[2]), broker_url='redis://127.0.0.1:9/0'))",
    "gateway": "from eyrie_operator.embedded.gateway import main; "
               "sys.argv[1:] = ['--directory', sys.argv[1], '--port', sys.argv[2]]; main()",
    "engine": "from eyrie_workers.engines.server import main; "
              "main(['--target', 'quickstart', '--port', sys.argv[2], '--threads', '1'])",
}
POSTS = {"control plane": "/v1alpha1/jobs", "API server": "/v1alpha1/jobs", "gateway": "/v1/completions",
         "engine": "/v1/completions"}
"""A path of each whose handler reads the body."""

MOST_SLOW = 20
"""More than any server has threads for handlers."""


@pytest.fixture(params=PROGRAMS)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A port, and the path of a POST."""
    if request.param == "API server":
        database = Database(Settings(home=tmp_path).resolved_database_url)
        upgrade(database)
        database.close()
    chosen = free_port()
    process = subprocess.Popen([sys.executable, "-c", SHORTER + PROGRAMS[request.param], str(tmp_path), str(chosen)])

    def ready() -> bool:
        assert process.poll() is None
        return answer(f"http://127.0.0.1:{chosen}/health") is not None

    try:
        assert wait_until(ready, LIMIT_S)
        yield chosen, POSTS[request.param]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def answer(url: str) -> httpx.Response | None:
    """None where the server does not answer, or this process was too slow to send the header in time."""
    try:
        return httpx.get(url, timeout=60.0)
    except httpx.TransportError:
        return None


def is_closed_by_server(port: int, begun: bytes) -> bool:
    """Whether the server closes a connection with this part of a request; False: it waits longer than it may."""
    with socket.create_connection(("127.0.0.1", port), timeout=120 * HEADER_S) as connection:
        connection.sendall(begun)
        try:
            return connection.recv(4096) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False


def test_half_a_header_is_closed_and_slow_callers_delay_no_other(served: tuple[int, str]) -> None:
    port, path = served
    slow = (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            "Content-Length: 9\r\n\r\n{").encode()
    with contextlib.ExitStack() as open_connections:
        for _ in range(MOST_SLOW):
            connection = open_connections.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(slow)
        assert wait_until(lambda: answer(f"http://127.0.0.1:{port}/health") is not None, LIMIT_S)
        assert is_closed_by_server(port, b"GET /health HTTP/1.1\r\nHost: 127")
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)  # the body of the slow ones is still awaited


@pytest.mark.parametrize("begun", [b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: h"])
def test_the_operator_s_port_closes_a_request_that_does_not_arrive(begun: bytes,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "HEADER_S", HEADER_S)
    server = serve_probes("127.0.0.1", 0, {"/healthz": lambda: (200, b"ok\n")})
    port = int(server.server_address[1])
    try:
        assert is_closed_by_server(port, begun)
        assert wait_until(lambda: (got := answer(f"http://127.0.0.1:{port}/healthz")) is not None
                          and got.text == "ok\n", LIMIT_S)
    finally:
        server.shutdown()
        server.server_close()
