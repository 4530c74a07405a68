"""How an endpoint's engines are started and read, whichever engine it is."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from eyrie_api.contract.engine import SGLANG_PROGRAM, DraftTreeShape, EngineSpec
from eyrie_api.contract.serving import EndpointServeSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import OFF, DrafterUse, OperatingMap, OperatingPoint, Setting
from eyrie_api.database.endpoints import Serving
from eyrie_api.database.engine import Database
from eyrie_api.database.migrations import upgrade
from eyrie_api.errors import ArtifactCorrupt
from eyrie_api.settings import Settings
from eyrie_operator.embedded.processes import engine_argv, read_counters
from eyrie_operator.endpoints.records import EndpointRecords
from eyrie_pipelines.processes import wait_until
from eyrie_workers.sglang.profiles import requests_that_fit
from tests.api.samples import benchmark_report, finish_stage, target_directory

CHAIN = Setting(tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4))

EMBEDDED = """# HELP eyrie_drafted_rounds_total x
eyrie_verify_rounds_total 900.0
eyrie_generated_tokens_total 1210.0
eyrie_drafted_rounds_total 200.0
eyrie_drafted_round_tokens_total 500.0
eyrie_accepted_tokens_total{position="1"} 9.0
"""
SGLANG = """sglang:spec_verify_calls_total{model_name="m"} 200.0
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 450.0
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 50.0
sglang:spec_accept_length{model_name="m"} 2.5
"""


class Metrics(ThreadingHTTPServer):
    """Says what it was given."""

    daemon_threads = True
    text = ""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Metrics)
        body = self.server.text.encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    server = Metrics(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As far as a launch line looks."""
    return target_directory(tmp_path_factory.mktemp("endpoint") / "tiny", max_position_embeddings=512)


@pytest.mark.parametrize("text", [EMBEDDED, SGLANG])
def test_rounds_and_tokens_are_read_from_either_engine(metrics: Metrics, text: str) -> None:
    metrics.text = text
    def is_read() -> bool:  # not in time on a machine that is held up
        counters = read_counters(f"http://127.0.0.1:{metrics.server_address[1]}")
        return counters is not None and (counters.rounds, counters.tokens) == (200.0, 500.0)

    assert wait_until(is_read, 60.0)


def test_an_engine_decodes_by_its_map_where_it_can_follow_one(target: Path) -> None:
    serving = Serving(TargetSpec(model=str(target)), EndpointServeSpec(max_concurrency=3))
    points = tuple(OperatingPoint(concurrency=load, setting=setting, speedup=1.0, tokens_per_s=1.0, measured=True)
                   for load, setting in ((1, CHAIN), (4, OFF)))
    use = DrafterUse(drafter_dir="/d", setting=CHAIN, map=OperatingMap(points=points))
    line = engine_argv(serving, use, "m", Path("/r/ready.json"))
    assert DrafterUse.model_validate_json(line[line.index("--use") + 1]) == use
    assert line[line.index("--max-concurrency") + 1] == "3"
    assert "--use" not in engine_argv(serving, DrafterUse(), "m", Path("/r/ready.json"))


def test_an_engine_and_its_keeper_have_the_endpoint_s_time_for_the_last_answers(target: Path, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    database = Database(settings.resolved_database_url)
    upgrade(database)
    records = EndpointRecords(settings, database)
    made = records.endpoints.create("default", TargetSpec(model=str(target)), EndpointServeSpec(drain_s=42.5), "tiny")
    serving = records.endpoints.serving("default")
    line = engine_argv(serving, DrafterUse(), "tiny", tmp_path / "ready.json")
    assert line[line.index("--drain-s") + 1] == "42.5"
    assert records.policy(made, serving).drain_s == 42.5
    database.close()


def test_an_engine_is_not_started_with_a_drafter_that_differs_from_its_manifest(target: Path, tmp_path: Path) -> None:
    stage = tmp_path / "stages" / "train" / "a"
    weights = "checkpoints/c/model.safetensors"
    finish_stage(stage, "benchmark", benchmark_report("c", {"chat": (2.0,)}), {weights: b"weights"}, "j")
    serving = Serving(TargetSpec(model=str(target)), EndpointServeSpec())
    use = DrafterUse(drafter_dir=str(stage / "checkpoints/c"), setting=CHAIN)
    assert engine_argv(serving, use, "m", tmp_path / "ready.json")
    (stage / weights).write_bytes(b"weightz")
    with pytest.raises(ArtifactCorrupt):
        engine_argv(serving, use, "m", tmp_path / "ready.json")


def test_a_sglang_engine_says_where_it_will_listen_and_becomes_the_launcher(target: Path, tmp_path: Path) -> None:
    """The arguments of the launcher, with `echo` in its place."""
    served = EndpointServeSpec.model_validate({"max_concurrency": 3, "engine": {
        "kind": "sglang", "tp_size": 2, "sglang_arguments": {"chunked_prefill_size": 128}}})
    serving = Serving(TargetSpec(model=str(target)), served)
    use = DrafterUse(setting=Setting(method="ngram", tree=CHAIN.tree))
    ready = tmp_path / "ready.json"
    done = subprocess.run(engine_argv(serving, use, "tiny", ready), env={**os.environ, SGLANG_PROGRAM: "echo"},
                          timeout=120, capture_output=True, text=True, check=True)
    port = json.loads(ready.read_text())["url"].removeprefix("http://127.0.0.1:")
    assert f"--host 127.0.0.1 --port {port} " in done.stdout
    assert f"--model-path {target} --served-model-name tiny" in done.stdout
    assert "--max-running-requests 3" in done.stdout
    assert "--tp-size 2" in done.stdout
    assert "--chunked-prefill-size 128" in done.stdout
    assert "NGRAM" in done.stdout
    assert "--enable-metrics" in done.stdout


def test_without_a_limit_sglang_serves_as_many_requests_as_its_memory_holds(target: Path, tmp_path: Path) -> None:
    served = EndpointServeSpec(engine=EngineSpec(kind="sglang"))
    argv = engine_argv(Serving(TargetSpec(model=str(target)), served), DrafterUse(), "tiny", tmp_path / "ready.json")
    assert "--max-concurrency" not in argv
    assert requests_that_fit(40 * 2**30, 128 * 2**10, 131_072) == 80
    assert requests_that_fit(40 * 2**30, 128 * 2**10, 1024) == 256
    assert requests_that_fit(0, 128 * 2**10, 1024) == 1
