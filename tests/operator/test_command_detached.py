"""Who runs a home's control plane: a lock tells, not a file that outlives its writer."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyrie_api.cli.commands import app
from eyrie_api.cli.verbs import PLANE_FILE, running_plane
from eyrie_api.errors import Conflict, PortInUse
from eyrie_api.processes import free_port
from eyrie_operator.cli import detached
from eyrie_operator.cli.detached import check_port, claim

HOLDER = """
import sys, pathlib
from eyrie_operator.cli.detached import claim
with claim(pathlib.Path(sys.argv[1]), "http://127.0.0.1:1"):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(home: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_nobody_runs_an_empty_home(tmp_path: Path) -> None:
    assert running_plane(tmp_path) is None
    assert running_plane(tmp_path / "nowhere") is None


def test_the_holder_is_found_from_another_process_and_a_second_claim_is_refused(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        plane = running_plane(tmp_path)
        assert plane is not None
        assert (plane.pid, plane.url) == (holder.pid, "http://127.0.0.1:1")
        with pytest.raises(Conflict, match=r"http://127\.0\.0\.1:1"), claim(tmp_path, "http://127.0.0.1:2"):
            pass
        found = running_plane(tmp_path)
        assert found is not None
        assert found.url == "http://127.0.0.1:1"  # the loser did not overwrite it
    finally:
        holder.kill()
        holder.wait()


def test_a_command_that_reaches_no_server_names_the_one_that_runs_on_this_home(tmp_path: Path) -> None:
    def said(server: str) -> str:
        done = CliRunner().invoke(app, ["jobs"], env={"EYRIE_HOME": str(tmp_path), "EYRIE_SERVER": server})
        assert done.exit_code == 69
        return " ".join(done.stderr.split())

    elsewhere = f"http://127.0.0.1:{free_port()}"
    assert "give its URL by --server or EYRIE_SERVER" in said(elsewhere)
    assert "export EYRIE_SERVER" not in said(elsewhere)
    holder = hold(tmp_path)
    try:
        assert f"the control plane of {tmp_path} is at http://127.0.0.1:1: export EYRIE_SERVER=http://127.0.0.1:1" in \
            said(elsewhere)
        assert "export EYRIE_SERVER" not in said("http://127.0.0.1:1"), "it does not answer"
    finally:
        holder.kill()
        holder.wait()


def test_a_killed_holder_leaves_a_file_that_does_not_lie(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / PLANE_FILE).exists()
    assert running_plane(tmp_path) is None
    with claim(tmp_path, "http://127.0.0.1:3"):
        pass


def test_a_home_is_claimed_while_somebody_looks_whether_a_control_plane_runs(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "_CLAIM_S", 600.0)  # longer than this machine may be held up
    file = tmp_path / PLANE_FILE
    file.write_text(json.dumps({"pid": 1, "url": "http://127.0.0.1:1"}))  # of one that was killed
    with file.open() as looking, ThreadPoolExecutor(1) as other:
        fcntl.flock(looking, fcntl.LOCK_SH)
        claimed = other.submit(_claim_once, tmp_path)
        with pytest.raises(TimeoutError):
            claimed.result(timeout=0.5)
        fcntl.flock(looking, fcntl.LOCK_UN)
        assert claimed.result(timeout=60.0)["url"] == "http://127.0.0.1:4"


def _claim_once(home: Path) -> Any:
    with claim(home, "http://127.0.0.1:4"):
        return json.loads((home / PLANE_FILE).read_text())


def test_a_port_in_use_is_reported_with_the_hint() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)) as result:
            check_port("127.0.0.1", port)
    assert result.value.exit_code == 69
    assert "--port" in result.value.hint
    check_port("127.0.0.1", free_port())
    check_port("127.0.0.1", 0)
