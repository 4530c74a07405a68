"""Pods with an artifact store between them: each begins with an empty home, and may be killed anywhere."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest

from eyrie_api.artifacts import digest_model, read_manifest
from eyrie_api.artifacts.directories import download_dir
from eyrie_api.artifacts.local import LocalStore
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.artifacts.store import ArtifactStore, StoreOptions, StoreUnavailable
from eyrie_api.contract.benchmark import BenchmarkSpec, SuiteSpec
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.hardware import HardwareSpec, PlacedProfile
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.prove import ProveSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.reports import RegenerateReport
from eyrie_api.contract.stages import RegenerateStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.errors import Transient
from eyrie_api.planning.resolve import derive
from eyrie_pipelines import tasks, work_area
from eyrie_pipelines.directory_sync import DirectorySync, _take_snapshot, join_parts
from eyrie_pipelines.processes import wait_until
from eyrie_pipelines.run_records import RunFailure, StageFailed
from eyrie_pipelines.runner import JobFile
from eyrie_pipelines.stage_process import INTERRUPTED_EXIT_CODE
from eyrie_pipelines.stage_specs import regenerate_spec
from eyrie_workers.catalog import (
    CATALOG,
    LEDGER_PARTS,
    ROWS_FILE,
    SELECTION_FILE,
    STATE_DIR,
    STORE_ADDRESS_FILE,
    SYNC_VARIABLE,
)
from eyrie_workers.targets.model_cache import cached_snapshot
from tests.pipelines.conftest import Rehearsal, fill, spec_of, sweeping_spec
from tests.servers.hub import served_hub
from tests.servers.s3 import S3Server
from tests.tiny import chats_file, tiny_target
from tests.workers.regeneration.openai_double import Service, Troubles, openai_double

LIMIT_S = 600.0
INCUMBENT = DrafterUse(drafter_dir="/drafters/before", setting=Setting(tree=DraftTreeShape()))
SPEC = spec_of(benchmark=BenchmarkSpec(suites=(SuiteSpec(name="chat", path="held-out"),)))


class Pods:
    """A job whose pods have nothing in common but the store. Their homes have one path, as in a cluster."""

    def __init__(self, home: Path, store: ArtifactStore, spec: JobSpec = SPEC, job_id: str = "job-1",
                 reuse: tuple[str, ...] = ()) -> None:
        self.job_dir, self.store = home / "jobs" / job_id, store
        self.take(JobFile(id=job_id, resolved=derive(spec), reuse=reuse))

    def take(self, job: JobFile) -> None:
        """Be about that job."""
        self.job = job
        self.store.write(f"jobs/{job.id}/job.json", job.model_dump_json().encode())

    def run(self, box: Callable[..., object], *arguments: object) -> object:
        """One box in a pod of its own."""
        self.lose_the_node()
        given = () if box is tasks.select else (digest_model(self.job),)
        return box(str(self.job_dir), *given, *arguments)

    def start(self, box: str, *arguments: str) -> subprocess.Popen[bytes]:
        """The same, as a process that can be killed."""
        self.lose_the_node()
        code = "import sys; from eyrie_pipelines import tasks; getattr(tasks, sys.argv[1])(*sys.argv[2:])"
        return subprocess.Popen([sys.executable, "-c", code, box, str(self.job_dir), digest_model(self.job),
                                 *arguments], start_new_session=True)

    def lose_the_node(self) -> None:
        shutil.rmtree(self.job_dir.parent.parent, ignore_errors=True)

    def stored(self) -> set[str]:
        return {one.key.removeprefix("jobs/job-1/") for one in self.store.list("jobs/job-1")}

    def here(self) -> set[str]:
        return {path.relative_to(self.job_dir).as_posix() for path in self.job_dir.rglob("*") if path.is_file()}


@pytest.fixture
def environment(tmp_path: Path, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `placement` gives a pod."""
    monkeypatch.setenv("EYRIE_ARTIFACTS_URL", str(tmp_path / "store"))
    monkeypatch.setenv(SYNC_VARIABLE, "0.05")
    for name, stage in CATALOG.items():  # boxes run in this process: what `sitecustomize` does for others
        monkeypatch.setitem(CATALOG, name, dataclasses.replace(stage, module="rehearsal_stage",
                                                               together="rehearsal_stage"))
    return tmp_path


@pytest.fixture
def pods(environment: Path) -> Pods:
    return Pods(environment / "home", LocalStore(environment / "store"))


def test_a_job_passes_from_pod_to_pod_through_the_store_and_each_brings_only_what_it_reads(
        pods: Pods, rehearsal: Rehearsal) -> None:
    rows = pods.run(tasks.regenerate)
    store = pods.run(tasks.capture, rows)
    assert {"stages/regenerate/rows.jsonl", "stages/regenerate/held_out.jsonl"} <= pods.here()
    assert pods.run(tasks.list_candidates) == ["base"]
    trained = pods.run(tasks.train, store, "base")
    assert "stages/capture/index.json" in pods.here()
    assert "stages/regenerate/rows.jsonl" not in pods.here()
    names = pods.run(tasks.list_checkpoints, [trained])
    assert names == ["base-step-10", "base-step-20"]
    measured = [pods.run(tasks.benchmark, name) for name in ("base-step-10", "base-step-20")]
    assert {"stages/regenerate/held_out.jsonl", "stages/train/base/checkpoints/base-step-20/config.json",
            "stages/train/base/manifest.json"} <= pods.here(), "a stage compares the drafter with it"
    assert not {"stages/regenerate/rows.jsonl", "stages/train/base/checkpoints/base-step-10/config.json",
                "stages/capture/index.json"} & pods.here()
    best = pods.run(tasks.select, measured)
    tuned = pods.run(tasks.tune, best)
    pods.run(tasks.prove, best, tuned)
    assert rehearsal.starts() == ["regenerate", "capture", "train/base", "benchmark/base-step-10",
                                  "benchmark/base-step-20", "tune", "prove"]
    done = {f"stages/{name}/manifest.json" for name in (
        "regenerate", "capture", "train/base", "benchmark/base-step-10", "benchmark/base-step-20", "tune", "prove")}
    assert done <= pods.stored()
    assert {"stages/prove/events.jsonl", "stages/prove/log.txt", "stages/prove/spec.json"} <= pods.stored()
    # A run that is started again finds every stage finished.
    assert pods.run(tasks.train, store, "base") == trained
    assert len(rehearsal.starts()) == 7
    # A proof is of one incumbent. Another one's is made anew, and takes the old one's place.
    proof = pods.store.read("jobs/job-1/stages/prove/manifest.json")
    pods.take(pods.job.model_copy(update={"incumbent": INCUMBENT}))
    pods.run(tasks.prove, best, tuned)
    assert rehearsal.starts()[7:] == ["prove"]
    assert pods.store.read("jobs/job-1/stages/prove/manifest.json") != proof


def test_a_hardware_profile_gets_the_drafter_the_proof_and_the_requests_of_the_first_profile(
        pods: Pods, rehearsal: Rehearsal) -> None:
    hardware = HardwareSpec(profiles=(PlacedProfile(name="one", price_per_hour=1.0),
                                      PlacedProfile(name="two", price_per_hour=2.0)))
    pods.take(JobFile(id="job-1", resolved=derive(spec_of(prove=ProveSpec(hardware=hardware)))))
    trained = pods.run(tasks.train, pods.run(tasks.capture, pods.run(tasks.regenerate)), "base")
    assert pods.run(tasks.list_checkpoints, [trained]) == ["base-step-10", "base-step-20"]
    best = pods.run(tasks.select, [pods.run(tasks.benchmark, name) for name in ("base-step-10", "base-step-20")])
    pods.run(tasks.prove, best, pods.run(tasks.tune, best))
    for profile in ("one", "two"):
        pods.run(tasks.hardware, best, profile)
    assert rehearsal.starts()[-2:] == ["hardware/one", "hardware/two"]
    assert {"stages/hardware/one/results.json", "stages/prove/manifest.json", "stages/train/base/manifest.json",
            f"stages/train/base/checkpoints/{best}/config.json"} <= pods.here()
    assert "stages/hardware/one/manifest.json" in pods.stored()
    with pytest.raises(StageFailed, match=r"profile 'three' is not in this job's prove\.hardware"):
        pods.run(tasks.hardware, best, "three")


def test_a_drafter_of_another_job_that_training_continues_from_is_brought_to_capture_and_to_training(
        environment: Path) -> None:
    store = LocalStore(environment / "store")
    head = environment / "home/jobs/job-0/stages/train/base/checkpoints/base-step-20"
    before = Pods(environment / "home", store)
    states = before.run(tasks.capture, before.run(tasks.regenerate))
    before.run(tasks.train, states, "base")
    for one in list(store.list("jobs/job-1")):
        store.write(one.key.replace("job-1", "job-0"), store.read(one.key))
    pods = Pods(environment / "home", store, SPEC.model_copy(update={"drafter": DrafterSpec(init_from=str(head))}))
    for one in list(store.list("jobs/job-1/stages")):
        store.delete(one.key)
    states = pods.run(tasks.capture, pods.run(tasks.regenerate))
    assert (head / "config.json").is_file()
    pods.run(tasks.train, states, "base")
    assert (head / "config.json").is_file()


def test_answers_of_earlier_jobs_are_brought_to_regenerate(environment: Path) -> None:
    store = LocalStore(environment / "store")
    Pods(environment / "home", store).run(tasks.regenerate)
    later = Pods(environment / "home", store, job_id="job-2", reuse=("job-0", "job-1"))
    later.run(tasks.regenerate)
    earlier = later.job_dir.with_name("job-1")
    assert (earlier / "stages/regenerate/manifest.json").is_file()
    assert (earlier / "stages/regenerate/rows.jsonl").is_file()
    assert {one.key.split("/")[1] for one in store.list("jobs")} == {"job-1", "job-2"}


@pytest.mark.slow
def test_answers_of_an_earlier_job_are_brought_to_regenerate_or_generated_where_they_are_not_whole(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stage itself."""
    monkeypatch.setenv("EYRIE_ARTIFACTS_URL", str(tmp_path / "store"))
    monkeypatch.setenv(SYNC_VARIABLE, "0.05")
    store = LocalStore(tmp_path / "store")
    source = DataSource(path=str(chats_file(tmp_path / "chats.jsonl", 6)))
    spec = spec_of(target=TargetSpec(model=str(tiny_target(tmp_path / "target"))),
                   data=DataSpec(sources=(source,), held_out_fraction=0.0), regenerate=RegenerateSpec(max_new_tokens=4))

    def reused(job_id: str, *earlier: str) -> int:
        pods = Pods(tmp_path / "home", store, spec, job_id, earlier)
        assert pods.run(tasks.regenerate) == "stages/regenerate"
        report = read_manifest(pods.job_dir / "stages/regenerate").report
        assert isinstance(report, RegenerateReport)
        assert report.rows_answered == 6
        return report.rows_reused

    assert reused("job-1") == 0
    assert reused("job-2", "job-0", "job-1") == 6
    assert {one.key.split("/")[1] for one in store.list("jobs")} == {"job-1", "job-2"}
    rows = "jobs/job-1/stages/regenerate/rows.jsonl"
    store.write(rows, store.read(rows).replace(b'"line":1,', b'"line":7,'))
    assert reused("job-3", "job-1") == 0
    events = store.read("jobs/job-3/stages/regenerate/events.jsonl").decode()
    assert "AnswersNotReused" in events


def test_a_pod_whose_disk_is_full_brings_its_inputs_when_there_is_space(environment: Path, disk: Path) -> None:
    pods = Pods(disk / "home", LocalStore(environment / "store"))
    rows = pods.run(tasks.regenerate)
    filler = fill(disk)
    space = threading.Timer(3.0, filler.unlink)
    space.start()
    assert pods.run(tasks.capture, rows) == "stages/capture"
    assert space.finished.is_set(), "it waited"
    assert "stages/capture/manifest.json" in pods.stored()


def test_states_too_large_for_a_pods_disk_stay_in_the_store_and_training_is_given_the_place(
        pods: Pods, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(work_area.STATES_VARIABLE, "ranged")
    store = pods.run(tasks.capture, pods.run(tasks.regenerate))
    pods.run(tasks.train, store, "base")
    states = {name for name in pods.here() if name.startswith("stages/capture/")}
    assert states == {f"stages/capture/{STORE_ADDRESS_FILE}"}
    result = (pods.job_dir / "stages" / "capture" / STORE_ADDRESS_FILE).read_text().strip()
    assert result == f"{pods.store.url}/jobs/job-1/stages/capture"
    assert not {name for name in pods.stored() if name.endswith(STORE_ADDRESS_FILE)}


@pytest.mark.slow
@pytest.mark.parametrize("disk", [72], indirect=True)
def test_states_larger_than_a_pods_disk_are_captured_through_it_and_a_killed_pod_repeats_none_of_its_shards(
        tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stages themselves."""
    monkeypatch.setenv("EYRIE_ARTIFACTS_URL", str(tmp_path / "store"))
    monkeypatch.setenv(SYNC_VARIABLE, "0.05")
    words = "".join(f"{number} plus {2 * number}, " for number in range(26))
    chats = [{"messages": [{"role": "user", "content": f"{number}: {words}"}]} for number in range(160)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    source, target = DataSource(path=str(tmp_path / "chats.jsonl")), tiny_target(tmp_path / "target", hidden_size=256)
    spec = spec_of(target=TargetSpec(model=str(target)), data=DataSpec(sources=(source,), held_out_fraction=0.0),
                   regenerate=RegenerateSpec(max_new_tokens=2),
                   capture=CaptureSpec(codec="float32", shard_size_bytes=2**21, batch_tokens=512, check_rows=0))
    store = LocalStore(tmp_path / "store")
    elsewhere = Pods(tmp_path / "home", store, spec)
    rows = str(elsewhere.run(tasks.regenerate))
    elsewhere.run(tasks.capture, rows)
    wanted = artifact_in(store, "jobs/job-1/stages/capture")
    assert sum(map(len, wanted.values())) > 72 * 2**20
    store.delete_all("jobs/job-1/stages/capture")

    monkeypatch.setenv(work_area.STATES_VARIABLE, "ranged")
    pods = Pods(disk / "home", store, spec)
    pod = pods.start("capture", rows)
    assert wait_until(lambda: sum(name.endswith(".states") for name in pods.stored()) >= 4, LIMIT_S)
    os.killpg(pod.pid, signal.SIGKILL)
    pod.wait()
    assert "stages/capture/manifest.json" not in pods.stored()
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("shard-*.states")}
    assert pods.run(tasks.capture, rows) == "stages/capture"
    assert artifact_in(store, "jobs/job-1/stages/capture") == wanted
    assert not list((pods.job_dir / "stages/capture").glob("*shard-*"))
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("shard-*.states")}
    assert times.items() <= after.items(), "shards that were in the store are not written again"

    # A damaged shard, noted by training, is written again alone.
    damaged = "jobs/job-1/stages/capture/shard-00002.states"
    store.write(damaged, wanted["shard-00002.states"][:-9])
    store.write(damaged.replace(".states", ".damaged"), b"its end cannot be read")
    pods.run(tasks.capture, rows)
    assert artifact_in(store, "jobs/job-1/stages/capture") == wanted
    repaired = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("shard-*.states")}
    assert {name for name in after if after[name] != repaired[name]} == {"shard-00002.states"}


REGENERATE, CAPTURE = "jobs/job-1/stages/regenerate", "jobs/job-1/stages/capture"


def answers_through(home: Path, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                    num_rows: int, answer: str) -> tuple[Pods, JobSpec, Service]:
    """A job whose answers go through `home` into the store; its pod is killed when half of them are answered."""
    rows = [{"messages": [{"role": "user", "content": f"{number}?"}]} for number in range(num_rows)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source, target = DataSource(path=str(tmp_path / "chats.jsonl")), tiny_target(tmp_path / "target")
    gate = threading.Event()
    gate.set()
    with openai_double(Troubles(message={"role": "assistant", "content": answer}, gate=gate)) as service:
        spec = spec_of(target=TargetSpec(model=str(target)), data=DataSpec(sources=(source,), held_out_fraction=0.0),
                       regenerate=RegenerateSpec(engine="openai", base_url=service.url, concurrency=4),
                       capture=CaptureSpec(max_length=32, check_rows=0))
        elsewhere = Pods(tmp_path / "home", store, spec)
        elsewhere.run(tasks.regenerate)
        wanted = {name: store.read(f"{REGENERATE}/{name}") for name in (ROWS_FILE, "quarantine.jsonl")}
        files = read_manifest(elsewhere.job_dir / "stages/regenerate").files
        assert wanted[ROWS_FILE].count(b"\n") == num_rows
        store.delete_all(REGENERATE)

        monkeypatch.setenv(work_area.STATES_VARIABLE, "ranged")
        pods = Pods(home, store, spec)
        service.attempts.clear()
        service.at_gate, service.troubles.before_gate = 0, num_rows // 2
        gate.clear()
        pod = pods.start("regenerate")
        parts = f"{REGENERATE}/{LEDGER_PARTS}"
        quarter = len(wanted[ROWS_FILE]) / 4
        assert wait_until(lambda: sum(one.size_bytes for one in store.list(parts)) > quarter, LIMIT_S)
        os.killpg(pod.pid, signal.SIGKILL)
        pod.wait()
        gate.set()
        stored = b"".join(store.read(one.key) for one in store.list(parts)).splitlines()
        assert 0 < len(stored) < num_rows
        assert pods.run(tasks.regenerate) == "stages/regenerate"
        answered = {rows[json.loads(line)["line"] - 1]["messages"][0]["content"] for line in stored}  # type: ignore[index]
        assert {service.attempts[asked] for asked in answered} == {1}, "what was in the store is not asked again"
        assert len(service.attempts) == num_rows
        manifest = read_manifest(pods.job_dir / "stages/regenerate")
        assert manifest.files == files, "the manifest does not say where the pod kept the answers"
        assert isinstance(manifest.report, RegenerateReport)
        assert manifest.report.rows_resumed >= len(stored)
        assert {name: store.read(f"{REGENERATE}/{name}") for name in wanted} == wanted
        assert not {name for name in pods.here() if name.endswith((ROWS_FILE, SELECTION_FILE))}
        assert f"stages/regenerate/{ROWS_FILE}" in pods.stored()
        assert not {name for name in pods.stored() if LEDGER_PARTS in name or name.endswith(SELECTION_FILE)}
        return pods, spec, service


@pytest.mark.slow
def test_answers_stay_in_a_real_store_and_a_killed_pod_later_stages_and_later_jobs_read_them_there(
        tmp_path: Path, rclone_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stages themselves."""
    store = in_environment(rclone_s3, tmp_path, monkeypatch)
    pods, spec, _service = answers_through(tmp_path / "home", store, tmp_path, monkeypatch, 60, "An answer. " * 40)
    pods.run(tasks.capture, "stages/regenerate")
    assert not {name for name in pods.here() if name.endswith(ROWS_FILE)}
    index = store.read(f"{CAPTURE}/index.json")
    # A later job: the endpoint is away by now, and every answer is that of the first job.
    later = Pods(tmp_path / "home", store, spec, "job-2", ("job-1",))
    later.run(tasks.regenerate)
    report = read_manifest(later.job_dir / "stages/regenerate").report
    assert isinstance(report, RegenerateReport)
    assert report.rows_reused == 60
    assert "jobs/job-1/stages/regenerate/rows.jsonl" not in {
        path.relative_to(tmp_path / "home").as_posix() for path in (tmp_path / "home").rglob("*")}
    # Pods with large disks read the same answers as a file.
    store.delete_all(CAPTURE)
    monkeypatch.delenv(work_area.STATES_VARIABLE)
    pods.run(tasks.capture, "stages/regenerate")
    assert f"stages/regenerate/{ROWS_FILE}" in pods.here()
    assert store.read(f"{CAPTURE}/index.json") == index
    # Answers that were damaged in the store are found before anything is computed.
    rows = f"{REGENERATE}/{ROWS_FILE}"
    store.write(rows, store.read(rows).replace(b"An answer", b"No answer", 1))
    store.delete_all(CAPTURE)
    monkeypatch.setenv(work_area.STATES_VARIABLE, "ranged")
    with pytest.raises(StageFailed, match="checksum differs"):
        pods.run(tasks.capture, "stages/regenerate")


@pytest.mark.slow
@pytest.mark.parametrize("disk", [72], indirect=True)
def test_answers_larger_than_a_pods_disk_pass_through_it_and_a_killed_pod_asks_for_none_of_its_answers_again(
        tmp_path: Path, disk: Path, rclone_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stage itself."""
    store = in_environment(rclone_s3, tmp_path, monkeypatch)
    answers_through(disk / "home", store, tmp_path, monkeypatch, 400, "An answer of many words. " * 2400)
    stored = store.stat(f"{REGENERATE}/{ROWS_FILE}")
    assert stored is not None
    assert stored.size_bytes > 72 * 2**20


def in_environment(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    """A real store that pods find by their environment."""
    store = bucket(server, tmp_path)
    monkeypatch.setenv("EYRIE_ARTIFACTS_URL", store.url)
    monkeypatch.setenv("EYRIE_ARTIFACTS_ENDPOINT_URL", server.endpoint_url)
    monkeypatch.setenv("EYRIE_ARTIFACTS_CREDENTIALS_DIR", str(tmp_path / "secret"))
    monkeypatch.setenv(SYNC_VARIABLE, "0.05")
    return store


def artifact_in(store: ArtifactStore, prefix: str) -> dict[str, bytes]:
    """The shards, the index and the notes of a stage."""
    names = {one.key.removeprefix(f"{prefix}/"): one.key for one in store.list(prefix)}
    return {name: store.read(key) for name, key in names.items() if name.startswith("shard-") or name == "index.json"}


def test_candidates_trained_together_in_one_pod_are_each_in_the_store_whichever_failed(
        pods: Pods, rehearsal: Rehearsal) -> None:
    pods.take(JobFile(id="job-1", resolved=derive(sweeping_spec())))
    store = pods.run(tasks.capture, pods.run(tasks.regenerate))
    rehearsal.plan(**{"train__c1-lr-0p001": ["permanent", "ok"]})
    with pytest.raises(StageFailed, match=r"lower train\.learning_rate"):
        pods.run(tasks.sweep, store)
    done = {name for name in pods.stored() if name.startswith("stages/train/") and name.endswith("/manifest.json")}
    assert done == {"stages/train/c2-lr-0p002/manifest.json", "stages/train/c3-lr-0p003/manifest.json"}
    pods.store.delete("jobs/job-1/run/failure.json")  # as the runner does when it starts the next attempt
    assert pods.run(tasks.sweep, store) == store
    assert rehearsal.starts()[2:] == ["train/c1-lr-0p001", "train/c2-lr-0p002", "train/c3-lr-0p003",
                                      "train/c1-lr-0p001"]
    for name in ("c1-lr-0p001", "c2-lr-0p002", "c3-lr-0p003"):  # the train boxes find all of them finished
        assert pods.run(tasks.train, store, name) == f"stages/train/{name}"
    assert len(rehearsal.starts()) == 6
    assert "stages/capture/index.json" not in pods.here()


def test_a_damaged_shard_in_the_store_is_marked_and_rebuilt_by_a_retry(
        pods: Pods, rehearsal: Rehearsal) -> None:
    states = pods.run(tasks.capture, pods.run(tasks.regenerate))
    shard, note = ("jobs/job-1/stages/capture/shard-000000" + ending for ending in (".safetensors", ".damaged"))
    whole = pods.store.read(shard)
    pods.store.write(shard, b"not what was written")
    with pytest.raises(StageFailed, match=r"shard-000000\.safetensors") as failed:
        pods.run(tasks.train, states, "base")
    assert "retry the job: capture rebuilds the damaged files" in failed.value.hint
    assert {note} == {one.key for one in pods.store.list("jobs/job-1/stages/capture") if one.key == note}
    pods.store.delete("jobs/job-1/run/failure.json")  # what a retry does
    pods.run(tasks.capture, "stages/regenerate")
    assert pods.store.read(shard) == whole
    assert note not in {one.key for one in pods.store.list("jobs/job-1/stages/capture")}
    pods.run(tasks.train, states, "base")
    assert rehearsal.starts() == ["regenerate", "capture", "capture", "train/base"]


def test_a_pod_killed_at_work_loses_nothing_it_had_put_into_the_store(pods: Pods, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["hang", "ok"])
    pod = pods.start("regenerate")
    assert wait_until(lambda: "stages/regenerate/events.jsonl" in pods.stored(), LIMIT_S)
    os.killpg(pod.pid, signal.SIGKILL)
    pod.wait()
    said = pods.store.read("jobs/job-1/stages/regenerate/events.jsonl")
    assert said
    pods.run(tasks.regenerate)
    assert rehearsal.starts() == ["regenerate", "regenerate"]
    assert pods.store.read("jobs/job-1/stages/regenerate/events.jsonl").startswith(said)


def test_a_pod_that_is_terminated_puts_what_it_has_into_the_store_first(
        pods: Pods, rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SYNC_VARIABLE, "3600")
    rehearsal.plan(regenerate=["hang", "ok"])
    pod = pods.start("regenerate")
    assert wait_until(lambda: rehearsal.starts() == ["regenerate"], LIMIT_S)
    pod.terminate()
    assert pod.wait(LIMIT_S) == INTERRUPTED_EXIT_CODE
    assert b"Interrupted" in pods.store.read("jobs/job-1/stages/regenerate/events.jsonl")


def test_the_first_failure_of_a_run_stops_boxes_in_other_pods_and_is_reported_in_the_stages_words(
        pods: Pods, rehearsal: Rehearsal) -> None:
    rehearsal.plan(regenerate=["permanent"])
    with pytest.raises(StageFailed, match=r"lower train\.learning_rate"):
        pods.run(tasks.regenerate)
    assert {"run/failure.json", "stages/regenerate/failure.json"} <= pods.stored()
    with pytest.raises(StageFailed, match="already failed in stage regenerate"):
        pods.run(tasks.capture, "stages/regenerate")
    pods.store.delete("jobs/job-1/run/failure.json")  # as the runner does when it starts the next attempt
    rehearsal.plan(regenerate=["permanent", "ok"])
    pods.run(tasks.regenerate)


def interrupted(area: work_area.WorkArea, spec: RegenerateStage, directory: Path, shards: int) -> list[str]:
    """A pod whose stage writes so many shards before SIGTERM; also the shards it found."""
    with contextlib.suppress(KeyboardInterrupt), area.stage(spec, directory) as needed:
        assert needed
        found = sorted(path.name for path in directory.glob("shard-*"))
        write_shards(directory, shards)
        raise KeyboardInterrupt
    return found


class Leaving:
    """A store that goes away after so many uploads."""

    def __init__(self, store: LocalStore, uploads: int) -> None:
        self._store, self._left = store, uploads

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def upload(self, key: str, source: Path) -> None:
        if self._left == 0:
            raise StoreUnavailable("the bucket is away")
        self._left -= 1
        self._store.upload(key, source)


@pytest.mark.parametrize("uploads", range(5))
def test_what_lies_in_the_store_never_mentions_what_is_not_there_wherever_a_sync_is_cut_off(
        tmp_path: Path, uploads: int) -> None:
    directory, store = tmp_path / "stage", LocalStore(tmp_path / "store")
    write_shards(directory, 2)
    DirectorySync(store, directory, "s").sync()
    sync = DirectorySync(Leaving(store, uploads), directory, "s")  # type: ignore[arg-type]
    sync.begin()
    write_shards(directory, 5)  # three shards and the index have changed
    with pytest.raises(StoreUnavailable) if uploads < 4 else contextlib.nullcontext():
        sync.sync()
    stored = {one.key for one in store.list("s")}
    mentioned = store.read("s/index.json").decode().split()
    assert {f"s/{name}" for name in mentioned} <= stored


def write_shards(directory: Path, number: int) -> None:
    """As the feature writer does: a shard, then the index that lists it, each renamed into place."""
    names: list[str] = []
    for one in range(number):
        names.append(f"shard-{one}.safetensors")
        for name, text in ((names[-1], f"{one}"), ("index.json", " ".join(names))):
            if not (directory / name).exists() or name == "index.json":
                aside = directory / f".{name}.part"
                aside.parent.mkdir(parents=True, exist_ok=True)
                aside.write_text(text)
                aside.replace(directory / name)


@pytest.fixture
def working_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """The directory of a stage that writes one more file of data and the index of all, each renamed into place,
    whenever a snapshot has linked the first, until there are so many. Data sorts before the index: a snapshot links the
    index last, when it names data that were written after the snapshot began."""
    directory, names, link = tmp_path / "stage", list[str](), os.link

    def write_next() -> None:
        names.append(f"data-{len(names):03d}")
        for name, text in ((names[-1], names[-1]), ("index.json", " ".join(names))):
            aside = directory / f".{name}.part"
            aside.write_text(text)
            aside.replace(directory / name)

    def start(num_data: int) -> Path:
        def link_and_write(source: Path, target: Path) -> None:
            link(source, target)
            if source.name == names[0] and len(names) < num_data:
                write_next()

        directory.mkdir()
        write_next()
        monkeypatch.setattr(os, "link", link_and_write)
        return directory

    return start


def test_a_snapshot_of_a_working_stage_is_consistent(working_stage: Callable[[int], Path]) -> None:
    directory = working_stage(4)
    stamps = _take_snapshot(directory)
    mentioned = (directory / ".sync/index.json").read_text().split()
    assert len(mentioned) == 4, "the stage wrote while the snapshot was taken"
    assert {"index.json", *mentioned} == set(stamps)
    assert [(directory / ".sync" / name).read_text() for name in mentioned] == mentioned


def test_a_stage_that_never_pauses_is_left_to_the_next_sync(working_stage: Callable[[int], Path]) -> None:
    with pytest.raises(Transient, match="changes faster than a snapshot"):
        _take_snapshot(working_stage(sys.maxsize))


def test_what_a_stage_removes_leaves_the_store_too(tmp_path: Path) -> None:
    directory, store = tmp_path / "stage", LocalStore(tmp_path / "store")
    write_shards(directory, 2)
    sync = DirectorySync(store, directory, "s")
    sync.sync()
    (directory / "shard-0.safetensors").unlink()
    sync.sync()
    assert {one.key for one in store.list("s")} == {"s/shard-1.safetensors", "s/index.json"}


def test_of_a_growing_ledger_only_whole_new_lines_are_uploaded_and_the_next_pod_has_all_of_them(tmp_path: Path) -> None:
    directory, store = tmp_path / "stage", LocalStore(tmp_path / "store")
    directory.mkdir()
    ledger, parts = directory / ROWS_FILE, f"s/{LEDGER_PARTS}"
    sync = DirectorySync(store, directory, "s")
    sync.begin()
    sync.sync()
    ledger.write_bytes(b"one\ntwo\nthr")
    sync.sync()
    with ledger.open("ab") as file:
        file.write(b"ee\nfo")
    sync.sync()
    sync.sync()
    assert {one.key: store.read(one.key) for one in store.list("s")} == {
        f"{parts}/000000000000000": b"one\ntwo\n", f"{parts}/000000000000008": b"three\n"}
    (tmp_path / "finished").write_bytes(b"three\ntwo\none\nfour\n")
    (tmp_path / "finished").replace(ledger)  # in the order of the selection
    sync.sync()
    assert len(list(store.list("s"))) == 2

    pod = tmp_path / "pod"
    download_dir(store, "s", pod, unfinished=True)
    join_parts(pod)
    assert {path.name: path.read_bytes() for path in pod.iterdir()} == {ROWS_FILE: b"one\ntwo\nthree\n"}
    sync = DirectorySync(store, pod, "s")
    sync.begin()
    with (pod / ROWS_FILE).open("ab") as file:
        file.write(b"four\n")
    sync.sync()
    assert store.read(f"{parts}/000000000000014") == b"four\n"

    # A part that is lost: what follows it is generated again.
    store.delete(f"{parts}/000000000000008")
    gap = tmp_path / "gap"
    download_dir(store, "s", gap, unfinished=True)
    join_parts(gap)
    assert (gap / ROWS_FILE).read_bytes() == b"one\ntwo\n"
    sync = DirectorySync(store, gap, "s")
    sync.begin()
    sync.sync()
    assert {one.key for one in store.list(parts)} == {f"{parts}/000000000000000"}


def test_what_a_killed_stage_goes_on_from_is_in_the_store_until_it_has_finished(pods: Pods) -> None:
    directory, spec = pods.job_dir / "stages" / "regenerate", regenerate_spec(pods.job, pods.job_dir)
    state = directory / STATE_DIR / "training.safetensors"
    with contextlib.suppress(SystemExit), work_area.WorkArea(pods.job_dir, pods.store, 3600).stage(spec, directory):
        state.parent.mkdir(parents=True)
        state.write_bytes(b"step 50")
        raise SystemExit(143)
    pods.lose_the_node()
    with contextlib.suppress(SystemExit), work_area.WorkArea(pods.job_dir, pods.store, 3600).stage(spec, directory):
        assert state.read_bytes() == b"step 50"
        raise SystemExit(143)
    pods.run(tasks.regenerate)
    stored = {name for name in pods.stored() if name.startswith("stages/regenerate/")}
    assert "stages/regenerate/manifest.json" in stored
    assert not [name for name in stored if f"/{STATE_DIR}/" in name]


def test_a_stage_goes_on_while_the_store_is_away_and_what_it_made_arrives_later(pods: Pods) -> None:
    directory, spec = pods.job_dir / "stages" / "regenerate", regenerate_spec(pods.job, pods.job_dir)
    assert isinstance(pods.store, LocalStore)
    away = work_area.WorkArea(pods.job_dir, Leaving(pods.store, 0), 0.01)  # type: ignore[arg-type]
    assert interrupted(away, spec, directory, 1) == []
    assert "stages/regenerate/shard-0.safetensors" not in pods.stored()
    # The container is started again where it was.
    assert interrupted(work_area.WorkArea(pods.job_dir, pods.store, 0.01), spec, directory,
                       1) == ["shard-0.safetensors"]
    assert "stages/regenerate/shard-0.safetensors" in pods.stored()
    assert "stages/regenerate/manifest.json" not in pods.stored()


def test_through_s3_a_stage_is_resumed_where_another_pod_left_it(tmp_path: Path, moto_s3: S3Server) -> None:
    store = bucket(moto_s3, tmp_path)
    pods = Pods(tmp_path / "home", store)
    directory, spec = pods.job_dir / "stages" / "regenerate", regenerate_spec(pods.job, pods.job_dir)
    area = work_area.WorkArea(pods.job_dir, store, 3600)
    assert interrupted(area, spec, directory, 2) == []
    pods.lose_the_node()
    assert interrupted(area, spec, directory, 3) == ["shard-0.safetensors", "shard-1.safetensors"]
    assert store.read("jobs/job-1/stages/regenerate/index.json").count(b"shard") == 3
    assert store.stat("jobs/job-1/stages/regenerate/shard-2.safetensors") is not None


def bucket(server: S3Server, directory: Path) -> ArtifactStore:
    """A place of the test's own on a real server, with its secret as Kubernetes mounts it."""
    secret = directory / "secret"
    secret.mkdir()
    (secret / "access_key").write_text(server.access_key)
    (secret / "secret_key").write_text(server.secret_key)
    name = f"work-{uuid.uuid4().hex[:12]}"
    boto3.client("s3", endpoint_url=server.endpoint_url, region_name="us-east-1",
                 aws_access_key_id=server.access_key, aws_secret_access_key=server.secret_key,
                 ).create_bucket(Bucket=name)
    return open_store(f"s3://{name}/eyrie", StoreOptions(endpoint_url=server.endpoint_url, credentials_dir=secret))


def test_the_model_cache_is_filled_in_the_first_stage_s_name_and_what_that_stage_has_stored_stays(
        pods: Pods, environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights" * 1000}
    with served_hub(files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("EYRIE_MODEL_CACHE", str(environment / "models"))
        pods.take(JobFile(id="job-1", resolved=derive(spec_of(target=TargetSpec(model="org/model")))))
        ledger = f"stages/regenerate/{ROWS_FILE}.parts/{0:015d}"
        pods.store.write(f"jobs/job-1/{ledger}", b"{}\n")
        assert pods.run(tasks.prefetch) == "org/model"
        assert cached_snapshot(environment / "models", TargetSpec(model="org/model")) is not None
        assert {ledger, "stages/regenerate/events.jsonl", "stages/regenerate/spec.json"} <= pods.stored()
        assert "stages/regenerate/manifest.json" not in pods.stored()
        events = pods.store.read("jobs/job-1/stages/regenerate/events.jsonl").decode()
        assert '"unit":"MB"' in events
        assert "TargetFetched" in events
        hub.token = "needed"
        shutil.rmtree(environment / "models")
        with pytest.raises(StageFailed, match="TargetNotFound"):
            pods.run(tasks.prefetch)
        failure = RunFailure.model_validate_json(pods.store.read("jobs/job-1/run/failure.json"))
        assert (failure.stage, failure.failure.reason) == ("regenerate", "TargetNotFound")
        assert "TargetFetched" in pods.store.read("jobs/job-1/stages/regenerate/events.jsonl").decode()
