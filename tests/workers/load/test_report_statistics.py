"""Figures of a load test from samples made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from eyrie_api.v1alpha1.load import LoadComparison, LoadSpec, ServiceLevel
from eyrie_api.v1alpha1.model import Interval
from eyrie_workers.load.client import RequestResult
from eyrie_workers.load.report_statistics import LevelResults, cell, comparison, crossover, keeps, level_report
from eyrie_workers.load.schedule import Level

SPEC = LoadSpec(concurrencies=(1,))


def sample(index: int, seconds: float = 1.0, tokens: int = 11, category: str = "a", ttft_s: float = 0.1,
           digest: bytes = b"same", histogram: tuple[int, ...] | None = None) -> RequestResult:
    gaps_s = np.full(tokens - 1, (seconds - ttft_s) / (tokens - 1))
    return RequestResult(category, f"p{index}", 0, index, tokens=tokens, ttft_s=ttft_s, digest=digest,
                         histogram=histogram, gaps_s=gaps_s, end_to_end_s=seconds)


def seen(variant: str, *samples: RequestResult, users: int = 1) -> LevelResults:
    return LevelResults(variant, Level("closed", users), samples, sum(s.end_to_end_s for s in samples) / users, 0.01)


def test_a_cell_by_hand() -> None:
    failed = RequestResult("a", "p9", 0, 9, failure="Http429", detail="full")
    made = cell([sample(0, 1.0), sample(1, 2.0), failed], 3.0, SPEC, drafting=True)
    assert (made.requests, made.completed, made.failed, made.output_tokens) == (3, 2, {"Http429": 1}, 22)
    assert made.tokens_per_s == pytest.approx(22 / 3)
    assert made.tokens_per_s_per_user == pytest.approx((11 + 5.5) / 2)
    assert made.end_to_end_s is not None
    assert made.end_to_end_s.p50 == pytest.approx(1.5)
    assert made.inter_token_s is not None
    assert made.inter_token_s.mean == pytest.approx((0.09 + 0.19) / 2)
    assert made.tau is None


def test_a_cell_of_failures_has_no_latencies_and_no_speed() -> None:
    made = cell([RequestResult("a", "p", 0, 0, failure="Timeout")], 5.0, SPEC, drafting=True)
    assert (made.completed, made.tokens_per_s, made.ttft_s, made.tau) == (0, 0.0, None, None)


def test_acceptance_is_summed_over_the_requests_histograms() -> None:
    made = cell([sample(0, histogram=(2, 3)), sample(1, histogram=(0, 0, 5)), sample(2)], 3.0, SPEC, drafting=True)
    assert made.accepted_histogram == (2, 3, 5)
    assert made.tau == pytest.approx(2.3)
    assert made.acceptance == (0.8, 0.625)
    assert made.tau_interval is not None
    assert 1.0 <= made.tau_interval.low < 2.3 < made.tau_interval.high


def test_an_answer_that_accepted_nothing_counts_where_others_show_that_the_variant_drafts() -> None:
    report = level_report(seen("candidate", sample(0, histogram=(4,)), sample(1, histogram=(0, 4), category="b")), SPEC)
    assert report.total.tau == pytest.approx(1.5)
    assert [part.tau for part in report.by_category.values()] == [1.0, 2.0]


def test_an_engine_that_counts_rounds_without_drafting_has_no_tau() -> None:
    assert level_report(seen("off", sample(0, histogram=(4,)), sample(1, histogram=(9,))), SPEC).total.tau is None
    told = replace(sample(0, histogram=(4,)), proposed=True)
    assert level_report(seen("candidate", told), SPEC).total.tau == 1.0


def test_goodput_counts_requests_that_keep_every_bound() -> None:
    slo = ServiceLevel(ttft_s=0.2, inter_token_s=0.1)
    spec = LoadSpec(concurrencies=(1,), slo=slo)
    good, slow, late = sample(0, 1.0), sample(1, 2.0), sample(2, 1.0, ttft_s=0.3)
    assert [keeps(s, slo) for s in (good, slow, late)] == [True, False, False]
    failed = RequestResult("a", "p", 0, 3, failure="Reset")
    assert cell([good, slow, late, failed], 4.0, spec, drafting=False).goodput_per_s == 0.25
    assert cell([good], 1.0, SPEC, drafting=False).goodput_per_s is None


def test_categories_share_the_wall_clock_of_their_level() -> None:
    report = level_report(seen("off", sample(0, category="a"), sample(1, category="b")), SPEC)
    assert list(report.by_category) == ["a", "b"]
    assert sum(part.tokens_per_s for part in report.by_category.values()) == pytest.approx(report.total.tokens_per_s)


def test_a_comparison_by_hand() -> None:
    off = seen("off", *(sample(i, 2.0, category="ab"[i % 2]) for i in range(8)))
    fast = seen("candidate", *(sample(i, 1.0, category="ab"[i % 2]) for i in range(7)), sample(7, 1.0, category="b",
                                                                                              digest=b"other"))
    found = comparison(fast, off, SPEC)
    assert found is not None
    assert found.throughput_ratio == pytest.approx(2.0)
    assert found.user_ratio == pytest.approx(2.0)
    # All prompts agree on the ratio, so resampling them changes nothing.
    assert found.user_interval.low == pytest.approx(2.0)
    assert found.throughput_interval.high == pytest.approx(2.0)
    assert found.by_category == {"a": pytest.approx(2.0), "b": pytest.approx(2.0)}
    assert (found.compared, found.identical) == (8, 7)
    assert found.ttft_p99_ratio == pytest.approx(1.0)


def test_prompts_that_disagree_widen_the_interval() -> None:
    off = seen("off", *(sample(i, 2.0) for i in range(8)))
    mixed = seen("candidate", *(sample(i, 0.5 + 0.25 * i) for i in range(8)))
    found = comparison(mixed, off, SPEC)
    assert found is not None
    assert found.user_interval.low < found.user_ratio < found.user_interval.high
    assert found.throughput_interval.low < found.throughput_ratio < found.throughput_interval.high


def test_token_ids_decide_over_text_where_both_variants_give_them() -> None:
    off = seen("off", replace(sample(0), ids_digest=b"1"))
    same_text = seen("candidate", replace(sample(0), ids_digest=b"2"))
    no_ids = seen("candidate", sample(0))
    by_ids, by_text = comparison(same_text, off, SPEC), comparison(no_ids, off, SPEC)
    assert by_ids is not None
    assert by_text is not None
    assert (by_ids.identical, by_text.identical) == (0, 1)


def test_variants_that_answered_no_common_prompt_are_not_compared() -> None:
    assert comparison(seen("candidate", sample(0)), seen("off", sample(1)), SPEC) is None


def compared(level: float, ratio: float, variant: str = "candidate") -> LoadComparison:
    interval = Interval(low=ratio, high=ratio)
    return LoadComparison(variant=variant, baseline="off", mode="closed", level=level, throughput_ratio=ratio,
                          throughput_interval=interval, user_ratio=ratio, user_interval=interval, compared=1,
                          identical=1)


def test_the_crossover_is_interpolated_over_the_logarithm_of_the_load() -> None:
    assert crossover([compared(1, 2.0), compared(4, 1.5), compared(16, 0.5)]) == pytest.approx(8.0)
    assert crossover([compared(2, 0.9), compared(4, 0.8)]) == 2
    assert crossover([compared(1, 2.0), compared(4, 1.0)]) is None
    assert crossover([]) is None


def test_the_crossover_is_the_first_compared_variants() -> None:
    assert crossover([compared(1, 2.0), compared(1, 0.5, "incumbent")]) is None
