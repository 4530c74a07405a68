"""`eyrie up` and `eyrie down` as processes: ready when they say so, gone when they say so, up again after a kill."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyrie_api.cli.verbs import running_plane
from eyrie_api.processes import free_port
from tests.operator.conftest import Eyrie


def run_process(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EYRIE_")}
    return subprocess.run([sys.executable, "-m", "eyrie_operator.command", *arguments, "--home", str(home)],
                          capture_output=True, text=True, check=False, timeout=300, env=environment, cwd=home.parent)


def reply_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_up_is_ready_when_it_returns_also_after_a_kill_and_down_leaves_nothing(tmp_path: Path) -> None:
    home, port = tmp_path / "home", free_port()
    first = run_process("up", "--detach", "--port", str(port), home=home)
    try:
        assert f"http://127.0.0.1:{port}/docs" in first.stdout, first.stderr
        assert f"--server http://127.0.0.1:{port}" in first.stdout  # the next line works as it stands
        running = reply_of(run_process("up", "--detach", "--json", home=home))
        assert running["already"] is True
        os.kill(running["pid"], signal.SIGKILL)
        again = reply_of(run_process("up", "--detach", "--port", str(port), "--json", home=home))
        assert again["already"] is False
        assert again["pid"] != running["pid"]
        assert again["url"] == f"http://127.0.0.1:{port}"
        assert httpx.get(f"{again['url']}/readyz").status_code == 200
        second = run_process("up", "--detach", "--port", str(port), home=tmp_path / "other")
        assert second.returncode == 69
        assert f"port {port}" in second.stderr
    finally:
        down = reply_of(run_process("down", "--json", home=home))
    assert down["stopped"] is True
    assert running_plane(home) is None
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert reply_of(run_process("down", "--json", home=home))["stopped"] is False


def test_a_wrong_setting_is_reported_by_the_name_of_its_variable(tmp_path: Path, eyrie: Eyrie) -> None:
    done = eyrie("up", "--home", tmp_path, env={"EYRIE_LEASE_TTL_S": "soon"})
    assert done.returncode == 65
    assert "EYRIE_LEASE_TTL_S" in done.stderr
    assert "hint:" in done.stderr
