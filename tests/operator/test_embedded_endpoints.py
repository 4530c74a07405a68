"""An endpoint tended on one machine: real rows, a real gateway, real engines on a tiny target."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from eyrie_api.clock import utc_now
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.promotion import CanarySpec, DriftSpec, PromotionPolicy
from eyrie_api.contract.serving import EndpointServeSpec, ServeSpec
from eyrie_api.contract.status import Endpoint, Revision
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import OFF, DrafterUse, OperatingMap, OperatingPoint, Setting
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.planning.resolve import derive
from eyrie_api.processes import free_port
from eyrie_api.settings import Settings
from eyrie_operator.conditions import find
from eyrie_operator.embedded import endpoints
from eyrie_operator.embedded.endpoints import EmbeddedEndpoints, FreeMemory
from eyrie_operator.embedded.gateway import GATEWAY_FILE, GatewayRecord
from eyrie_operator.embedded.processes import (
    ENGINE_FILE,
    EngineRecord,
    endpoint_dir,
    list_engines,
    read_counters,
    resolve_target,
    stop_endpoints,
)
from eyrie_operator.embedded.routing import ROUTE_FILE, RouteRecord
from eyrie_operator.endpoints.engine_metrics import EngineCounters
from eyrie_operator.endpoints.plan import MIN_ROUNDS
from eyrie_operator.endpoints.records import retraining_job
from eyrie_operator.jobs.observation import observe_serving
from eyrie_pipelines.processes import is_alive, wait_until
from eyrie_pipelines.run_records import read_record
from tests.api.samples import benchmark_report, finish_stage
from tests.waiting import wait_for
from tests.workers.engines.conftest import drafter, target
from tests.workers.engines.test_server import metric

__all__ = ["drafter", "target"]

LIMIT_S = 180.0
CHAIN = DraftTreeShape(num_steps=2, top_k=1, num_draft_tokens=3)
LONG_TOKENS = 400
"""An answer that takes about a second, in which the metrics are read many times."""


class Harness:
    """One home with one endpoint, and the job its drafters come from."""

    def __init__(self, home: Path, target: Path, policy: PromotionPolicy | None = None) -> None:
        self.settings = Settings(home=home)
        self.database = Database(self.settings.resolved_database_url)
        upgrade(self.database)
        self.endpoints = Endpoints(self.database)
        self.keeper = EmbeddedEndpoints(self.settings, self.database)
        self.directory = endpoint_dir(home, "default")
        self.jobs, self.histories = Jobs(self.database), Histories(self.database)
        self.serve_spec = EndpointServeSpec(max_concurrency=2, record_prompts=100, health_timeout_s=LIMIT_S)
        self.target = TargetSpec(model=str(target))
        self.endpoints.create("default", self.target, self.serve_spec, "tiny")
        self.submit(policy or PromotionPolicy(canary=CanarySpec(shares=(0.5,), min_requests=2, max_step_s=2.0)))

    def submit(self, policy: PromotionPolicy) -> None:
        """The job that drafters are proposed from is another one now."""
        self.job = self.jobs.submit(derive(JobSpec(
            target=self.target, data=DataSpec(sources=(DataSource(path="chats.jsonl"),)), promotion=policy,
            serve=ServeSpec(max_concurrency=2, record_prompts=100, health_timeout_s=LIMIT_S))))

    def tend_until(self, holds: Callable[[Endpoint], bool]) -> Endpoint:
        def looked() -> bool:
            self.keeper.reconcile("default")
            return holds(self.endpoints.get("default"))
        # At longer intervals than others wait: a look costs 10 ms of the cores on which the engines start.
        wait_for(looked, "it is as expected", LIMIT_S, every_s=0.1, state=lambda: self.endpoints.get("default"))
        return self.endpoints.get("default")

    def serve(self, revision: int) -> Endpoint:
        return self.tend_until(lambda seen: seen.active_revision == revision and is_serving(seen))

    def propose(self, drafter: Path, tau: float = 1.0) -> Revision:
        return self.endpoints.propose("default", job_id=self.job.id, checkpoint="c1", tree=CHAIN,
                                      drafter_dir=str(drafter), reason="better", tau=tau)

    def events(self, *kinds: str) -> list[tuple[str, int | None, str]]:
        return [(one.kind, one.revision, one.reason) for one in self.histories.read("default").items
                if one.kind in kinds]

    def engines(self) -> dict[int, EngineRecord]:
        return {record.revision: record for _, record in list_engines(self.directory)}

    def route(self) -> RouteRecord:
        record = read_record(self.directory / ROUTE_FILE, RouteRecord)
        assert record is not None
        return record

    def gateway(self) -> GatewayRecord:
        record = read_record(self.directory / GATEWAY_FILE, GatewayRecord)
        assert record is not None
        return record

    def close(self) -> None:
        stop_endpoints(self.settings.home)
        self.database.close()


@pytest.fixture
def harness(tmp_path: Path, target: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "home", target)
    yield made
    made.close()


def test_without_memory_for_two_engines_the_old_one_is_stopped_first_and_the_gap_recorded(
        harness: Harness, drafter: Path) -> None:
    harness.serve(1)
    [old] = harness.engines().values()
    harness.keeper = EmbeddedEndpoints(harness.settings, harness.database, free=lambda: FreeMemory(0))
    harness.propose(drafter)
    harness.tend_until(lambda _: 2 in harness.engines())
    assert not is_alive(old.process)
    assert harness.engines()[2].alone
    assert harness.route().on_hold  # the gateway holds requests
    harness.serve(2)
    assert (harness.route().revision, harness.route().on_hold) == (2, False)
    assert ("gap", 2, "ReplacingEngine") in harness.events("gap")
    harness.tend_until(lambda _: list(harness.engines()) == [2])


def is_serving(endpoint: Endpoint) -> bool:
    serving, recording = (find(endpoint.conditions, kind) for kind in ("Serving", "Recording"))
    assert recording is not None
    return serving is not None and serving.status == "True"


def ask(url: str | None, max_tokens: int = 8) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=LIMIT_S)


def test_a_promotion_replaces_the_engine_behind_the_url_without_a_failed_request(
        harness: Harness, drafter: Path) -> None:
    url = harness.serve(1).url
    first = ask(url)
    assert first.headers["x-eyrie-revision"] == "1"
    harness.submit(PromotionPolicy(canary=CanarySpec(shares=(0.5,), min_requests=2, max_step_s=600.0)))
    harness.propose(drafter)
    answers: list[httpx.Response] = []
    done = threading.Event()

    def keep_asking() -> None:
        while not done.is_set():
            answers.append(ask(url))

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        assert harness.serve(2).url == url
        harness.tend_until(lambda _seen: set(harness.engines()) == {2})
    finally:
        done.set()
        asking.join(LIMIT_S)
    assert {answer.status_code for answer in answers} == {200}
    last = ask(url)
    assert last.headers["x-eyrie-revision"] == "2"
    assert last.json()["choices"] == first.json()["choices"]
    # Half of the requests went to the new engine before all of them did.
    assert harness.events("canary", "activated") == [
        ("activated", 1, "Activated"), ("canary", 2, "CanaryStep"), ("activated", 2, "Activated")]
    assert "2" in {answer.headers["x-eyrie-revision"] for answer in answers}

    # A drafter that cannot be loaded costs nothing: the engine that serves goes on serving.
    harness.propose(Path("/nowhere/drafter"))
    seen = harness.tend_until(lambda seen: seen.candidate_revision is None)
    assert seen.active_revision == 2
    rolled_back = find(seen.conditions, "RolledBack")
    assert rolled_back is not None
    assert rolled_back.reason == "EngineDied"
    assert "/nowhere/drafter" in rolled_back.message
    observed = observe_serving(seen, 3)
    assert (observed.state, observed.reason) == ("rolled-back", "EngineDied")
    assert "/nowhere/drafter" in observed.message
    assert observe_serving(seen, 2).state == "serving"
    assert ask(url).headers["x-eyrie-revision"] == "2"


@pytest.mark.slow
def test_processes_outlive_the_one_who_tends_them_and_are_restarted_when_they_die(
        harness: Harness, target: Path) -> None:
    url = harness.serve(1).url
    engine, gateway = harness.engines()[1], harness.gateway()
    harness.keeper = EmbeddedEndpoints(harness.settings, harness.database)  # another control plane
    harness.serve(1)
    assert harness.engines()[1].process == engine.process
    assert harness.gateway() == gateway
    # A control plane that is killed between start and record leaves no record; a damaged one is none either.
    folder = harness.directory / "engines" / "1"
    (folder / ENGINE_FILE).unlink()
    harness.serve(1)
    assert harness.engines()[1].process == engine.process
    for damaged in (folder / ENGINE_FILE, harness.directory / ROUTE_FILE, harness.directory / GATEWAY_FILE):
        damaged.write_bytes(b"{\xff")
        harness.serve(1)
        assert (harness.engines()[1].process, harness.gateway().process) == (engine.process, gateway.process)
        assert ask(url).status_code == 200
    # Neither is one with another digit, which would be valid JSON.
    for record, was in ((harness.directory / GATEWAY_FILE, f'"port": {gateway.port}'),
                        (folder / ENGINE_FILE, f'"pid": {engine.process.pid}')):
        text = record.read_text()
        assert was in text
        record.write_text(text.replace(was, f'{was[:-1]}{(int(was[-1]) + 1) % 10}'))
        assert harness.serve(1).url == url
        assert (harness.engines()[1].process, harness.gateway()) == (engine.process, gateway)
    # With the record and the ready file both damaged nobody knows where the engine is: it is started again.
    for name in (ENGINE_FILE, "ready.json"):
        (folder / name).write_bytes(b"{\xff")
    harness.keeper.reconcile("default")
    assert harness.engines()[1].process == engine.process
    later = timedelta(seconds=LIMIT_S + 60)
    harness.keeper = EmbeddedEndpoints(harness.settings, harness.database, clock=lambda: utc_now() + later)
    assert harness.serve(1).url == url
    assert not is_alive(engine.process)
    assert ask(url).status_code == 200
    engine = harness.engines()[1]
    os.kill(engine.process.pid, signal.SIGKILL)
    os.kill(gateway.process.pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(engine.process) and not is_alive(gateway.process), 60.0)
    seen = harness.tend_until(lambda seen: is_serving(seen) and is_alive(harness.engines()[1].process))
    assert seen.url == url
    assert ask(url).status_code == 200
    harness.endpoints.set_desired("default", "off")
    last = harness.engines()[1]
    harness.tend_until(lambda _seen: not harness.engines() and not is_alive(last.process))
    with pytest.raises(httpx.ConnectError):
        ask(url)
    (harness.directory / "port").write_text(f"{free_port()}\n")  # the row has the endpoint's URL, and so its port
    harness.tend_until(lambda seen: seen.url == url)
    harness.endpoints.set_desired("default", "on")
    assert harness.serve(1).url == url
    assert (harness.directory / "port").read_text() == f"{gateway.port}\n"


@pytest.mark.slow
def test_collapsed_acceptance_brings_the_revision_before_back(harness: Harness, drafter: Path) -> None:
    harness.serve(1)
    harness.propose(drafter, tau=50.0)  # benchmarked far above what random guesses reach
    url = harness.serve(2).url
    assert ask(url, max_tokens=3 * MIN_ROUNDS).status_code == 200
    seen = harness.serve(1)
    rolled_back = find(seen.conditions, "RolledBack")
    assert ask(url).headers["x-eyrie-revision"] == "1"
    assert rolled_back is not None
    assert (rolled_back.status, rolled_back.reason) == ("True", "AcceptanceCollapsed")
    assert "proven 50.00" in rolled_back.message


def test_requests_of_the_target_without_a_drafter_are_recorded_once_though_the_engine_then_does_not_respond(
        harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    url = harness.serve(1).url
    for _ in range(3):
        assert ask(url).status_code == 200
    readings = list[EngineCounters | None]()

    def every_second_fails(engine: str) -> EngineCounters | None:
        readings.append(None if readings and readings[-1] is not None else read_counters(engine))
        return readings[-1]

    later = EmbeddedEndpoints(harness.settings, harness.database, clock=lambda: utc_now() + timedelta(minutes=2))

    def read_on() -> bool:
        later.reconcile("default")
        windows = harness.histories.read("default", kind="window").items
        return bool(windows) and len(readings) >= 8

    with monkeypatch.context() as patch:
        patch.setattr(endpoints, "read_counters", every_second_fails)
        assert wait_until(read_on, LIMIT_S)
    (window,) = harness.histories.read("default", kind="window").items
    assert window.revision == 1
    assert set(window.figures) == {"requests", "tokens", "seconds"}
    assert window.figures["requests"] >= 3.0
    assert window.figures["tokens"] >= 3 * 8
    assert window.figures["seconds"] >= 60.0
    harness.keeper.reconcile("default")
    assert len(harness.histories.read("default", kind="window").items) == 1, "nobody has asked since"


def test_drifted_traffic_starts_one_job_on_what_users_asked_lately(harness: Harness, drafter: Path) -> None:
    # What random guesses reach is below 0.9 x 1.9, and above the half of it that would be a collapse.
    drift = DriftSpec(ratio=0.9, windows=2, window_s=0.0, action="retrain")
    harness.submit(PromotionPolicy(canary=CanarySpec(shares=()), drift=drift))
    harness.endpoints.propose("default", job_id=harness.job.id, checkpoint="base-step-10", tree=CHAIN,
                              drafter_dir=str(drafter), reason="better", tau=1.9)
    url = harness.serve(2).url

    def asked(_seen: Endpoint) -> bool:
        assert ask(url, max_tokens=2 * MIN_ROUNDS).status_code == 200
        return bool(harness.events("retraining"))

    harness.tend_until(asked)
    for _ in range(2):
        harness.keeper.reconcile("default")
    assert harness.events("drift", "retraining", "rolled-back") == [
        ("drift", 2, "TrafficDrifted"), ("retraining", 2, "RetrainingStarted")]
    (window,) = harness.histories.latest(["default"], ["window"])
    assert window.figures["requests"] >= 1.0
    assert window.figures["seconds"] > 0.0
    started = harness.jobs.list().items[0]
    assert started.spec.labels == {"retrained-from": harness.job.id}
    assert started.spec.drafter.init_from == str(drafter)
    (source,) = started.spec.data.sources
    assert '"content": "hello"' in Path(source.path).read_text()
    (offered,) = harness.histories.latest(["default"], ["drift"])
    assert JobSpec.model_validate(offered.data["job"]) == started.spec


def test_the_candidate_of_a_sweep_that_serves_is_trained_again_on_traffic_alone(tmp_path: Path) -> None:
    mixes = [{"a": 1, "b": 1}, {"a": 3, "b": 1}]
    spec = JobSpec.model_validate({
        "target": {"model": "quickstart"}, "data": {"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]},
        "sweep": {"axes": [{"field": "data.mix", "values": mixes}], "families": ["eagle3", "medusa"]}})
    promoted, traffic = derive(spec), str(tmp_path / "t.jsonl")
    named = {candidate.drafter.family: candidate.name for candidate in promoted.candidates}
    job = retraining_job("j-1", promoted, "chat", traffic, f"{named['eagle3']}-step-20", tmp_path / "head")
    warm = job.spec
    assert [(candidate.name, candidate.mix) for candidate in job.candidates] == [("base", None)]
    assert JobSpec.model_validate(warm.model_dump(mode="json")) == warm  # a job that would be accepted
    assert (warm.sweep.axes, warm.data.mix, warm.drafter.init_from) == ((), None, str(tmp_path / "head"))
    assert [source.path for source in warm.data.sources] == [traffic]
    cold = retraining_job("j-1", promoted, "chat", traffic, f"{named['medusa']}-step-20", tmp_path / "head").spec
    assert (cold.drafter.family, cold.drafter.init_from) == ("medusa", None)  # cannot be continued
    elsewhere = retraining_job("j-1", promoted, "chat", traffic, f"{named['eagle3']}-step-20").spec
    assert elsewhere.drafter.init_from is None


def test_an_endpoint_follows_its_operating_map_under_load_and_shows_the_depth_in_use(
        harness: Harness, drafter: Path) -> None:
    plain = ask(harness.serve(1).url, LONG_TOKENS).json()["choices"]
    points = tuple(OperatingPoint(concurrency=users, setting=setting, speedup=1.0, tokens_per_s=1.0, measured=True)
                   for users, setting in ((1, Setting(tree=CHAIN)), (2, OFF)))
    use = DrafterUse(drafter_dir=str(drafter), setting=Setting(tree=CHAIN), map=OperatingMap(points=points))
    harness.submit(PromotionPolicy(canary=CanarySpec(shares=())))
    harness.endpoints.propose("default", job_id=harness.job.id, checkpoint="c1", use=use, reason="better", tau=1.0)
    url = str(harness.serve(2).url)
    with httpx.Client(base_url=url.removesuffix("/v1")) as client, ThreadPoolExecutor(2) as users:
        def in_use() -> tuple[float, float]:
            return metric(client, "eyrie_num_steps"), metric(client, "eyrie_num_draft_tokens")

        assert ask(url, LONG_TOKENS).json()["choices"] == plain
        assert in_use() == (CHAIN.num_steps, CHAIN.num_draft_tokens)
        together = [users.submit(ask, url, LONG_TOKENS) for _ in range(2)]
        wait_for(lambda: in_use() == (0, 1), "two requests are decoded without drafting", LIMIT_S)
        assert [answer.result().json()["choices"] for answer in together] == [plain, plain]
        assert ask(url).status_code == 200
        assert in_use() == (CHAIN.num_steps, CHAIN.num_draft_tokens), "alone again"


@pytest.mark.slow
def test_an_engine_killed_on_trial_is_rejected_and_no_user_notices(harness: Harness, drafter: Path) -> None:
    url = harness.serve(1).url
    harness.submit(PromotionPolicy(canary=CanarySpec(shares=(0.5,), min_requests=1_000, max_step_s=600.0)))
    harness.propose(drafter)
    harness.tend_until(lambda _seen: bool(harness.events("canary")))
    trial = harness.engines()[2]
    os.kill(trial.process.pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(trial.process), 60.0)
    assert {ask(url).headers["x-eyrie-revision"] for _ in range(4)} == {"1"}
    seen = harness.tend_until(lambda seen: seen.candidate_revision is None and set(harness.engines()) == {1})
    assert (seen.active_revision, seen.revisions[1].state) == (1, "rejected")
    assert (seen.revisions[1].rejected_reason or "").startswith("EngineDied: ")


@pytest.mark.slow
def test_no_error_of_a_client_counts_against_a_canary(harness: Harness, drafter: Path) -> None:
    url = harness.serve(1).url
    harness.submit(PromotionPolicy(canary=CanarySpec(shares=(0.9,), min_requests=1_000, max_step_s=600.0)))
    harness.propose(drafter)
    harness.tend_until(lambda _seen: bool(harness.events("canary")))
    chat = "/chat/completions"
    user = {"role": "user", "content": "Hi"}
    deep: object = "x"
    for _ in range(100):
        deep = [deep]
    bodies: list[object] = [
        b"{", b"[]", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', {"messages": []}, {"messages": "x"},
        {"messages": [user | {"role": "robot"}]}, {"messages": [user | {"wieght": 1}]},
        {"messages": [user], "temprature": 1}, {"messages": [user], "max_tokens": 10**6},
        {"messages": [user | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        {"messages": [user | {"content": "long " * 4000}]}, {"messages": [user], "model": "another"},
        {"messages": [user], "tools": deep}, {"messages": [user], "response_format": {"type": "json_object"}}]
    answered: list[object] = [  # odd, and no error
        {"messages": [user | {"content": "\ue0000\ue001 \ue0009\ue001 <|im_end|>"}], "max_tokens": 2},
        {"messages": [user], "max_tokens": 2, "chat_template_kwargs": {"\ue0007\ue001": "<|im_end|>"}},
        {"messages": [user], "max_tokens": 2, "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"\ue0003\ue001": "<|im_start|>"}}}]}]
    with httpx.Client(base_url=url or "", timeout=60.0) as client:
        def status(body: object) -> int:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            return client.post(chat, **content, headers={"Content-Type": "application/json"}).status_code

        for _ in range(3):
            assert {status(body) for body in bodies} <= {400, 404, 413, 422}
            assert {status(body) for body in answered} == {200}
            assert client.get(chat).status_code in (404, 405)
    harness.keeper.reconcile("default")
    assert harness.endpoints.get("default").candidate_revision == 2
    assert not harness.events("rejected", "rolled-back")


@pytest.mark.slow
def test_an_endpoint_whose_drafter_is_damaged_serves_without_one_and_an_event_says_so(
        harness: Harness, drafter: Path, tmp_path: Path) -> None:
    stage = tmp_path / "stages" / "train" / "a"
    files = {f"checkpoints/c/{one.name}": one.read_bytes() for one in drafter.iterdir()}
    finish_stage(stage, "benchmark", benchmark_report("c", {"chat": (2.0,)}), files, "j")
    harness.serve(1)
    harness.propose(stage / "checkpoints" / "c")
    harness.serve(2)
    next((stage / "checkpoints/c").glob("*.safetensors")).write_bytes(b"damaged")
    serving = harness.engines()[2]
    os.kill(serving.process.pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(serving.process), 60.0)
    seen = harness.serve(1)  # nobody asks for it
    answer = ask(seen.url)
    assert answer.status_code == 200, answer.text
    assert harness.events("rolled-back") == [("rolled-back", 2, "DrafterDamaged")]
    rolled_back = find(seen.conditions, "RolledBack")
    assert rolled_back is not None
    assert "eyrie retry" in rolled_back.message
    assert (seen.revisions[0].rejected_reason, answer.headers["x-eyrie-revision"]) == (None, "1")


def test_no_engine_opens_files_that_its_endpoints_project_may_not_read(tmp_path: Path, target: Path) -> None:
    # A link of the target's directory was changed after the job was promoted.
    theirs, model = tmp_path / "home/jobs/theirs/rows.jsonl", tmp_path / "model"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("{}")
    model.mkdir()
    (model / "config.json").symlink_to(theirs)
    harness = Harness(tmp_path / "home", model)
    try:
        seen = harness.tend_until(lambda seen: find(seen.conditions, "Serving") is not None)
        condition = find(seen.conditions, "Serving")
        assert condition is not None
        assert (condition.status, condition.reason) == ("False", "InvalidInput")
        assert "not of your project" in condition.message
        assert harness.engines() == {}
        # The drafter of another job's directory, by the same rules.
        (model / "config.json").unlink()
        harness.propose(theirs.parent)
        seen = harness.tend_until(lambda seen: seen.revisions[-1].state == "rejected")
        assert "the drafter" in str(seen.revisions[-1].rejected_reason)
        assert harness.engines() == {}
    finally:
        harness.close()


def test_a_port_in_use_is_reported_on_the_endpoint(tmp_path: Path, target: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        harness = Harness(tmp_path / "home", target)
        harness.endpoints.create("other", TargetSpec(model=str(target)), EndpointServeSpec(port=port), "tiny")
        harness.keeper.reconcile("other")
        seen = harness.endpoints.get("other")
        serving = find(seen.conditions, "Serving")
        assert serving is not None
        assert (serving.status, serving.reason) == ("False", "PortInUse")
        assert str(port) in serving.message
        assert seen.candidate_revision is None
        harness.close()


def test_a_target_is_found_by_its_directory_and_by_the_quickstart_name(target: Path) -> None:
    assert resolve_target(TargetSpec(model=str(target))) == target
    assert (resolve_target(TargetSpec(model="quickstart")) / "config.json").exists()
