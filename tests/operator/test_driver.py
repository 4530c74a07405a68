"""Jobs driven to their ends on one machine: real rows, real runs under kfp.local, rehearsed stages."""

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eyrie_api.artifacts import write_model
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.records import Failure, ProgressRecord
from eyrie_api.contract.serving import ServeSpec
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.status import Job, StageStatus
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.database.endpoints import Endpoints
from eyrie_api.database.engine import Database
from eyrie_api.database.ingest import Ingest
from eyrie_api.database.jobs import Jobs
from eyrie_api.database.migrations import upgrade
from eyrie_api.database.tables import JobRow
from eyrie_api.errors import Conflict
from eyrie_api.planning.resolve import derive
from eyrie_api.settings import Settings
from eyrie_operator.conditions import find, is_over
from eyrie_operator.jobs.driver import Driver
from eyrie_operator.jobs.observation import changes
from eyrie_operator.jobs.reconcile import ObservedJob, StartRun
from eyrie_pipelines import local
from eyrie_pipelines.local import LocalRunner, RunHandle, RunResult
from eyrie_pipelines.processes import ProcessId, group_members, identify, wait_until
from eyrie_pipelines.run_records import RunFailure
from eyrie_pipelines.tasks import load_job
from tests.pipelines.conftest import Rehearsal, job_file, spec_of
from tests.pipelines.finished_job import lay_out
from tests.waiting import wait_for

LIMIT_S = 240.0
ENDED = ProcessId(pid=1, started_ticks=0, boot="an earlier boot of the machine")
SPEC = spec_of(serve=ServeSpec(enabled=False))


class Harness:
    """One home with its database and the driver of its jobs; its path has a space and the word kfp.local rewrites."""

    def __init__(self, home: Path) -> None:
        self.settings = Settings(home=home, lease_ttl_s=600.0)  # one step keeps its lease, however slow
        self.database = Database(self.settings.resolved_database_url)
        upgrade(self.database)
        self.jobs = Jobs(self.database)
        self.driver = Driver(self.settings, self.database, LocalRunner(self.settings.home))

    def submit(self, spec: JobSpec = SPEC) -> str:
        return self.jobs.submit(derive(spec)).id

    def directory(self, job_id: str) -> Path:
        return self.settings.job_dir(job_id)

    def drive(self, job_id: str) -> Job:
        """Advance until the job is over."""
        def over() -> bool:
            self.driver.advance(job_id)
            return is_over(self.jobs.get(job_id).status.conditions)
        # A look costs 5 ms of the cores on which the stages start.
        wait_for(over, "the job is over", LIMIT_S, every_s=0.1, state=lambda: self.jobs.get(job_id).status)
        return self.jobs.get(job_id)

    def finish(self, job_id: str, spec: JobSpec) -> None:
        """Write what a run that succeeded leaves, without running it."""
        directory = self.directory(job_id)
        lay_out(directory, job_id, spec)
        write_model(directory / "run/run.json", RunHandle(run_id="run", job_id=job_id, attempt=1, process=ENDED,
                                                          started_at=datetime.now(UTC)))
        write_model(directory / "run/result.json", RunResult(run_id="run", state="succeeded",
                                                             finished_at=datetime.now(UTC)))

    def fail(self, job_id: str, stage: StageName) -> None:
        """End the run and write what one leaves whose stage after regenerate failed."""
        directory, run = self.directory(job_id), local.find_handle(self.directory(job_id))
        assert run is not None
        local.stop(directory, grace_s=0.0)
        lay_out(directory, job_id, self.jobs.get(job_id).spec)
        for path in (directory / "stages").iterdir():
            if path.name != "regenerate":
                shutil.rmtree(path)
        now = datetime.now(UTC)
        failure = Failure(reason="LossDiverged", message="loss was nan", exit_code=70, time=now)
        write_model(directory / "run/result.json", RunResult(
            run_id=run.run_id, state="failed", failure=RunFailure(stage=stage, failure=failure), finished_at=now))

    def close(self) -> None:
        for directory in self.settings.home.glob("jobs/*"):
            local.stop(directory, grace_s=0.5)
        self.database.close()


@pytest.fixture
def harness(tmp_path: Path, rehearsal: Rehearsal) -> Iterator[Harness]:
    made = Harness(tmp_path / "my python3 home")
    yield made
    made.close()


def test_a_job_runs_to_success_and_leaves_its_results_and_its_story(
        harness: Harness, rehearsal: Rehearsal) -> None:
    job_id = harness.submit()
    job = harness.drive(job_id)
    assert job.status.phase == "Succeeded"
    assert rehearsal.starts() == ["regenerate", "capture", "train/base", "benchmark/base-step-10",
                                  "benchmark/base-step-20", "tune", "prove"]
    assert not [path for path in (harness.directory(job_id) / "run").iterdir() if path.name in ("root", "tmp")]
    assert {stage.state for stage in job.status.stages} == {"Succeeded"}
    assert len(job.status.stages) == 7
    assert job.status.best is not None
    assert job.status.best.checkpoint == "base-step-20"
    assert job.status.decision is not None
    assert job.status.decision.promote
    reasons = [event.reason for event in harness.jobs.events(job_id)]
    assert reasons.count("Rehearsed") == 7  # one per stage, each read exactly once
    assert reasons.count("StageStarted") == reasons.count("StageFinished") == 7
    assert {"Promoted", "Succeeded"} <= set(reasons)
    series = {(one.stage, one.key, one.name) for one in harness.jobs.metrics(job_id)}
    assert ("train", "base", "train/loss") in series


def test_a_failed_stage_fails_the_job_in_its_own_words_and_a_retry_goes_on_from_there(
        harness: Harness, rehearsal: Rehearsal) -> None:
    rehearsal.plan(capture=["permanent", "hang"])
    job_id = harness.submit()
    job = harness.drive(job_id)
    assert job.status.phase == "Failed"
    for kind in ("Failed", "Captured"):
        found = find(job.status.conditions, kind)
        assert found is not None
        assert found.reason == "LossDiverged"
        assert "lower train.learning_rate" in found.message
    failed = next(one for one in job.status.stages if one.stage == "capture")
    assert (failed.state, failed.reason, failed.hint) == ("Failed", "LossDiverged", "lower train.learning_rate")
    harness.jobs.retry(job_id)
    harness.driver.advance(job_id)
    assert wait_until(lambda: len(rehearsal.starts()) == 3, LIMIT_S)
    harness.driver.advance(job_id)
    status = harness.jobs.get(job_id).status
    assert (status.phase, status.attempt) == ("Running", 2)
    assert rehearsal.starts() == ["regenerate", "capture", "capture"]


@pytest.mark.slow
def test_a_job_that_has_ended_runs_again_from_the_stage_that_is_named(harness: Harness, rehearsal: Rehearsal) -> None:
    job_id = harness.submit()
    harness.finish(job_id, SPEC)
    assert harness.drive(job_id).status.phase == "Succeeded"
    with pytest.raises(Conflict, match="--from STAGE"):
        harness.jobs.retry(job_id)
    stages = harness.directory(job_id) / "stages"
    (stages / "tune" / "left").write_text("of the first attempt")
    harness.jobs.retry(job_id, "tune")
    job = harness.drive(job_id)
    assert (job.status.phase, job.status.attempt, job.status.restarted_from) == ("Succeeded", 2, "tune")
    assert not (stages / "tune" / "left").exists()
    assert rehearsal.starts() == ["tune", "prove"]


def test_the_earlier_jobs_whose_answers_a_job_may_take_over_are_its_projects_and_are_chosen_once(
        harness: Harness, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang"])

    def chosen(job_id: str) -> tuple[str, ...]:
        """What its run is started with; then it fails with its answers there, which is enough."""
        harness.driver.advance(job_id)
        reuse = load_job(str(harness.directory(job_id))).reuse
        harness.fail(job_id, "capture")
        assert harness.drive(job_id).status.phase == "Failed"
        return reuse

    first = harness.submit()
    assert chosen(first) == ()
    elsewhere = SPEC.model_copy(update={"serve": ServeSpec(enabled=False, endpoint="theirs")})
    assert chosen(harness.jobs.submit(derive(elsewhere), project="theirs").id) == ()
    second = harness.submit()
    harness.driver.advance(second)
    assert load_job(str(harness.directory(second))).reuse == (first,)
    harness.jobs.cancel(second)
    harness.driver.advance(second)
    harness.jobs.retry(first)
    harness.driver.advance(first)
    assert load_job(str(harness.directory(first))).reuse == (), "a retry keeps it: regenerate has finished"
    assert harness.jobs.get(first).status.attempt == 2


def test_cancelling_frees_the_machine_and_ends_the_job_cancelled(harness: Harness, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["stubborn"])
    job_id = harness.submit()
    harness.driver.advance(job_id)
    assert wait_until(lambda: "regenerate" in rehearsal.starts(), LIMIT_S)
    handle = local.find_handle(harness.directory(job_id))
    assert handle is not None
    harness.jobs.cancel(job_id)
    harness.driver.advance(job_id)
    assert group_members(handle.process.pid) == []
    job = harness.jobs.get(job_id)
    assert job.status.phase == "Cancelled"
    assert next(one for one in job.status.stages if one.stage == "regenerate").state == "Cancelled"


def test_a_run_receives_what_its_endpoint_serves_when_it_begins(harness: Harness, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang"])
    endpoints, spec = Endpoints(harness.database), spec_of()
    endpoints.create("default", spec.target, spec.serve, "quickstart")
    serving = DrafterUse(drafter_dir="/drafters/before", setting=Setting(tree=DraftTreeShape()))
    endpoints.propose("default", job_id=None, checkpoint="before", use=serving, reason="by hand")
    endpoints.activate("default", 2, "http://127.0.0.1:1/v1")
    job_id = harness.submit(spec)
    harness.driver.advance(job_id)
    assert load_job(str(harness.directory(job_id))).incumbent == serving


@pytest.mark.slow
def test_a_killed_control_plane_leaves_the_run_alone_and_the_next_one_adopts_it(
        harness: Harness, rehearsal: Rehearsal) -> None:
    rehearsal.plan(capture=["hang", "ok"], train__base=["hang"])
    job_id = harness.submit()
    code = (
        "import sys, time; from pathlib import Path; from eyrie_api.settings import Settings\n"
        "from eyrie_api.database.engine import Database; from eyrie_operator.jobs.driver import Driver\n"
        "from eyrie_pipelines.local import LocalRunner; settings = Settings(home=Path(sys.argv[1]))\n"
        "harness = Driver(settings, Database(settings.resolved_database_url), LocalRunner(settings.home))\n"
        "harness.advance(sys.argv[2]); print('advanced', flush=True); time.sleep(600)\n")
    plane = subprocess.Popen([sys.executable, "-c", code, str(harness.settings.home), job_id], stdout=subprocess.PIPE)
    assert plane.stdout is not None
    assert plane.stdout.readline() == b"advanced\n"
    plane.kill()
    plane.wait()
    assert wait_until(lambda: "capture" in rehearsal.starts(), LIMIT_S)
    harness.driver.advance(job_id)
    assert harness.jobs.get(job_id).status.phase == "Running"
    handle = local.find_handle(harness.directory(job_id))
    assert handle is not None
    assert handle.starts == 1  # adopted, not started again
    # Now the machine itself goes down: everything of the run dies, and the next look starts it again.
    os.killpg(handle.process.pid, signal.SIGKILL)
    assert wait_until(lambda: not group_members(handle.process.pid), 60.0)
    harness.driver.advance(job_id)
    assert wait_until(lambda: "train/base" in rehearsal.starts(), LIMIT_S)
    assert harness.jobs.get(job_id).status.phase == "Running"
    assert rehearsal.starts() == ["regenerate", "capture", "capture", "train/base"]


def test_a_run_that_another_driver_started_meanwhile_is_followed_and_not_started_again(
        harness: Harness, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang"])
    job_id = harness.submit()
    planned, started = threading.Event(), threading.Event()

    class SlowDriver(Driver):
        """One that is stopped between its plan and its action, longer than its lease."""

        def _start(self, action: StartRun, job: Job, seen: ObservedJob) -> None:
            planned.set()
            assert started.wait(LIMIT_S)
            super()._start(action, job, seen)

    late = SlowDriver(harness.settings, harness.database, LocalRunner(harness.settings.home))
    thread = threading.Thread(target=late.advance, args=(job_id,))
    thread.start()
    assert planned.wait(LIMIT_S)
    run = local.start(harness.directory(job_id), job_file(SPEC, job_id=job_id))
    started.set()
    thread.join(LIMIT_S)
    assert harness.jobs.get(job_id).status.phase != "Failed", harness.jobs.get(job_id).status
    harness.driver.advance(job_id)
    assert harness.jobs.get(job_id).status.phase == "Running"
    followed = local.find_handle(harness.directory(job_id))
    assert followed is not None
    assert (followed.run_id, followed.starts) == (run.run_id, 1)


def test_jobs_wait_in_line_for_the_machine_and_run_in_order(harness: Harness, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang"])
    first, second = harness.submit(), harness.submit()
    harness.driver.advance(second)
    assert local.observe(harness.directory(second)).state == "none"  # the older job goes first
    harness.driver.advance(first)
    harness.driver.advance(second)
    assert local.observe(harness.directory(first)).state == "running"
    assert local.observe(harness.directory(second)).state == "none"
    waiting = find(harness.jobs.get(second).status.conditions, "Accepted")
    assert waiting is not None
    assert waiting.reason == "Queued"
    harness.jobs.cancel(first)
    harness.driver.advance(first)
    harness.driver.advance(second)
    assert local.observe(harness.directory(second)).state == "running"


def test_stopping_in_order_pauses_runs_and_the_next_start_goes_on(harness: Harness, rehearsal: Rehearsal) -> None:
    rehearsal.plan(capture=["hang"])
    job_id = harness.submit()
    harness.driver.advance(job_id)
    assert wait_until(lambda: "capture" in rehearsal.starts(), LIMIT_S)
    harness.driver.stop_runs()
    assert local.observe(harness.directory(job_id)).state == "none"
    assert not is_over(harness.jobs.get(job_id).status.conditions)
    harness.driver.advance(job_id)
    assert wait_until(lambda: rehearsal.starts() == ["regenerate", "capture", "capture"], LIMIT_S)


@pytest.mark.slow
def test_a_manifest_that_cannot_be_read_fails_the_job_with_a_hint(harness: Harness, rehearsal: Rehearsal) -> None:
    job_id = harness.submit()
    broken = harness.directory(job_id) / "stages" / "capture" / "manifest.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    job = harness.drive(job_id)
    found = find(job.status.conditions, "Failed")
    assert found is not None
    assert found.reason == "ArtifactCorrupt"
    assert "eyrie retry JOB --from STAGE" in found.message
    harness.jobs.retry(job_id, "capture")
    assert harness.drive(job_id).status.phase == "Succeeded"
    assert rehearsal.starts().count("regenerate") == 1


def test_a_run_is_stopped_before_its_job_fails_for_a_manifest_that_cannot_be_read(
        harness: Harness, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang"])
    job_id = harness.submit()
    harness.driver.advance(job_id)
    pids = local.live_processes(harness.directory(job_id))
    assert pids
    broken = harness.directory(job_id) / "stages" / "capture" / "manifest.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    harness.driver.advance(job_id)
    found = find(harness.jobs.get(job_id).status.conditions, "Failed")
    assert found is not None
    assert found.reason == "ArtifactCorrupt"
    assert [pid for pid in pids if identify(pid) is not None] == []


def test_a_job_with_damaged_records_goes_on_and_is_cancelled_with_its_processes(
        harness: Harness, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang"])
    job_id = harness.submit()
    harness.driver.advance(job_id)
    directory = harness.directory(job_id)
    pids = local.live_processes(directory)
    assert pids
    for name in ("run/run.json", "run/result.json", "run/failure.json", "stages/regenerate/failure.json",
                 "outcome.json"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"{")
    harness.driver.advance(job_id)
    status = harness.jobs.get(job_id).status
    assert (status.phase, status.decision) == ("Running", None)
    harness.jobs.cancel(job_id)
    harness.driver.advance(job_id)
    assert harness.jobs.get(job_id).status.phase == "Cancelled"
    assert [pid for pid in pids if identify(pid) is not None] == []


def test_a_damaged_outcome_is_restored_from_the_row_and_nothing_is_proposed_twice(
        harness: Harness) -> None:
    job_id, endpoints = harness.submit(spec_of()), Endpoints(harness.database)
    harness.finish(job_id, spec_of())

    def promoted() -> bool:
        harness.driver.advance(job_id)
        found = find(harness.jobs.get(job_id).status.conditions, "Serving")
        return found is not None and found.reason == "Deploying"

    assert wait_until(promoted, LIMIT_S), harness.jobs.get(job_id).status
    outcome = harness.directory(job_id) / "outcome.json"
    before, decision = outcome.read_text(), harness.jobs.get(job_id).status.decision
    endpoints.activate("default", 2, "http://127.0.0.1:1/v1")  # the drafter is the incumbent now
    outcome.write_text(before[:40])
    status = harness.drive(job_id).status
    assert (status.phase, status.decision) == ("Succeeded", decision)
    assert outcome.read_text() == before
    assert [one.number for one in endpoints.get("default").revisions] == [1, 2]


@pytest.mark.slow
def test_a_job_of_a_restored_backup_continues_from_files_that_are_newer_than_its_row(
        harness: Harness, rehearsal: Rehearsal, tmp_path: Path) -> None:
    rehearsal.plan(capture=["hang", "ok"], train__base=["hang", "ok"])
    job_id = harness.submit()

    def running(stage: str) -> bool:
        harness.driver.advance(job_id)
        return stage in rehearsal.starts()

    assert wait_until(lambda: running("capture"), LIMIT_S)
    live = harness.settings.home / "eyrie.db"
    with contextlib.closing(sqlite3.connect(live)) as source, contextlib.closing(
            sqlite3.connect(tmp_path / "backup.db")) as backup:
        source.backup(backup)
    harness.jobs.cancel(job_id)
    harness.drive(job_id)
    harness.jobs.retry(job_id)
    assert wait_until(lambda: running("train/base"), LIMIT_S)
    harness.close()  # attempt 2 has finished capture
    for name in ("eyrie.db-wal", "eyrie.db-shm"):
        (harness.settings.home / name).unlink(missing_ok=True)
    shutil.copy(tmp_path / "backup.db", live)
    restored = Harness(harness.settings.home)
    try:
        status = restored.jobs.get(job_id).status
        handle = local.find_handle(restored.directory(job_id))
        assert handle is not None
        assert (status.phase, status.attempt, handle.attempt) == ("Running", 1, 2)
        status = restored.drive(job_id).status
        assert (status.phase, status.attempt) == ("Succeeded", 1)
        assert {stage.state for stage in status.stages} == {"Succeeded"}
        assert [rehearsal.starts().count(one) for one in ("regenerate", "capture", "train/base")] == [1, 2, 2]
    finally:
        restored.close()


@pytest.mark.slow
def test_a_job_of_a_restored_backup_whose_directory_is_gone_runs_from_its_beginning(
        harness: Harness, rehearsal: Rehearsal) -> None:
    rehearsal.plan(capture=["hang", "ok"])
    job_id = harness.submit()

    def captures() -> bool:
        harness.driver.advance(job_id)
        return "capture" in rehearsal.starts()

    assert wait_until(captures, LIMIT_S)
    local.stop(harness.directory(job_id), grace_s=0.5)
    shutil.rmtree(harness.directory(job_id))
    assert harness.jobs.get(job_id).status.phase == "Running"
    job = harness.drive(job_id)
    assert (job.status.phase, job.status.attempt) == ("Succeeded", 1)
    assert [rehearsal.starts().count(one) for one in ("regenerate", "capture")] == [2, 2]


def test_a_stored_job_without_rules_for_files_fails_with_the_hint_to_submit_it_again(harness: Harness) -> None:
    job_id = harness.submit()
    with harness.database.writing() as session:
        row = session.get(JobRow, job_id)
        assert row is not None
        resolved = {name: value for name, value in row.submission["resolved"].items() if name != "reads"}
        row.submission = row.submission | {"resolved": resolved}
    harness.driver.advance(job_id)
    failed = find(harness.jobs.get(job_id).status.conditions, "Failed")
    assert failed is not None
    assert "submit it again" in failed.message
    assert not (harness.directory(job_id) / "run").exists()


def test_advancing_what_is_gone_over_or_driven_by_another_does_nothing(harness: Harness, rehearsal: Rehearsal) -> None:
    harness.driver.advance("job-unknown")
    job_id = harness.submit()
    assert harness.jobs.take_lease(job_id, "somebody-else", 600.0)
    harness.driver.advance(job_id)
    assert local.observe(harness.directory(job_id)).state == "none"


def test_the_start_of_a_stage_is_reported_although_its_progress_was_stored_by_a_driver_that_was_killed(
        harness: Harness, tmp_path: Path) -> None:
    job_id, events = harness.submit(), tmp_path / "events.jsonl"
    events.write_text(ProgressRecord(time=datetime.now(UTC), done=1.0).model_dump_json() + "\n")
    Ingest(harness.database).read(job_id, "benchmark", "base-step-10", events)
    before = harness.jobs.get(job_id).status
    finished = StageStatus(stage="benchmark", key="base-step-10", state="Succeeded")
    reported = changes(before, before.model_copy(update={"stages": (finished,)}))
    assert [one.reason for one in reported] == ["StageStarted", "StageFinished"]
