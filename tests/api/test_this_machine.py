"""A job that asks for what this machine does not have is refused; a plan of it is made, and notes that."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.contract.engine import SGLANG_PROGRAM
from eyrie_api.contract.job import JobSpec
from eyrie_api.errors import InvalidInput
from eyrie_api.planning.capacity import missing_here
from eyrie_api.planning.facts import Facts, read_facts
from eyrie_api.planning.preflight import check, plan
from eyrie_api.planning.resolve import derive, resolve
from eyrie_api.planning.sglang_support import SGLANG_VERSION
from eyrie_api.planning.submission import Submission
from eyrie_api.settings import Settings
from tests.api.samples import job_spec, target_directory


@pytest.fixture(autouse=True)
def _as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("EYRIE_DEVICE", "CUDA_VISIBLE_DEVICES", SGLANG_PROGRAM):
        monkeypatch.delenv(variable, raising=False)


def job(tmp_path: Path, **changes: Any) -> Any:
    return job_spec(target={"model": str(target_directory(tmp_path / "target"))}, **changes)


@pytest.mark.parametrize(("changes", "field"), [
    ({"placement": {"stages": {"train": {"num_gpus": 3}}}}, "placement.stages.train.num_gpus is 3"),
    ({"placement": {"stages": {"capture": {"num_gpus": 3}}}}, "placement.stages.capture.num_gpus is 3"),
    ({"placement": {"every": {"num_gpus": 64}}}, "placement.every.num_gpus is 64"),
    ({"serve": {"placement": {"num_gpus": 4}}}, "serve.placement.num_gpus is 4"),
])
def test_more_gpus_than_this_machine_has_are_refused_and_planned(
        changes: dict[str, Any], field: str, settings: Settings, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYRIE_DEVICE", "cpu")
    spec = job(tmp_path, **changes)
    with pytest.raises(InvalidInput) as refused:
        check(spec, settings)
    assert refused.value.message == f"{field} and EYRIE_DEVICE is cpu, with which this machine uses no GPUs"
    assert "omit it" in refused.value.hint
    planned = plan(spec, settings)
    assert planned.total_hours > 0.0
    assert planned.notes[0].startswith(f"a job of this plan is refused on this machine: {field}")


def test_gpus_are_counted_by_their_device_files_without_those_that_are_hidden(
        settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    spec = job(tmp_path, placement={"every": {"num_gpus": 1}, "stages": {"train": {"num_gpus": 2}}})

    def missing(spec: JobSpec = spec) -> list[str]:
        return [one.message for one in missing_here(Submission(derive(spec), Facts(), settings), devices)]

    assert missing() == ["placement.every.num_gpus is 1 and this machine has 0 GPUs",
                         "placement.stages.train.num_gpus is 2 and this machine has 0 GPUs"]
    two = {"kind": "sglang", "tp_size": 2}
    assert not any("tp_size" in message for message in missing(job(tmp_path, engine=two))), "CPUs share a server too"
    (devices / "nvidia0").touch()
    assert missing() == ["placement.stages.train.num_gpus is 2 and this machine has 1 GPU"]
    (devices / "nvidia1").touch()
    assert missing() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert missing() == ["placement.stages.train.num_gpus is 2 and this machine has 1 GPU"]
    assert "engine.tp_size is 2 and this machine has 1 GPU" in missing(job(tmp_path, engine=two))
    (devices / "kfd").touch()
    assert missing() == [], "GPUs of AMD are not counted here"


def test_as_many_gpus_as_this_machine_has_are_accepted(
        settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    spec = job(tmp_path, placement={"stages": {"train": {"num_gpus": 2}}})
    assert check(spec, settings).spec.placement == spec.placement
    assert "refused" not in " ".join(plan(spec, settings).notes)


def test_a_type_of_gpu_is_for_the_plan_alone_on_one_machine(settings: Settings, tmp_path: Path) -> None:
    spec = job(tmp_path, placement={"stages": {"train": {"gpu_type": "NVIDIA-H200"}}})
    check(spec, settings)
    [note] = [one for one in plan(spec, settings).notes if "gpu_type" in one]
    assert note.startswith("placement.stages.train.gpu_type 'NVIDIA-H200' is for the plan alone")


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed next to Eyrie")
def test_sglang_that_is_not_on_this_machine_is_refused_and_planned(
        settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job(tmp_path, engine={"kind": "sglang"})
    with pytest.raises(InvalidInput, match=r"engine\.kind is 'sglang', and this server finds no SGLang") as refused:
        check(spec, settings)
    assert f"pip install sglang=={SGLANG_VERSION}" in refused.value.hint
    assert f"{SGLANG_PROGRAM}='ENVIRONMENT/bin/python -m sglang.launch_server' before `eyrie up`" in refused.value.hint
    assert plan(spec, settings).notes[0].startswith("a job of this plan is refused on this machine: engine.kind")
    monkeypatch.setenv(SGLANG_PROGRAM, "/opt/sglang/bin/python -m sglang.launch_server")
    assert check(spec, settings).spec.engine.kind == "sglang"
    assert not any("refused" in note for note in plan(spec, settings).notes)


def test_gpus_and_types_that_only_a_cluster_has_are_no_matter_of_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"kubeflow": {"url": "http://ml-pipeline:8888"}, "stages": {
        "image": "eyrie/workers", "work": {"kind": "s3", "url": "s3://bucket/eyrie"}}}))
    settings = Settings(home=tmp_path, cluster_profile=file)
    spec = job(tmp_path, engine="sglang", placement={"every": {"num_gpus": 8, "gpu_type": "NVIDIA-H200"}})
    check(spec.model_copy(update={"target": spec.target.model_copy(update={"dtype": "bfloat16"})}), settings)
    facts = read_facts(spec, settings)
    assert missing_here(Submission(resolve(spec, facts), facts, settings)) == []
