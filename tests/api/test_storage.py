"""What may be deleted: nothing of a job that may go on, nothing an endpoint may serve; and only that is."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from eyrie_api.artifacts.local import LocalStore
from eyrie_api.artifacts.storage_usage import (
    JobFacts,
    StorageUsage,
    files_in_home,
    files_in_store,
    group_files,
    plan_removal,
    read_by,
    read_in_home,
    remove_from_home,
    remove_from_store,
    reused_by,
    served_by,
    states_of,
    that_have_not,
)
from eyrie_api.cli.storage import storage_view
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.status import Condition, Endpoint, Job, JobStatus, Phase, Revision
from tests.api.samples import NOW

FILES = (
    "stages/capture/shard-00000.states", "stages/capture/index.json", "stages/capture/manifest.json",
    "stages/regenerate/rows.jsonl", "stages/train/c0/.state/training.safetensors", "stages/train/c0/manifest.json",
    "stages/train/c0/checkpoints/c0-step-5/model.safetensors", "stages/train/c0/checkpoints/c0-step-9/config.json",
    "stages/train/c0/checkpoints/c0-step-9/model.safetensors", "job.json",
)


def make_home(home: Path, *jobs: str) -> Path:
    for job in jobs:
        for name in FILES:
            path = home / "jobs" / job / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * 10)
    return home


def judged(home: Path, jobs: dict[str, JobFacts], served: set[tuple[str, str]] | None = None, *,
           failed_too: bool = False) -> StorageUsage:
    return plan_removal(group_files(files_in_home(home)), jobs, served or set(), set(), failed_too=failed_too)


def goes(usage: StorageUsage) -> set[tuple[str, str, str]]:
    return {(each.item.job_id, each.item.kind, each.item.name) for each in usage.decisions if each.removable}


def test_of_a_succeeded_job_states_and_losing_checkpoints_go_and_its_best_stays(tmp_path: Path) -> None:
    storage = judged(make_home(tmp_path, "j1"), {"j1": JobFacts("Succeeded", "c0-step-9")})
    assert goes(storage) == {("j1", "captured-states", ""), ("j1", "training-state", ""),
                             ("j1", "checkpoint", "c0-step-5")}
    assert (storage.total_bytes, storage.removable_bytes) == (100, 40)
    assert remove_from_home(tmp_path, storage) == 40
    left = {path.relative_to(tmp_path / "jobs/j1").as_posix() for path in (tmp_path / "jobs").rglob("*")
            if path.is_file()}
    assert left == {"stages/capture/manifest.json", "stages/regenerate/rows.jsonl", "stages/train/c0/manifest.json",
                    "stages/train/c0/checkpoints/c0-step-9/config.json", "job.json",
                    "stages/train/c0/checkpoints/c0-step-9/model.safetensors"}
    assert not (tmp_path / "jobs/j1/stages/train/c0/checkpoints/c0-step-5").exists()
    assert remove_from_home(tmp_path, storage) == 0, "twice is fine"
    assert goes(judged(tmp_path, {"j1": JobFacts("Succeeded", "c0-step-9")})) == set()


@pytest.mark.parametrize("phase", ["Pending", "Running", "Cancelling"])
def test_nothing_goes_of_a_job_that_has_not_ended(tmp_path: Path, phase: Phase) -> None:
    assert not goes(judged(make_home(tmp_path, "j1"), {"j1": JobFacts(phase, None)}, failed_too=True))


def test_nothing_goes_of_a_job_that_nobody_knows(tmp_path: Path) -> None:
    assert not goes(judged(make_home(tmp_path, "j1"), {}, failed_too=True))


def test_a_failed_job_keeps_what_a_retry_goes_on_from_unless_asked(tmp_path: Path) -> None:
    home, jobs = make_home(tmp_path, "j1"), {"j1": JobFacts("Failed", None)}
    assert not goes(judged(home, jobs))
    assert len(goes(judged(home, jobs, failed_too=True))) == 4


def revision(number: int, checkpoint: str, state: str) -> Revision:
    return Revision(number=number, job_id="j1", checkpoint=checkpoint, tree=None, drafter_dir=None, created_at=NOW,
                    reason="", state=state)  # type: ignore[arg-type]


def test_what_an_endpoint_serves_or_may_go_back_to_stays() -> None:
    endpoint = Endpoint.model_construct(
        name="e", active_revision=2, revisions=(
            revision(1, "old", "retired"), revision(2, "now", "active"), revision(3, "next", "canary"),
            revision(4, "bad", "rejected"), revision(5, "worse", "rolled-back")))
    assert served_by([endpoint]) == {("j1", "old"), ("j1", "now"), ("j1", "next")}


CHECKPOINTS = "/srv/eyrie/jobs/j1/stages/train/c0/checkpoints"
OTHER_JOB = JobSpec.model_validate({
    "target": {"model": "quickstart"}, "data": {"sources": [{"path": "chats.jsonl"}]},
    "drafter": {"init_from": f"{CHECKPOINTS}/c0-step-5"},
    "sweep": {"axes": [{"field": "drafter.init_from", "values": [f"{CHECKPOINTS}/c0-step-6", "org/published-head"]}]},
    "rivals": [{"method": "drafter", "path": f"{CHECKPOINTS}/c0-step-7"}]})


def other_job(phase: Phase) -> Job:
    return Job.model_construct(id="j2", spec=OTHER_JOB, status=JobStatus(phase=phase))


@pytest.mark.parametrize("phase", ["Pending", "Running", "Cancelling", "Failed"])
def test_a_checkpoint_that_another_job_reads_now_or_when_retried_stays(tmp_path: Path, phase: Phase) -> None:
    read = read_by([other_job(phase)])
    assert read == {("j1", "c0-step-5"), ("j1", "c0-step-6"), ("j1", "c0-step-7")}
    items = group_files(files_in_home(make_home(tmp_path, "j1")))
    usage = plan_removal(items, {"j1": JobFacts("Succeeded", "c0-step-9")}, set(), read)
    assert ("j1", "checkpoint", "c0-step-5") not in goes(usage)
    assert "another job continues from it, or measures it as a rival" in {each.reason for each in usage.decisions}


@pytest.mark.parametrize("phase", ["Succeeded", "Cancelled"])
def test_a_job_that_has_ended_reads_no_checkpoint_of_another(phase: Phase) -> None:
    assert read_by([other_job(phase)]) == set()


def reader(job_id: str, phase: Phase, *, regenerated: bool = False) -> Job:
    done = Condition(type="Regenerated", status="True" if regenerated else "False", reason="Test",
                     last_transition_time=NOW)
    return Job.model_construct(id=job_id, spec=OTHER_JOB, status=JobStatus(phase=phase, conditions=(done,)))


def test_answers_are_read_by_jobs_that_have_none_of_their_own_yet(tmp_path: Path) -> None:
    for name in ("j2", "j3", "j4", "j5"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
        (tmp_path / "jobs" / name / "job.json").write_text('{"reuse": ["j1", "j0"]}')
    (tmp_path / "jobs/j5/job.json").write_text('{"id": "of an earlier version"}')
    jobs = [reader("j2", "Failed"), reader("j3", "Running", regenerated=True), reader("j4", "Succeeded"),
            reader("j5", "Running"), reader("pending", "Pending")]
    expected = {"j0": ("j2",), "j1": ("j2",)}
    assert reused_by(that_have_not("Regenerated", jobs), lambda place: read_in_home(tmp_path, place)) == expected
    assert reused_by(that_have_not("Regenerated", jobs), LocalStore(tmp_path).read) == expected


def test_the_table_names_the_jobs_that_read_the_answers_of_another(tmp_path: Path) -> None:
    text = io.StringIO()
    Console(file=text, width=120).print(
        storage_view(judged(make_home(tmp_path, "j1"), {"j1": JobFacts("Succeeded", "c0-step-9")}), None,
                     {"j1": ("j2", "j5")}))
    *_, shared, end = text.getvalue().splitlines()
    assert shared == "j1: its answers are read by j2, j5"
    assert end.endswith("removable: eyrie storage --clean")


def test_captured_states_stay_while_a_job_that_has_not_captured_may_copy_them(tmp_path: Path) -> None:
    items = group_files(files_in_home(make_home(tmp_path, "j1")))
    (tmp_path / "jobs/j3").mkdir()
    (tmp_path / "jobs/j3/job.json").write_text('{"reuse": ["j1"]}')
    copying = that_have_not("Captured", [reader("j3", "Running", regenerated=True)])
    read = states_of(reused_by(copying, LocalStore(tmp_path).read))
    facts = {"j1": JobFacts("Succeeded", "c0-step-9")}
    kept = plan_removal(items, facts, set(), read, failed_too=True)
    assert {one.reason for one in kept.decisions if one.item.kind == "captured-states"} == {"another job may copy them"}
    assert ("j1", "captured-states", "") in goes(plan_removal(items, facts, set(), set()))


@given(phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Cancelling", "Cancelled"]),
       best=st.sampled_from([None, "c0-step-5", "c0-step-9"]), failed=st.booleans(),
       served=st.sets(st.sampled_from(["c0-step-5", "c0-step-9"])))
def test_whatever_ends_a_job_records_and_served_checkpoints_never_go(phase: Phase, best: str | None, failed: bool,
                                                                     served: set[str]) -> None:
    found = group_files((f"jobs/j1/{name}", 10) for name in FILES)
    gone = goes(plan_removal(found, {"j1": JobFacts(phase, best)}, {("j1", one) for one in served}, set(),
                              failed_too=failed))
    assert not any(kind == "record" for _, kind, _ in gone)
    assert not any(name in served or name == best for _, kind, name in gone if kind == "checkpoint")


def test_an_artifact_store_is_cleaned_by_the_same_rules(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for name in FILES:
        if "/." not in name:
            store.write(f"jobs/j1/{name}", b"x" * 10)
    jobs = {"j1": JobFacts("Cancelled", None)}
    storage = plan_removal(group_files(files_in_store(store)), jobs, {("j1", "c0-step-5")}, set())
    assert goes(storage) == {("j1", "captured-states", ""), ("j1", "checkpoint", "c0-step-9")}
    assert remove_from_store(store, storage) == 40
    assert "jobs/j1/stages/train/c0/checkpoints/c0-step-5/model.safetensors" in {one.key for one in store.list()}
