"""Figures of a load test from results load by hand."""

from dataclasses import replace

import numpy as np
import pytest

from eyrie_api.contract.load import LoadComparison, LoadSpec, ServiceLevel
from eyrie_api.contract.model import Interval
from eyrie_workers.measure.load.client import RequestResult
from eyrie_workers.measure.load.report_statistics import (
    LevelResults,
    comparison,
    crossover,
    level_report,
    load_cell,
    meets_slo,
)
from eyrie_workers.measure.load.schedule import RequestLevel

SPEC = LoadSpec(concurrencies=(1,))


def result(index: int, seconds: float = 1.0, tokens: int = 11, category: str = "a", ttft_s: float = 0.1,
           digest: bytes = b"same", histogram: tuple[int, ...] | None = None) -> RequestResult:
    gaps_s = np.full(tokens - 1, (seconds - ttft_s) / (tokens - 1))
    return RequestResult(category, f"p{index}", 0, index, tokens=tokens, ttft_s=ttft_s, digest=digest,
                         histogram=histogram, gaps_s=gaps_s, end_to_end_s=seconds)


def level_results(variant: str, *results: RequestResult, users: int = 1) -> LevelResults:
    seconds = sum(result.end_to_end_s for result in results) / users
    return LevelResults(variant, RequestLevel("closed", users), results, seconds, 0.01)


def test_a_cell_computed_by_hand() -> None:
    failed = RequestResult("a", "p9", 0, 9, failure="Http429", detail="full")
    load = load_cell([result(0, 1.0), result(1, 2.0), failed], 3.0, SPEC, drafting=True)
    assert (load.requests, load.completed, load.failed, load.output_tokens) == (3, 2, {"Http429": 1}, 22)
    assert load.tokens_per_s == pytest.approx(22 / 3)
    assert load.tokens_per_s_per_user == pytest.approx((11 + 5.5) / 2)
    assert load.end_to_end_s is not None
    assert load.end_to_end_s.p50 == pytest.approx(1.5)
    assert load.inter_token_s is not None
    assert load.inter_token_s.mean == pytest.approx((0.09 + 0.19) / 2)
    assert load.tau is None


def test_a_cell_of_failures_has_no_latencies_and_no_speed() -> None:
    load = load_cell([RequestResult("a", "p", 0, 0, failure="Timeout")], 5.0, SPEC, drafting=True)
    assert (load.completed, load.tokens_per_s, load.ttft_s, load.tau) == (0, 0.0, None, None)


def test_acceptance_is_summed_over_the_requests_histograms() -> None:
    load = load_cell([result(0, histogram=(2, 3)), result(1, histogram=(0, 0, 5)), result(2)], 3.0, SPEC, drafting=True)
    assert load.accepted_histogram == (2, 3, 5)
    assert load.tau == pytest.approx(2.3)
    assert load.acceptance == (0.8, 0.625)
    assert load.tau_interval is not None
    assert 1.0 <= load.tau_interval.low < 2.3 < load.tau_interval.high


def test_a_response_without_accepted_tokens_counts_if_others_show_that_the_variant_drafts() -> None:
    candidate = level_results("candidate", result(0, histogram=(4,)), result(1, histogram=(0, 4), category="b"))
    report = level_report(candidate, SPEC)
    assert report.total.tau == pytest.approx(1.5)
    assert [part.tau for part in report.by_category.values()] == [1.0, 2.0]


def test_an_engine_that_counts_rounds_without_drafting_has_no_tau() -> None:
    off = level_results("off", result(0, histogram=(4,)), result(1, histogram=(9,)))
    assert level_report(off, SPEC).total.tau is None
    proposed = replace(result(0, histogram=(4,)), proposed=True)
    assert level_report(level_results("candidate", proposed), SPEC).total.tau == 1.0


def test_goodput_counts_requests_that_meet_every_bound() -> None:
    slo = ServiceLevel(ttft_s=0.2, inter_token_s=0.1)
    spec = LoadSpec(concurrencies=(1,), slo=slo)
    good, slow, late = result(0, 1.0), result(1, 2.0), result(2, 1.0, ttft_s=0.3)
    assert [meets_slo(s, slo) for s in (good, slow, late)] == [True, False, False]
    failed = RequestResult("a", "p", 0, 3, failure="Reset")
    assert load_cell([good, slow, late, failed], 4.0, spec, drafting=False).goodput_per_s == 0.25
    assert load_cell([good], 1.0, SPEC, drafting=False).goodput_per_s is None


def test_categories_share_the_wall_clock_of_their_level() -> None:
    report = level_report(level_results("off", result(0, category="a"), result(1, category="b")), SPEC)
    assert list(report.by_category) == ["a", "b"]
    assert sum(part.tokens_per_s for part in report.by_category.values()) == pytest.approx(report.total.tokens_per_s)


def test_a_comparison_computed_by_hand() -> None:
    off = level_results("off", *(result(i, 2.0, category="ab"[i % 2]) for i in range(8)))
    fast = level_results("candidate", *(result(i, 1.0, category="ab"[i % 2]) for i in range(7)),
                         result(7, 1.0, category="b", digest=b"other"))
    report = comparison(fast, off, SPEC)
    assert report is not None
    assert report.throughput_ratio == pytest.approx(2.0)
    assert report.user_ratio == pytest.approx(2.0)
    # All prompts agree on the ratio, so resampling them changes nothing.
    assert report.user_interval.low == pytest.approx(2.0)
    assert report.throughput_interval.high == pytest.approx(2.0)
    assert report.by_category == {"a": pytest.approx(2.0), "b": pytest.approx(2.0)}
    assert (report.compared, report.identical) == (8, 7)
    assert report.ttft_p99_ratio == pytest.approx(1.0)


def test_prompts_with_different_ratios_widen_the_interval() -> None:
    off = level_results("off", *(result(i, 2.0) for i in range(8)))
    mixed = level_results("candidate", *(result(i, 0.5 + 0.25 * i) for i in range(8)))
    report = comparison(mixed, off, SPEC)
    assert report is not None
    assert report.user_interval.low < report.user_ratio < report.user_interval.high
    assert report.throughput_interval.low < report.throughput_ratio < report.throughput_interval.high


def test_token_ids_take_precedence_over_text_if_both_variants_return_them() -> None:
    off = level_results("off", replace(result(0), ids_digest=b"1"))
    same_text = level_results("candidate", replace(result(0), ids_digest=b"2"))
    no_ids = level_results("candidate", result(0))
    by_ids, by_text = comparison(same_text, off, SPEC), comparison(no_ids, off, SPEC)
    assert by_ids is not None
    assert by_text is not None
    assert (by_ids.identical, by_text.identical) == (0, 1)


def test_variants_without_a_common_completed_prompt_are_not_compared() -> None:
    assert comparison(level_results("candidate", result(0)), level_results("off", result(1)), SPEC) is None


def compared_at(level: float, ratio: float, variant: str = "candidate") -> LoadComparison:
    interval = Interval(low=ratio, high=ratio)
    return LoadComparison(variant=variant, baseline="off", mode="closed", level=level, throughput_ratio=ratio,
                          throughput_interval=interval, user_ratio=ratio, user_interval=interval, compared=1,
                          identical=1)


def test_the_crossover_is_interpolated_over_the_logarithm_of_the_load() -> None:
    assert crossover([compared_at(1, 2.0), compared_at(4, 1.5), compared_at(16, 0.5)]) == pytest.approx(8.0)
    assert crossover([compared_at(2, 0.9), compared_at(4, 0.8)]) == 2
    assert crossover([compared_at(1, 2.0), compared_at(4, 1.0)]) is None
    assert crossover([]) is None


def test_the_crossover_is_the_first_compared_variants() -> None:
    assert crossover([compared_at(1, 2.0), compared_at(1, 0.5, "incumbent")]) is None


def in_blocks(variant: str, *block_s: float, prompts: int = 40) -> LevelResults:
    """Blocks of two requests in turn, of these seconds each, over so many prompts."""
    results = tuple(replace(result(2 * repeat + index, seconds / 2), repeat=repeat, index=index,
                            prompt_id=f"p{(2 * repeat + index) % prompts}")
                    for repeat, seconds in enumerate(block_s) for index in range(2))
    return LevelResults(variant, RequestLevel("closed", 1), results, sum(block_s), 0.01, dict(enumerate(block_s)))


def test_pairs_of_blocks_near_in_time_are_compared_however_much_the_machine_changes_between_them() -> None:
    slow_hour = (1.0, 1.1, 5.0, 5.2, 1.0, 0.9)
    off, fast = in_blocks("off", *(2.0 * s for s in slow_hour)), in_blocks("candidate", *slow_hour)
    report = comparison(fast, off, SPEC)
    assert report is not None
    assert (report.pairs, report.throughput_ratio) == (6, pytest.approx(2.0))
    assert report.throughput_interval.low == pytest.approx(2.0)
    assert report.ttft_ratio == pytest.approx(1.0)


def test_a_neighbour_in_half_of_the_pairs_widens_the_interval_to_no_evidence() -> None:
    off = in_blocks("off", *[2.0] * 8)
    report = comparison(in_blocks("candidate", *[1.0, 3.0] * 4), off, SPEC)
    assert report is not None
    assert report.throughput_interval.low < 1.0 < report.throughput_interval.high


def test_few_pairs_are_compared_by_their_prompts() -> None:
    report = comparison(in_blocks("candidate", *[1.0] * 4), in_blocks("off", *[2.0] * 4), SPEC)
    assert report is not None
    assert (report.pairs, report.ttft_ratio) == (0, None)
    assert report.throughput_ratio == pytest.approx(2.0)
