"""Which settings are compared, what is said of depth against width, and how entries become cells."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from eyrie_api.contract.engine import DraftServing, DraftTreeShape
from eyrie_api.contract.tuning import OFF, OperatingPoint, Setting, TuneSpec
from eyrie_workers.data.suites import Prompt
from eyrie_workers.measure.benchmark.reports import cell_report, rate
from eyrie_workers.measure.benchmark.variants import BASELINE, Entry, Sample
from eyrie_workers.measure.tuner.operating import (
    adaptive,
    depth_against_width,
    draw,
    even_shares,
    possible_settings,
    with_block,
)
from eyrie_workers.measure.tuner.predict import PredictedSpeed

CHAIN3, CHAIN7 = (DraftTreeShape(num_steps=n, top_k=1, num_draft_tokens=n + 1) for n in (3, 7))
TREE3, TREE7 = (DraftTreeShape(num_steps=n, top_k=4, num_draft_tokens=16) for n in (3, 7))


def sample(seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4), histogram: tuple[int, ...] = ()) -> Sample:
    return Sample(token_ids=tokens, seconds=seconds, cpu_seconds=seconds, ttft_s=seconds / 10,
                  rounds=sum(histogram), accepted_histogram=histogram)


def entry(prompt: str, temperature: float = 0.0, repeat: int = 0, suite: str = "s", **variants: Sample) -> Entry:
    named = {"chain3": CHAIN3.label(), "tree3": TREE3.label(), "baseline": BASELINE}
    return Entry(suite=suite, prompt_id=prompt, temperature=temperature, repeat=repeat,
                 samples={named[name]: value for name, value in variants.items()})


def predicted(shape: DraftTreeShape, speedup: float, tau: float = 3.0) -> PredictedSpeed:
    return PredictedSpeed(Setting(tree=shape), 1, 65 * speedup, speedup, tau)


def test_the_grid_holds_each_chain_once_and_only_possible_trees() -> None:
    shapes = TuneSpec().shapes
    assert [s.label() for s in shapes if s.top_k == 1] == [f"{depth}/1/{depth + 1}" for depth in range(1, 8)]
    assert len(set(shapes)) == len(shapes)
    assert "3/2/16" not in [s.label() for s in shapes]  # two wide and three deep grows eleven nodes
    assert "3/4/16" in [s.label() for s in shapes]


def test_verifications_multiply_chains_alone_and_a_map_with_one_is_not_adaptive() -> None:
    spec = TuneSpec(num_steps=(3,), top_k=(1, 2), num_draft_tokens=(6,), verifications=("target", "block"), ngram=False)
    settings = possible_settings(spec)
    assert [one.label() for one in settings] == ["off", "3/1/4", "3/1/4/block", "3/2/6"]
    assert [one.label() for one in with_block(settings, 4)] == ["off", "3/1/4", "3/1/4/block"]
    points = [OperatingPoint(concurrency=concurrency, setting=setting, speedup=1.0, tokens_per_s=1.0, measured=True)
              for concurrency, setting in ((1, settings[2]), (8, OFF))]
    assert adaptive(points) is None


def test_ways_to_compute_the_drafter_multiply_the_shapes_that_they_draft() -> None:
    drafts = ({}, {"kv_dtype": "fp8_e4m3"}, {"attention_backend": "fa4", "quantization": "fp8"})
    spec = TuneSpec(num_steps=(3,), top_k=(1, 2), num_draft_tokens=(6,), ngram=False,
                    drafts=tuple(DraftServing.model_validate(draft) for draft in drafts))
    settings = possible_settings(spec)
    assert [one.label() for one in settings] == [
        "off", "3/1/4", "3/1/4/kv-fp8_e4m3", "3/1/4/fa4/fp8", "3/2/6", "3/2/6/kv-fp8_e4m3"]
    assert [one.label() for one in with_block(settings, 4)] == ["off", "3/1/4", "3/1/4/kv-fp8_e4m3", "3/1/4/fa4/fp8"]
    points = [OperatingPoint(concurrency=concurrency, setting=setting, speedup=1.0, tokens_per_s=1.0, measured=True)
              for concurrency, setting in ((1, settings[2]), (8, OFF))]
    assert adaptive(points) is None
    with pytest.raises(ValidationError, match="n-gram look-up has none"):
        Setting(method="ngram", tree=settings[2].tree)


def test_a_drafter_of_blocks_is_compared_in_chains_up_to_its_whole_block_with_off_and_n_grams() -> None:
    settings = possible_settings(TuneSpec(num_steps=(3, 5, 9), top_k=(1, 4), num_draft_tokens=(8, 16)))
    assert [one.label() for one in with_block(settings, 8) if one.method == "drafter"] == [
        "3/1/4", "5/1/6", CHAIN7.label()]
    assert [one for one in with_block(settings, 8) if one.method != "drafter"] == [
        one for one in settings if one.method != "drafter"]


@given(st.builds(
    TuneSpec,
    num_steps=st.lists(st.integers(1, 16), min_size=1, max_size=4).map(tuple),
    top_k=st.lists(st.integers(1, 64), max_size=4).map(lambda widths: (1, *widths)),
    num_draft_tokens=st.lists(st.integers(2, 512), min_size=1, max_size=4).map(tuple)))
def test_every_shape_of_any_grid_is_valid_and_every_valid_product_is_in_it(spec: TuneSpec) -> None:
    shapes = set(spec.shapes)
    for shape in shapes:
        assert DraftTreeShape.model_validate(shape.model_dump()) == shape
        assert shape.num_steps in spec.num_steps
        assert shape.top_k in spec.top_k
    assert {s.num_steps for s in shapes if s.top_k == 1} == set(spec.num_steps)


@pytest.mark.parametrize("grid", [{"num_steps": (5, 6, 7), "top_k": (2,), "num_draft_tokens": (4,)},
                                  {"num_steps": (1,), "top_k": (2,), "num_draft_tokens": (4,)},
                                  {"top_k": (2, 4), "drafts": ({"attention_backend": "fa4"},)}])
def test_a_grid_without_any_possible_shape_is_refused(grid: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"no possible shape.*fa4 or trtllm_mha are chains: add 1 to top_k"):
        TuneSpec.model_validate(grid)


def test_off_and_lookup_are_settings_like_any_other() -> None:
    settings = possible_settings(TuneSpec(num_steps=(3, 7), top_k=(1, 4), num_draft_tokens=(16,)))
    assert [setting.label() for setting in settings] == [
        "off", "3/1/4", "7/1/8", "3/4/16", "7/4/16", "ngram 3/1/4", "ngram 7/1/8"]
    without = possible_settings(TuneSpec(num_steps=(3,), top_k=(1,), ngram=False))
    assert [setting.label() for setting in without] == ["off", "3/1/4"]


def test_the_finding_reports_depth_and_width_from_the_predictions() -> None:
    said = depth_against_width([predicted(CHAIN3, 2.0, 3.0), predicted(CHAIN7, 3.0, 5.0), predicted(TREE3, 1.8, 3.5),
                                predicted(TREE7, 2.7, 6)])
    assert "at depth 7 the chain runs 3.00x (tau 5.00) and the best tree, 7/4/16, 2.70x (tau 6.00)" in said
    assert "the chain is faster" in said
    assert "raising num_steps from 3 to 7 changes speed by +50%" in said


def test_the_finding_of_other_figures_says_the_opposite() -> None:
    said = depth_against_width([predicted(CHAIN3, 3.0), predicted(CHAIN7, 2.0), predicted(TREE3, 3.5),
                                predicted(TREE7, 2.0)])
    assert "the tree is faster" in said
    assert "slower" in said


def test_a_grid_of_chains_alone_speaks_of_depth_alone() -> None:
    lookup = PredictedSpeed(Setting(method="ngram", tree=CHAIN3), 1, 65.0, 9.0, 1.2)
    said = depth_against_width([predicted(CHAIN3, 2.0), predicted(CHAIN7, 2.01), lookup])
    assert "top_k" not in said
    assert "no significant difference" in said


@given(st.integers(1, 200), st.integers(1, 20))
def test_prompts_are_shared_out_evenly(total: int, num_suites: int) -> None:
    shares = even_shares(total, num_suites)
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 12))
def test_grid_and_final_prompts_are_disjoint_whenever_the_suite_allows(size: int, num_benchmark: int,
                                                                       num_grid: int) -> None:
    prompts = [Prompt(str(i), "s", ()) for i in range(size)]
    grid, final, further = draw(prompts, num_benchmark, num_grid)
    assert final
    assert not {p.id for p in final} & {p.id for p in further}
    if size > num_grid:
        assert not {p.id for p in grid} & {p.id for p in (*final, *further)}
    if size >= 2 * num_benchmark + num_grid:
        assert len(final) == num_benchmark
        assert not {p.id for p in prompts[:num_benchmark]} & {p.id for p in (*grid, *final)}


def test_a_cell_is_summed_from_its_prompts() -> None:
    entries = [
        entry("a", baseline=sample(2.0), chain3=sample(1.0, histogram=(0, 0, 0, 1))),
        entry("b", baseline=sample(2.0), chain3=sample(0.6, histogram=(1, 0, 0, 1))),
        entry("a", suite="other", baseline=sample(9.0), chain3=sample(9.0, histogram=(4,))),
        entry("a", temperature=1.0, baseline=sample(9.0), chain3=sample(9.0, histogram=(4,))),
    ]
    cell = cell_report(entries, "s", 0.0, CHAIN3)
    assert (cell.prompts, cell.identical, cell.tokens) == (2, 2, 8)
    assert cell.tokens_per_s == pytest.approx(5.0)
    assert cell.baseline_tokens_per_s == pytest.approx(2.0)
    assert cell.speedup == pytest.approx(2.5)
    assert cell.accepted_histogram == (1, 0, 0, 2)
    assert cell.tau == pytest.approx(3.0)
    assert cell.speedup_interval.low <= cell.speedup <= cell.speedup_interval.high


def test_a_prompt_is_identical_only_if_every_repeat_was() -> None:
    entries = [entry("a", repeat=0, baseline=sample(1.0), chain3=sample(1.0)),
               entry("a", repeat=1, baseline=sample(1.0), chain3=sample(1.0, tokens=(1, 2, 3, 5)))]
    cell = cell_report(entries, "s", 0.0, CHAIN3)
    assert (cell.prompts, cell.identical) == (1, 0)


def test_the_baseline_rate_is_of_everything_measured() -> None:
    entries = [entry("a", 0.0, baseline=sample(4.0), chain3=sample(1.0)),
               entry("a", 1.0, baseline=sample(40.0), chain3=sample(20.0))]
    assert rate([one.samples[BASELINE] for one in entries]) == pytest.approx(8 / 44)
