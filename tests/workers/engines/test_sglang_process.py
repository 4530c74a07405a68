"""The SGLang process, with a program in its place that behaves like it at start and stop."""

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import packaging
import pytest

from eyrie_api.contract.engine import SGLANG_PROGRAM
from eyrie_api.errors import Transient
from eyrie_api.processes import free_port
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.sglang.process import (
    SglangServer,
    launcher_command,
    merged_environment,
    plugin_root,
    start_sglang,
)
from tests.waiting import wait_for

# Serves /ready on the port after --port, and keeps a child that would outlive it.
SERVER = """
    import http.server, subprocess, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/ready" else 404)
            self.end_headers()
        def log_message(self, *args): pass
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
# Its child computes, and says so before the server is ready; then measures as a stage does.
MEASURED = """
    import sys, time
    from pathlib import Path
    from eyrie_workers.engines.parent_death_signal import adopt_orphans
    from eyrie_workers.sglang.process import start_sglang
    from eyrie_workers.machine import ProcessorTime
    adopt_orphans()
    before = ProcessorTime.now()
    server = start_sglang((), Path(sys.argv[1]), prefix=(sys.executable, "-c", sys.argv[2]))
    while "computed" not in server.log_file.read_text():
        time.sleep(0.05)
        server.check()
    server.stop(0.0)
    print(ProcessorTime.now().own_s - before.own_s)
"""
COMPUTING = r"""
import subprocess, sys, time
code = "import time\nwhile time.process_time() < 1.5: pass\nprint('computed', flush=True)\ntime.sleep(600)"
subprocess.Popen([sys.executable, "-c", code]).wait()
"""
FAILURE = """
    print("loading weights")
    print("[2026-11-21 20:00:00] Scheduler hit an exception: Traceback (most recent call last):")
    print("ValueError: topk > 1 needs page_size 1")
    print("[2026-11-21 20:00:01] Received sigquit from a child process. It usually means the child failed.")
    raise SystemExit(3)
"""


def started(path: Path, source: str, *arguments: str) -> SglangServer:
    script = path / "launcher.py"
    script.write_text(textwrap.dedent(source))
    return start_sglang(arguments, path / "server", prefix=(sys.executable, str(script)))


def gone(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" in status.read_text()
    except OSError:
        return True


def test_wait_ready_returns_the_url_and_stop_ends_the_children(tmp_path: Path) -> None:
    port = free_port()
    server = started(tmp_path, SERVER, "--host", "127.0.0.1", "--port", str(port))
    try:
        assert server.wait_ready(60.0) == f"http://127.0.0.1:{port}"
        child = int(server.log_file.read_text().split()[1])
        assert not gone(child)
    finally:
        server.stop()
    wait_for(lambda: gone(child), "the child ends with the server")
    assert not server.ready()


def test_the_time_that_killed_processes_of_a_server_computed_is_the_stages_own(tmp_path: Path) -> None:
    script = textwrap.dedent(MEASURED)
    shown = subprocess.run([sys.executable, "-c", script, str(tmp_path), COMPUTING], capture_output=True, text=True,
                           check=True, timeout=120)
    assert float(shown.stdout) >= 1.5


def test_the_error_of_a_server_that_ends_is_quoted(tmp_path: Path) -> None:
    server = started(tmp_path, FAILURE, "--port", "1")
    with pytest.raises(EngineFailed) as failed:
        server.wait_ready(60.0)
    assert "exit code 3" in failed.value.message
    assert "ValueError: topk > 1 needs page_size 1" in failed.value.message
    assert "sigquit" not in failed.value.message
    assert "launcher.py --port 1" in failed.value.hint


def test_a_server_that_is_not_ready_in_time_raises_transient(tmp_path: Path) -> None:
    server = started(tmp_path, "import time; time.sleep(600)", "--port", "1")
    try:
        with pytest.raises(Transient):
            server.wait_ready(0.3)
    finally:
        server.stop(0.0)


def test_a_python_path_is_prepended_to_the_inherited_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    script = tmp_path / "launcher.py"
    script.write_text("import os; print('path', os.environ['PYTHONPATH'], os.environ['ONE'])")
    server = start_sglang((), tmp_path / "server", prefix=(sys.executable, str(script)),
                          environment={"PYTHONPATH": "/its", "ONE": "1"})
    assert server.process.wait(60.0) == 0
    assert server.log_file.read_text().strip() == "path /its:/ours 1"
    assert merged_environment({})["PYTHONPATH"] == "/ours"
    monkeypatch.delenv("PYTHONPATH")
    assert merged_environment({"PYTHONPATH": "/its"})["PYTHONPATH"] == "/its"


def test_an_interpreter_without_eyrie_can_import_the_model_package_only(tmp_path: Path) -> None:
    root = plugin_root(tmp_path)
    assert plugin_root(tmp_path) == root
    asked = ("import importlib.util as u; import eyrie_workers.sglang.plugin as p; "
             "print(p.__doc__ is not None, u.find_spec('eyrie_api'), u.find_spec('torch'))")
    # -S: without this environment's site-packages, as in an interpreter that is not ours.
    said = subprocess.run([sys.executable, "-S", "-c", asked], env={"PYTHONPATH": root}, cwd=tmp_path, text=True,
                          capture_output=True, check=True).stdout
    assert said.split() == ["True", "None", "None"]
    # Our own interpreter, which wraps the command of the server, finds that part first, and needs none of it.
    server = start_sglang((), tmp_path / "server", environment={"PYTHONPATH": root},
                          prefix=(sys.executable, "-c", "print('began')"))
    assert server.process.wait(60) == 0, server.log_file.read_text()


@pytest.mark.parametrize(("torch", "given", "backend"), [
    ("2.11.0+cu130", None, "python"), ("2.14.1+cpu", None, None), ("2.11.0", "rust", "rust"), (None, None, None)])
def test_sglang_s_prefix_cache_is_in_python_with_another_torch_than_it_was_compiled_for(
        torch: str | None, given: str | None, backend: str | None, tmp_path: Path) -> None:
    for name, version, asks in (("sglang", "0.5.23", "Requires-Dist: torch==2.14.1\n"), ("torch", torch, "")):
        if version is not None:
            made = tmp_path / "site" / f"{name}-{version}.dist-info"
            made.mkdir(parents=True)
            (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{asks}")
    (tmp_path / "site" / "packaging").symlink_to(Path(packaging.__file__).parent)
    # As SGLang finds its plugins.
    code = ("import importlib.metadata as m, os; [p.load()() for p in m.entry_points(group='sglang.srt.plugins')]; "
            "print(os.environ.get('SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND'))")
    variables = {"PYTHONPATH": f"{plugin_root(tmp_path)}{os.pathsep}{tmp_path / 'site'}"}
    if given is not None:
        variables["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = given
    done = subprocess.run([sys.executable, "-S", "-c", code], env=variables, text=True, capture_output=True, check=True)
    assert done.stdout.strip() == str(backend)
    assert ("torch 2.11.0+cu130 is installed" in done.stderr) == (backend == "python")


def test_the_last_error_is_the_last_lines_without_an_exception(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\n\nthree\nfour\n")
    server = SglangServer(subprocess.Popen(["true"]), log)
    assert server.last_error() == "two | three | four"
    log.write_text("")
    assert server.last_error() == "no output"
    assert server.process.wait() == 0


def test_the_launcher_command_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SGLANG_PROGRAM, raising=False)
    assert launcher_command() == ("python", "-m", "sglang.launch_server")
    words = ("/opt/sglang/bin/python", "/opt/with space/serve.py")
    monkeypatch.setenv(SGLANG_PROGRAM, shlex.join(words))
    assert launcher_command() == words
