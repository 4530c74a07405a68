"""The runner of one machine, with real processes under the real kfp.local."""

import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eyrie_api.artifacts import digest_model, read_manifest, write_model
from eyrie_api.contract.engine import DraftTreeShape, EngineSpec
from eyrie_api.contract.hardware import HardwareSpec, PlacedProfile
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.placement import JobPlacement
from eyrie_api.contract.prove import ProveReport, ProveSpec
from eyrie_api.contract.records import ProgressRecord
from eyrie_api.contract.reports import TuneReport
from eyrie_api.contract.stages import StageName
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.errors import Conflict, Transient
from eyrie_api.planning.facts import gpus_of
from eyrie_api.planning.resolve import derive
from eyrie_pipelines import local, tasks
from eyrie_pipelines.processes import ProcessId, boot_id, group_members, identify, is_alive, wait_until
from eyrie_pipelines.run_records import Attempts, StageFailed, read_failure, read_stage_failure
from eyrie_pipelines.runner import JOB_FILE, JobFile, ObservedRun
from eyrie_pipelines.several_gpus import SHARES, gpu_shares
from eyrie_pipelines.tasks import load_job
from eyrie_workers.catalog import CATALOG
from tests.pipelines.conftest import Rehearsal, job_file, spec_of, sweeping_spec
from tests.pipelines.finished_job import lay_out

LIMIT_S = 600.0


def wait_for(job_dir: Path, *states: str) -> ObservedRun:
    assert wait_until(lambda: local.observe(job_dir).state in states, LIMIT_S), local.observe(job_dir)
    return local.observe(job_dir)


INCUMBENT = DrafterUse(drafter_dir="/drafters/before", setting=Setting(tree=DraftTreeShape()))


def log_of(job_dir: Path) -> str:
    return (job_dir / "run" / "pipeline.log").read_text()


def wait_for_start(rehearsal: Rehearsal, name: str) -> None:
    assert wait_until(lambda: name in rehearsal.starts(), LIMIT_S), rehearsal.starts()


@pytest.fixture
def boxes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes run in this process: what `sitecustomize` does for others, without a run around them."""
    for name in ("regenerate", "capture"):
        monkeypatch.setitem(CATALOG, name, dataclasses.replace(CATALOG[name], module="rehearsal_stage"))


def written_job(job_dir: Path) -> str:
    """The digest of a job whose file is there."""
    job = job_file(spec_of())
    write_model(job_dir / JOB_FILE, job)
    return digest_model(job)


@pytest.mark.slow
def test_a_run_walks_all_stages_once_in_a_path_with_spaces_and_the_word_python3(
        job_dir: Path, rehearsal: Rehearsal) -> None:
    local.start(job_dir, job_file(spec_of()))
    seen = wait_for(job_dir, "succeeded", "failed", "gone")
    assert seen.state == "succeeded", log_of(job_dir)
    assert rehearsal.starts() == ["regenerate", "capture", "train/base", "benchmark/base-step-10",
                                  "benchmark/base-step-20", "tune", "prove"]
    report = read_manifest(job_dir / "stages" / "tune").report
    assert isinstance(report, TuneReport)
    assert report.checkpoint == "base-step-20"  # the best average, not the first
    assert not (job_dir / "run" / "root").exists()
    assert not (job_dir / "run" / "tmp").exists()

    # Run again, every stage finds its manifest: that is our cache. Only the proof compares with what serves meanwhile.
    first = rehearsal.starts()
    second = local.start(job_dir, job_file(spec_of(), 2, INCUMBENT))
    assert wait_until(lambda: local.observe(job_dir).state == "succeeded", LIMIT_S), log_of(job_dir)
    assert local.find_handle(job_dir) == second
    assert rehearsal.starts() == [*first, "prove"]
    proof = read_manifest(job_dir / "stages" / "prove").report
    assert isinstance(proof, ProveReport)
    assert proof.load is not None
    assert "incumbent" in proof.load.variants


@pytest.mark.slow
def test_a_run_of_drafters_that_were_trained_elsewhere_begins_with_their_benchmarks(
        job_dir: Path, rehearsal: Rehearsal) -> None:
    local.start(job_dir, job_file(JobSpec.model_validate(
        {"target": {"model": "quickstart"}, "drafters": ["org/head-10", "org/head-90", "org/head-20"]})))
    assert wait_for(job_dir, "succeeded", "failed", "gone").state == "succeeded", log_of(job_dir)
    assert rehearsal.starts() == ["benchmark/head-10", "benchmark/head-90", "benchmark/head-20", "tune", "prove"]
    report = read_manifest(job_dir / "stages" / "tune").report
    assert isinstance(report, TuneReport)
    assert report.checkpoint == "head-90"


@pytest.mark.slow
def test_every_hardware_profile_is_measured_after_the_proof_and_once(job_dir: Path, rehearsal: Rehearsal) -> None:
    spec = spec_of(prove=ProveSpec(hardware=HardwareSpec(profiles=(
        PlacedProfile(name="one-thread", price_per_hour=0.1, threads=1),
        PlacedProfile(name="two-threads", price_per_hour=0.2, threads=2)))))
    rehearsal.plan(**{"hardware__two-threads": ["permanent", "ok"]})
    local.start(job_dir, job_file(spec))
    assert wait_until(lambda: local.observe(job_dir).state == "failed", LIMIT_S), log_of(job_dir)
    assert rehearsal.starts()[-3:] == ["prove", "hardware/one-thread", "hardware/two-threads"]
    before = rehearsal.starts()
    local.start(job_dir, job_file(spec, 2))
    assert wait_until(lambda: local.observe(job_dir).state == "succeeded", LIMIT_S), log_of(job_dir)
    assert rehearsal.starts() == [*before, "hardware/two-threads"]


@pytest.mark.slow
def test_a_sweep_trains_each_candidate_and_benchmarks_every_checkpoint_one_at_a_time(
        job_dir: Path, rehearsal: Rehearsal) -> None:
    local.start(job_dir, job_file(sweeping_spec()))
    assert wait_until(lambda: "tune" in rehearsal.starts(), LIMIT_S), log_of(job_dir)
    starts = rehearsal.starts()
    assert len([one for one in starts if one.startswith("train/")]) == 3
    assert rehearsal.sweeps() == ["--rungs 0.25,0.5"]  # one program; the train boxes found nothing to do
    assert len([one for one in starts if one.startswith("benchmark/")]) == 6
    for stage in ("train", "benchmark"):
        spans = []
        for manifest in (job_dir / "stages" / stage).glob("*/manifest.json"):
            read = read_manifest(manifest)
            spans.append((read.started_at, read.finished_at))
        spans.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.slow
def test_checkpoints_are_measured_at_once_each_on_a_share_of_the_gpus(
        job_dir: Path, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EYRIE_DEVICE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    rehearsal.plan(**{f"benchmark__c{number}-lr-0p00{number}-step-{step}": ["meet"]
                      for number in (1, 2, 3) for step in (10, 20)})
    local.start(job_dir, job_file(sweeping_spec(engine=EngineSpec(kind="sglang", tp_size=2))))
    assert wait_until(lambda: "tune" in rehearsal.starts(), LIMIT_S), log_of(job_dir)
    lines = [line.split() for line in (rehearsal.home / "gpus.log").read_text().splitlines()]
    measured = {name: gpus for name, gpus in lines if name.startswith("benchmark/")}
    assert len(measured) == len([name for name, _ in lines if name.startswith("benchmark/")]) == 6
    assert set(measured.values()) == {"4,5", "6,7"}  # the fifth GPU is no pair
    assert {gpus for name, gpus in lines if name in ("tune", "prove")} <= {"4,5,6,7,8"}


def test_the_failure_of_a_checkpoint_on_a_share_of_the_gpus_is_the_runs(
        job_dir: Path, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARES, "0;1")  # as the leader does on a machine with two GPUs
    rehearsal.plan(**{"benchmark__base-step-20": ["permanent"]})
    lay_out(job_dir, "job-1", spec_of())
    shutil.rmtree(job_dir / "stages" / "benchmark")
    with pytest.raises(StageFailed, match="benchmark base-step-20 failed"):
        tasks.benchmark(str(job_dir), digest_model(job_file(spec_of())), "base-step-10")
    failure = read_failure(job_dir)
    assert failure is not None
    assert (failure.stage, failure.key, failure.failure.reason) == ("benchmark", "base-step-20", "LossDiverged")


@pytest.mark.parametrize(("gpus", "engine", "shares"), [
    ("", EngineSpec(), ""),
    ("0", EngineSpec(), "0"),
    ("0,1,2", EngineSpec(), "0;1;2"),
    ("0,1,2,3", EngineSpec(kind="sglang", tp_size=2), "0,1;2,3"),
    ("0,1,2,3", EngineSpec(kind="sglang", tp_size=2, num_gpus=4), "0,1,2,3"),
    ("0,1", EngineSpec(kind="sglang", tp_size=4), ""),
])
def test_the_gpus_of_a_machine_are_divided_by_what_one_measurement_uses(
        gpus: str, engine: EngineSpec, shares: str) -> None:
    divided = gpu_shares(gpus_of({"CUDA_VISIBLE_DEVICES": gpus}), engine)
    assert ";".join(",".join(share) for share in divided) == shares


def test_gpus_are_counted_without_a_variable_and_none_are_used_when_told_so(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_of({}, tmp_path) == ("0", "1")
    assert gpus_of({"EYRIE_DEVICE": "cpu"}, tmp_path) == ()
    assert gpus_of({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == ()


@pytest.mark.slow
def test_candidates_of_different_mixes_are_trained_one_by_one_from_one_capture(
        job_dir: Path, rehearsal: Rehearsal) -> None:
    mixes = [{"chats": 1, "tools": 1}, {"chats": 3, "tools": 1}]
    spec = spec_of(data={"sources": [{"path": "quickstart", "name": "chats"}, {"path": "tools.jsonl"}]},
                   sweep={"axes": [{"field": "data.mix", "values": mixes}]})
    local.start(job_dir, job_file(spec))
    assert wait_until(lambda: "tune" in rehearsal.starts(), LIMIT_S), log_of(job_dir)
    before = rehearsal.starts()[:4]
    assert before[:2] == ["regenerate", "capture"]
    assert sorted(before[2:]) == ["train/c1-mix-chats-1-tools-1", "train/c2-mix-chats-3-tools-1"]
    assert rehearsal.sweeps() == []


@pytest.mark.slow
def test_a_permanent_failure_ends_the_run_with_the_stages_own_words_and_the_fan_out_with_it(
        job_dir: Path, rehearsal: Rehearsal) -> None:
    spec = sweeping_spec("never")
    rehearsal.plan(**{"train__c1-lr-0p001": ["permanent"]})
    local.start(job_dir, job_file(spec))
    seen = wait_for(job_dir, "succeeded", "failed", "gone")
    assert seen.state == "failed"
    assert seen.failure is not None
    assert seen.failure.stage == "train"
    assert seen.failure.key == "c1-lr-0p001"
    assert seen.failure.reason == "LossDiverged"
    assert seen.failure.hint == "lower train.learning_rate"
    # kfp.local goes on with queued members of a failed fan-out; ours stop before they start their program.
    assert [one for one in rehearsal.starts() if one.startswith("train/")] == ["train/c1-lr-0p001"]
    assert rehearsal.sweeps() == []


@pytest.mark.slow
def test_of_candidates_trained_together_one_fails_in_its_own_words_and_a_retry_trains_it_alone(
        job_dir: Path, rehearsal: Rehearsal) -> None:
    rehearsal.plan(**{"train__c2-lr-0p002": ["permanent", "ok"], "tune": ["hang"]})
    local.start(job_dir, job_file(sweeping_spec()))
    seen = wait_for(job_dir, "succeeded", "failed", "gone")
    assert seen.failure is not None
    assert (seen.failure.stage, seen.failure.key) == ("train", "c2-lr-0p002")
    assert seen.failure.reason == "LossDiverged"
    assert seen.failure.hint == "lower train.learning_rate"
    assert sorted(path.parent.name for path in job_dir.glob("stages/train/*/manifest.json")) == [
        "c1-lr-0p001", "c3-lr-0p003"]
    local.start(job_dir, job_file(sweeping_spec(), attempt=2))
    wait_for_start(rehearsal, "tune")
    assert [one for one in rehearsal.starts() if one.startswith("train/")] == [
        "train/c1-lr-0p001", "train/c2-lr-0p002", "train/c3-lr-0p003", "train/c2-lr-0p002"]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "starts", "reason", "words"), [
    ("transient", 3, "Transient", "the bucket refused the write"),
    ("die", 3, "StageFailed", r"killed by SIGKILL 3 times"),
    ("crash", 1, "StageFailed", r"RuntimeError: an index was out of range"),
])
def test_candidates_trained_together_are_tried_again_as_one_alone_is(
        word: str, starts: int, reason: str, words: str, job_dir: Path, rehearsal: Rehearsal,
        monkeypatch: pytest.MonkeyPatch) -> None:
    # The box runs in this process: what `sitecustomize` does for others.
    monkeypatch.setitem(CATALOG, "train", dataclasses.replace(CATALOG["train"], together="rehearsal_stage"))
    rehearsal.plan(**{"train__c1-lr-0p001": [word]})
    job = JobFile(id="job-1", resolved=derive(sweeping_spec()))
    write_model(job_dir / JOB_FILE, job)
    with pytest.raises(StageFailed, match=words):
        tasks.sweep(str(job_dir), digest_model(job), "stages/capture")
    assert len(rehearsal.sweeps()) == starts
    failed = read_failure(job_dir)
    assert failed is not None
    assert (failed.stage, failed.failure.reason) == ("train", reason)
    if reason == "StageFailed":
        assert "sweep.shared_passes to never" in failed.failure.hint


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "key"), [("train", "base"), ("capture", "")])
def test_a_stage_on_two_gpus_is_two_processes_and_is_tried_again_when_one_was_killed(
        stage: StageName, key: str, job_dir: Path, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, stage, dataclasses.replace(CATALOG[stage], module="rehearsal_stage"))
    monkeypatch.delenv("EYRIE_DEVICE", raising=False)
    rehearsal.plan(train__base=["die", "ok"], capture=["die", "ok"])
    placement = JobPlacement.model_validate({"stages": {stage: {"num_gpus": 2}}})
    job = JobFile(id="job-1", resolved=derive(spec_of(placement=placement)))
    write_model(job_dir / JOB_FILE, job)
    if stage == "train":
        assert tasks.train(str(job_dir), digest_model(job), "stages/capture", key) == "stages/train/base"
    else:
        assert tasks.capture(str(job_dir), digest_model(job), "stages/regenerate") == "stages/capture"
    ranks = (rehearsal.home / "ranks.log").read_text().splitlines()
    assert set(ranks) == {"0 of 2: cuda", "1 of 2: cuda"}, "on a machine without two GPUs they refuse to compute"
    assert rehearsal.starts() == [f"{stage}/{key}".rstrip("/")] * 2


@pytest.mark.slow
def test_transient_failures_are_tried_again_and_a_retry_goes_on_from_the_failed_stage(
        job_dir: Path, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["transient", "die", "ok"], capture=["permanent", "ok"], train__base=["hang"])
    local.start(job_dir, job_file(spec_of()))
    assert wait_for(job_dir, "succeeded", "failed", "gone").state == "failed", log_of(job_dir)
    assert rehearsal.starts() == ["regenerate"] * 3 + ["capture"]
    local.start(job_dir, job_file(spec_of(), attempt=2))
    wait_for_start(rehearsal, "train/base")
    assert rehearsal.starts() == ["regenerate"] * 3 + ["capture"] * 2 + ["train/base"]


@pytest.mark.parametrize(("word", "starts", "reason", "words"), [
    ("transient", 3, "Transient", "the bucket refused the write"),
    ("die", 3, "StageFailed", "killed by SIGKILL 3 times"),
    ("crash", 1, "StageFailed", "RuntimeError: an index was out of range"),
])
def test_what_does_not_pass_is_not_tried_forever_and_always_explained(
        word: str, starts: int, reason: str, words: str, job_dir: Path, rehearsal: Rehearsal, boxes_here: None) -> None:
    rehearsal.plan(regenerate=[word])
    with pytest.raises(StageFailed, match=words):
        tasks.regenerate(str(job_dir), written_job(job_dir))
    assert rehearsal.starts() == ["regenerate"] * starts
    failed = read_failure(job_dir)
    assert failed is not None
    assert failed.failure.reason == reason
    assert words in failed.failure.message
    assert failed.failure.hint


def test_a_stage_that_gets_further_is_started_again_however_often_it_is_killed(
        job_dir: Path, rehearsal: Rehearsal, boxes_here: None) -> None:
    rehearsal.plan(regenerate=["further"] * 4 + ["ok"], capture=["further", "die", "die", "die"])
    digest = written_job(job_dir)
    rows = tasks.regenerate(str(job_dir), digest)
    with pytest.raises(StageFailed, match="killed by SIGKILL 3 times and got no further"):
        tasks.capture(str(job_dir), digest, rows)
    assert rehearsal.starts() == ["regenerate"] * 5 + ["capture"] * 4


def test_kills_are_counted_from_the_furthest_position_and_recorded_failures_always() -> None:
    rows, steps = ("regenerate", "rows"), ("regenerate", "steps")
    attempts, counts = Attempts(), []
    for now in ({}, {rows: 0.0}, {rows: 0.0}, {rows: 7.0}, {rows: 5.0}, {rows: 6.0}, {steps: 0.0}, {steps: 0.0}):
        attempts = attempts.after_kill(now)
        counts.append(attempts.count)
    assert counts == [1, 1, 2, 1, 2, 3, 1, 2]
    assert attempts.after_failure().count == 3


@pytest.mark.slow
def test_candidates_trained_together_are_started_again_while_one_of_them_gets_further(
        job_dir: Path, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    # The box runs in this process: what `sitecustomize` does for others.
    monkeypatch.setitem(CATALOG, "train", dataclasses.replace(CATALOG["train"], together="rehearsal_stage"))
    rehearsal.plan(**{"train__c2-lr-0p002": ["further"] * 4 + ["ok"]})
    job = JobFile(id="job-1", resolved=derive(sweeping_spec()))
    write_model(job_dir / JOB_FILE, job)
    tasks.sweep(str(job_dir), digest_model(job), "stages/capture")
    assert len(rehearsal.sweeps()) == 5


@pytest.mark.parametrize("manner", [pytest.param("hang", marks=pytest.mark.slow), "stubborn"])
def test_stop_leaves_no_process_even_when_a_stage_ignores_sigterm(
        manner: str, job_dir: Path, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=[manner])
    handle = local.start(job_dir, job_file(spec_of()))
    wait_for_start(rehearsal, "regenerate")
    assert len(group_members(handle.process.pid)) >= 3  # leader, shell, box, stage
    local.stop(job_dir, grace_s=1.0)
    assert group_members(handle.process.pid) == []
    assert local.observe(job_dir).state == "gone"


def test_a_run_outlives_the_process_that_started_it_and_is_found_again(job_dir: Path, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang"])
    code = (
        "import sys, time; from pathlib import Path; from eyrie_pipelines import local\n"
        "from eyrie_pipelines.runner import JobFile\n"
        "job = JobFile.model_validate_json(sys.argv[2])\n"
        "local.start(Path(sys.argv[1]), job); print('started', flush=True); time.sleep(600)\n")
    plane = subprocess.Popen([sys.executable, "-c", code, str(job_dir), job_file(spec_of()).model_dump_json()],
                             stdout=subprocess.PIPE)
    assert plane.stdout is not None
    plane.stdout.readline()
    plane.kill()
    plane.wait()
    wait_for_start(rehearsal, "regenerate")
    assert local.observe(job_dir).state == "running"
    with pytest.raises(Conflict, match="is alive"):
        local.start(job_dir, job_file(spec_of()))
    local.stop(job_dir)
    assert local.live_processes(job_dir) == []


def test_two_leaders_in_one_job_directory_are_impossible(job_dir: Path, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang"])
    first = local.start(job_dir, job_file(spec_of()))
    second = subprocess.run([sys.executable, "-m", "eyrie_pipelines.local", "--job-dir", str(job_dir)],
                            capture_output=True, timeout=60, check=False)
    assert second.returncode == 3
    assert local.find_handle(job_dir) == first
    assert local.observe(job_dir).state == "running"


def test_a_runner_asked_to_start_a_run_that_is_alive_leaves_it_alone(tmp_path: Path, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang"])
    runner, job_dir = local.LocalRunner(tmp_path), tmp_path / "jobs" / "job-1"
    try:
        runner.start(job_file(spec_of()))
        first = runner.observe("job-1")
        runner.start(job_file(spec_of()))
        assert runner.observe("job-1") == first
        record = (job_dir / "run" / "run.json").rename(tmp_path / "aside")  # its leader has not written it yet
        runner.start(job_file(spec_of()))
        record.rename(job_dir / "run" / "run.json")
        assert runner.observe("job-1") == first
    finally:
        local.stop(job_dir, grace_s=0.5)


def test_when_only_the_leader_is_killed_the_next_start_clears_its_orphans_and_goes_on(
        job_dir: Path, rehearsal: Rehearsal) -> None:
    rehearsal.plan(capture=["hang"])
    first = local.start(job_dir, job_file(spec_of()))
    wait_for_start(rehearsal, "capture")
    os.kill(first.process.pid, signal.SIGKILL)
    assert wait_until(lambda: local.observe(job_dir).state == "gone", LIMIT_S)
    assert local.live_processes(job_dir)
    # What serves was looked up when the attempt began; a start after a death keeps it.
    second = local.start(job_dir, job_file(spec_of(), incumbent=INCUMBENT))
    assert load_job(str(job_dir)).incumbent is None
    assert second.starts == 1, "a stage has finished since"
    assert group_members(first.process.pid) == []
    assert wait_until(lambda: len(rehearsal.starts()) == 3, LIMIT_S)
    assert rehearsal.starts() == ["regenerate", "capture", "capture"]


@pytest.mark.slow
def test_deaths_are_counted_until_the_run_gets_further(job_dir: Path, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang", "hang", "hang", "hang"])
    events = job_dir / "stages" / "regenerate" / "events.jsonl"
    counted, since = [], []
    for number, done in enumerate((None, None, 7.0, 7.0)):
        if done is not None:
            events.parent.mkdir(parents=True, exist_ok=True)
            record = ProgressRecord(time=datetime.now(UTC), done=done).model_dump_json()
            events.write_text(f'{record}\n{{"kind": "event", "torn')
        handle = local.start(job_dir, job_file(spec_of()))
        counted.append(handle.starts)
        since.append(handle.since)
        assert wait_until(lambda number=number: rehearsal.starts().count("regenerate") == number + 1, LIMIT_S)  # type: ignore[misc]
        os.killpg(handle.process.pid, signal.SIGKILL)
        assert wait_until(lambda: local.observe(job_dir).state == "gone", LIMIT_S)
    assert counted == [1, 2, 1, 2]
    assert since[0] == since[1] < since[2] == since[3]


@pytest.mark.parametrize("damage", [None, b"{", b"\xff\xfe"])
def test_a_run_whose_record_is_damaged_or_lost_is_followed_and_stopped_all_the_same(
        tmp_path: Path, rehearsal: Rehearsal, damage: bytes | None) -> None:
    rehearsal.plan(regenerate=["hang"])
    runner, job_dir = local.LocalRunner(tmp_path), tmp_path / "jobs" / "job-1"
    try:
        runner.start(job_file(spec_of(), 2))
        first = runner.observe("job-1")
        record = job_dir / "run" / "run.json"
        record.unlink() if damage is None else record.write_bytes(damage)
        # When it was started, for the pause before another start, is in the record alone.
        seen = runner.observe("job-1")
        assert dataclasses.replace(seen, since=first.since, started_at=first.started_at) == first
        assert (first.state, first.attempt) == ("running", 2)
        pids = local.live_processes(job_dir)
        assert pids
        runner.stop("job-1")
        assert [pid for pid in pids if identify(pid) is not None] == []
        assert runner.observe("job-1").state == "none"
    finally:
        local.stop(job_dir, grace_s=0.5)


def test_a_damaged_job_file_is_written_again_by_the_next_start(job_dir: Path, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang"])
    (job_dir / JOB_FILE).write_bytes(b"{")
    local.start(job_dir, job_file(spec_of(), incumbent=INCUMBENT))
    job = load_job(str(job_dir))
    assert (job.id, job.spec, job.incumbent) == ("job-1", spec_of(), INCUMBENT)


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]"])
def test_a_damaged_record_of_a_failure_counts_as_none_and_is_logged(
        job_dir: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    for path in (job_dir / "run" / "failure.json", job_dir / "stages" / "capture" / "failure.json"):
        path.parent.mkdir(parents=True)
        path.write_bytes(damage)
    assert read_failure(job_dir) is None
    assert read_stage_failure(job_dir / "stages" / "capture") is None
    assert [str(record.args[0]) for record in caplog.records if record.args] == [  # type: ignore[index]
        str(job_dir / "run" / "failure.json"), str(job_dir / "stages" / "capture" / "failure.json")]


def test_a_leader_that_is_killed_before_its_record_is_started_again(
        job_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(Transient, match="killed by signal 9 before it wrote its record"):
        local.start(job_dir, job_file(spec_of()))
    assert local.observe(job_dir).state == "none"


def test_a_run_that_failed_without_a_failed_stage_is_gone_since_a_process_of_it_was_killed(job_dir: Path) -> None:
    me, now = identify(os.getpid()), datetime.now(UTC)
    assert me is not None
    (job_dir / "run").mkdir()
    handle = local.RunHandle(run_id="r", job_id="j", attempt=1, process=me, started_at=now)
    write_model(job_dir / "run/run.json", handle)
    write_model(job_dir / "run/result.json", local.RunResult(run_id="r", state="failed", message="task failed",
                                                             finished_at=now))
    assert local.observe(job_dir).state == "gone"
    (job_dir / "run/run.json").unlink()  # names this process, which the fixture would end


def test_a_reused_pid_is_not_mistaken_for_the_leader(job_dir: Path) -> None:
    own = identify(os.getpid())
    assert own is not None
    for stranger in (own.model_copy(update={"started_ticks": own.started_ticks - 1}),
                     own.model_copy(update={"boot": "another-boot"})):
        assert not is_alive(stranger)
        write_model(job_dir / "run" / "run.json", local.RunHandle.model_validate(
            {"run_id": "r", "job_id": "job-1", "attempt": 1, "process": stranger.model_dump(),
             "started_at": "2026-01-01T00:00:00Z"}))
        assert local.observe(job_dir).state == "gone"
        local.stop(job_dir)  # must not signal this very process


def test_a_zombie_counts_as_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    name = ProcessId(pid=child.pid, started_ticks=0, boot=boot_id())
    assert wait_until(lambda: identify(name.pid) is None, LIMIT_S)
    child.wait()


def test_nothing_started_is_observed_as_none(job_dir: Path) -> None:
    assert local.observe(job_dir).state == "none"
    local.stop(job_dir)


def test_a_run_whose_leader_died_has_the_end_of_its_log(tmp_path: Path) -> None:
    leader = subprocess.Popen(["sleep", "60"])
    process = identify(leader.pid)
    leader.kill()
    leader.wait()
    assert process is not None
    run_dir = tmp_path / "jobs" / "job-1" / "run"
    run_dir.mkdir(parents=True)
    write_model(run_dir / "run.json", local.RunHandle(run_id="r", job_id="job-1", attempt=1, process=process,
                                                      started_at=datetime.now(UTC)))
    (run_dir / "pipeline.log").write_text("Traceback\nModuleNotFoundError: No module named 'kfp'\n")
    seen = local.LocalRunner(tmp_path).observe("job-1")
    assert seen.state == "gone"
    assert seen.last_words == "Traceback | ModuleNotFoundError: No module named 'kfp'"


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]"])
def test_a_damaged_record_of_a_run_concerns_no_other_job(tmp_path: Path, damage: bytes) -> None:
    run_dir = tmp_path / "jobs" / "broken" / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_bytes(damage)
    runner = local.LocalRunner(tmp_path)
    assert runner.has_capacity("broken", ("broken", "other"), 0)
    assert runner.has_capacity("other", ("other", "broken"), 0)
    assert runner.observe("broken").state == "none"
    runner.stop("broken")
