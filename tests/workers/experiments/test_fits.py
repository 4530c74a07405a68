"""The arithmetic of experiments, on values whose answer is known."""

import numpy as np
import pytest

from benchmarks.experiments.fits import (
    Counted,
    fit_line,
    rank_correlation,
    resampled,
    tau,
    tau_interval,
    tau_ratio,
)


def counted(*accepted: int, rounds: int = 10) -> list[Counted]:
    return [Counted(suite="chat", prompt=f"chat/{i}", tokens=rounds + value, rounds=rounds, accepted=value)
            for i, value in enumerate(accepted)]


def test_tau_weighs_rounds_and_not_prompts() -> None:
    runs = [*counted(10, rounds=10), *counted(0, rounds=90)]
    assert tau(runs) == pytest.approx(1.1)


def test_the_interval_of_equal_prompts_is_the_point() -> None:
    interval = tau_interval(counted(20, 20, 20))
    assert (interval.low, interval.high) == pytest.approx((3.0, 3.0))


def test_a_ratio_of_taus_is_paired_by_prompt() -> None:
    hard_and_easy = counted(2, 30, 5, 28)
    ratio = tau_ratio([hard_and_easy], [hard_and_easy])
    assert ratio.value == 1.0
    assert (ratio.interval.low, ratio.interval.high) == pytest.approx((1.0, 1.0))
    assert not ratio.clear


def test_a_ratio_that_every_prompt_shows_is_clear() -> None:
    ratio = tau_ratio([counted(20, 22, 21, 24)], [counted(10, 11, 10, 12)])
    assert ratio.clear
    assert ratio.text.startswith("+5")


def test_runs_over_other_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different prompts"):
        tau_ratio([counted(1, 2)], [counted(1, 2, 3)])


def test_points_on_a_line_have_its_slope_and_an_r2_of_one() -> None:
    line = fit_line([1.0, 2.0, 4.0], [5.0, 7.0, 11.0])
    assert (line.slope, line.intercept, line.r2, line.at(10.0)) == pytest.approx((2.0, 3.0, 1.0, 23.0))


def test_points_that_do_not_spread_have_no_line() -> None:
    assert fit_line([1.0, 1.0], [2.0, 3.0]).r2 == 0.0


def test_ranks_are_all_that_counts_and_ties_share_theirs() -> None:
    assert rank_correlation([1.0, 10.0, 100.0], [0.1, 0.2, 9.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert rank_correlation([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(0.866, abs=1e-3)
    assert rank_correlation([1.0, 1.0], [1.0, 2.0]) == 0.0


def test_resampling_prompts_that_are_alike_changes_nothing() -> None:
    fields = np.ones((4, 2))
    interval = resampled(fields, lambda sums: float(sums[0] / sums[1]))
    assert (interval.low, interval.high) == (1.0, 1.0)
