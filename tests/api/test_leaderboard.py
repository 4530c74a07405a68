"""Selection by average, not by peak; ranking; and the promotion policy's reasons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.errors import InvalidInput
from eyrie_api.leaderboard import Measured, mean_speedup, rank, select_best
from eyrie_api.promotion import decide
from eyrie_api.v1alpha1.job import PromotionPolicy
from tests.api.samples import benchmark_report

STEADY = benchmark_report("a-step-1", {"chat": (2.0, 1.8), "math": (2.2, 2.0)})
PEAKED = benchmark_report("b-step-2", {"chat": (1.2, 1.1), "math": (3.4, 1.9)})
LOSSY = benchmark_report("c-step-3", {"chat": (4.0, 4.0), "math": (4.0, 4.0)}, lossless=False)


def test_the_best_average_wins_over_the_best_peak() -> None:
    assert select_best([PEAKED, STEADY]) is STEADY


def test_a_drafter_that_changes_the_output_is_chosen_only_when_all_do() -> None:
    assert select_best([LOSSY, PEAKED]) is PEAKED
    assert select_best([LOSSY]) is LOSSY


def test_a_suite_counts_once_however_many_temperatures_it_was_measured_at() -> None:
    report = benchmark_report("x", {"chat": (1.0, 1.0, 1.0), "math": (3.0,)})
    assert mean_speedup(report) == 2.0


def test_equal_averages_are_told_apart_by_the_worst_suite() -> None:
    even = benchmark_report("z", {"chat": (2.0,), "math": (2.0,)})
    uneven = benchmark_report("a", {"chat": (1.0,), "math": (3.0,)})
    assert select_best([uneven, even]) is even


def test_nothing_measured_is_an_error_and_not_a_winner() -> None:
    with pytest.raises(InvalidInput):
        select_best([])
    with pytest.raises(InvalidInput, match="no cells"):
        select_best([STEADY.model_copy(update={"cells": ()})])


@given(st.permutations([STEADY, PEAKED, LOSSY]))
def test_the_ranking_does_not_depend_on_the_order_of_the_reports(reports: list[object]) -> None:
    entries = rank(Measured("j", "eagle3", "t", False, report) for report in reports)  # type: ignore[arg-type]
    assert [(entry.rank, entry.checkpoint) for entry in entries] == [(1, "a-step-1"), (2, "b-step-2"), (3, "c-step-3")]


def test_an_entry_averages_greedy_and_sampled_cells_apart() -> None:
    (entry,) = rank([Measured("j", "eagle3", "t", True, STEADY)])
    assert entry.speedup_greedy == pytest.approx(2.1)
    assert entry.speedup_sampled == pytest.approx(1.9)
    assert entry.suites == pytest.approx({"chat": 1.9, "math": 2.1})
    greedy_only = benchmark_report("g", {"chat": (2.0,)})
    assert rank([Measured("j", "eagle3", "t", True, greedy_only)])[0].speedup_sampled is None


SUITES = ("chat", "math")


def test_a_lossless_faster_candidate_is_promoted_over_nothing_and_every_suite_is_named() -> None:
    decision = decide(PromotionPolicy(), STEADY, None, SUITES)
    assert (decision.promote, decision.verdict) == (True, "promote")
    assert decision.candidate_speedup == pytest.approx(2.0)
    assert all(any(suite in reason for reason in decision.reasons) for suite in SUITES)


def test_one_slow_cell_in_a_required_suite_keeps_the_bare_target() -> None:
    slow = benchmark_report("s", {"chat": (3.0, 1.04), "math": (3.0, 3.0)})
    decision = decide(PromotionPolicy(min_speedup=1.05), slow, None, SUITES)
    assert (decision.promote, decision.verdict) == (False, "no-drafter")
    assert "chat: 1.04x over no drafter at temperature 1, its slowest, below the required 1.05x" in decision.reasons


def test_a_slow_suite_that_is_not_required_does_not_matter() -> None:
    slow = benchmark_report("s", {"chat": (0.5,), "math": (3.0,)})
    assert decide(PromotionPolicy(), slow, None, ("math",)).promote


def test_a_required_suite_that_was_not_measured_refuses() -> None:
    decision = decide(PromotionPolicy(), STEADY, None, (*SUITES, "code"))
    assert not decision.promote
    assert "code: required, but not measured" in decision.reasons


def test_a_changed_output_refuses_unless_the_policy_allows_it() -> None:
    assert decide(PromotionPolicy(), LOSSY, None, SUITES).verdict == "no-drafter"
    assert decide(PromotionPolicy(require_identical=False), LOSSY, None, SUITES).verdict == "promote"


def test_the_incumbent_stays_when_the_candidate_is_better_by_less_than_the_margin() -> None:
    slightly = benchmark_report("n", {"chat": (2.01, 1.81), "math": (2.21, 2.01)})
    decision = decide(PromotionPolicy(min_speedup_over_incumbent=1.02), slightly, STEADY, SUITES)
    assert (decision.promote, decision.verdict) == (False, "keep-incumbent")
    assert (decision.candidate_speedup, decision.incumbent_speedup) == pytest.approx((2.01, 2.0))


def test_a_better_average_that_gives_up_a_required_suite_is_refused() -> None:
    lopsided = benchmark_report("n", {"chat": (1.5, 1.5), "math": (4.0, 4.0)})
    decision = decide(PromotionPolicy(), lopsided, STEADY, SUITES)
    assert decision.verdict == "keep-incumbent"
    assert any("chat" in reason and "slower" in reason for reason in decision.reasons)


def test_a_clearly_better_candidate_replaces_the_incumbent() -> None:
    better = benchmark_report("n", {"chat": (2.5, 2.2), "math": (2.7, 2.4)})
    assert decide(PromotionPolicy(), better, STEADY, SUITES).verdict == "promote"


@pytest.mark.parametrize(("mode", "verdict"), [("manual", "awaits-approval"), ("never", "no-drafter")])
def test_a_policy_that_leaves_it_to_people_does_not_promote(mode: str, verdict: str) -> None:
    decision = decide(PromotionPolicy(mode=mode), STEADY, None, SUITES)  # type: ignore[arg-type]
    assert (decision.promote, decision.verdict) == (False, verdict)
    assert any(mode in reason for reason in decision.reasons)


def test_manual_mode_does_not_offer_for_approval_what_the_policy_refuses() -> None:
    assert decide(PromotionPolicy(mode="manual"), LOSSY, STEADY, SUITES).verdict == "keep-incumbent"


@given(st.floats(0.5, 5.0), st.floats(0.5, 5.0))
def test_whatever_is_promoted_beats_both_margins(new: float, old: float) -> None:
    policy = PromotionPolicy()
    decision = decide(policy, benchmark_report("n", {"chat": (new,)}), benchmark_report("o", {"chat": (old,)}),
                      ("chat",))
    assert decision.promote == (new >= policy.min_speedup and new >= old * policy.min_speedup_over_incumbent)
