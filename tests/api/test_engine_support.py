"""What a job's engine cannot do is refused at submission."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eyrie_api.contract.engine import SGLANG_PROGRAM, DraftTreeShape, EngineSpec, SglangArguments
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.planning.checks import (
    attention_backend_serves,
    blocks_are_chains_within_their_length,
    check_divided,
    engine_can_compute,
    heads_read_plain_logits,
    vocabularies_fit,
)
from eyrie_api.planning.facts import Device, Facts, local_device
from eyrie_api.planning.plan_work import TargetFacts
from eyrie_api.planning.preflight import check
from eyrie_api.planning.resolve import resolve
from eyrie_api.planning.submission import Submission
from eyrie_api.settings import Settings
from eyrie_api.unknown_fields import unknown_field_hint
from tests.api.samples import job_body, job_spec, target_directory
from tests.api.test_placing import profile


def resolved(spec: JobSpec, device: Device | None) -> ResolvedJob:
    return resolve(spec, Facts(local_device=device or "gpu"))


def submission(spec: JobSpec, device: Device | None, architecture: str = "LlamaForCausalLM") -> Submission:
    facts = Facts(local_device=device or "gpu", config={"architectures": [architecture]})
    return Submission(resolve(spec, facts), facts, Settings())


def test_an_engine_is_written_as_its_kind_alone() -> None:
    assert job_spec(engine="sglang").engine == EngineSpec(kind="sglang")
    assert job_spec().engine.kind == "embedded"
    stored = JobSpec.model_validate_json(job_spec(engine="sglang").model_dump_json())
    assert resolved(stored, None).endpoint_serve.engine.kind == "sglang"


@pytest.mark.parametrize(("engine", "says"), [
    ({"kind": "sglang", "tp_size": 4, "num_gpus": 2}, "engine.num_gpus is 2, fewer than the engine.tp_size 4"),
    ({"kind": "embedded", "tp_size": 2}, "engine.tp_size is 2 and engine.kind is 'embedded'"),
    ({"num_gpus": 2}, "engine.num_gpus is 2 and engine.kind is 'embedded'"),
    ({"attention_backend": "fa3"}, "engine.attention_backend is set and engine.kind is 'embedded'"),
    ({"sglang_arguments": {"chunked_prefill_size": 64}}, "engine.sglang_arguments is set and engine.kind is"),
    ({"kind": "sglang", "attention_backend": "torch_native"}, "Input should be 'fa3', 'flashinfer'"),
    ("vllm", "Input should be 'embedded' or 'sglang'"),
])
def test_gpus_that_servers_cannot_use_are_refused(engine: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        job_spec(engine=engine)


@pytest.mark.parametrize(("device", "changes", "architecture", "says"), [
    ("gpu", {"target": {"model": "m", "dtype": "float32"}}, "LlamaForCausalLM", "target.dtype is 'float32'"),
    ("cpu", {"target": {"model": "m", "dtype": "float16"}}, "LlamaForCausalLM", "target.dtype is 'float16'"),
    ("cpu", {"benchmark": {"temperatures": [0.0, 0.7]}}, "LlamaForCausalLM",
     "benchmark.temperatures has 0.7 and engine is 'sglang' on a CPU"),
    ("cpu", {"tune": {"temperatures": [1.0]}}, "LlamaForCausalLM", "tune.temperatures has 1 and"),
    ("cpu", {"drafter": {"family": "dflash"}}, "LlamaForCausalLM", "'dflash' and engine 'sglang' on a CPU"),
    ("gpu", {"drafter": {"family": "dflash"}}, "Qwen2ForCausalLM", "for a drafter of blocks"),
    (None, {}, "MixtralForCausalLM", "cannot capture hidden states of MixtralForCausalLM"),
])
def test_what_sglang_cannot_do_on_a_device_is_refused_with_field_and_rule(
        device: Device | None, changes: dict[str, Any], architecture: str, says: str) -> None:
    changes = {"target": {"model": "m", "dtype": "bfloat16"}} | changes
    with pytest.raises(EyrieError, match=says) as caught:
        engine_can_compute(submission(job_spec(engine="sglang", **changes), device, architecture))
    assert caught.value.hint
    engine_can_compute(submission(job_spec(engine="embedded", **changes), device, architecture))


@pytest.mark.parametrize(("device", "family", "says"), [
    ("cpu", "eagle3", "verification is 'block' and engine is 'sglang' on a CPU"),
    ("gpu", "standalone", "whose drafts SGLang verifies by target"),
])
def test_drafts_that_are_drawn_are_refused_where_sglang_cannot_verify_them(
        device: Device, family: str, says: str) -> None:
    asked = {"target": {"model": "m", "dtype": "bfloat16"}, "tune": {"verifications": ["block"]}}
    with pytest.raises(InvalidInput, match=says):
        engine_can_compute(submission(job_spec(engine="sglang", drafter={"family": family}, **asked), device,
                                      "LlamaForCausalLM"))
    with pytest.raises(ValidationError, match="engine is 'embedded', whose draws are the same"):
        job_spec(engine="embedded", **asked)


def test_drafts_are_drawn_from_the_targets_whole_vocabulary_alone(tmp_path: Path) -> None:
    target = target_directory(tmp_path / "target", vocab_size=6000)

    def fits(**drafter: Any) -> None:
        spec = job_spec(target={"model": str(target)}, engine="sglang", drafter=drafter,
                        benchmark={"tree": {"num_steps": 3, "num_draft_tokens": 4, "verification": "rejection"}})
        facts = Facts(local_device="gpu", target=target)
        vocabularies_fit(Submission(resolve(spec, facts), facts, Settings()))

    fits(draft_vocab_size=6000)
    fits(family="eagle1")
    for reduced in ({}, {"draft_vocab_size": 5000}):
        with pytest.raises(InvalidInput, match=r"draft_vocab_size is \w+ .*drafts of the target's whole") as caught:
            fits(**reduced)
        assert "6000" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["kv_cache_dtype", "disable_radix_cache", "max_running_requests"])
def test_an_argument_that_is_not_in_the_list_is_refused_with_the_list(name: str) -> None:
    with pytest.raises(ValidationError) as refused:
        job_spec(engine={"kind": "sglang", "sglang_arguments": {name: True}})
    [error] = refused.value.errors()
    assert error["type"] == "extra_forbidden"
    assert unknown_field_hint(error["loc"]).endswith(f"allowed are {', '.join(SglangArguments.model_fields)}")


LLAMA = {"architectures": ["LlamaForCausalLM"]}


def on_a_cluster(gpu: str) -> Facts:
    work = {"kind": "s3", "url": "s3://bucket/eyrie"}
    stages = {"image": "eyrie/workers", "work": work, "num_gpus": 1, "gpu_type": gpu}
    return Facts(profile(stages=stages), "gpu", config=LLAMA)


@pytest.mark.parametrize(("backend", "device", "gpu", "changes", "says"), [
    ("triton", "cpu", None, {}, "'triton', which does not serve this target on cpu"),
    ("intel_amx", "gpu", None, {}, "'intel_amx', which does not serve this target on"),
    ("fa3", "gpu", "NVIDIA-B200", {}, "'fa3', which does not serve this target on B200"),
    ("trtllm_mha", "gpu", None, {}, "chains only, and top_k is 4"),
    ("triton", "gpu", None, {"drafter": {"sliding_window": 64}, "tune": {"top_k": [1]}}, "sliding window"),
    ("intel_amx", "cpu", None, {}, None), ("fa3", "gpu", "NVIDIA-H100-80GB-HBM3", {}, None),
    ("fa3", "gpu", "Something-Else", {}, None), ("trtllm_mha", "gpu", "NVIDIA-B200", {"tune": {"top_k": [1]}}, None),
    ("aiter", "gpu", None, {"tune": {"top_k": [1]}}, None)])
def test_an_attention_backend_that_cannot_serve_the_job_is_refused_at_submission(
        backend: str, device: Device, gpu: str | None, changes: dict[str, Any], says: str | None,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the GPUs of this machine are not the job's
    facts = Facts(None, device, config=LLAMA) if gpu is None else on_a_cluster(gpu)
    spec = job_spec(engine={"kind": "sglang", "attention_backend": backend}, **changes)
    submitted = Submission(resolve(spec, facts), facts, Settings())
    if says is None:
        attention_backend_serves(submitted)
        return
    with pytest.raises(InvalidInput, match=says) as refused:
        attention_backend_serves(submitted)
    assert "omit" in refused.value.hint


@pytest.mark.parametrize(("device", "gpu", "draft", "says"), [
    ("gpu", "Something-Else", {"step_rates": []}, "of DSpark's confidences"),
    ("gpu", "Something-Else", {"attention_backend": "fa3"}, None),
    ("cpu", "", {"kv_dtype": "fp8_e4m3"}, "for GPUs, and this is a CPU"),
    ("gpu", "NVIDIA-B200", {"attention_backend": "fa3"}, "does not draft EAGLE3 on B200"),
    ("gpu", "NVIDIA-B200", {"attention_backend": "fa4"}, None)])
def test_a_way_to_compute_the_drafter_that_sglang_does_not_have_is_refused_at_submission(
        device: Device, gpu: str, draft: dict[str, str], says: str | None,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the GPUs of this machine are not the job's
    facts = on_a_cluster(gpu) if device == "gpu" else Facts(None, device, config=LLAMA)
    spec = job_spec(engine="sglang", tune={"drafts": [{}, draft]})
    submitted = Submission(resolve(spec, facts), facts, Settings())
    if says is None:
        attention_backend_serves(submitted)
        return
    with pytest.raises(InvalidInput, match=says):
        attention_backend_serves(submitted)
    with pytest.raises(ValidationError, match="engine is 'embedded', which computes drafter and target alike"):
        job_spec(engine="embedded", tune={"drafts": [draft]})


@pytest.mark.parametrize(("gpu", "backend", "says"), [
    ("NVIDIA-A100-SXM4-80GB", None, "'flashinfer' of the target does not"), ("NVIDIA-H100-80GB-HBM3", None, None),
    ("NVIDIA-H100-80GB-HBM3", "triton", "'triton' of the target does not")])
def test_parts_of_blocks_are_refused_at_submission_where_the_targets_attention_does_not_verify_them(
        gpu: str, backend: str | None, says: str | None) -> None:
    facts = on_a_cluster(gpu)
    spec = job_spec(engine={"kind": "sglang", "attention_backend": backend}, drafter={"family": "dspark"},
                    tune={"drafts": [{}, {"step_rates": []}]})
    submitted = Submission(resolve(spec, facts), facts, Settings())
    if says is None:
        attention_backend_serves(submitted)
        return
    with pytest.raises(InvalidInput, match=says):
        attention_backend_serves(submitted)
    with pytest.raises(ValidationError, match=r"benchmark\.tree\.draft\.step_rates is empty"):
        job_spec(engine="sglang", benchmark={"tree": {"draft": {"step_rates": []}}})


@pytest.mark.parametrize(("head", "config", "refused"), [
    ("lilicorr", {"logit_scale": 0.0625}, True), ("lilicorr", {"text_config": {"final_logit_softcapping": 30.0}}, True),
    ("lilicorr", {}, False), ("selector", {"logit_scale": 0.0625}, False)])
def test_a_head_that_reads_logits_without_the_targets_factor_or_bound_is_refused_for_a_target_that_has_one(
        head: str, config: dict[str, Any], refused: bool) -> None:
    facts = Facts(local_device="gpu", config={"architectures": ["LlamaForCausalLM"]} | config)
    spec = job_spec(drafter={"family": "dflash", "causal_head": head})
    submitted = Submission(resolve(spec, facts), facts, Settings())
    if not refused:
        heads_read_plain_logits(submitted)
        return
    with pytest.raises(InvalidInput, match="scales or bounds its logits"):
        heads_read_plain_logits(submitted)


def test_drafters_of_blocks_are_ranked_by_chains_within_their_block_in_sglang() -> None:
    def on_gpus(**changes: Any) -> Submission:
        return submission(job_spec(**{"engine": "sglang"} | changes), "gpu")

    def tree(of: Submission) -> DraftTreeShape:
        return of.job.spec.benchmark.tree

    alone = on_gpus(drafter={"family": "dflash"}, train={"ttt_length": 5})
    assert tree(alone) == DraftTreeShape(num_steps=5, top_k=1, num_draft_tokens=6)
    swept = on_gpus(sweep={"families": ["eagle3", "dflash"]}, drafter={"max_draft_tokens": 3})
    assert tree(swept).num_draft_tokens == 4
    assert tree(on_gpus()) == job_spec().benchmark.tree
    for whole in (alone, swept, on_gpus()):
        blocks_are_chains_within_their_length(whole)
    for label, shape in (("8/1/9", (8, 1, 9)), ("5/2/6", (5, 2, 6))):
        with pytest.raises(InvalidInput, match=rf"benchmark\.tree is {label} and .* blocks of 8 tokens") as caught:
            blocks_are_chains_within_their_length(on_gpus(drafter={"family": "dflash"}, benchmark={"tree": dict(zip(
                ("num_steps", "top_k", "num_draft_tokens"), shape, strict=True))}))
        assert "top_k 1 and num_steps up to 7" in caught.value.hint
    blocks_are_chains_within_their_length(on_gpus(drafter={"family": "dflash"}, benchmark={"tree": {
        "num_steps": 5, "top_k": 1, "num_draft_tokens": 6}}))
    blocks_are_chains_within_their_length(on_gpus(engine="embedded", drafter={"family": "dflash"}))
    assert tree(on_gpus(drafter={"family": "dspark", "max_draft_tokens": 4})).label() == "4/1/5"


def test_default_temperatures_are_greedy_where_sglang_verifies_greedily() -> None:
    on_cpu = resolved(job_spec(engine="sglang"), "cpu").spec
    assert on_cpu.benchmark.temperatures == on_cpu.tune.temperatures == (0.0,)
    devices: tuple[tuple[JobSpec, Device], ...] = ((job_spec(engine="sglang"), "gpu"), (job_spec(), "cpu"))
    for spec, device in devices:
        unchanged = resolved(spec, device).spec
        assert (unchanged.benchmark, unchanged.tune) == (spec.benchmark, spec.tune)


@pytest.mark.parametrize(("tp_size", "says"), [
    (1, None), (4, None), (12, None), (8, "12 attention heads"), (3, "4 key-value heads")])
def test_heads_are_divided_among_the_gpus_of_one_server(tp_size: int, says: str | None) -> None:
    facts = TargetFacts(hidden_size=64, num_layers=2, vocab_size=100, intermediate_size=128, num_heads=12,
                        num_kv_heads=4, head_dim=16, tie_word_embeddings=False, source="test")
    if says is None:
        check_divided(tp_size, facts)
        return
    with pytest.raises(InvalidInput, match=f"engine.tp_size {tp_size} does not divide the target.s {says}") as caught:
        check_divided(tp_size, facts)
    assert "1, 2, 4, 12" in caught.value.hint


def test_a_job_for_sglang_on_this_cpu_is_accepted_with_what_it_can_do(
        settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(SGLANG_PROGRAM, "python -m sglang.launch_server")
    if local_device() == "gpu":
        pytest.skip("an AMD GPU is visible")
    target = {"model": str(target_directory(tmp_path / "target"))}
    accepted = check(job_spec(target=target, engine="sglang"), settings).spec
    assert accepted.benchmark.temperatures == (0.0,)
    with pytest.raises(InvalidInput, match=r"benchmark\.temperatures has 1"):
        check(job_spec(target=target, engine="sglang", benchmark={"temperatures": [1.0]}), settings)
    with pytest.raises(InvalidInput, match=r"engine\.tp_size 3 does not divide"):
        check(JobSpec.model_validate(job_body(target=target, engine={"kind": "sglang", "tp_size": 3})), settings)


def test_gpus_are_found_by_their_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local_device(tmp_path) == "cpu"
    (tmp_path / "nvidia0").touch()
    assert local_device(tmp_path) == "gpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_device(tmp_path) == "cpu"
