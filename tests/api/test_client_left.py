"""A request that reads files ends when its client closes the connection, before it has changed anything."""

import asyncio
import io
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from eyrie_api import client_left
from eyrie_api.artifacts import digest_file
from eyrie_api.client_left import ClientLeft
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.data_files import array_rows, data_files, open_regular, row_lines
from eyrie_api.file_rules import check_path
from tests.api.conftest import Running
from tests.api.samples import job_body, target_directory
from tests.waiting import wait_for

ENDLESS = "{% for a in range(99999) %}" * 9 + "x" + "{% endfor %}" * 9


def template_processes() -> list[str]:
    """Processes in which this process's requests render templates."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended, or its child
            found += [child for child in children.read_text().split()
                      if b"eyrie_api.chat_template" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return found


@pytest.mark.parametrize("path", ["/v1alpha1/jobs", "/v1alpha1/plans"])
def test_a_request_that_waits_for_a_template_ends_when_its_client_leaves_and_changes_nothing(
        server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr("eyrie_api.chat_template._PROBE_SECONDS", 600)
    target = target_directory(tmp_path / "target")
    (target / "chat_template.jinja").write_text(ENDLESS)
    body = json.dumps(job_body(target={"model": str(target)})).encode()
    address = urlsplit(server.url)
    with socket.create_connection((str(address.hostname), address.port or 0), timeout=60) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                           f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(template_processes, "the template is rendered")
    count = f'eyrie_http_requests_total{{method="POST",route="{path}",status="{ClientLeft.http_status}"}} 1.0'
    wait_for(lambda: count in httpx.get(server.url + "/metrics").text, "the request ends")
    assert template_processes() == []
    assert server.client.jobs().items == ()


READS: dict[str, Callable[[Path], Any]] = {
    "digests": lambda path: digest_file(path / "rows.jsonl"),
    "lines": lambda path: list(row_lines(io.BytesIO(b"{}\n"))),
    "elements of an array": lambda path: list(array_rows(io.BytesIO(b"[{}]"))),
    "files of a directory": lambda path: data_files(str(path)),
    "links of a directory": lambda path: check_path("data", path, ReadRules(home="/home/eyrie")),
    "files": lambda path: open_regular(path / "rows.jsonl").close(),
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return tmp_path


@pytest.mark.parametrize("kind", READS)
def test_reading_ends_once_the_client_has_left_and_goes_on_before(rows: Path, kind: str) -> None:
    async def request() -> None:
        leaves = asyncio.Event()

        async def receive() -> dict[str, str]:
            await leaves.wait()
            return {"type": "http.disconnect"}

        async with client_left.watch(receive):
            await asyncio.to_thread(READS["files"], rows)
            leaves.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            with pytest.raises(ClientLeft):
                await asyncio.to_thread(READS[kind], rows)

    asyncio.run(request())
    READS[kind](rows)  # outside of a request
