"""The control plane as a process: it comes up, drives jobs, ends in order, and is survived by what it started."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyrie_api.contract.serving import ServeSpec
from eyrie_api.processes import free_port
from eyrie_pipelines import local
from eyrie_pipelines.processes import wait_until
from tests.pipelines.conftest import Rehearsal, fill, spec_of

LIMIT_S = 600.0
JOB = spec_of(serve=ServeSpec(enabled=False)).model_dump(mode="json")
CODE = """
import sys
from pathlib import Path
from eyrie_api.settings import Settings
from eyrie_operator.control_plane import run
run(Settings(home=Path(sys.argv[1]), port=int(sys.argv[2]), reconcile_interval_s=0.2))
"""


class PlaneProcess:
    """A control plane in a process of its own."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, free_port()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60.0,
                                 limits=httpx.Limits(max_keepalive_connections=0))
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen([sys.executable, "-c", CODE, str(self.home), str(self.port)])
        assert wait_until(self.is_ready, LIMIT_S)
        return self.process

    def is_ready(self) -> bool:
        assert self.process.poll() is None
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def job(self, job_id: str) -> dict[str, Any]:
        body: dict[str, Any] = self.http.get(f"/v1alpha1/jobs/{job_id}").json()
        return body

    def phase(self, job_id: str) -> str:
        return str(self.job(job_id)["status"]["phase"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.http.close()
        for directory in self.home.glob("jobs/*"):
            local.stop(directory, grace_s=0.5)


@pytest.fixture
def plane(tmp_path: Path, rehearsal: Rehearsal) -> Iterator[PlaneProcess]:
    made = PlaneProcess(tmp_path / "home")
    yield made
    made.close()


@pytest.mark.slow
def test_a_posted_job_survives_an_ordered_end_and_a_kill_of_the_plane(
        plane: PlaneProcess, rehearsal: Rehearsal) -> None:
    rehearsal.plan(capture=["hang", "ok"], tune=["hang", "ok"])
    answer = plane.http.post("/v1alpha1/jobs", json=JOB)
    assert answer.status_code == 202, answer.text
    job_id = answer.json()["id"]
    directory = plane.home / "jobs" / job_id
    assert wait_until(lambda: "capture" in rehearsal.starts(), LIMIT_S)

    plane.process.send_signal(signal.SIGTERM)
    assert plane.process.wait(LIMIT_S) == 0
    assert local.live_processes(directory) == []  # ended in order: nothing of the run is left

    plane.start()
    assert wait_until(lambda: "tune" in rehearsal.starts(), LIMIT_S)
    plane.process.kill()
    plane.process.wait()
    assert local.observe(directory).state == "running"  # killed: the run goes on alone

    plane.start()
    assert wait_until(lambda: plane.phase(job_id) == "Running", LIMIT_S)
    assert plane.http.post(f"/v1alpha1/jobs/{job_id}/cancel").status_code == 202
    assert wait_until(lambda: plane.phase(job_id) == "Cancelled", LIMIT_S)
    assert local.live_processes(directory) == []

    assert plane.http.post(f"/v1alpha1/jobs/{job_id}/retry").status_code == 202
    assert wait_until(lambda: plane.phase(job_id) == "Succeeded", LIMIT_S), plane.job(job_id)
    assert rehearsal.starts().count("regenerate") == 1
    assert plane.job(job_id)["status"]["attempt"] == 2


def test_a_second_plane_is_refused_the_port_before_anything_is_started_and_sigterm_ends_the_first_whatever_clients_do(
        plane: PlaneProcess, rehearsal: Rehearsal, tmp_path: Path) -> None:
    second = subprocess.run([sys.executable, "-c", CODE, str(tmp_path / "other"), str(plane.port)],
                            capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert second.returncode != 0
    assert f"port {plane.port}" in second.stderr
    assert not (tmp_path / "other").exists()
    rehearsal.plan(regenerate=["hang"])
    job = plane.http.post("/v1alpha1/jobs", json=JOB).json()["id"]
    requests = ("GET /v1alpha1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n",  # headers that do not end
                "POST /v1alpha1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                "Content-Length: 5000\r\n\r\n{",
                f"GET /v1alpha1/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n", "")
    with contextlib.ExitStack() as open_connections:
        for request in requests:
            connection = open_connections.enter_context(socket.create_connection(("127.0.0.1", plane.port)))
            connection.sendall(request.encode())
        assert plane.http.get("/readyz").status_code == 200
        plane.process.send_signal(signal.SIGTERM)
        assert plane.process.wait(LIMIT_S) == 0


def test_a_plane_starts_on_a_full_disk_says_so_and_goes_on_when_there_is_space(
        disk: Path, rehearsal: Rehearsal) -> None:
    plane = PlaneProcess(disk / "home")
    try:
        plane.process.send_signal(signal.SIGTERM)
        assert plane.process.wait(LIMIT_S) == 0
        filler = fill(disk)
        plane.start()
        refused = plane.http.post("/v1alpha1/jobs", json=JOB)
        assert refused.status_code == 507, refused.text
        assert plane.http.get("/v1alpha1/jobs").json()["items"] == []
        filler.unlink()
        assert wait_until(lambda: plane.http.post("/v1alpha1/jobs", json=JOB).status_code == 202, LIMIT_S)
    finally:
        plane.close()
