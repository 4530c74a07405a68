"""A target whose weights exceed the memory of the GPUs that load it: named by the plan, refused at submission."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.contract.job import JobSpec
from eyrie_api.errors import GpuTooSmall
from eyrie_api.planning.facts import gpu_memory_here, read_config, target_facts
from eyrie_api.planning.hardware import memory_of
from eyrie_api.planning.preflight import check, plan
from eyrie_api.planning.target_files import INDEX, served_bytes
from eyrie_api.settings import Settings
from tests.api.samples import job_spec, target_directory
from tests.api.test_placing import profile

LARGE = {"hidden_size": 4096, "intermediate_size": 16384, "head_dim": 1024}
"""Weights of 1.9 GiB in bfloat16."""

SGLANG: dict[str, Any] = {"kind": "sglang"}


def job(tmp_path: Path, **changes: Any) -> JobSpec:
    target = target_directory(tmp_path / "target", **LARGE)
    return job_spec(**({"target": {"model": str(target), "dtype": "bfloat16"}} | changes))


@pytest.fixture
def cluster(tmp_path: Path) -> Settings:
    """Stages on GPUs of 1 GB, except training; endpoints on CPUs."""
    work = {"kind": "s3", "url": "s3://bucket/eyrie"}
    stages = {"image": "eyrie/workers", "work": work, "num_gpus": 1, "gpu_type": "Some-1GB"}
    file = tmp_path / "cluster.json"
    file.write_text(profile(stages=stages, per_stage={"train": stages | {"gpu_type": "Some-80GB"}}).model_dump_json())
    return Settings(home=tmp_path / "home", cluster_profile=file)


def problems(spec: JobSpec, settings: Settings) -> list[str]:
    return [one for one in plan(spec, settings).warnings if "the target's weights are" in one]


def test_a_target_larger_than_the_gpu_of_its_servers_is_planned_with_the_problem_and_refused(
        cluster: Settings, tmp_path: Path) -> None:
    spec = job(tmp_path, engine=SGLANG)
    with pytest.raises(GpuTooSmall) as refused:
        check(spec, cluster)
    assert refused.value.message == (
        "engine.tp_size is 1: the target's weights are 1.9 GiB, and 1 x Some-1GB has 1.0 GiB "
        "(for benchmark, tune, prove, regenerate, capture)")
    assert refused.value.hint == (
        "set engine.tp_size to 2 or more, with as many GPUs there, or name a type of GPU with more than 1.9 GiB")
    [problem] = problems(spec, cluster)
    assert problem.startswith(refused.value.message)
    assert refused.value.hint in problem


def test_the_hint_is_enough(cluster: Settings, tmp_path: Path) -> None:
    every = {"num_gpus": 2}
    spec = job(tmp_path, engine=SGLANG | {"tp_size": 2}, placement={"every": every})
    check(spec, cluster)
    assert problems(spec, cluster) == []
    stages = {stage: {"gpu_type": "Some-80GB"} for stage in ("regenerate", "capture", "benchmark", "tune", "prove")}
    assert problems(job(tmp_path, engine=SGLANG, placement={"stages": stages}), cluster) == []


def test_an_embedded_engine_is_not_advised_to_divide_the_weights_itself(cluster: Settings, tmp_path: Path) -> None:
    [problem] = problems(job(tmp_path, engine={"kind": "embedded"}), cluster)
    assert "engine.kind is 'embedded', which computes on one device" in problem
    assert "set engine to {kind: sglang, tp_size: 2}" in problem


@pytest.mark.parametrize(("changes", "named"), [
    # Of a family whose training step is described, the step would be refused first.
    ({"capture": {"mode": "stream"}, "drafter": {"family": "eagle1"}}, "capture.mode is 'stream'"),
    ({"capture": {"source": "reference"}}, "capture.source is 'reference'"),
    ({"regenerate": {"engine": "embedded"}}, "regenerate.engine is 'embedded'")])
def test_what_computes_on_one_gpu_is_named_whatever_the_size_of_a_server(
        changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    target = target_directory(tmp_path / "target", **LARGE, num_hidden_layers=80)  # 37.5 GiB: training alone fits
    placed = {"every": {"num_gpus": 2, "gpu_type": "Some-30GB"}}
    spec = job_spec(target={"model": str(target), "dtype": "bfloat16"}, engine=SGLANG | {"tp_size": 2},
                    placement=placed, **changes)
    [problem] = problems(spec, Settings(home=tmp_path / "home"))
    assert named in problem


@pytest.mark.parametrize("changes", [
    {"placement": {"every": {"num_gpus": 0}}}, {"placement": {"every": {"gpu_type": "Unknown"}}}])
def test_cpus_and_gpus_of_unknown_memory_are_no_reason_to_refuse(
        changes: dict[str, Any], cluster: Settings, tmp_path: Path) -> None:
    check(job(tmp_path, engine=SGLANG, **changes), cluster)


def test_an_endpoint_counts_with_its_own_gpus_unless_nothing_is_served(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    placed = {"placement": {"every": {"gpu_type": "Some-80GB"}}, "serve": {"placement": {"gpu_type": "Some-1GB"}}}
    [problem] = problems(job(tmp_path, engine=SGLANG, **placed), settings)
    assert problem.split(": such a job")[0].endswith("(for serve)")
    assert problems(job(tmp_path, engine=SGLANG, promotion={"mode": "never"}, **placed), settings) == []


def test_on_one_machine_a_type_of_gpu_is_for_the_plan_alone(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    spec = job(tmp_path, placement={"stages": {"benchmark": {"gpu_type": "Some-1GB"}}})
    [problem] = problems(spec, settings)
    assert "(for benchmark)" in problem
    check(spec, settings)


def test_a_quantised_checkpoint_counts_with_its_files_and_one_of_unknown_size_not_at_all(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    directory = target_directory(tmp_path / "target", **LARGE, **config)
    facts, read = target_facts(directory), read_config(directory)
    stored = (directory / "model.safetensors").stat().st_size
    assert served_bytes(directory, read, facts, "bfloat16", "sglang") == stored
    # The embedded engine holds every weight in the dtype of the job.
    held = served_bytes(directory, read, facts, "float32", "embedded")
    assert held == pytest.approx(facts.parameters * 4, rel=1e-4)  # which counts no norms
    (directory / "model.safetensors").unlink()
    embeddings = 2 * 320 * 4096
    estimated = 2 * embeddings + (facts.parameters - embeddings)
    assert served_bytes(directory, read, facts, "bfloat16", "sglang") == pytest.approx(estimated, rel=1e-4)
    assert served_bytes(directory, read | {"model_type": "another"}, facts, "bfloat16", "sglang") is None
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 7}, "weight_map": {"a": "absent"}}))
    assert served_bytes(directory, read, facts, "bfloat16", "sglang") == 7


@pytest.mark.parametrize(("stored", "served", "expected"), [
    ("float32", "bfloat16", 0.5), ("bfloat16", "float32", 2.0), ("bfloat16", "float16", 1.0), (None, "bfloat16", None)])
def test_weights_of_an_unknown_architecture_count_with_their_files_in_the_served_dtype(
        stored: str | None, served: str, expected: float | None, tmp_path: Path) -> None:
    directory = target_directory(tmp_path / "target", torch_dtype=stored)
    (directory / "config.json").write_text((directory / "config.json").read_text().replace('"qwen3"', '"another"'))
    on_disk = (directory / "model.safetensors").stat().st_size
    found = served_bytes(directory, read_config(directory), target_facts(directory), served, "sglang")
    assert found == (None if expected is None else int(on_disk * expected))


def test_a_share_of_memory_that_the_job_gives_its_servers_is_judged(cluster: Settings, tmp_path: Path) -> None:
    def spec(fraction: float) -> JobSpec:
        return job(tmp_path, engine=SGLANG | {"sglang_arguments": {"mem_fraction_static": fraction}},
                   placement={"every": {"gpu_type": "Some-24GB"}})

    check(spec(0.1), cluster)
    with pytest.raises(GpuTooSmall, match=r"of which SGLang takes 1\.2 GiB for weights and KV cache"):
        check(spec(0.05), cluster)


@pytest.mark.parametrize(("label", "gib"), [
    ("NVIDIA-H100-80GB-HBM3", 80), ("NVIDIA H200", 141), ("NVIDIA-H100-NVL", 94), ("NVIDIA-B200", 192),
    ("NVIDIA-L4", 24), ("NVIDIA-A100-SXM4-40GB", 40), ("NVIDIA-A100", None), ("AMD-MI300X", None), (None, None)])
def test_a_gpu_has_at_most_what_its_label_names(label: str | None, gib: int | None) -> None:
    assert memory_of(label) == (None if gib is None else gib * 2**30)


def test_the_driver_names_the_gpus_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu(number: int, name: str) -> None:
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "information").write_text(f"Model: \t\t {name}\nIRQ: 7\n")

    monkeypatch.delenv("EYRIE_DEVICE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpu_memory_here(tmp_path) is None
    gpu(0, "NVIDIA A100-SXM4-40GB")
    gpu(1, "NVIDIA H100 80GB HBM3")
    assert gpu_memory_here(tmp_path) == 80 * 2**30
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_memory_here(tmp_path) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpu(2, "Something Else")
    assert gpu_memory_here(tmp_path) is None, "the process may be given any of them"
