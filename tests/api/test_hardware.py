"""Plans that know the GPUs a job requests: rates, ranges, GPU hours, money, and what the time is bound by."""

from typing import Any

import pytest
import yaml

from benchmarks.plans import LLAMA_8B, OLMO_32B
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.plan import Plan, StagePlan
from eyrie_api.contract.stages import STAGES
from eyrie_api.planning.hardware import ASSUMED, GPUS, Rates, gpu_rates, known_gpu
from eyrie_api.planning.plan import make_plan
from eyrie_api.planning.plan_stages import starts
from eyrie_api.planning.plan_work import DataFacts, PlannedWork, TargetFacts
from eyrie_api.planning.resolve import derive
from tests.api.samples import job_spec
from tests.house.sources import ROOT

H200, H100 = "NVIDIA-H200", "NVIDIA-H100-80GB-HBM3"


def planned(spec: JobSpec, target: TargetFacts, **options: Any) -> Plan:
    return make_plan(derive(spec), target, None, **options)


def seeds_job(gpu_type: str = H200, num_gpus: int = 8, **changes: Any) -> JobSpec:
    return job_spec(**({
        "target": {"model": "allenai/Olmo-3.1-32B-Think", "dtype": "bfloat16"},
        "data": {"sources": [{"path": "allenai/Dolci-Instruct-SFT"}], "max_conversations": 500_000,
                 "max_prompt_tokens": 1024},
        "engine": {"kind": "sglang"}, "regenerate": {"max_new_tokens": 1024, "concurrency": 512},
        "capture": {"max_length": 2048, "codec": "bfloat16"}, "train": {"epochs": 1},
        "placement": {"every": {"num_gpus": num_gpus, "gpu_type": gpu_type}}} | changes))


def stage(plan: Plan, name: str) -> StagePlan:
    return next(one for one in plan.stages if one.stage == name)


@pytest.mark.parametrize(("label", "name"), [
    (H100, "H100"), ("NVIDIA-H100-PCIe", "H100 PCIe"), (H200, "H200"), ("NVIDIA-B200", "B200"),
    ("NVIDIA-A100-SXM4-80GB", "A100 80 GB"), ("NVIDIA-A100-SXM4-40GB", "A100"), ("NVIDIA-L40S", "L40S"),
    ("NVIDIA-L4", "L4"), ("Tesla-T4", None), ("NVIDIA-A10G", None), ("", None), (None, None)])
def test_a_type_is_known_by_its_node_label_and_a_similar_name_is_not_taken_for_it(
        label: str | None, name: str | None) -> None:
    found = known_gpu(label)
    assert (None if found is None else found.name) == name


def test_captured_tokens_per_second_are_those_that_specforge_reports_for_an_8b_on_an_h200() -> None:
    low, expected, high = (gpu_rates(next(one for one in GPUS if one.name == "H200"), speed, num_gpus=1, tp_size=1,
                                     batch=1, weight_bytes=2, active_share=1.0).prefill * 1e9
                           / (2 * LLAMA_8B.parameters) for speed in ("low", "expected", "high"))
    assert low < expected < high
    assert low < 27_000 < high


def test_one_request_reads_every_weight_for_a_token_and_a_batch_reads_them_once_until_arithmetic_limits_it() -> None:
    one = {"num_gpus": 1, "tp_size": 1, "weight_bytes": 2, "active_share": 1.0}
    single = gpu_rates(ASSUMED, "expected", batch=1, **one)  # type: ignore[arg-type]
    assert single.single * 1e9 / (2 * 8e9) == pytest.approx(0.6 * 3350e9 / 16e9), "tokens/s of 16 GB of weights"
    assert single.decode == pytest.approx(single.single)
    many = gpu_rates(ASSUMED, "expected", batch=16, **one)  # type: ignore[arg-type]
    assert many.decode == pytest.approx(16 * single.single)
    most = gpu_rates(ASSUMED, "high", batch=10_000, **one)  # type: ignore[arg-type]
    assert most.decode <= most.prefill
    mixture = gpu_rates(ASSUMED, "expected", batch=16, **one | {"active_share": 0.1})  # type: ignore[arg-type]
    assert mixture.decode < many.decode, "a batch reads all experts"


def test_the_seeds_job_takes_days_of_eight_gpus_and_not_decades_of_a_cpu() -> None:
    plan = planned(seeds_job(), OLMO_32B, data_facts=DataFacts(500_000, 1024.0, 1024.0, "the seed"))
    capture = stage(plan, "capture")
    assert capture.num_gpus == 8
    assert 1.0 < capture.hours < 48.0
    assert 24.0 < plan.total_hours < 24.0 * 14
    for one in plan.stages:
        assert one.hours_range is not None
        assert one.hours_range.low <= one.hours <= one.hours_range.high
    assert plan.bottleneck
    assert plan.total_gpu_hours == pytest.approx(8 * plan.total_hours)
    assert all("H200" in one.source for one in plan.assumptions if one.unit == "GFLOP/s")


def test_an_8b_target_on_one_h100_is_done_in_an_evening() -> None:
    spec = job_spec(
        target={"model": "meta-llama/Llama-3.1-8B-Instruct", "dtype": "bfloat16"}, engine={"kind": "sglang"},
        data={"sources": [{"path": "org/chats"}], "max_conversations": 20_000}, train={"epochs": 3},
        regenerate={"max_new_tokens": 512, "concurrency": 64}, capture={"codec": "int8"},
        placement={"every": {"num_gpus": 1, "gpu_type": H100}})
    plan = planned(spec, LLAMA_8B, data_facts=DataFacts(20_000, 200.0, 400.0, "a sample"))
    assert plan.total_hours < 8.0
    assert "H100" in stage(plan, "train").gpu_type


def test_in_sglang_each_setting_and_checkpoint_is_a_start_and_an_engine_of_ours_starts_once_in_a_stage() -> None:
    first = {"train": {"num_checkpoints": 2}}
    sglang, ours = (planned(seeds_job(num_gpus=1, engine={"kind": kind}, **first), OLMO_32B)
                    for kind in ("sglang", "embedded"))
    named = next(one for one in sglang.assumptions if one.name.startswith("start"))
    settings = len(seeds_job().tune.shapes) + len(seeds_job().tune.num_steps) * seeds_job().tune.ngram + 1
    # The server without a drafter is the first benchmark's; that which follows the load is the proof's.
    assert f"benchmark {2 + 1}, tune {seeds_job().tune.trials(settings) - 1}, prove 1" in named.source
    assert named.value == pytest.approx(60 + 2 * OLMO_32B.parameters / 2e9, abs=1)
    embedded = next(one for one in ours.assumptions if one.name.startswith("start"))
    assert "benchmark 1, tune 1, prove 1" in embedded.source
    for name, num_starts in (("benchmark", 2 + 1), ("prove", 1)):
        more_s = 3600 * (stage(sglang, name).hours - stage(ours, name).hours)
        assert more_s == pytest.approx(num_starts * named.value - embedded.value, abs=2.0 * num_starts)


@pytest.mark.parametrize(("on_cluster", "by_load", "servers"), [(True, True, 10), (False, True, 7), (False, False, 6)])
def test_the_short_job_of_the_gpu_pack_starts_so_many_servers(on_cluster: bool, by_load: bool, servers: int) -> None:
    document = yaml.safe_load((ROOT / "benchmarks" / "gpu" / "pack" / "job.yaml").read_text())
    spec = JobSpec.model_validate(document | {"target": document["target"] | {"model": "./target"}})
    if not by_load:
        spec = spec.model_copy(update={"tune": spec.tune.model_copy(update={"concurrencies": (1,)})})
    work = PlannedWork(derive(spec, on_cluster=on_cluster), LLAMA_8B, DataFacts(3000, 100.0, 256.0, "a sample"))
    found = starts(work, dict.fromkeys(STAGES, 1))
    assert found.pop("capture") == 1  # a program
    assert sum(found.values()) == servers, found


def test_faster_gpus_and_more_of_them_take_less_time_and_more_do_not_take_more_gpu_hours() -> None:
    hours = {label: planned(seeds_job(label), OLMO_32B).total_hours for label in (H100, H200, "NVIDIA-B200")}
    assert hours["NVIDIA-B200"] < hours[H200] < hours[H100]
    few, many = (stage(planned(seeds_job(num_gpus=number), OLMO_32B), "regenerate") for number in (2, 16))
    assert many.hours < few.hours


def test_money_is_gpu_hours_at_the_price_of_the_type_and_unknown_where_one_has_no_price() -> None:
    plan = planned(seeds_job(), OLMO_32B, gpu_hour_prices={H200: 3.0})
    assert plan.total_cost == pytest.approx(3.0 * plan.total_gpu_hours)
    mixed = seeds_job(placement={"every": {"num_gpus": 8, "gpu_type": H200},
                                 "stages": {"train": {"num_gpus": 4, "gpu_type": "NVIDIA-B200"}}})
    plan = planned(mixed, OLMO_32B, gpu_hour_prices={H200: 3.0})
    assert plan.total_cost is None
    assert stage(plan, "train").cost is None
    assert stage(plan, "train").gpu_type == "B200"
    assert stage(plan, "capture").cost == pytest.approx(3.0 * stage(plan, "capture").gpu_hours)


def test_uncompressed_states_are_bound_by_their_storage_and_streamed_ones_are_not() -> None:
    def capture_of(**fields: Any) -> StagePlan:
        return stage(planned(seeds_job("NVIDIA-B200", 16, capture={"max_length": 2048, **fields}), OLMO_32B), "capture")

    assert capture_of(codec="bfloat16").bound_by == "storage"
    assert capture_of(mode="stream").hours == 0.0


def test_an_unknown_type_is_said_and_set_rates_are_used_for_all() -> None:
    plan = planned(seeds_job("Some-New-GPU"), OLMO_32B)
    assert any("Some-New-GPU" in warning and ASSUMED.name in warning for warning in plan.warnings)
    own = planned(seeds_job("Some-New-GPU"), OLMO_32B, rates=Rates(1e6, 1e6, 1e6, 1e6, "measured here"))
    assert not any("Some-New-GPU" in warning for warning in own.warnings)
    assert stage(own, "capture").hours_range is None


def test_a_job_without_gpus_is_planned_with_the_rates_of_a_cpu() -> None:
    plan = planned(job_spec(), LLAMA_8B)
    assert {one.num_gpus for one in plan.stages} == {0}
    assert {one.bound_by for one in plan.stages} == {""}
    assert plan.total_cost is None
    assert any("CPU" in one.source for one in plan.assumptions)
