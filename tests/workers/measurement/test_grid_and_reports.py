"""Which shapes are tried, dropped and chosen; how entries become cells; what the finding says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.v1alpha1.job import DraftTreeShape, TuneSpec
from eyrie_api.v1alpha1.model import Interval
from eyrie_api.v1alpha1.reports import TuneCell
from eyrie_workers.measurement.grid import (
    choose_winner,
    describe_finding,
    draw,
    even_shares,
    possible_shapes,
    survivors,
)
from eyrie_workers.measurement.reports import baseline_rate, cell_report, common_prompts, tune_cell
from eyrie_workers.measurement.samples import BASELINE, Entry, Sample, first_difference
from eyrie_workers.measurement.suites import Prompt

CHAIN3, CHAIN7 = (DraftTreeShape(num_steps=n, top_k=1, num_draft_tokens=n + 1) for n in (3, 7))
TREE3, TREE7 = (DraftTreeShape(num_steps=n, top_k=4, num_draft_tokens=16) for n in (3, 7))


def sample(seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4), histogram: tuple[int, ...] = ()) -> Sample:
    return Sample(token_ids=tokens, seconds=seconds, cpu_seconds=seconds, ttft_s=seconds / 10,
                  rounds=sum(histogram), accepted_histogram=histogram)


def entry(prompt: str, temperature: float = 0.0, repeat: int = 0, suite: str = "s", **arms: Sample) -> Entry:
    named = {"chain3": CHAIN3.label(), "tree3": TREE3.label(), "baseline": BASELINE}
    return Entry(suite=suite, prompt_id=prompt, temperature=temperature, repeat=repeat,
                 samples={named[name]: value for name, value in arms.items()})


def tune_row(shape: DraftTreeShape, speedup: float, tau: float = 3.0, prompts: int = 4,
             identical: int | None = None) -> TuneCell:
    return TuneCell(tree=shape, tau=tau, tau_by_temperature={"0.0": tau}, tokens_per_s=65 * speedup, speedup=speedup,
                    speedup_by_temperature={"0.0": speedup}, speedup_interval=Interval(low=speedup, high=speedup),
                    identical=prompts if identical is None else identical, prompts=prompts)


def test_the_grid_holds_each_chain_once_and_only_possible_trees() -> None:
    shapes = possible_shapes(TuneSpec())
    assert [s.label() for s in shapes if s.top_k == 1] == [f"{depth}/1/{depth + 1}" for depth in range(1, 8)]
    assert len(set(shapes)) == len(shapes)
    assert "3/2/16" not in [s.label() for s in shapes]  # two wide and three deep grows eleven nodes
    assert "3/4/16" in [s.label() for s in shapes]


@given(st.builds(
    TuneSpec,
    num_steps=st.lists(st.integers(1, 16), min_size=1, max_size=4).map(tuple),
    top_k=st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple),
    num_draft_tokens=st.lists(st.integers(2, 512), min_size=1, max_size=4).map(tuple)))
def test_every_shape_of_any_grid_is_valid_and_every_valid_product_is_in_it(spec: TuneSpec) -> None:
    shapes = set(possible_shapes(spec))
    for shape in shapes:
        assert DraftTreeShape.model_validate(shape.model_dump()) == shape
        assert shape.num_steps in spec.num_steps
        assert shape.top_k in spec.top_k
    if 1 in spec.top_k:
        assert {s.num_steps for s in shapes if s.top_k == 1} == set(spec.num_steps)


def test_clearly_slower_shapes_drop_out_and_close_ones_stay() -> None:
    speeds = {CHAIN3: 1.0, CHAIN7: 3.0, TREE3: 2.8, TREE7: 2.4}
    assert survivors(speeds, num_prompts=4) == (CHAIN7, TREE3)
    assert survivors(speeds, num_prompts=1) == (CHAIN7, TREE3, TREE7)


@given(st.dictionaries(st.sampled_from([CHAIN3, CHAIN7, TREE3, TREE7]), st.floats(0.5, 5.0), min_size=1),
       st.integers(1, 100))
def test_the_leader_always_survives(speeds: dict[DraftTreeShape, float], num_prompts: int) -> None:
    kept = survivors(speeds, num_prompts)
    assert max(speeds, key=lambda s: speeds[s]) in kept or len(kept) >= 2
    assert max(speeds.values()) in [speeds[s] for s in kept]


def test_the_winner_is_the_fastest_lossless_shape_of_those_that_finished() -> None:
    lucky_but_dropped = tune_row(CHAIN3, 9.0, prompts=2)
    lossy = tune_row(TREE7, 4.0, identical=3)
    best = tune_row(CHAIN7, 3.0)
    assert choose_winner([lucky_but_dropped, lossy, best, tune_row(TREE3, 2.0)]) == best


def test_without_any_lossless_shape_the_fastest_is_named_and_the_finding_says_so() -> None:
    cells = [tune_row(CHAIN7, 3.0, identical=3), tune_row(TREE7, 2.5, identical=2)]
    winner = choose_winner(cells)
    assert winner == cells[0]
    assert "not lossless: 1 of 4" in describe_finding(cells, winner)


def test_the_finding_reports_depth_and_width_from_the_table() -> None:
    cells = [tune_row(CHAIN3, 2.0, 3.0), tune_row(CHAIN7, 3.0, 5.0), tune_row(TREE3, 1.8, 3.5), tune_row(TREE7, 2.7, 6)]
    said = describe_finding(cells, cells[1])
    assert "At depth 7 the chain runs 3.00x (tau 5.00) and the best tree, 7/4/16, 2.70x (tau 6.00)" in said
    assert "the chain wins" in said
    assert "Raising num_steps from 3 to 7 changes speed by +50%" in said
    assert "Chosen: chain 7/1/8" in said


def test_the_finding_of_other_figures_says_the_opposite() -> None:
    cells = [tune_row(CHAIN3, 3.0), tune_row(CHAIN7, 2.0), tune_row(TREE3, 3.5), tune_row(TREE7, 2.0)]
    said = describe_finding(cells, cells[2])
    assert "the tree wins" in said
    assert "slower" in said


def test_a_grid_of_chains_alone_speaks_of_depth_alone() -> None:
    said = describe_finding([tune_row(CHAIN3, 2.0), tune_row(CHAIN7, 2.01)], tune_row(CHAIN7, 2.01))
    assert "top_k" not in said.replace("num_steps/top_k/num_draft_tokens", "")
    assert "no telling difference" in said


@given(st.integers(1, 200), st.integers(1, 20))
def test_prompts_are_shared_out_evenly(total: int, num_suites: int) -> None:
    shares = even_shares(total, num_suites)
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 12))
def test_grid_and_final_prompts_are_disjoint_whenever_the_suite_allows(size: int, num_benchmark: int,
                                                                       num_grid: int) -> None:
    prompts = [Prompt(str(i), "s", ()) for i in range(size)]
    grid, final = draw(prompts, num_benchmark, num_grid)
    assert final
    if size > num_grid:
        assert not {p.id for p in grid} & {p.id for p in final}
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


def test_a_shape_dropped_early_keeps_its_smaller_number_of_prompts() -> None:
    entries = [entry("a", baseline=sample(2.0), chain3=sample(1.0), tree3=sample(2.0)),
               entry("b", baseline=sample(2.0), chain3=sample(1.0))]
    assert tune_cell(entries, CHAIN3, (0.0,)).prompts == 2
    assert tune_cell(entries, TREE3, (0.0,)).prompts == 1
    common = common_prompts(entries, [CHAIN3, TREE3], (0.0,))
    assert common == {("s", "a")}
    assert tune_cell(entries, CHAIN3, (0.0,), common).prompts == 1


def test_speedups_are_averaged_over_temperatures_not_over_tokens() -> None:
    entries = [entry("a", 0.0, baseline=sample(4.0), chain3=sample(1.0)),
               entry("a", 1.0, baseline=sample(40.0), chain3=sample(20.0))]
    cell = tune_cell(entries, CHAIN3, (0.0, 1.0))
    assert cell.speedup == pytest.approx(3.0)
    assert cell.speedup_by_temperature == {"0.0": pytest.approx(4.0), "1.0": pytest.approx(2.0)}
    assert cell.identical == cell.prompts == 1
    assert baseline_rate(entries) == pytest.approx(8 / 44)


def test_a_missing_token_is_a_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [5]) == 0
