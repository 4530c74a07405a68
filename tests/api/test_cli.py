"""The client verbs against a real API on a real port: words, JSON, exit codes, and a watch that outlives the server."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner, Result

from eyrie_api.cli.commands import absolute_paths, app
from eyrie_api.cli.spec import comparison
from eyrie_api.client import Client
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.plan import StagePlan
from eyrie_api.contract.status import Condition, JobStatus, Phase, Progress, StageStatus
from eyrie_api.database.endpoint_history import Histories
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.jobs import JobFilter, Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.database.results import Results
from eyrie_api.decisions.leaderboard import MeasuredCheckpoint
from eyrie_api.decisions.promotion import decide
from eyrie_api.http.server import create_app
from eyrie_api.planning.resolve import derive
from eyrie_api.processes import free_port
from eyrie_api.settings import Settings
from tests.api.samples import (
    benchmark_report,
    job_spec,
    planned,
    record_event,
    record_metrics,
    set_stage,
    target_directory,
)
from tests.tiny import chats_file, tiny_target
from tests.waiting import wait_for

MEASURED = tuple(name for name, row in FAMILIES.items() if row.quickstart_speedup is not None)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("cli") / "tiny")


@dataclass
class Plane:
    """The API over one database, on one port, which may be closed and opened again."""

    settings: Settings
    database: Database
    server: uvicorn.Server | None = None
    thread: threading.Thread | None = None
    streamed: threading.Event = field(default_factory=threading.Event)
    """A stream of events was asked for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.database)

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(self.database)

    @property
    def histories(self) -> Histories:
        return Histories(self.database)

    def open(self) -> None:
        api = create_app(self.settings, database=self.database)

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            async def sending(message: Any) -> None:
                await send(message)
                if scope.get("path", "").endswith("/events") and message.get("body"):
                    self.streamed.set()

            await api(scope, receive, sending)

        self.server = uvicorn.Server(uvicorn.Config(
            noting, host="127.0.0.1", port=self.settings.port, log_level="error", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        server = self.server
        wait_for(lambda: server.started, "the server answers")

    def close(self) -> None:
        assert self.server is not None
        assert self.thread is not None
        self.server.should_exit = True
        self.thread.join()


@dataclass
class Eyrie:
    """The command, pointed at one plane."""

    plane: Plane
    target: Path
    chats: Path
    runner: CliRunner = field(default_factory=CliRunner)

    def __call__(self, *arguments: str, **options: Any) -> Result:
        return self.runner.invoke(app, list(arguments), env={"EYRIE_SERVER": self.plane.url}, **options)

    def json(self, *arguments: str) -> Any:
        done = self(*arguments, "--json")
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    def submit(self, name: str = "mine", *more: str) -> str:
        job = self.json("train", "--target", str(self.target), "--data", str(self.chats), "--name", name, "--no-watch",
                        *more)
        return str(job["id"])


@pytest.fixture
def eyrie(tmp_path: Path, target: Path) -> Iterator[Eyrie]:
    settings = Settings(home=tmp_path / "home", port=free_port(), sse_poll_s=0.02)
    settings.home.mkdir()
    database = Database(settings.resolved_database_url)
    upgrade(database)
    plane = Plane(settings, database)
    plane.open()
    yield Eyrie(plane, target, chats_file(tmp_path / "chats.jsonl"))
    plane.close()
    database.close()


def ended(phase: Phase, *stages: StageStatus) -> JobStatus:
    now = datetime.now(UTC)
    return JobStatus(phase=phase, stages=stages, started_at=now, finished_at=now, conditions=(
        Condition(type=phase, status="True", reason="Ended", message="ended", last_transition_time=now),))


def stage(state: str, **fields: Any) -> StageStatus:
    return StageStatus.model_validate(
        {"stage": "train", "key": "base", "state": state, "started_at": datetime.now(UTC)} | fields)


def later(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_the_version_is_that_of_the_package_and_help_begins_with_training() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout) == (0, f"{version('eyrie')}\n")
    commands = CliRunner().invoke(app, ["--help"]).stdout.split("Commands")[1]
    assert commands.index("train") < commands.index("whoami")


def test_train_submits_a_job_with_absolute_paths(eyrie: Eyrie, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(eyrie.chats.parent)
    job = eyrie.json("train", "--target", str(eyrie.target), "--data", "chats.jsonl", "--no-watch", "--set",
                     "train.epochs=1")
    assert job["spec"]["target"]["model"] == str(eyrie.target)
    assert job["spec"]["data"]["sources"][0]["path"] == str(eyrie.chats)
    assert job["spec"]["train"]["epochs"] == 1
    with Client(eyrie.plane.url) as client:
        assert client.submitted(job["id"]) == {
            "target": {"model": str(eyrie.target)}, "data": {"sources": [{"path": str(eyrie.chats)}]},
            "train": {"epochs": 1}}, "the document that the command has made of its options"
    (eyrie.chats.parent / "head").mkdir()
    resolved = absolute_paths(JobSpec.model_validate({
        "target": {"model": "org/name"}, "data": {"sources": [{"path": "chats.jsonl"}]},
        "drafter": {"init_from": "./head"}, "promotion": {"drift": {"traffic_file": "log.jsonl"}},
        "sweep": {"axes": [{"field": "drafter.init_from", "values": ["head", "job:01", None]}]}}), eyrie.plane.url)
    here = eyrie.chats.parent
    assert resolved.drafter.init_from == str(here / "head")
    assert resolved.sweep.axes[0].values == (str(here / "head"), "job:01", None)
    assert (resolved.target.model, resolved.promotion.drift.traffic_file) == ("org/name", str(here / "log.jsonl"))
    words = eyrie("train", "--target", str(eyrie.target), "--data", "chats.jsonl", "--no-watch")
    assert words.exit_code == 0
    assert "eyrie watch" in words.stdout


def test_a_comparison_is_a_job_with_every_family_that_its_engine_serves_and_the_rivals_beside_them(
        eyrie: Eyrie) -> None:
    given = ("compare", "--target", str(eyrie.target), "--data", str(eyrie.chats), "--no-watch")
    spec = eyrie.plane.jobs.get(eyrie.json(*given, "--set", "benchmark.max_new_tokens=8")["id"]).spec
    assert (spec.name, spec.sweep.families) == ("compare", MEASURED)
    assert [rival.method for rival in spec.rivals] == ["ngram", "off"]
    assert (spec.train.num_checkpoints, spec.benchmark.concurrencies, spec.serve.enabled) == (1, (1, 4), False)
    assert spec.benchmark.max_new_tokens == 8
    chosen = eyrie.json(*given, "--families", "eagle1,hydra", "--set", "train.num_checkpoints=2", "--set",
                        "rivals=['off']", "--name", "two")
    spec = eyrie.plane.jobs.get(chosen["id"]).spec
    assert (spec.name, spec.sweep.families, spec.train.num_checkpoints) == ("two", ("eagle1", "hydra"), 2)
    assert [rival.method for rival in spec.rivals] == ["off", "ngram"]
    def run() -> None:
        jobs = wait_for(lambda: eyrie.plane.jobs.list(JobFilter(name="watched")).items, "the job is there")
        report = benchmark_report("hydra-step-1", {"chat": (2.0, 1.5)})
        Results(eyrie.plane.database).record(MeasuredCheckpoint(jobs[0].id, "hydra", "tiny", False, report), "drafters")
        eyrie.plane.jobs.save_status(jobs[0].id, ended("Succeeded"))

    thread = later(run)
    watched = eyrie(*given[:-1], "--name", "watched")
    thread.join()
    assert watched.exit_code == 0, watched.stderr
    assert "hydra-step-1" in watched.stdout, "the leaderboard of the job"
    refused = eyrie(*given, "--rival", "./not-here")
    assert refused.exit_code == 65
    assert "rivals[0].path" in refused.stderr
    assert comparison(job_spec(engine={"kind": "sglang"})).sweep.families == tuple(
        name for name in MEASURED if FAMILIES[name].sglang_algorithm is not None)


def test_plan_names_its_assumptions_and_runs_nothing(eyrie: Eyrie) -> None:
    arguments = ("plan", "--target", str(eyrie.target), "--data", str(eyrie.chats))
    plan = eyrie.json(*arguments)
    assert plan["total_tokens"] > 0
    assert plan["assumptions"]
    assert "ASSUMED" in eyrie(*arguments).stdout
    assert eyrie.json("jobs")["items"] == []


def test_a_plan_of_a_job_that_would_be_refused_ends_with_another_code(
        eyrie: Eyrie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYRIE_DEVICE", "cpu")
    target = target_directory(tmp_path / "large", head_dim=65_536)  # a token's keys and values are 8 MiB
    arguments = ("--target", str(target), "--data", str(eyrie.chats), "--set", "regenerate.max_new_tokens=100000")
    shown = eyrie("plan", *arguments)
    assert shown.exit_code == 78
    assert "regenerate needs at least" in shown.stdout
    assert "Such a job is refused: see the warnings." in shown.stdout
    assert eyrie("train", *arguments, "--no-watch").exit_code == 78


def test_jobs_are_listed_by_page_and_filtered_by_phase(eyrie: Eyrie) -> None:
    ids = [eyrie.submit(f"job-{i}") for i in range(3)]
    first = eyrie.json("jobs", "--limit", "2")
    assert [job["id"] for job in first["items"]] == ids[:0:-1]
    second = eyrie.json("jobs", "--limit", "2", "--cursor", first["next_cursor"])
    assert [job["id"] for job in second["items"]] == ids[:1]
    assert eyrie.json("jobs", "--phase", "Succeeded")["items"] == []
    assert "job-2" in eyrie("jobs").stdout


def test_a_job_is_found_by_id_by_its_beginning_and_by_name(eyrie: Eyrie) -> None:
    eyrie.submit("by-name")
    job_id = eyrie.submit("by-name")
    for number in range(51):  # more than a page of newer jobs
        eyrie.plane.jobs.submit(derive(job_spec(name=f"newer-{number}")))
    for wanted in (job_id, "by-name"):
        assert eyrie.json("job", wanted)["id"] == job_id
    job_id = eyrie.submit("newest")
    for wanted in (job_id, job_id[:9], "newest"):
        assert eyrie.json("job", wanted)["id"] == job_id
    assert job_id in eyrie("job", job_id).stdout


def test_events_metrics_and_logs_of_a_job_in_words_and_as_json(eyrie: Eyrie) -> None:
    job_id = eyrie.submit()
    set_stage(eyrie.plane.jobs, job_id, stage("Running"))
    record_event(eyrie.plane.jobs, job_id, "DraftVocabularyBuilt", "320 tokens", stage="train", key="base")
    record_metrics(eyrie.plane.jobs, job_id, "train", "base", [
        ("loss", step, 2.0 / step, datetime.now(UTC)) for step in (1, 2, 3)])
    log = eyrie.plane.settings.stage_dir(job_id, "train", "base") / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("first line\n\x1b[31msecond\n")

    lines = [json.loads(line) for line in eyrie("events", job_id, "--json").stdout.splitlines()]
    assert [line["reason"] for line in lines] == ["Accepted", "DraftVocabularyBuilt"]
    assert "train/base DraftVocabularyBuilt: 320 tokens" in eyrie("events", job_id).stdout

    (series,) = eyrie.json("metrics", job_id, "--name", "loss")["items"]
    assert [point["value"] for point in series["points"]] == [2.0, 1.0, 2.0 / 3]
    assert "loss" in eyrie("metrics", job_id).stdout

    lines = [json.loads(line) for line in eyrie("logs", job_id, "--json").stdout.splitlines()]
    assert [line["line"] for line in lines] == ["first line", "\x1b[31msecond"]
    shown = eyrie("logs", job_id).stdout
    assert "first line" in shown
    assert "\x1b" not in shown  # a log does not drive the terminal
    missing = eyrie("logs", job_id, "--stage", "tune")
    assert missing.exit_code == 65
    assert "train --key base" in missing.stderr


def test_leaderboard_and_endpoints_are_lists_even_when_empty(eyrie: Eyrie) -> None:
    assert eyrie.json("leaderboard") == {"items": []}
    assert eyrie.json("endpoints") == eyrie.json("endpoints", "list") == {"items": []}
    for verb in ("leaderboard", "endpoints", "jobs"):
        assert eyrie(verb).stdout.strip()


def test_what_needs_a_person_is_listed_in_words_and_as_json(eyrie: Eyrie) -> None:
    assert eyrie.json("alerts") == {"items": []}
    assert eyrie("alerts").stdout.strip() == "Nothing needs a person."
    job_id = eyrie.submit("broken")
    eyrie.plane.jobs.save_status(job_id, JobStatus(phase="Failed"))
    set_stage(eyrie.plane.jobs, job_id, stage("Failed"))
    (item,) = eyrie.json("alerts")["items"]
    assert (item["kind"], item["job_id"], item["title"]) == ("job-failed", job_id, "Job broken failed in train")
    assert "Job broken failed in train" in eyrie("alerts").stdout


def test_a_running_job_with_a_plan_shows_its_time_left(eyrie: Eyrie) -> None:
    train = StagePlan(stage="train", tokens=1, bytes_on_disk=1, hours=200.0)
    for job in (planned(job_spec(name="with"), train), derive(job_spec(name="without"))):
        job_id = eyrie.plane.jobs.submit(job).id
        eyrie.plane.jobs.save_status(job_id, JobStatus(phase="Running"))
    assert "about 8d8h" in eyrie("job", "with").stdout
    without = eyrie("job", "without")
    assert without.exit_code == 0
    assert "time left" not in without.stdout


def test_a_target_of_the_leaderboard_may_be_a_relative_path_as_of_a_job(
        eyrie: Eyrie, monkeypatch: pytest.MonkeyPatch) -> None:
    report = benchmark_report("base-step-9", {"chat": (2.0, 1.5)})
    Results(eyrie.plane.database).record(
        MeasuredCheckpoint(eyrie.submit(), "eagle3", str(eyrie.target.resolve()), False, report), "/base-step-9")
    monkeypatch.chdir(eyrie.target.parent)
    (entry,) = eyrie.json("leaderboard", "--target", f"./{eyrie.target.name}")["items"]
    assert entry["checkpoint"] == "base-step-9"
    assert eyrie("leaderboard", "--target", "./elsewhere").exit_code == 66


def test_a_target_that_is_not_there_is_not_found_by_every_verb(eyrie: Eyrie, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(eyrie.target.parent)
    for verb in ("plan", "train"):
        for wanted in ("./elsewhere", "/no/such/model", "one/two/three"):
            missing = eyrie(verb, "--target", wanted, "--data", str(eyrie.chats), "--json")
            assert missing.exit_code == 66, missing.output
            assert "TargetNotFound" in missing.output


def test_a_file_that_is_not_there_is_named_by_the_field_or_option_that_names_it(
        eyrie: Eyrie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = tmp_path / "job.yaml"

    def refusal(verb: str, model: object, paths: list[object], *options: str) -> str:
        document.write_text(json.dumps({"target": {"model": str(model)},
                                        "data": {"sources": [{"path": str(path)} for path in paths]}}))
        done = eyrie(verb, "--file", "job.yaml", *options)
        assert done.exit_code in (65, 66), done.output
        return " ".join(done.stderr.split())

    here, chats = eyrie.target, eyrie.chats
    for verb in ("plan", "train"):
        assert "NoUsableData: data.sources[1].path ./a.jsonl: no such" in refusal(verb, here, [chats, "./a.jsonl"])
        assert "TargetNotFound: target.model ./model: no such" in refusal(verb, "./model", [chats])
        assert "NoUsableData: --data ./b.jsonl: no such" in refusal(verb, here, ["./a.jsonl"], "--data", "./b.jsonl")
        assert "TargetNotFound: --target ./other: no such" in refusal(verb, "./model", [chats], "--target", "./other")


def test_cancel_retry_and_delete(eyrie: Eyrie) -> None:
    job_id = eyrie.submit()
    assert eyrie.json("cancel", job_id)["id"] == job_id
    eyrie.plane.jobs.save_status(job_id, ended("Cancelled"))
    assert eyrie.json("retry", job_id)["status"]["attempt"] == 2
    refused = eyrie("retry", job_id, "--json")
    assert refused.exit_code == 1
    error = json.loads(refused.stderr)["error"]
    assert (error["reason"], refused.stdout) == ("Conflict", "")
    assert error["hint"]
    eyrie.plane.jobs.save_status(job_id, ended("Failed"))
    assert eyrie.json("retry", job_id, "--from", "train")["status"]["restarted_from"] == "train"
    assert eyrie("retry", job_id, "--from", "tea").exit_code == 2
    eyrie.plane.jobs.save_status(job_id, ended("Failed"))
    kept = eyrie("delete", job_id, input="n\n")
    assert kept.exit_code != 0
    assert eyrie.json("delete", job_id) == {"id": job_id, "deleted": True}
    assert eyrie("job", job_id).exit_code == 66


def test_endpoints_are_shown_switched_and_rolled_back(eyrie: Eyrie) -> None:
    eyrie.submit()
    spec = eyrie.plane.jobs.list().items[0].spec
    endpoints = eyrie.plane.endpoints
    endpoints.create("default", spec.target, spec.serve, "tiny")
    endpoints.activate("default", 1, "http://127.0.0.1:1/v1")
    endpoints.propose("default", job_id=None, checkpoint="base-step-9", tree=DraftTreeShape(), drafter_dir="/x",
                      reason="by hand", speedup=2.0, tau=3.0)
    endpoints.activate("default", 2)
    shown = eyrie("endpoints", "show", "default").stdout
    assert "base-step-9 5/1/6" in shown
    assert "2.00x" in shown
    assert eyrie.json("endpoints", "rollback", "default")["candidate_revision"] == 1
    assert eyrie.json("endpoints", "off", "default")["desired"] == "off"
    refused = eyrie("chat", "hello")
    assert refused.exit_code == 66
    assert "endpoints on" in refused.stderr
    assert eyrie.json("endpoints", "on", "default")["desired"] == "on"
    assert eyrie("endpoints", "show", "nowhere").exit_code == 66


def test_an_endpoints_history_tells_decisions_with_their_checks_and_one_command_goes_back(eyrie: Eyrie) -> None:
    eyrie.submit()
    spec = eyrie.plane.jobs.list().items[0].spec
    decision = decide(spec.promotion, benchmark_report("base-step-9", {"chat": (2.0,)}), None, ("chat",))
    eyrie.plane.histories.record_decision("default", decision, job_id="job-1", attempt=1)
    endpoints = eyrie.plane.endpoints
    endpoints.create("default", spec.target, spec.serve, "tiny")
    endpoints.activate("default", 1, "http://127.0.0.1:1/v1")
    endpoints.propose("default", job_id=None, checkpoint="base-step-9", tree=DraftTreeShape(), drafter_dir="/x",
                      reason="by hand")
    endpoints.activate("default", 2)
    for tau in (2.25, 2.5):
        eyrie.plane.histories.record_window("default", 2, tau, 200, 3.0)
    eyrie.plane.histories.record("default", "drift", "TrafficDrifted", "three windows low", once="x", revision=2,
                                 data={"job": spec.model_dump(mode="json")})
    assert eyrie.json("rollback", "default", "--to", "1")["candidate_revision"] == 1
    shown = " ".join(eyrie("endpoints", "history", "default").stdout.split())
    assert "NO proof: not proven in the serving engine" in shown
    assert "ok suite:chat: chat: 2.00x" in shown
    assert "tau 2.50 over 200 rounds" in shown
    assert "tau 2.25" not in shown
    assert "eyrie endpoints history default --kind drift" in shown
    assert '-H "Authorization: Bearer $EYRIE_TOKEN"' in shown, "for a server that requires a token"
    assert "person" in shown
    result = eyrie.json("endpoints", "history", "default", "--kind", "window")
    assert [one["figures"]["tau"] for one in result["items"]] == [2.25, 2.5]
    assert eyrie("endpoints", "history", "default", "--kind", "gossip").exit_code == 65
    assert eyrie("endpoints", "history", "nowhere").exit_code == 66


def test_plots_are_of_a_job_or_of_an_endpoint_and_never_of_both(eyrie: Eyrie, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="pip install 'eyrie[plots]'")
    eyrie.submit()
    spec = eyrie.plane.jobs.list().items[0].spec
    eyrie.plane.endpoints.create("default", spec.target, spec.serve, "tiny")
    assert eyrie.json("plots", "--endpoint", "default", "--out", str(tmp_path))["files"] == []
    eyrie.plane.histories.record_window("default", 1, 2.5, 200, 3.0, accepted=(160, 140))
    files = eyrie.json("plots", "--endpoint", "default", "--out", str(tmp_path))["files"]
    assert [Path(one).name for one in files] == ["acceptance.svg", "acceptance-by-position.svg"]
    assert all(Path(one).read_text().startswith("<svg") for one in files)
    for arguments in ((), ("some-job", "--endpoint", "default")):
        assert eyrie("plots", *arguments).exit_code == 65


def test_plots_of_a_job_that_trains_are_its_curves(eyrie: Eyrie, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="pip install 'eyrie[plots]'")
    job_id = eyrie.submit()
    assert eyrie.json("plots", job_id, "--out", str(tmp_path))["files"] == []
    record_metrics(eyrie.plane.jobs, job_id, "train", "base", [
        (name, step, 4.0 / step, datetime.now(UTC)) for step in range(1, 2001) for name in ("loss", "grad_norm")])
    files = [Path(one) for one in eyrie.json("plots", job_id, "--out", str(tmp_path))["files"]]
    assert [one.name for one in files] == ["training-loss.svg", "training-gradient-norm.svg"]
    assert all(one.read_text().startswith("<svg") for one in files)


def test_the_console_of_a_job_is_opened_by_its_name(eyrie: Eyrie) -> None:
    job_id = eyrie.submit()
    assert eyrie.json("open")["url"] == f"{eyrie.plane.url}/"
    assert eyrie.json("open", job_id[:-2])["url"] == f"{eyrie.plane.url}/console/jobs/{job_id}"
    assert eyrie("open", "job-none").exit_code == 66


def test_a_watch_shows_progress_and_ends_with_the_job(eyrie: Eyrie) -> None:
    job_id = eyrie.submit()

    def run() -> None:
        set_stage(eyrie.plane.jobs, job_id, stage("Running", progress=Progress(done=1, total=2, unit="steps")))
        record_event(eyrie.plane.jobs, job_id, "HalfWay", "one of two", stage="train", key="base")
        eyrie.plane.jobs.save_status(job_id, ended("Succeeded", stage("Succeeded")))

    thread = later(run)
    done = eyrie("watch", job_id)
    thread.join()
    assert done.exit_code == 0, done.stderr
    assert "train/base HalfWay: one of two" in done.stdout
    assert f"Job {job_id} succeeded" in done.stdout
    lines = [json.loads(line) for line in eyrie("watch", job_id, "--json").stdout.splitlines()]
    assert [line.get("reason") for line in lines[:-1]] == ["Accepted", "HalfWay"]
    assert lines[-1]["status"]["phase"] == "Succeeded"


def test_a_watch_ends_with_the_url_of_the_endpoint_and_what_it_serves(eyrie: Eyrie) -> None:
    job_id = eyrie.submit()
    spec = eyrie.plane.jobs.get(job_id).spec
    eyrie.plane.endpoints.create("assistant", derive(spec).target, derive(spec).endpoint_serve, "my-model")
    eyrie.plane.jobs.save_status(job_id, ended("Succeeded").model_copy(update={"endpoint": "assistant"}))
    assert "It does not serve yet" in eyrie("watch", job_id).stdout
    eyrie.plane.endpoints.activate("assistant", 1, "http://127.0.0.1:1/v1")
    words = eyrie("watch", job_id).stdout.splitlines()
    assert words[-2] == "It serves model my-model without a drafter at http://127.0.0.1:1/v1"
    assert words[-1].startswith("curl http://127.0.0.1:1/v1/chat/completions")
    assert '"model": "my-model"' in words[-1]


def test_a_failed_job_ends_the_watch_with_its_hint_and_a_code(eyrie: Eyrie) -> None:
    job_id = eyrie.submit()
    eyrie.plane.jobs.save_status(job_id, ended("Failed", stage("Failed", reason="LossDiverged", message="nan at 3",
                                                              hint="lower train.learning_rate")))
    done = eyrie("watch", job_id)
    assert done.exit_code == 70
    assert "LossDiverged: nan at 3" in done.stderr
    assert "hint:  lower train.learning_rate" in done.stderr
    eyrie.plane.jobs.save_status(job_id, ended("Cancelled"))
    assert eyrie("watch").exit_code == 130


AWAY_S = 1.5
"""Longer than a watch waits before it asks again."""


def test_a_watch_survives_a_restart_of_the_server(eyrie: Eyrie) -> None:
    job_id = eyrie.submit()

    def restart() -> None:
        assert eyrie.plane.streamed.wait(60.0), "a watch that has not begun finds no server"
        eyrie.plane.close()
        record_event(eyrie.plane.jobs, job_id, "WhileAway", "written with nobody listening")
        time.sleep(AWAY_S)
        eyrie.plane.open()
        eyrie.plane.jobs.save_status(job_id, ended("Succeeded"))

    thread = later(restart)
    done = eyrie("watch", job_id, "--json")
    thread.join()
    assert done.exit_code == 0, done.stderr
    reasons = [json.loads(line).get("reason") for line in done.stdout.splitlines()]
    assert reasons[:2] == ["Accepted", "WhileAway"]  # nothing lost, nothing twice
    assert len(reasons) == 3


def test_no_server_is_reported_with_the_hint_and_exit_code_69(eyrie: Eyrie) -> None:
    eyrie.plane.close()
    done = eyrie("jobs")
    assert done.exit_code == 69
    assert "eyrie up" in done.stderr
    assert "EYRIE_SERVER" in done.stderr
    assert eyrie("train", "--target", str(eyrie.target), "--data", str(eyrie.chats)).exit_code == 69
    eyrie.plane.open()


@pytest.mark.parametrize(("arguments", "code", "named"), [
    (("train", "--target", "./missing", "--data", "CHATS"), 66, "./missing"),
    (("train", "--target", "TARGET", "--data", "missing.jsonl"), 65, "missing.jsonl"),
    (("train", "--target", "TARGET"), 65, "--data"),
    (("train", "--target", "TARGET", "--data", "CHATS", "--set", "train.epochs=-1"), 65, "train.epochs"),
    (("train", "--target", "TARGET", "--data", "CHATS", "--set", "drafter.draft_vocab_size=99999"), 65, "99999"),
    (("job", "nowhere"), 66, "nowhere"), (("cancel", "nowhere"), 66, "nowhere"), (("jobs", "--limit", "x"), 2, "limit"),
    (("chat", "hi", "--url", "http://127.0.0.1:9/v1"), 65, "--model"),
    (("chat", "hi", "--url", "http://127.0.0.1:9/v1", "--model", "m"), 75, "127.0.0.1:9"),
    (("jobs", "--server", "not a url"), 65, "not a url"),
])
def test_what_is_wrong_is_named_with_its_exit_code(
        eyrie: Eyrie, arguments: tuple[str, ...], code: int, named: str) -> None:
    given = [{"TARGET": str(eyrie.target), "CHATS": str(eyrie.chats)}.get(one, one) for one in arguments]
    done = eyrie(*given)
    assert done.exit_code == code, done.stderr
    assert named in done.stderr
    assert done.stdout == ""


def test_a_pipe_gets_no_colour(eyrie: Eyrie) -> None:
    eyrie.submit()
    for arguments in (("jobs",), ("job", "mine"), ("endpoints",), ("events", "mine"), ("job", "nowhere")):
        done = eyrie(*arguments)
        assert "\x1b" not in done.stdout + done.stderr


def test_storage_tells_what_may_go_and_removes_it_only_when_asked(eyrie: Eyrie) -> None:
    job, home = eyrie.submit(), eyrie.plane.settings.home
    shard = home / "jobs" / job / "stages" / "capture" / "shard-00000.states"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"x" * 1000)
    at = ("--home", str(home))
    running = eyrie.json("storage", *at)
    assert (running["total_bytes"], running["removable_bytes"]) == (1000, 0)
    eyrie.plane.jobs.save_status(job, ended("Cancelled"))
    assert eyrie.json("storage", *at)["removable_bytes"] == 1000
    assert "1000 B removable" in eyrie("storage", *at).stdout
    assert shard.exists()
    assert eyrie.json("storage", "--clean", *at)["removed_bytes"] == 1000
    assert not shard.exists()


def test_storage_of_the_server_equals_that_of_the_machine_with_the_files(
        eyrie: Eyrie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, home = eyrie.submit(), eyrie.plane.settings.home
    for place, size in (("capture/shard-00000.states", 1000), ("train/c0/checkpoints/c0-step-5/weights", 500)):
        path = home / "jobs" / job / "stages" / place
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * size)
    eyrie.plane.jobs.save_status(job, ended("Cancelled"))
    here = eyrie.json("storage", "--home", str(home))
    monkeypatch.setenv("EYRIE_HOME", str(tmp_path / "elsewhere"))
    there = eyrie.json("storage")
    for one in here["decisions"]:
        one["item"]["files"] = []
    by_kind = {one["item"]["kind"]: one for one in here["decisions"]}
    assert {one["item"]["kind"]: one for one in there["decisions"]} == by_kind
    assert (there["total_bytes"], there["removable_bytes"]) == (here["total_bytes"], here["removable_bytes"])
    shown = eyrie("storage")
    assert "1.5 KiB held" in shown.stdout
    assert "measured by the server" in shown.stderr
    for option in ("--clean", "--failed"):
        assert eyrie("storage", option).exit_code == 65, "it is about files, and there are none here"
