"""Plans of targets that need several GPUs or are quantised, against arithmetic that is done here."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plans import (
    DATA,
    DEEPSEEK_671B,
    H200,
    LLAMA_8B,
    QWEN_235B,
    SIX,
    Job,
    served_by_sglang,
    smallest_server,
)
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.plan import Plan, StagePlan
from eyrie_api.contract.tuning import TuneSpec
from eyrie_api.errors import GpuTooSmall, InvalidInput
from eyrie_api.planning.facts import facts_of
from eyrie_api.planning.hardware import fitting_sizes, undivided
from eyrie_api.planning.plan import make_plan
from eyrie_api.planning.plan_work import TargetFacts
from eyrie_api.planning.preflight import check, plan
from eyrie_api.planning.resolve import derive
from eyrie_api.planning.target_files import INDEX
from eyrie_api.quantities import duration
from eyrie_api.settings import Settings
from tests.api.samples import job_spec
from tests.api.test_preflight import on_cluster

GIB = 2**30


def job(num_gpus: int = 8, tp_size: int = 1, **changes: Any) -> JobSpec:
    return job_spec(**({
        "target": {"model": "org/large", "dtype": "bfloat16"}, "data": {"sources": [{"path": "org/chats"}]},
        "engine": {"kind": "sglang", "tp_size": tp_size},
        "placement": {"every": {"num_gpus": num_gpus, "gpu_type": H200}}} | changes))


def planned(spec: JobSpec, target: TargetFacts = LLAMA_8B) -> Plan:
    return make_plan(derive(spec), target, None, data_facts=DATA)


def stage(plan: Plan, name: str) -> StagePlan:
    return next(one for one in plan.stages if one.stage == name)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of which the Hub cache has the config.json of the 235B target alone."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--large/snapshots/main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN_235B))
    return on_cluster(tmp_path)


# Sizes of targets.


def test_a_mixture_has_the_parameters_that_its_authors_publish() -> None:
    qwen, deepseek = (facts_of(config, "config.json") for config in (QWEN_235B, DEEPSEEK_671B))
    assert qwen.parameters / 1e9 == pytest.approx(235.1, abs=0.1)
    assert qwen.active_parameters / 1e9 == pytest.approx(22.2, abs=0.1)
    # "671B total parameters with 37B activated for each token" (arXiv:2412.19437).
    assert deepseek.parameters / 1e9 == pytest.approx(671.0, abs=0.1)
    assert deepseek.active_parameters / 1e9 == pytest.approx(37.6, abs=0.1)
    assert deepseek.key_values == 61 * (512 + 64)
    assert qwen.key_values == 2 * 94 * 4 * 128


def test_a_quantised_target_is_planned_with_the_bytes_that_sglang_loads(cluster: Settings, tmp_path: Path) -> None:
    def weights() -> float:
        return next(one.value for one in plan(job(tp_size=4), cluster).assumptions if one.name == "target weights")

    embeddings = 2 * 151_936 * 4096
    layer = 4096 * (64 + 2 * 4) * 128 + 64 * 128 * 4096 + 128 * 3 * 4096 * 1536 + 128 * 4096 + 2 * 4096
    assert weights() == pytest.approx((2 * embeddings + 94 * layer * (1 + 4 / 128**2)) / 1e9, rel=1e-3)
    index = {"metadata": {"total_size": 236_400_000_000}, "weight_map": {"a": "not-here.safetensors"}}
    (tmp_path / "models--org--large/snapshots/main" / INDEX).write_text(json.dumps(index))
    assert weights() == 236.4


def test_decoding_reads_the_bytes_of_a_quantised_target_and_computes_its_active_experts() -> None:
    spec = job(tp_size=4, regenerate={"concurrency": 24, "max_new_tokens": 512})
    regenerate = stage(planned(spec, served_by_sglang(QWEN_235B)), "regenerate")
    rows = spec.data.max_conversations * (1 - spec.data.held_out_fraction)
    # Two servers with twelve requests each; a step of a server reads all weights with four GPUs, of whose bandwidth
    # 0.6 is reached and 0.9 left by each doubling.
    bandwidth = 4 * 0.9**2 * 0.6 * 4800e9
    answers_s = rows * 500 / (2 * 12 / (236.4e9 / bandwidth))
    prompts_s = rows * 250 * 2 * 22.19e9 / (8 * 0.9**2 * 0.4 * 989e12)
    start_s = 60 + 236.4e9 / 2e9
    assert regenerate.hours * 3600 == pytest.approx(answers_s + prompts_s + start_s, rel=0.01)


@pytest.mark.parametrize(("name", "num_gpus"), [
    (name, num_gpus) for name, target in SIX.items() for num_gpus in (1, 8) if smallest_server(target) <= num_gpus])
def test_the_hours_of_every_stage_of_six_targets_are_those_of_arithmetic_done_here(name: str, num_gpus: int) -> None:
    target, tp = SIX[name], smallest_server(SIX[name])
    job = Job(name, "one_gpu.yaml", target, DATA, H200, num_gpus, tp)
    hours = {one.stage: one.hours for one in job.plan().stages}
    servers, weights = num_gpus // tp, target.quantised_bytes or 2 * target.parameters
    active, share = target.active_parameters, target.active_parameters / target.parameters
    # Of a server: 989 TFLOP/s and 4.8 TB/s for each GPU, of which 40 % and 60 % are reached, and 90 % of that for each
    # doubling.
    doubled = tp * 0.9 ** math.log2(tp)
    flops_s, bytes_s = 0.4 * 989e12 * doubled, 0.6 * 4.8e12 * doubled
    prompt_tokens_s, one_user = flops_s / (2 * active), bytes_s / (weights * share)

    def users_tokens_s(users: int) -> float:
        return min(prompt_tokens_s, bytes_s / weights * max(1 / share, users))

    rows, server_s, program_s = 19_600, 60 + weights / 2e9, 20 + weights / 2e9
    seconds = {
        "regenerate": rows * 250 / (servers * prompt_tokens_s) + rows * 500 / (servers * users_tokens_s(64 * tp))
        + server_s,
        # Computed, or written at 1 GB/s.
        "capture": max(rows * 750 / (servers * prompt_tokens_s), job.plan().stages[1].bytes_on_disk / 1e9) + program_s,
        "train": 3 * rows * 750 * job.plan().bytes_per_token / 1e9}  # three epochs, read at 1 GB/s
    # Three checkpoints, each with and without a drafter: 80 prompts at two temperatures, 256 tokens. Measured in turn
    # they share the server without one, and so does tuning; side by side they do not.
    suite_tokens, in_turn = 2 * 80 * 2 * 256, math.ceil(3 / servers)
    seconds["benchmark"] = 3 * suite_tokens / (servers * one_user) + server_s * (
        in_turn + 1 if servers == 1 else 2 * in_turn)
    # The settings of the grid with n-gram look-up and off, a quarter of which are raced at three loads.
    spec = TuneSpec()
    raced = math.floor((len(spec.shapes) + 7 + 1) / 4)
    race_s = min(600, raced * 3 * 8 * 2 * 256 / one_user)
    seconds["tune"] = race_s + suite_tokens / one_user + (raced - (servers == 1)) * server_s
    # One user: 64 requests in both variants, 3 x 12 of parity, 32 in both with another prompt. Loads of 8 and 32: six
    # pairs of blocks of two requests per user, and parity under load. One start: the server that follows the load.
    alone, together = 2 * 64 + 3 * 12 + 2 * 32, 2 * 6 * 2 * (8 + 32) + 2 * (2 * 32 + 12)
    seconds["prove"] = alone * 256 / one_user + together * 256 / users_tokens_s(32) + server_s
    for stage, expected in seconds.items():
        if (name, num_gpus, stage) == ("Olmo-3.1-32B", 1, "train"):  # one GPU computes for longer than it reads
            assert 3600 * hours[stage] > expected
        else:
            assert 3600 * hours[stage] == pytest.approx(expected, rel=0.01), stage


# Tensor parallelism.


def test_a_target_that_no_gpu_holds_is_refused_with_the_smallest_number_of_them_that_does(cluster: Settings) -> None:
    with pytest.raises(GpuTooSmall, match=r"engine\.tp_size is 1: the target's weights are 220\.\d GiB, and 1 x "
                       r"NVIDIA-H200 has 141\.0 GiB, of which SGLang takes 124\.1 GiB") as refused:
        check(job(), cluster)
    assert refused.value.hint.startswith("set engine.tp_size to 2 or more")
    assert not plan(job(), cluster).possible
    assert plan(job(tp_size=2), cluster).possible
    check(job(tp_size=2), cluster)


def test_gpus_that_would_divide_a_block_of_scales_are_refused_with_the_numbers_that_do_not(cluster: Settings) -> None:
    with pytest.raises(InvalidInput, match=r"engine\.tp_size 8 does not divide the target's moe_intermediate_size 1536 "
                       r"into whole blocks of 128 \(weight_block_size\)") as refused:
        check(job(tp_size=8), cluster)
    assert refused.value.hint == "use a number that does: 1, 2, 4"


@pytest.mark.parametrize(("changes", "tp_size", "what"), [
    ({}, 16, None), ({}, 32, "intermediate_size 14336"), ({"block": None}, 32, None),
    ({"intermediate_size": 14_400}, 1, "intermediate_size 14400"),
    ({"head_dim": 64, "intermediate_size": 16_384}, 8, "8 key-value heads into whole blocks"),
    ({"num_kv_heads": 3}, 2, "3 key-value heads"), ({}, 3, "32 attention heads")])
def test_heads_and_whole_blocks_are_divided_among_the_gpus_of_a_server(
        changes: dict[str, Any], tp_size: int, what: str | None) -> None:
    facts = replace(replace(LLAMA_8B, block=(128, 128)), **changes)
    found = undivided(facts, tp_size)
    assert found is None if what is None else found is not None and what in found
    assert (tp_size in fitting_sizes(facts)) == (what is None)


def test_a_stage_with_fewer_gpus_than_one_server_takes_is_refused(cluster: Settings) -> None:
    placed: dict[str, Any] = {"every": {"num_gpus": 8, "gpu_type": H200}, "stages": {"tune": {"num_gpus": 2}}}
    with pytest.raises(InvalidInput, match=r"engine\.tp_size is 4 and tune has 2 GPUs") as refused:
        check(job(tp_size=4, placement=placed), cluster)
    assert "give it 4 or more" in refused.value.hint
    placed["stages"] = {"train": {"num_gpus": 1}}
    check(job(tp_size=4, placement=placed), cluster)


def test_a_server_of_more_gpus_than_a_node_has_is_refused_with_the_number_that_holds_the_target(
        cluster: Settings) -> None:
    for ask in (check, plan):
        with pytest.raises(InvalidInput, match=r"engine\.tp_size is 16 and one node has 8 GPUs: servers") as refused:
            ask(job(tp_size=16), cluster)
        assert refused.value.hint == "set it to 2, which hold the target"
        with pytest.raises(InvalidInput, match=r"placement\.every\.num_gpus is 16 and one node has 8") as refused:
            ask(job(16, tp_size=2), cluster)
        assert refused.value.hint == "give at most 8, or correct cluster.node_gpus of the cluster"


def test_a_target_that_no_node_holds_is_refused_with_the_gpus_and_the_checkpoint_that_would_do(
        cluster: Settings, tmp_path: Path) -> None:
    def spec(num_gpus: int, tp_size: int) -> JobSpec:
        return job(tp_size=tp_size, placement={"every": {"num_gpus": num_gpus, "gpu_type": "NVIDIA-H100-80GB-HBM3"}})

    (tmp_path / "models--org--large/snapshots/main/config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16_384, "num_hidden_layers": 126,
        "vocab_size": 128_256, "intermediate_size": 53_248, "num_attention_heads": 128, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}))  # 405B
    hint = ("it takes 16 GPUs of this size, and one node has 8: name a larger type of GPU, such as 8 x H200, or use an "
            "FP8 checkpoint")
    with pytest.raises(GpuTooSmall, match=r"engine\.tp_size is 8: the target's weights are 75\d\.\d GiB") as refused:
        check(spec(8, 8), cluster)
    assert refused.value.hint == hint
    planned = plan(spec(8, 8), cluster)
    assert not planned.possible
    assert any(hint in warning for warning in planned.warnings)
    with pytest.raises(InvalidInput, match=r"engine\.tp_size is 16") as too_many:
        check(spec(8, 16), cluster)
    assert too_many.value.hint == hint
    assert cluster.cluster_profile is not None
    profile = json.loads(cluster.cluster_profile.read_text())
    cluster.cluster_profile.write_text(json.dumps(profile | {"node_gpus": 16}))
    check(spec(16, 16), cluster)


def test_an_endpoint_with_fewer_gpus_than_one_server_takes_or_a_number_that_divides_no_target_is_refused(
        cluster: Settings) -> None:
    assert cluster.cluster_profile is not None
    serving = {"namespace": "eyrie", "hardware_profile": "h200", "placement": {"image": "sglang", "num_gpus": 1}}
    profile = json.loads(cluster.cluster_profile.read_text())
    cluster.cluster_profile.write_text(json.dumps(profile | {"serving": serving}))
    with pytest.raises(InvalidInput, match=r"engine\.tp_size is 2 and the endpoint has 1 GPUs \(serve\.placement"):
        check(job(tp_size=2), cluster)
    with pytest.raises(InvalidInput, match=r"serve\.placement\.num_gpus 3 does not divide"):
        check(job(tp_size=2, serve={"placement": {"num_gpus": 3}}), cluster)
    check(job(tp_size=2, serve={"placement": {"num_gpus": 2, "gpu_type": H200}}), cluster)
    check(job(tp_size=2, promotion={"mode": "never"}), cluster)


def test_the_hours_of_every_stage_with_servers_follow_the_gpus_of_one_server() -> None:
    hours = {size: {one.stage: one.hours for one in planned(job(tp_size=size)).stages} for size in (1, 2, 4, 8)}
    for name in ("regenerate", "tune", "prove"):  # fewer and larger servers read the weights for more requests
        assert hours[1][name] > hours[2][name] > hours[4][name] > hours[8][name]
    assert hours[8]["benchmark"] > hours[1]["benchmark"], "one checkpoint at a time in place of eight"
    assert hours[8]["train"] == hours[1]["train"]
    one, four = (stage(planned(job(tp_size=size), served_by_sglang(QWEN_235B)), "capture").hours for size in (1, 4))
    assert four > one, "four GPUs together have less than four times the rate of one"


# What limits a stage.


def test_requests_at_once_that_limit_regeneration_are_named_with_the_hours_of_as_many_as_memory_holds() -> None:
    few = stage(planned(job()), "regenerate")
    many = stage(planned(job(regenerate={"concurrency": 512})), "regenerate")
    assert (few.bound_by, few.hint) == (
        "requests at once", f"regenerate.concurrency is 24; with 512 regenerate takes {duration(3600 * many.hours)} in "
        f"place of {duration(3600 * few.hours)}")
    assert (many.bound_by, many.hint) == ("memory bandwidth", "")
    assert many.hours < 0.8 * few.hours


def test_other_limits_are_named_with_the_field_that_changes_them() -> None:
    whole = planned(job(capture={"codec": "bfloat16"}, benchmark={"max_new_tokens": 1024}))
    hints = {one.stage: one.hint for one in whole.stages}
    assert hints["capture"].startswith("capture.codec is bfloat16; with int4 capture takes ")
    assert hints["benchmark"].startswith("benchmark.max_new_tokens is 1024; with 256 benchmark takes ")
    assert hints["tune"].startswith("engine.tp_size is 1; with 8 tune takes ")
    assert {one.hint for one in make_plan(derive(job_spec()), LLAMA_8B, None).stages} == {""}, "on CPUs"


def test_an_object_store_is_not_compared_with_the_disk_of_the_machine_that_plans(cluster: Settings) -> None:
    assert plan(job(tp_size=4), cluster).fits_disk is None


# Serving.


def test_the_endpoint_holds_as_many_users_as_are_left_room_by_target_and_drafter() -> None:
    serving = planned(job(1)).serving
    assert serving is not None
    assert serving.available_bytes == int(141 * GIB * 0.88)
    layer = 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 14_336
    assert serving.weight_bytes == pytest.approx(2 * (2 * 128_256 * 4096 + 32 * layer), rel=1e-4)
    # Fusion of three layers, a layer with twice the input, 32,768 draft tokens.
    drafter = 3 * 4096**2 + 2 * 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 14_336 + 32_768 * 4096
    assert serving.drafter_bytes == 2 * drafter
    assert serving.user_bytes == 4096 * 2 * (32 + 1) * 8 * 128 * 2
    left = serving.available_bytes - serving.weight_bytes - serving.drafter_bytes
    assert serving.users_that_fit == left // serving.user_bytes
    assert (serving.users, serving.update_gpus, serving.context_tokens) == (4, 2, 4096)
    longer = planned(job(1, data={"sources": [{"path": "org/chats"}], "max_prompt_tokens": 30_000})).serving
    assert longer is not None
    assert longer.context_tokens == 30_000 + job().regenerate.max_new_tokens


def test_keys_and_values_are_repeated_where_there_are_fewer_heads_than_gpus_and_latent_ones_on_every_gpu() -> None:
    def user(config: dict[str, Any], tp_size: int) -> int:
        serving = planned(job(tp_size=tp_size), served_by_sglang(config)).serving
        assert serving is not None
        return serving.user_bytes

    assert user(QWEN_235B, 2) == user(QWEN_235B, 4) == 4096 * 2 * (94 + 1) * 4 * 128 * 2
    assert user(QWEN_235B, 8) == 2 * user(QWEN_235B, 4)
    assert user(DEEPSEEK_671B, 8) == 8 * 4096 * (61 + 1) * 576 * 2


def test_users_that_do_not_fit_are_warned_of_and_what_is_not_served_has_no_memory() -> None:
    crowded = planned(job(2, tp_size=2, prove={"concurrencies": [1, 512]}), served_by_sglang(QWEN_235B))
    assert crowded.serving is not None
    assert 0 < crowded.serving.users_that_fit < 512
    assert any(warning.startswith(f"{crowded.serving.users_that_fit} of the 512 declared users fit the endpoint")
               for warning in crowded.warnings)
    assert planned(job(promotion={"mode": "never"})).serving is None
    assert make_plan(derive(job_spec()), LLAMA_8B, None).serving is None
