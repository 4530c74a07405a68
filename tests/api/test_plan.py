"""Plans: the second seed's storage figure recomputed, and bounds that hold for any job."""

import json
import math
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks import training_memory
from eyrie_api.contract.capture import BEST_FIRST, ID_AND_MASK_BYTES, StoredAs
from eyrie_api.contract.data import FEW_ROWS, DataSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.plan import Plan, StageComparison, StagePlan
from eyrie_api.contract.tuning import TuneSpec
from eyrie_api.errors import NoUsableData
from eyrie_api.planning.facts import data_facts, quickstart_dir, target_facts
from eyrie_api.planning.hardware import Rates
from eyrie_api.planning.plan import make_plan, measured_rates
from eyrie_api.planning.plan_work import DataFacts, TargetFacts, expected_draft_vocabulary
from eyrie_api.planning.resolve import derive
from tests.api.samples import job_spec, target_directory
from tests.house.sources import ROOT
from tests.tiny import tiny_target

MIB, TIB, TB = 2**20, 2**40, 10**12
# allenai/Olmo-3.1-32B-Think as far as the post uses it; depth and heads do not enter the storage figure.
SEED_TARGET = TargetFacts(hidden_size=5120, num_layers=64, vocab_size=100_278, intermediate_size=27_648, num_heads=40,
                          num_kv_heads=8, head_dim=128, tie_word_embeddings=False, source="the seed")
SMALL = TargetFacts(hidden_size=256, num_layers=16, vocab_size=2048, intermediate_size=704, num_heads=4,
                    num_kv_heads=2, head_dim=64, tie_word_embeddings=False, source="test")


def plan_of(spec: JobSpec, target: TargetFacts, free_bytes: int | None) -> Plan:
    return make_plan(derive(spec), target, free_bytes)


def test_with_the_rates_that_a_job_measured_its_plan_has_the_times_that_its_stages_took() -> None:
    spec, slower = job_spec(), {"regenerate": 2.0, "capture": 2.0, "train": 0.5, "prove": 4.0}
    before = plan_of(spec, SMALL, None)
    rows = tuple(StageComparison(stage=stage.stage, planned=stage, seconds=slower[stage.stage] * stage.hours * 3600,
                                 is_running=False, size_bytes=1) for stage in before.stages if stage.stage in slower)
    rates = {name.removeprefix("EYRIE_").removesuffix("_GFLOPS").lower(): value
             for name, value in measured_rates(before, rows).items()}
    after = make_plan(derive(spec), SMALL, None, rates=Rates(**rates))
    for row, stage in zip(rows, (stage for stage in after.stages if stage.stage in slower), strict=True):
        assert stage.hours * 3600 == pytest.approx(row.seconds, rel=0.05), stage.stage
    unfinished = tuple(row.model_copy(update={"size_bytes": None}) for row in rows)
    assert measured_rates(before, unfinished) == {}


def test_the_seeds_42_tib_is_40_tib_when_divided_by_1024s() -> None:
    plain = StoredAs("bfloat16")
    per_sample = 2048 * (plain.token_bytes(3, 5120) + plain.supervised_token_bytes(5120) - ID_AND_MASK_BYTES)
    assert per_sample == 80 * MIB, "the post's ~80 MiB per sample is exact"
    total = 500_000 * per_sample
    assert total == 40_000_000 * MIB
    assert round(total / TIB, 3) == 38.147
    assert round(total / TB, 3) == 41.943
    with_overhead = Fraction(total) * Fraction(105, 100)
    assert round(float(with_overhead / TIB), 3) == 40.054
    assert round(float(with_overhead / TB), 3) == 44.040
    # Where "~42 TiB" comes from: 40 000 000 MiB / 10**6 instead of / 2**20, then 5 %.
    assert Fraction(40_000_000, 10**6) * Fraction(105, 100) == 42


def test_the_seeds_job_keeps_final_states_of_answers_alone_and_not_quite_5_gib_of_ids_and_masks() -> None:
    spec = job_spec(
        data={"sources": [{"path": "allenai/Dolci-Instruct-SFT"}], "max_conversations": 500_000,
              "held_out_fraction": 0.0, "max_prompt_tokens": 1024},
        regenerate={"max_new_tokens": 1024}, capture={"max_length": 2048, "codec": "bfloat16"})
    plan = plan_of(spec, SEED_TARGET, free_bytes=39 * TIB)
    capture = plan.stages[1]
    assert capture.tokens == 500_000 * 2048
    assert plan.bytes_per_token == 3 * 10_240 + 10_240 // 2, "half of the tokens are answers"
    states = capture.tokens * plan.bytes_per_token
    assert round(states / TIB, 3) == 33.379
    assert capture.bytes_on_disk - states == 5 * capture.tokens
    assert round((capture.bytes_on_disk - states) / 2**30, 1) == 4.8
    assert plan.fits_disk is True, "the post's 42 TiB would have been refused on this disk"
    assert plan_of(spec, SEED_TARGET, free_bytes=33 * TIB).fits_disk is False


def test_in_the_default_codec_the_seeds_states_take_less_than_half_of_its_40_tib() -> None:
    spec = job_spec(
        data={"sources": [{"path": "allenai/Dolci-Instruct-SFT"}], "max_conversations": 500_000,
              "held_out_fraction": 0.0, "max_prompt_tokens": 1024},
        regenerate={"max_new_tokens": 1024}, capture={"max_length": 2048})
    assert plan_of(spec, SEED_TARGET, None).stages[1].bytes_on_disk < 17 * TIB


def test_a_budget_of_bytes_takes_the_best_codec_that_fits_and_says_so() -> None:
    def planned(max_bytes: int) -> Plan:
        return plan_of(job_spec(capture={"codec": "float32", "max_bytes": max_bytes}), SMALL, None)

    def said(plan: Plan) -> str:
        return next(one.source for one in plan.assumptions if one.name == "stored states")

    whole = plan_of(job_spec(capture={"codec": "float32"}), SMALL, None).stages[1].bytes_on_disk
    assert said(planned(whole)).startswith("float32:")
    half = planned(whole - 1)
    assert said(half).startswith("bfloat16:")
    assert half.stages[1].bytes_on_disk < whole
    assert any("stored as bfloat16" in warning for warning in half.warnings)
    none = planned(2**16)
    assert none.fits_disk is False
    assert any("no codec fits" in warning for warning in none.warnings)


@pytest.mark.parametrize(("rows", "limit", "warned"), [
    (3, 1000, True), (FEW_ROWS, 1000, False), (None, 1000, False), (None, 50, True), (100_000, 50, True)])
def test_few_conversations_are_warned_of_where_their_number_is_known(
        rows: int | None, limit: int, warned: bool) -> None:
    spec = job_spec(data={"sources": [{"path": "a.jsonl"}], "max_conversations": limit, "held_out_fraction": 0.0})
    warnings = make_plan(derive(spec), SMALL, None, data_facts=DataFacts(rows=rows)).warnings
    found = [one for one in warnings if "conversations are left to train on" in one]
    assert len(found) == warned
    if warned:
        assert found[0].startswith(f"at most {min(rows or limit, limit)} conversations")


def test_storage_scales_with_hidden_size_and_not_with_depth_as_the_seed_says() -> None:
    deep = TargetFacts(**{**vars(SEED_TARGET), "num_layers": 640})
    assert plan_of(job_spec(), deep, None).bytes_per_token == plan_of(job_spec(), SEED_TARGET, None).bytes_per_token
    wide = TargetFacts(**{**vars(SEED_TARGET), "hidden_size": 8192})
    ratio = plan_of(job_spec(), wide, None).bytes_per_token / plan_of(job_spec(), SEED_TARGET, None).bytes_per_token
    assert ratio == pytest.approx(1.6, rel=1e-3), "a scale of two bytes per state does not grow"


def test_the_parameter_estimate_equals_the_weights_of_the_quickstart_target() -> None:
    directory = quickstart_dir()
    assert directory is not None
    with (directory / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    assert target_facts(directory).parameters == sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize(("target", "unit"), [(SMALL, "MB"), (SEED_TARGET, "GB")])
def test_the_weights_of_a_target_are_in_a_unit_that_shows_them(target: TargetFacts, unit: str) -> None:
    plan = plan_of(job_spec(), target, None)
    (weights,) = [one for one in plan.assumptions if one.name == "target weights"]
    assert weights.unit == unit
    assert 1.0 < weights.value < 1000.0


def test_every_number_of_a_plan_rests_on_a_named_assumption_with_a_source() -> None:
    plan = plan_of(job_spec(), SMALL, None)
    named = {one.name for one in plan.assumptions}
    assert {"prompt length", "answer length", "hidden size", "training rate", "candidates"} <= named
    assert all(one.source for one in plan.assumptions)
    assert any("upper bounds" in warning for warning in plan.warnings)
    assert plan.fits_disk is None


def test_of_candidates_that_race_one_another_the_steps_after_a_rung_are_not_charged() -> None:
    axes = [{"field": "train.learning_rate", "values": [number / 1000 for number in range(1, 9)]}]
    one, eight = plan_of(job_spec(), SMALL, None), plan_of(job_spec(sweep={"axes": axes}), SMALL, None)
    assert eight.stages[2].tokens == 4 * one.stages[2].tokens  # 8 * 0.25 + 4 * 0.25 + 2 * 0.5
    never = plan_of(job_spec(sweep={"axes": axes, "shared_passes": "never"}), SMALL, None)
    assert never.stages[2].tokens == 8 * one.stages[2].tokens
    families = ["eagle3", "eagle1", "medusa", "hydra", "standalone", "dflash", "dspark"]
    every = plan_of(job_spec(sweep={"families": families}), SMALL, None)
    assert every.stages[2].tokens == 7 * one.stages[2].tokens, "families are not halved against one another"
    assert [note.partition(":")[0] for note in every.notes[1:]] == families


def test_answers_of_the_data_take_no_time_to_generate_and_are_captured_like_others() -> None:
    job = job_spec().model_dump(mode="json")
    generated, given = (plan_of(JobSpec.model_validate({**job, "data": {**job["data"], "answered": answered}}), SMALL,
                                None) for answered in (False, True))
    assert (given.stages[0].hours, given.stages[0].tokens) == (0.0, generated.stages[0].tokens)
    assert generated.stages[0].hours > 0.0
    assert given.stages[1:] == generated.stages[1:]
    with pytest.raises(ValidationError, match=r"data\.answered is true.*regenerate\.engine is 'embedded'"):
        JobSpec.model_validate({**job, "data": {**job["data"], "answered": True}, "regenerate": {"engine": "embedded"}})


def test_a_streamed_job_needs_no_disk_for_states_and_pays_the_target_in_every_epoch() -> None:
    def planned(epochs: float, **changes: Any) -> Plan:
        return plan_of(job_spec(train={"epochs": epochs}, **changes), SMALL, None)

    stored, streamed = planned(2.0), planned(2.0, capture={"mode": "stream", "max_bytes": 2**16})
    tokens = stored.stages[1].tokens
    assert streamed.stages[1].bytes_on_disk == tokens * ID_AND_MASK_BYTES
    assert streamed.fits_disk is not False
    assert streamed.stages[1].hours == 0.0
    # The seven passes of the drafter aside, an epoch of training now takes an epoch of capture more.
    assert streamed.stages[2].hours == pytest.approx(stored.stages[2].hours + 2 * stored.stages[1].hours)
    eight = {"axes": [{"field": "train.learning_rate", "values": [number / 1000 for number in range(1, 9)]}]}
    together, alone = ({**eight, "rungs": [], "shared_passes": how} for how in ("auto", "never"))
    more = (planned(2.0, capture={"mode": "stream"}, sweep=sweep).stages[2].hours - planned(
        2.0, sweep=sweep).stages[2].hours for sweep in (together, alone))
    assert [round(hours / stored.stages[1].hours) for hours in more] == [2, 16]


@pytest.mark.parametrize(("sections", "states"), [
    ({}, 3),
    ({"sweep": {"families": ["eagle3", "medusa"]}}, 4),
    ({"drafter": {"family": "hydra"}}, 1),
    ({"drafter": {"family": "standalone"}}, 3),
    ({"capture": {"aux_layers": [1, 2]}, "sweep": {"families": ["dflash", "eagle1"]}}, 3),
    ({"sweep": {"axes": [{"field": "drafter.aux_layers", "values": [[1, 5], [1, 9, 12]]}]}}, 4),
])
def test_the_store_holds_what_any_candidate_reads(sections: dict[str, Any], states: int) -> None:
    plan = plan_of(job_spec(**sections), SMALL, None)
    assert next(one.value for one in plan.assumptions if one.name == "states of every token") == states


def test_a_rival_and_n_gram_cost_a_benchmark_each_and_off_costs_nothing() -> None:
    alone = plan_of(job_spec(train={"num_checkpoints": 2}), SMALL, None)
    joined = plan_of(job_spec(train={"num_checkpoints": 2}, rivals=["org/head", "ngram", "off"]), SMALL, None)
    assert joined.stages[3].tokens == alone.stages[3].tokens * 2
    assert joined.notes == (*alone.notes, "rival-head: benchmarked like a checkpoint, from org/head",
                            "rival-ngram: benchmarked like a checkpoint, from the text itself")


def test_a_rival_to_be_beaten_is_tuned_and_proven_too() -> None:
    compared = plan_of(job_spec(rivals=["org/head"]), SMALL, None)
    beaten = plan_of(job_spec(rivals=["org/head"], promotion={"must_beat": "rivals"}), SMALL, None)
    assert beaten.stages[4].tokens == 2 * compared.stages[4].tokens
    assert compared.stages[5].tokens < beaten.stages[5].tokens < compared.stages[5].tokens * 3 // 2


def test_every_higher_concurrency_of_the_benchmark_takes_the_fewest_clear_pairs_of_blocks() -> None:
    def tokens(*concurrencies: int) -> int:
        fields = {"suites": [{"name": "a", "path": "/a", "max_prompts": 20}], "temperatures": [0.0],
                  "max_new_tokens": 10, "concurrencies": concurrencies}
        return plan_of(job_spec(train={"num_checkpoints": 1}, benchmark=fields), SMALL, None).stages[3].tokens

    assert tokens(1) == 2 * 20 * 10
    assert tokens(1, 4) - tokens(1) == 2 * 6 * 8 * 10
    assert tokens(1, 4, 16) - tokens(1, 4) == 2 * 6 * 32 * 10


def test_a_sweep_is_charged_for_every_candidate_it_trains_and_benchmarks() -> None:
    one = plan_of(job_spec(), SMALL, None)
    three = plan_of(job_spec(sweep={"axes": [{"field": "train.seed", "values": [1, 2, 3]}]}), SMALL, None)
    assert three.stages[2].tokens == 3 * one.stages[2].tokens
    assert three.stages[3].tokens == 3 * one.stages[3].tokens
    assert three.stages[1] == one.stages[1], "captured once, whatever is trained from it"


@given(st.integers(1, 10**8), st.integers(8, 10**6), st.integers(1, 131_072), st.floats(0.0, 1.0),
       st.integers(16, 10**6), st.sampled_from(BEST_FIRST))
def test_a_plan_is_consistent_for_any_job(rows: int, prompt: int, answer: int, held_out: float, length: int,
                                          codec: str) -> None:
    spec = job_spec(
        data={"sources": [{"path": "quickstart"}], "max_conversations": rows, "max_prompt_tokens": prompt,
              "held_out_fraction": held_out},
        regenerate={"max_new_tokens": answer}, capture={"max_length": length, "codec": codec})
    plan = plan_of(spec, SMALL, free_bytes=10**12)
    assert plan.total_bytes_on_disk == sum(stage.bytes_on_disk for stage in plan.stages)
    assert plan.stages[1].tokens <= rows * length
    assert plan.stages[1].tokens <= rows * (prompt + answer)
    assert plan.fits_disk is (plan.total_bytes_on_disk <= 10**12)
    assert 0.0 <= plan.total_hours < float("inf")


@pytest.mark.parametrize(("vocab", "answer_tokens", "size"), [
    (2048, 10**9, 2048), (49_152, 100, 4096), (49_152, 58_000, pytest.approx(8448, rel=0.15)),
    (128_256, 10**7, 32_768)])
def test_a_draft_vocabulary_that_is_left_open_is_planned_by_the_tokens_of_the_answers(
        vocab: int, answer_tokens: int, size: int) -> None:
    assert expected_draft_vocabulary(vocab, answer_tokens) == size


def test_on_a_cpu_smaller_steps_over_the_same_data_take_longer_and_deeper_unrolls_more_so() -> None:
    def seconds(**fields: int) -> float:
        return 3600 * next(one.hours for one in plan_of(job_spec(train=fields), SMALL, None).stages
                           if one.stage == "train")

    def added(ttt_length: int) -> float:
        return seconds(max_tokens_per_batch=512, ttt_length=ttt_length) - seconds(ttt_length=ttt_length)

    assert added(7) > added(5) > 0


@pytest.mark.parametrize("placement", [{}, {"every": {"num_gpus": 1}}])
def test_a_limit_of_seconds_bounds_the_training_that_is_planned(placement: dict[str, Any]) -> None:
    def train_stage(**fields: float) -> StagePlan:
        return next(one for one in plan_of(job_spec(train=fields, placement=placement), SMALL, None).stages
                    if one.stage == "train")

    free = train_stage()
    half_s = 1800 * free.hours
    limited = train_stage(max_seconds=half_s)
    assert limited.hours == pytest.approx(free.hours / 2)
    assert limited.tokens == pytest.approx(free.tokens / 2, rel=1e-3)
    assert limited.hint.startswith("train.max_seconds ends it; without it train takes ")
    assert limited.hours_range is None or limited.hours_range.high <= half_s / 3600
    assert train_stage(max_seconds=10 * half_s) == free


def test_the_largest_numbers_are_planned_and_not_a_crash() -> None:
    spec = job_spec(train={"max_steps": 10**9, "max_tokens_per_batch": 2**30},
                    data={"sources": [{"path": "quickstart", "max_rows": 10**8}], "max_conversations": 10**8})
    assert plan_of(spec, SMALL, None).total_hours > 0


def test_impossible_tree_shapes_are_left_out_of_the_grid() -> None:
    shapes = TuneSpec(num_steps=(3, 7), top_k=(1, 2), num_draft_tokens=(6, 16)).shapes
    assert [shape.label() for shape in shapes] == ["3/1/4", "7/1/8", "3/2/6", "7/2/16"]


def sources(**fields: Any) -> DataSpec:
    return DataSpec.model_validate({"sources": [fields]})


def rows_file(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(number: int, *more: dict[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"question {number:04}"}, *more]}


def test_rows_of_a_local_file_are_estimated_from_its_first_lines(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "chats.jsonl", *map(asked, range(9000)))
    facts = data_facts(sources(path=str(path)))
    assert (facts.rows, facts.accepted, facts.not_usable) == (9000, 1.0, ())
    assert facts.prompt_tokens == pytest.approx(len(json.dumps(asked(0))) / 4, abs=0.5)
    assert data_facts(sources(path=str(path), max_rows=10)).rows == 10


def test_rows_of_a_packed_file_are_estimated_too() -> None:
    facts = data_facts(sources(path=str(ROOT / "benchmarks/published/data/gsm8k_train.jsonl.gz")))
    assert facts.rows == pytest.approx(7473, rel=0.3)
    assert facts.prompt_tokens == pytest.approx(65, rel=0.3)


def test_rows_that_the_job_will_not_answer_are_not_counted(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" \
               "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (target / "chat_template.jinja").write_text(template)
    refused = [{"messages": [{"role": "system", "content": "brief"}, *asked(number)["messages"]]}
               for number in range(30)]
    path = rows_file(tmp_path / "chats.jsonl", *map(asked, range(50)), asked(1), asked(2), *refused,
                     *[{"messages": "none"}] * 18)
    facts = data_facts(sources(path=str(path)), target)
    assert facts.rows is not None
    assert abs(facts.rows - 82) <= 2  # conversations; the mean length is an estimate
    assert facts.accepted == pytest.approx(50 / 82, abs=0.02)
    assert facts.source_rows is not None
    assert abs(next(iter(facts.source_rows.values())) - 50) <= 2
    assert "50 of the first 100 rows" in facts.not_usable[0]
    spec = job_spec(data={"sources": [{"path": str(path)}], "held_out_fraction": 0.0})
    plan = make_plan(derive(spec), SMALL, None, data_facts=facts)
    assert facts.not_usable[0] in plan.warnings
    only = rows_file(tmp_path / "only.jsonl", *refused)
    with pytest.raises(NoUsableData, match=r"none of the first 30 rows .* no system"):
        data_facts(sources(path=str(only)), target)


def test_what_cannot_be_sampled_is_unknown_and_not_guessed() -> None:
    assert data_facts(sources(path="org/dataset")) == DataFacts()


def test_a_real_target_directory_gives_the_facts(tmp_path: Path) -> None:
    facts = target_facts(target_directory(tmp_path / "t"))
    assert (facts.hidden_size, facts.num_kv_heads, facts.head_dim) == (64, 2, 16)


@pytest.mark.parametrize(("placement", "sweep", "tokens"), [
    ({}, {}, 2048), ({"every": {"num_gpus": 4}}, {}, 4 * 16_384),
    ({"stages": {"train": {"num_gpus": 2}}, "train_nodes": 2, "train_launcher": "trainjob"}, {}, 4 * 16_384),
    ({"every": {"num_gpus": 4}},
     {"shared_passes": "always", "axes": [{"field": "train.learning_rate", "values": [1e-3, 2e-3]}]}, 16_384)])
def test_the_tokens_of_a_step_follow_the_gpus_that_compute_one_candidate(
        placement: dict[str, Any], sweep: dict[str, Any], tokens: int) -> None:
    plan = plan_of(job_spec(placement=placement, sweep=sweep, data={"sources": [{"path": "quickstart"}],
                                                                    "max_conversations": 100_000}), SMALL, None)
    assert next(one.value for one in plan.assumptions if one.name == "tokens per training step") == tokens


@pytest.mark.parametrize(("engine", "placement", "gigabytes"), [
    # A float32 target on a CPU: 8 bytes for each of 2 * 16 * 2 * 64 keys and values of 24 * (1024 + 256) tokens.
    ("embedded", {}, 2.1), ("embedded", {"every": {"num_gpus": 1}}, None), ("sglang", {}, None)])
def test_the_plan_has_the_memory_of_regeneration_where_this_engine_generates_on_a_cpu(
        engine: str, placement: dict[str, Any], gigabytes: float | None) -> None:
    plan = plan_of(job_spec(engine=engine, placement=placement, target={"model": "quickstart", "dtype": "float32"}),
                   SMALL, None)
    assert next((one.value for one in plan.assumptions if one.name == "memory of regenerate"), None) == gigabytes


@pytest.mark.parametrize(("gpu", "train", "tokens"), [
    ("NVIDIA-H100-80GB-HBM3", {}, 16_384), ("Some-15GB", {}, 4096),
    ("Some-15GB", {"max_tokens_per_gpu": 1536}, 1536)])
def test_the_plan_shows_the_tokens_that_a_gpu_computes_at_a_time_and_why(
        gpu: str, train: dict[str, int], tokens: int) -> None:
    large = replace(SMALL, **asdict(training_memory.drafter_of("Llama-3.1-8B").sizes.target),
                    vocab_size=128_256)
    plan = plan_of(job_spec(placement={"every": {"num_gpus": 1, "gpu_type": gpu}}, train=train), large, None)
    [shown] = [one for one in plan.assumptions if one.name == "training tokens at a time on each GPU"]
    assert shown.value == tokens
    assert ("the largest that fits" in shown.source) == (not train)


def test_a_family_whose_memory_is_not_known_is_named_where_it_trains_on_gpus() -> None:
    for placement, family, warned in (({"every": {"num_gpus": 1}}, "hydra", True), ({}, "hydra", False),
                                      ({"every": {"num_gpus": 1}}, "eagle3", False)):
        warnings = plan_of(job_spec(placement=placement, drafter={"family": family}), SMALL, None).warnings
        assert any(f"of a training step of {family} is not known" in one for one in warnings) is warned


def test_a_float32_target_whose_checkpoint_is_narrower_is_named_where_gpus_compute_it() -> None:
    stored = replace(SMALL, dtype="bfloat16")
    placed = {"every": {"num_gpus": 1}}
    for target, more, warned in ((stored, {"placement": placed}, True), (stored, {}, False),
                                 (SMALL, {"placement": placed}, False)):
        warnings = plan_of(job_spec(target={"model": "quickstart", "dtype": "float32"}, **more), target, None).warnings
        assert any("the checkpoint stores bfloat16" in warning for warning in warnings) == warned


def test_the_proof_is_planned_as_clear_after_few_pairs_and_its_note_says_what_its_budget_takes() -> None:
    def proof(**fields: object) -> StagePlan:
        plan = plan_of(job_spec(prove={"concurrencies": [1, 8], "requests": 4, "system_prompt": "",
                                       "parity_prompts": 1, "max_new_tokens": 10} | fields), SMALL, None)
        assert "measures every load until it is clear" in plan.notes[0]
        return next(stage for stage in plan.stages if stage.stage == "prove")

    # Six pairs of blocks, of one request for one user and of two per user for eight, with and without the drafter, and
    # the parity of one prompt, for one user, under load, and sampled.
    parity = 3 * 10 + 2 * 16 * 10 + 2 * 10
    assert proof().tokens == 2 * 6 * (1 + 16) * 10 + parity
    assert proof(most_pairs=2).tokens == 2 * (4 + 2 * 16) * 10 + parity
    assert proof(requests=32).tokens == 2 * (32 + 6 * 16) * 10 + parity
    assert proof(concurrencies=[1]).tokens == 2 * 6 * 10 + 5 * 10
