"""Runs of Kubeflow, seen through the real client: what is asked once, what may be asked again, what an answer means."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.artifacts import write_model
from eyrie_api.artifacts.local import LocalStore
from eyrie_api.contract.cluster import ClusterProfile, KubeflowSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.placement import Placement, S3Work
from eyrie_api.contract.records import Failure, ProgressRecord
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.errors import Permanent, Transient
from eyrie_api.planning.resolve import derive
from eyrie_pipelines.kubeflow import (
    KfpApi,
    KubeflowAccessDenied,
    KubeflowNotFound,
    KubeflowRunner,
    KubeflowUnavailable,
    PipelineRejected,
)
from eyrie_pipelines.run_records import RunFailure
from eyrie_pipelines.runner import JobFile, ObservedRun
from tests.pipelines.conftest import job_file, spec_of
from tests.pipelines.kfp_server import KfpServer

SPEC = spec_of()
RESOLVED = derive(SPEC)
INCUMBENT = DrafterUse(drafter_dir="/drafters/before", setting=Setting(tree=DraftTreeShape()))


@pytest.fixture
def server() -> Iterator[KfpServer]:
    server = KfpServer()
    yield server
    server.close()


class Harness:
    """A runner with its home and its work area."""

    def __init__(self, server: KfpServer, directory: Path, **kubeflow: object) -> None:
        self.home, self.store = directory / "home", LocalStore(directory / "store")
        self.profile = ClusterProfile(
            kubeflow=KubeflowSpec(url=server.url, **kubeflow),  # type: ignore[arg-type]
            stages=Placement(image="eyrie/workers:1", work=S3Work(url="s3://bucket/eyrie")), home=str(self.home))
        self.runner = self.another()

    def another(self) -> KubeflowRunner:
        """Of another worker process: nothing is remembered."""
        return KubeflowRunner(self.profile, self.home, self.store)

    def start(self, attempt: int = 1, incumbent: DrafterUse | None = None) -> None:
        self.runner.start(job_file(SPEC, attempt, incumbent))

    def put(self, name: str, text: str) -> None:
        self.store.write(f"jobs/job-1/{name}", text.encode())

    def read(self, name: str) -> str | None:
        path = self.home / "jobs" / "job-1" / name
        return path.read_text() if path.exists() else None


@pytest.fixture
def harness(server: KfpServer, tmp_path: Path) -> Harness:
    return Harness(server, tmp_path, experiment="ours", namespace="team", service_account="runs")


def names(server: KfpServer) -> list[str]:
    return [run["display_name"] for run in server.runs]


def test_an_attempt_is_started_once_however_often_and_by_whomever_it_is_asked_for(
        harness: Harness, server: KfpServer) -> None:
    assert harness.runner.observe("job-1") == ObservedRun()
    harness.start()
    harness.start()
    harness.another().start(job_file(SPEC, 1, INCUMBENT))
    assert names(server) == ["job-1-1.1"]
    seen = harness.runner.observe("job-1")
    assert (seen.state, seen.attempt, seen.starts, seen.run_id) == ("running", 1, 1, server.runs[0]["run_id"])
    assert [one["display_name"] for one in server.experiments] == ["ours"]
    assert server.experiments[0]["namespace"] == "team"


def test_a_run_contains_the_pipeline_the_platform_spec_and_the_parameters(harness: Harness, server: KfpServer) -> None:
    harness.start()
    run = server.runs[0]
    assert run["service_account"] == "runs"
    assert run["experiment_id"] == server.experiments[0]["experiment_id"]
    assert set(run["pipeline_spec"]) == {"pipeline_spec", "platform_spec"}
    parameters = run["runtime_config"]["parameters"]
    assert parameters["job_dir"] == str(harness.home / "jobs" / "job-1")
    assert {name: parameters[name] for name in ("target", "data", "sweep")} == {
        "target": "quickstart", "data": "quickstart: quickstart; at most 1000 conversations",
        "sweep": "1 candidate: base"}
    assert json.loads(harness.store.read("jobs/job-1/job.json"))["id"] == "job-1"


def test_a_creation_whose_answer_was_lost_is_found_and_not_repeated(harness: Harness, server: KfpServer) -> None:
    harness.runner.observe("job-1")
    server.refusals = [(200, True), (503, True)]
    with pytest.raises(KubeflowUnavailable):
        harness.start()
    assert names(server) == ["job-1-1.1"]
    harness.start()
    assert names(server) == ["job-1-1.1"]


def test_another_jobs_runs_are_not_this_jobs_and_the_latest_of_many_pages_counts(
        harness: Harness, server: KfpServer) -> None:
    for attempt in range(1, 7):
        harness.start(attempt)
        server.runs[-1]["state"] = "FAILED" if attempt < 3 else "SUCCEEDED"
    server.runs.append({**server.runs[0], "display_name": "other-job-1-9.1"})
    assert harness.runner.observe("job-1").attempt == 6
    assert harness.runner.observe("job-2") == ObservedRun()


@pytest.mark.parametrize(("state", "seen"), [
    ("PENDING", "running"), ("RUNNING", "running"), ("PAUSED", "running"), ("CANCELING", "running"),
    ("RUNTIME_STATE_UNSPECIFIED", "running"), ("SUCCEEDED", "succeeded"), ("FAILED", "gone"), ("CANCELED", "failed"),
    ("SKIPPED", "gone")])
def test_every_state_of_kubeflow_means_something(harness: Harness, server: KfpServer, state: str, seen: str) -> None:
    harness.start()
    server.runs[0]["state"] = state
    assert harness.runner.observe("job-1").state == seen


def test_a_failed_run_is_reported_in_its_stages_words_before_kubeflows(harness: Harness, server: KfpServer) -> None:
    harness.start()
    server.runs[0] |= {"state": "FAILED", "error": {"code": 2, "message": "task train: exit status 70"}}
    write_model(harness.home / "failure.json", RunFailure(stage="train", key="base", failure=Failure(
        reason="LossDiverged", message="loss was nan", hint="lower it", exit_code=70, time=datetime.now(UTC))))
    harness.put("run/failure.json", (harness.home / "failure.json").read_text())
    failure = harness.runner.observe("job-1").failure
    assert failure is not None
    assert (failure.stage, failure.key, failure.reason, failure.hint) == ("train", "base", "LossDiverged", "lower it")
    harness.start(2)  # the next attempt is not held back by the last one's failure
    assert harness.store.stat("jobs/job-1/run/failure.json") is None
    assert harness.read("run/failure.json") is None


def test_a_stage_failure_fails_the_run_while_kubeflow_still_retries_it(harness: Harness, server: KfpServer) -> None:
    harness.start()
    server.runs[0]["state"] = "RUNNING"
    failure = RunFailure(stage="regenerate", failure=Failure(
        reason="DataInvalid", message="no conversation left", hint="give some", exit_code=65, time=datetime.now(UTC)))
    harness.put("run/failure.json", failure.model_dump_json())
    seen = harness.runner.observe("job-1")
    assert (seen.state, seen.alive) == ("failed", True)
    assert seen.failure is not None
    assert seen.failure.reason == "DataInvalid"
    harness.start()
    assert names(server) == ["job-1-1.1"], "nothing begins beside what lives"
    harness.runner.stop("job-1")
    assert server.runs[0]["state"] == "CANCELING"
    assert harness.runner.observe("job-1").alive
    server.runs[0] |= {"state": "FAILED", "state_history": [{"state": "CANCELING"}, {"state": "FAILED"}]}
    seen = harness.runner.observe("job-1")
    assert (seen.state, seen.alive) == ("failed", False)
    assert seen.failure is not None
    assert seen.failure.reason == "DataInvalid", "the stage's words, not how the run was ended"


@pytest.mark.parametrize("state", ["FAILED", "CANCELED"])
def test_a_run_that_somebody_terminated_is_not_started_again_behind_his_back(
        harness: Harness, server: KfpServer, state: str) -> None:
    harness.start()
    server.runs[0] |= {"state": state, "state_history": [{"state": "RUNNING"}, {"state": "CANCELING"},
                                                         {"state": state}]}
    seen = harness.runner.observe("job-1")
    assert seen.state == "failed"
    assert seen.failure is not None
    assert (seen.failure.reason, seen.failure.hint[:13]) == ("RunTerminated", "retry the job")


def test_a_run_that_fails_without_a_stages_word_is_started_again_and_believed_the_third_time(
        harness: Harness, server: KfpServer) -> None:
    for start in (1, 2, 3):
        harness.start()
        assert names(server)[-1] == f"job-1-1.{start}"
        server.runs[-1] |= {"state": "FAILED", "error": {"code": 2, "message": "ImagePullBackOff"}}
        seen = harness.runner.observe("job-1")
        assert (seen.state, seen.starts) == (("failed" if start == 3 else "gone"), start)
    assert seen.failure is not None
    assert "ImagePullBackOff" in seen.failure.message


def test_runs_that_die_but_get_further_each_time_are_started_again(harness: Harness, server: KfpServer) -> None:
    events: list[str] = []

    def progress(done: int) -> None:
        events.append(ProgressRecord(time=datetime.now(UTC), done=done, total=100, unit="rows", rate=None,
                                     eta_s=None).model_dump_json() + "\n")
        harness.put("stages/regenerate/events.jsonl", "".join(events))

    for start in (1, 2, 3, 4):
        harness.start()
        assert names(server)[-1] == f"job-1-1.{start}"
        progress(10 * start)
        server.runs[-1] |= {"state": "FAILED", "error": {"code": 2, "message": "evicted"}}
        assert harness.another().observe("job-1").state == "gone"
    for deaths, state in ((1, "gone"), (2, "gone"), (3, "failed")):  # from now on it gets nowhere
        harness.start()
        server.runs[-1] |= {"state": "FAILED", "error": {"code": 2, "message": "evicted"}}
        shutil.rmtree(harness.home)  # another worker's disk
        seen = harness.another().observe("job-1")
        assert (seen.state, seen.starts) == (state, deaths)
    harness.start(attempt=2)
    assert (harness.runner.observe("job-1").starts, names(server)[-1]) == (1, "job-1-2.1")


def test_the_first_start_of_an_attempt_decides_the_incumbent(harness: Harness, server: KfpServer) -> None:
    harness.start(1, INCUMBENT)
    server.runs[0]["state"] = "SKIPPED"
    harness.start(1, None)
    assert JobFile.model_validate_json(harness.store.read("jobs/job-1/job.json")).incumbent == INCUMBENT
    result = [run["runtime_config"]["parameters"]["spec_digest"] for run in server.runs]
    assert len(result) == 2
    assert result[0] == result[1]


@pytest.mark.parametrize("damage", ["", "{", "[]"])
def test_damaged_files_of_a_job_are_written_again_by_its_next_start(
        harness: Harness, server: KfpServer, damage: str) -> None:
    harness.start()
    server.runs[0]["state"] = "FAILED"
    for name in ("job.json", "run/counting.json", "run/failure.json"):
        harness.put(name, damage)
    assert harness.runner.observe("job-1").state == "gone"
    harness.another().start(job_file(SPEC))
    assert names(server) == ["job-1-1.1", "job-1-1.2"]
    assert JobFile.model_validate_json(harness.store.read("jobs/job-1/job.json")).spec == SPEC
    assert harness.runner.observe("job-1").state == "running"


def test_stopping_ends_what_lives_and_may_be_asked_again(harness: Harness, server: KfpServer) -> None:
    harness.runner.stop("job-1")
    harness.start()
    harness.runner.stop("job-1")
    harness.runner.stop("job-1")
    assert server.runs[0]["state"] == "CANCELING"
    assert [path for method, path, _ in server.asked if path.endswith(":terminate")] == [
        f"/apis/v2beta1/runs/{server.runs[0]['run_id']}:terminate"]


@pytest.mark.parametrize(("status", "kind", "base"), [
    (500, KubeflowUnavailable, Transient), (502, KubeflowUnavailable, Transient), (503, KubeflowUnavailable, Transient),
    (429, KubeflowUnavailable, Transient), (401, KubeflowAccessDenied, Permanent),
    (403, KubeflowAccessDenied, Permanent),
    (404, KubeflowNotFound, Permanent), (400, PipelineRejected, Permanent), (409, PipelineRejected, Permanent)])
def test_what_may_pass_is_distinguished_from_what_will_not(
        server: KfpServer, tmp_path: Path, status: int, kind: type[Exception], base: type[Exception]) -> None:
    token = tmp_path / "token"
    token.write_text("a-secret-token\n")
    api = KfpApi(KubeflowSpec(url=server.url, token_file=str(token)))
    server.refusals = [(status, False)]
    with pytest.raises(kind, match=f"answered {status}|rejected .* with {status}|has no") as result:
        api.find_runs("job-1-")
    assert isinstance(result.value, base)
    assert "because of the server" in str(result.value)
    assert "a-secret-token" not in str(result.value)
    assert result.value.hint  # type: ignore[attr-defined]


def test_a_server_that_is_not_there_may_come_back(server: KfpServer) -> None:
    server.close()
    with pytest.raises(KubeflowUnavailable, match="does not respond"):
        KfpApi(KubeflowSpec(url=server.url, timeout_s=5.0)).find_runs("job-1-")


def test_a_rotated_token_is_used_at_once(server: KfpServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    api = KfpApi(KubeflowSpec(url=server.url, token_file=str(token)))
    with pytest.raises(KubeflowUnavailable, match="cannot be read"):
        api.find_runs("x")
    for value in ("first", "second"):
        token.write_text(value + "\n")
        api.find_runs("x")
    result = [authorization for _method, path, authorization in server.asked if path.endswith("/runs")]
    assert result == ["Bearer first", "Bearer second"]


def test_what_stages_say_is_brought_here_piece_by_piece(harness: Harness, server: KfpServer) -> None:
    harness.start()
    harness.put("stages/regenerate/spec.json", "{}")
    harness.put("stages/regenerate/events.jsonl", "one\n")
    harness.runner.refresh("job-1", RESOLVED)
    assert harness.read("stages/regenerate/events.jsonl") == "one\n"
    began = (harness.home / "jobs/job-1/stages/regenerate/spec.json").stat().st_mtime_ns
    harness.put("stages/regenerate/events.jsonl", "one\ntwo\n")
    harness.put("stages/regenerate/failure.json", "{}")
    harness.runner.refresh("job-1", RESOLVED)
    assert harness.read("stages/regenerate/events.jsonl") == "one\ntwo\n"
    assert harness.read("stages/regenerate/failure.json") == "{}"
    assert (harness.home / "jobs/job-1/stages/regenerate/spec.json").stat().st_mtime_ns == began
    harness.store.delete("jobs/job-1/stages/regenerate/failure.json")  # the stage is tried again
    harness.put("stages/regenerate/events.jsonl", "anew\n")
    harness.runner.refresh("job-1", RESOLVED)
    assert harness.read("stages/regenerate/events.jsonl") == "anew\n"
    assert harness.read("stages/regenerate/failure.json") is None


def test_two_drivers_that_fetch_the_same_events_at_the_same_time_have_each_once(
        harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.start()
    harness.put("stages/regenerate/events.jsonl", "one\n")
    both_read, read = threading.Barrier(2, timeout=60), LocalStore.read

    def read_together(self: LocalStore, key: str, **part: Any) -> bytes:
        found = read(self, key, **part)
        if key.endswith("events.jsonl"):
            both_read.wait()
        return found

    monkeypatch.setattr(LocalStore, "read", read_together)  # the real store, at an unlucky moment
    with ThreadPoolExecutor(2) as drivers:
        list(drivers.map(lambda runner: runner.refresh("job-1", RESOLVED), (harness.runner, harness.another())))
    assert harness.read("stages/regenerate/events.jsonl") == "one\n"


def test_what_the_driver_decided_outlives_its_disk(harness: Harness, tmp_path: Path) -> None:
    write_model(harness.home / "jobs" / "job-1" / "outcome.json", INCUMBENT)
    harness.runner.persist("job-1", "outcome.json")
    kept = harness.read("outcome.json")
    harness.home = tmp_path / "another"
    other = KubeflowRunner(harness.profile, harness.home, harness.store)
    other.refresh("job-1", RESOLVED)
    assert harness.read("outcome.json") == kept


def test_stages_that_run_again_leave_nothing_in_the_store_and_here(harness: Harness) -> None:
    for stage in ("capture", "tune", "prove"):
        harness.put(f"stages/{stage}/manifest.json", "{}")
        directory = harness.home / "jobs" / "job-1" / "stages" / stage
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text("{}")
    harness.runner.discard("job-1", ("tune", "prove", "hardware"))
    assert [stored.key for stored in harness.store.list("jobs/job-1")] == ["jobs/job-1/stages/capture/manifest.json"]
    assert harness.read("stages/capture/manifest.json") == "{}"
    assert harness.read("stages/tune/manifest.json") is harness.read("stages/prove/manifest.json") is None


def test_a_deleted_job_leaves_neither_a_run_nor_bytes(harness: Harness, server: KfpServer) -> None:
    harness.start()
    harness.put("stages/regenerate/events.jsonl", "one\n")
    harness.runner.delete("job-1")
    assert server.runs[0]["state"] == "CANCELING"
    assert list(harness.store.list("jobs/job-1")) == []
    harness.runner.delete("job-1")
