"""What Kubeflow shows of a run: typed artifacts with figures and addresses, their lineage, and the report.

The compiled pipeline of a cluster is walked as the double walks it. Each component is run by kfp's own executor, in
this process, on a job whose stages have finished in the store; what it wrote is taken as Kubeflow's launcher takes it.
"""

import gzip
import json
import re
import shutil
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kfp.dsl.executor import Executor

from eyrie_api.artifacts import digest_model
from eyrie_api.artifacts.open_store import open_store
from eyrie_api.contract.cluster import ClusterProfile
from eyrie_pipelines import kfp_pipeline, run_artifacts
from eyrie_pipelines.placement import compile_for
from eyrie_pipelines.tasks import load_job
from tests.kubeflow.interpreter import (
    OUTPUT_FILE,
    Artifacts,
    Node,
    Pipeline,
    Seen,
    State,
    arguments_of,
    executor_input,
    merged_artifacts,
    outputs_of,
    startable,
    walk,
)
from tests.kubeflow.jobs import MESSAGE_BYTES
from tests.pipelines.conftest import spec_of
from tests.pipelines.finished_job import lay_out

BEST = "base-step-20"


@dataclass
class Shown:
    """The artifacts of a run."""

    inputs: dict[str, Artifacts]
    """By the path of the task."""
    outputs: dict[str, Artifacts]

    def of(self, task: str, name: str) -> dict[str, Any]:
        """The one output artifact of that name of a task."""
        (found,) = self.outputs[task][name]
        return found

    def text(self, task: str, name: str) -> str:
        return Path(self.of(task, name)["uri"]).read_text()


Walked = Callable[[], Shown]


@pytest.fixture
def job_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's directory in a pod: empty, since everything is in the work area's store."""
    root = tmp_path / "home" / "jobs" / "job-1"
    lay_out(root, "job-1", spec_of())
    monkeypatch.setenv("EYRIE_ARTIFACTS_URL", f"file://{tmp_path}/store")
    monkeypatch.setenv("EYRIE_SYNC_S", "15")
    shutil.copytree(tmp_path / "home", tmp_path / "laid-out")
    for path in (tmp_path / "laid-out").rglob("*.json"):
        open_store().write(path.relative_to(tmp_path / "laid-out").as_posix(), path.read_bytes())
    shutil.rmtree(root / "stages")
    return root


@pytest.fixture
def walked(job_dir: Path, tmp_path: Path) -> Walked:
    return lambda: run_through(job_dir, tmp_path / "objects")


def run_through(job_dir: Path, objects: Path) -> Shown:
    """Walk the pipeline of a job; artifacts' files lie in `objects`, under paths that serve as their URIs."""
    profile = ClusterProfile.model_validate({
        "kubeflow": {"url": "http://kubeflow:8888"},
        "stages": {"image": "eyrie/workers:1", "work": {"kind": "volume", "claim": "work"}}})
    job = load_job(str(job_dir))
    pipeline = Pipeline.of(compile_for(profile, job.resolved.model_copy(update={"trains_together": False})))
    arguments = arguments_of(pipeline, {"job_dir": str(job_dir), "spec_digest": digest_model(job),
                                        "code_version": "v", **job.run_parameters()})
    seen: dict[str, Seen] = {}
    shown = Shown({}, {})
    while wave := list(startable(walk(pipeline, arguments, seen))):
        for node in wave:
            seen[node.path] = _execute(pipeline, node, objects)
            shown.inputs[node.path], shown.outputs[node.path] = node.input_artifacts, seen[node.path].artifacts
    assert walk(pipeline, arguments, seen).outputs == {"Output": "stages/prove"}
    return shown


def _execute(pipeline: Pipeline, node: Node, objects: Path) -> Seen:
    handed = executor_input(pipeline, node, str(objects))
    written = objects / "written" / node.path / "output_metadata.json"
    component = getattr(kfp_pipeline, re.sub(r"\W", "_", node.component.removeprefix("comp-")))
    Executor({**handed, "outputs": {**handed["outputs"], "outputFile": str(written)}}, component).execute()
    files = {OUTPUT_FILE: written.read_bytes()}
    return Seen(State.SUCCEEDED, outputs_of(pipeline, node.component, files),
                merged_artifacts(handed, files, str(objects)))


def test_every_stage_puts_out_a_typed_artifact_with_the_address_of_its_data(walked: Walked) -> None:
    shown = walked()
    found = {f"{task}/{name}": (one["type"]["schemaTitle"], one["metadata"].get("data"))
             for task, artifacts in shown.outputs.items() for name, (one,) in artifacts.items()}
    stages = f"{open_store().url}/jobs/job-1/stages"
    loop, per_checkpoint = "for-loop-1/0/train", "for-loop-2/{}/benchmark/figures"
    assert found == {
        "regenerate/answers": ("system.Dataset", f"{stages}/regenerate"),
        "capture/states": ("system.Dataset", f"{stages}/capture"),
        f"{loop}/drafter": ("system.Model", f"{stages}/train/base"),
        f"{loop}/learning": ("system.Metrics", f"{stages}/train/base"),
        "list-checkpoints/checkpoints": ("system.Model", None),
        per_checkpoint.format(0): ("system.Metrics", f"{stages}/benchmark/base-step-10"),
        per_checkpoint.format(1): ("system.Metrics", f"{stages}/benchmark/base-step-20"),
        "select/winner": ("system.Model", f"{stages}/train/base/checkpoints/{BEST}"),
        "tune/tuning": ("system.Metrics", f"{stages}/tune"),
        "prove/proof": ("system.Metrics", f"{stages}/prove"),
        "prove/report": ("system.HTML", None)}


def test_lineage_leads_from_the_report_back_to_the_answers(walked: Walked) -> None:
    shown = walked()
    made_by = {one["uri"]: task for task, artifacts in shown.outputs.items() for (one,) in artifacts.values()}
    before = {task: {made_by[one["uri"]] for listed in artifacts.values() for one in listed}
              for task, artifacts in shown.inputs.items()}
    assert before["prove"] == {"select", "tune"}
    assert before["tune"] == {"select"}
    assert before["select"] == {"list-checkpoints", "for-loop-2/0/benchmark", "for-loop-2/1/benchmark"}
    assert before["for-loop-2/0/benchmark"] == {"list-checkpoints"}
    assert before["list-checkpoints"] == {"for-loop-1/0/train"}
    assert before["for-loop-1/0/train"] == {"capture"}
    assert before["capture"] == {"regenerate"}


def test_figures_are_numbers_named_after_all_they_depend_on(walked: Walked) -> None:
    shown = walked()
    figures = shown.of("for-loop-2/1/benchmark", "figures")["metadata"]
    assert (figures["checkpoint"], figures["speed-up"], figures["lossless"]) == (BEST, 2.2, True)
    where = "(math, T=1, 5/1/6)"
    assert {name: value for name, value in figures.items() if where in name} == {
        f"speed-up {where}": 2.2, f"speed-up, low {where}": 2.2, f"speed-up, high {where}": 2.2, f"tau {where}": 2.5}
    for task, name in (("for-loop-2/1/benchmark", "figures"), ("tune", "tuning"), ("prove", "proof")):
        taus = [key for key in shown.of(task, name)["metadata"] if key.startswith("tau")]
        assert taus
        assert all(re.search(r"(T=[\d.]+|greedy), \d+/\d+/\d+", key) for key in taus), "never tau without its shape"
    proof = shown.of("prove", "proof")["metadata"]
    assert proof["speed-up (candidate over off, 4 users)"] == 2.5
    assert proof["speed-up, low (candidate over off, 4 users)"] == 2.5
    assert shown.of("regenerate", "answers")["metadata"]["rows"] == 1
    assert shown.of("capture", "states")["metadata"]["layers"] == [1]
    model = shown.of("select", "winner")["metadata"]
    assert (model["checkpoint"], model["digest"]) == (BEST, "sha256:" + "0" * 64)


def test_metadata_are_json_without_null_and_fit_the_doubles_termination_message(walked: Walked, tmp_path: Path) -> None:
    shown = walked()
    written = list((tmp_path / "objects" / "written").rglob("output_metadata.json"))
    assert len(written) == len(shown.outputs)
    packed = [len(b64encode(gzip.compress(one.read_bytes()))) for one in written]
    assert max(packed) < MESSAGE_BYTES - 512  # headers of the archive
    for artifacts in shown.outputs.values():
        for (one,) in artifacts.values():
            assert None not in one["metadata"].values()
            json.dumps(one["metadata"], allow_nan=False)


def test_an_artifacts_file_is_the_manifest_of_its_stage_and_not_its_data(walked: Walked, job_dir: Path) -> None:
    shown = walked()
    assert shown.text("capture", "states") == (job_dir / "stages" / "capture" / "manifest.json").read_text()
    assert json.loads(shown.text("select", "winner"))["checkpoint"] == BEST
    assert json.loads(shown.text("list-checkpoints", "checkpoints"))["checkpoints"] == 2


def test_a_task_that_runs_again_writes_the_same(walked: Walked, tmp_path: Path) -> None:
    first = walked()
    bytes_of = {one["uri"]: Path(one["uri"]).read_bytes() for artifacts in first.outputs.values()
                for (one,) in artifacts.values()}
    shutil.rmtree(tmp_path / "objects")
    assert walked() == first
    assert {uri: Path(uri).read_bytes() for uri in bytes_of} == bytes_of


def test_the_report_has_decision_benchmark_and_tuning_and_loads_nothing(walked: Walked) -> None:
    page = walked().text("prove", "report")
    assert "By the figures of this run the drafter is promoted." in page
    assert "The control plane decides when the run has ended." in page
    for title in ("Promotion", "Benchmark", "Draft-tree shapes", "Proof under load", "Finding of the tuner"):
        assert f"<h2>{title}</h2>" in page
    assert "suite:math" in page
    assert BEST in page
    assert "1 candidate: base" in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=[\"'](?!data:)", page)
    assert "eyrie-report" not in page, "no report that the server keeps"


def test_on_a_volume_the_address_is_the_path(tmp_path: Path) -> None:
    lay_out(tmp_path / "jobs" / "job-1", "job-1", spec_of())

    class Artifact:
        """As kfp's: a path and metadata."""

        path = str(tmp_path / "states")
        metadata: dict[str, Any] = {}

    states = Artifact()
    run_artifacts.write_dataset(str(tmp_path / "jobs" / "job-1"), "stages/capture", states)
    assert states.metadata["data"] == f"{tmp_path}/jobs/job-1/stages/capture"
