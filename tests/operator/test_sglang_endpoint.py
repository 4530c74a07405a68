"""SGLang behind an endpoint: engines and gateways whose records are missing or damaged are found, kept or stopped, and
never started twice; and acceptance is not judged by answers that were generated past their end.

The engine is a stand-in for SGLang's launcher: nothing of the endpoint's folder is in its command line, and it has a
child that ignores SIGTERM. Each of its answers is 1000 tokens, none of them drafted.
"""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from eyrie_api.clock import utc_now
from eyrie_api.contract.engine import SGLANG_PROGRAM, DraftTreeShape, EngineSpec
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.status import Condition
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.settings import Settings
from eyrie_operator.conditions import find
from eyrie_operator.embedded.endpoints import EmbeddedEndpoints, FreeMemory
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_operator.embedded.processes import (
    ENGINE_FILE,
    PORT_FILE,
    EngineRecord,
    Mark,
    adopt_engines,
    endpoint_dir,
    marked_sessions,
    running_leaders,
    spawn,
    stop_endpoints,
    stop_marked,
)
from eyrie_pipelines.processes import group_members, is_alive, wait_until
from eyrie_pipelines.run_records import read_record
from tests.api.samples import target_directory
from tests.waiting import wait_for

LIMIT_S = 180.0
LAUNCHER = """
import signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
answers = []
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer("".join(f"sglang:{name} {count}\\n" for name, count in (
            ("spec_verify_calls_total", 1000 * len(answers)), ("generation_tokens_total", 1000 * len(answers)),
            ('http_responses_total{endpoint="/v1/completions",status_code="200"}', len(answers)))))
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        answers.append(self.path)
        self.answer("{}")
    def answer(self, text):
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *_line):
        pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


class Served:
    """An endpoint that a stand-in for SGLang serves."""

    def __init__(self, directory: Path) -> None:
        self.settings = Settings(home=directory / "home")
        self.database = Database(self.settings.resolved_database_url)
        upgrade(self.database)
        self.endpoints = Endpoints(self.database)
        target = target_directory(directory / "tiny", max_position_embeddings=512)
        self.endpoints.create("default", TargetSpec(model=str(target)), EndpointServeSpec(
            engine=EngineSpec(kind="sglang"), max_concurrency=2), "tiny")
        self.keeper = EmbeddedEndpoints(self.settings, self.database, free=lambda: FreeMemory(2**40))
        self.directory = endpoint_dir(self.settings.home, "default")
        self.folder = self.directory / "engines" / "1"

    def serving(self) -> Condition:
        found = find(self.endpoints.get("default").conditions, "Serving")
        assert found is not None
        return found

    def rolled_back(self) -> tuple[str, str] | None:
        found = find(self.endpoints.get("default").conditions, "RolledBack")
        return None if found is None else (found.status, found.reason)

    def tend_until(self, holds: Callable[[], bool], keeper: EmbeddedEndpoints | None = None) -> None:
        def looked() -> bool:
            (keeper or self.keeper).reconcile("default")
            return holds()
        wait_for(looked, "it is as expected", LIMIT_S, every_s=0.1, state=lambda: self.endpoints.get("default"))

    def serve(self) -> str | None:
        self.tend_until(lambda: self.serving().status == "True")
        return self.endpoints.get("default").url

    def engine(self) -> EngineRecord:
        record = read_record(self.folder / ENGINE_FILE, EngineRecord)
        assert record is not None
        return record

    def gateway(self) -> GatewayRecord:
        record = read_record(self.directory / GATEWAY_FILE, GatewayRecord)
        assert record is not None
        return record

    def running(self) -> set[int]:
        """All processes of the endpoint: the gateway, the engine and its child."""
        return {pid for one in marked_sessions(self.directory) for pid in group_members(one.leader.pid)}

    def lose_records(self) -> None:
        (self.folder / ENGINE_FILE).unlink()
        (self.directory / GATEWAY_FILE).write_bytes(b"{\xff")
        (self.directory / PORT_FILE).write_bytes(b"")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)
    monkeypatch.setenv(SGLANG_PROGRAM, shlex.join([sys.executable, str(launcher)]))
    made = Served(tmp_path)
    yield made
    stop_marked(made.directory, 0.0)  # the child ignores SIGTERM: a pause for it would be waited out
    stop_endpoints(made.settings.home)
    made.database.close()


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    assert wait_until(lambda: process not in group_members(process), 60.0)


def test_what_runs_without_its_record_goes_on_is_not_started_twice_and_ends_when_switched_off(served: Served) -> None:
    url, engine, gateway, running = served.serve(), served.engine(), served.gateway(), served.running()
    assert len(running) == 3
    for path in (served.folder / ENGINE_FILE, served.directory / GATEWAY_FILE):
        for text in (None, b"{\xff"):
            if text is None:
                path.unlink()
            else:
                path.write_bytes(text)
            assert served.serve() == url
            assert served.running() == running
            assert (served.engine().process, served.gateway()) == (engine.process, gateway)
    # Killed between a restart and its record, a control plane leaves the record of the engine before.
    before = engine.process.model_copy(update={"started_ticks": 1})
    (served.folder / ENGINE_FILE).write_text(
        engine.model_copy(update={"process": before, "starts": 4}).model_dump_json())
    assert served.serve() == url
    assert (served.engine().process, served.engine().starts) == (engine.process, 5)
    served.lose_records()
    served.endpoints.set_desired("default", "off")
    served.tend_until(lambda: not served.running())
    assert served.serving().reason == "Off"


def test_an_engine_whose_start_was_not_recorded_is_taken_over_as_the_one_that_the_serving_one_was_stopped_for(
        tmp_path: Path) -> None:
    folder = tmp_path / "engines" / "3"
    folder.mkdir(parents=True)
    process = spawn(["sleep", "600"], Mark(folder=str(folder), alone=True), folder / "engine.log")
    try:
        # The kernel reports the start of a program shortly before /proc shows its environment.
        assert wait_until(lambda: bool(running_leaders(tmp_path)), 60.0)
        adopt_engines(tmp_path, utc_now())
        record = read_record(folder / ENGINE_FILE, EngineRecord)
        assert record is not None
        assert (record.revision, record.process, record.starts, record.alone) == (3, process, 1, True)
    finally:
        stop_marked(tmp_path, 0.0)
    assert wait_until(lambda: not is_alive(process), 60.0)


@pytest.mark.parametrize("lost", ["the records", pytest.param("the engines' directories", marks=pytest.mark.slow),
                                  "the endpoint's directory"])
def test_down_stops_every_process_whatever_is_lost(served: Served, lost: str) -> None:
    served.serve()
    if lost == "the records":
        served.lose_records()
    else:
        shutil.rmtree(served.directory if "endpoint" in lost else served.folder.parent)
    assert len(served.running()) == 3
    stop_endpoints(served.settings.home)
    assert not served.running()


def test_children_of_a_killed_engine_are_stopped_before_the_next_one_starts(served: Served) -> None:
    served.serve()
    before, killed = served.running(), served.engine().process
    end(killed.pid)
    served.tend_until(lambda: is_alive(served.engine().process))
    assert served.running() & before == {served.gateway().process.pid}


def test_a_damaged_port_number_is_written_again_and_leaves_no_condition_stale(served: Served) -> None:
    url, port = served.serve(), served.directory / PORT_FILE
    number = port.read_text()
    for text in (b"", b"\xff\n", b"70000\n", b"-1\n"):
        port.write_bytes(text)
        served.keeper.reconcile("default")
        assert port.read_text() == number
    port.write_bytes(b"")
    end(served.engine().process.pid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SGLANG_PROGRAM, "false")  # the next engine cannot be healthy yet, however late it is looked at
        served.keeper.reconcile("default")
    assert served.serving().status != "True"
    port.write_bytes(b"")
    end(served.gateway().process.pid)
    assert served.serve() == url  # by the record of the gateway that has ended


def test_answers_past_their_end_leave_a_window_unjudged_and_the_next_one_is_judged_again(served: Served) -> None:
    use = DrafterUse(setting=Setting(method="ngram", tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4)))
    served.endpoints.propose("default", job_id=None, checkpoint=None, use=use, tau=3.0, reason="better")
    url = served.serve()
    later = EmbeddedEndpoints(served.settings, served.database, clock=lambda: utc_now() + timedelta(minutes=2))
    windows = Histories(served.database)

    def ask(**fields: bool) -> None:
        body = {"model": "tiny", "prompt": "x", **fields}
        assert httpx.post(f"{url}/completions", json=body, timeout=60).status_code == 200

    ask(ignore_eos=True)
    ask()
    served.keeper.reconcile("default")
    served.tend_until(lambda: bool(windows.read("default", kind="window").items), later)
    (window,) = windows.read("default", kind="window").items
    assert set(window.figures) == {"requests", "tokens", "seconds"}
    seen = served.endpoints.get("default")
    assert (seen.active_revision, seen.candidate_revision) == (2, None)
    ask()
    served.tend_until(lambda: served.rolled_back() == ("True", "AcceptanceCollapsed"), later)


def test_a_client_that_sends_what_sglang_answers_with_500_gets_400_and_sglang_never_sees_it(served: Served) -> None:
    url, metrics = served.serve(), f"{served.engine().url}/metrics"
    before = httpx.get(metrics, timeout=60).text
    for value in (r'"\ud800"', "[" * 5000 + "]" * 5000, "9" * 5000):
        answer = httpx.post(f"{url}/completions", content=f'{{"model": "tiny", "prompt": {value}}}',
                            headers={"content-type": "application/json"}, timeout=60)
        assert answer.status_code == 400, value[:20]
    assert httpx.get(metrics, timeout=60).text == before
    assert httpx.post(f"{url}/completions", json={"model": "tiny", "prompt": "x"}, timeout=60).status_code == 200
    assert httpx.get(metrics, timeout=60).text != before
