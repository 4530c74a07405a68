"""The arithmetic of acceptance, of speed ratios and of their intervals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.contract.model import Interval
from eyrie_workers.measure.intervals import (
    Tally,
    acceptance_interval,
    acceptance_length,
    add_histograms,
    anytime_interval,
    conditional_acceptance,
    ratio_interval,
    speed_ratio,
    student_quantile,
)

histograms = st.lists(st.integers(0, 1000), min_size=1, max_size=17)


def synthetic(rng: np.random.Generator, num: int, truth: float, spread: float = 0.25) -> list[Tally]:
    """Prompts of one length whose seconds scatter log-normally; the population's ratio of rates is `truth`."""
    noise = rng.normal(0.0, spread, size=num) - spread**2 / 2  # mean of exp(noise) is 1
    return [Tally(100, float(np.exp(e)) / truth, 100, 1.0) for e in noise]


def interval_of(tallies: list[Tally], seed: int = 0) -> Interval:
    return ratio_interval(speed_ratio(tallies), np.array(tallies), seed)


def test_tau_counts_the_bonus_token() -> None:
    assert acceptance_length([0, 0, 0, 4]) == 4.0
    assert acceptance_length([5]) == 1.0
    assert acceptance_length([]) == 1.0


def test_conditional_acceptance_by_hand() -> None:
    # 10 rounds: 2 accepted nothing, 3 one token, 5 two. P(1st) = 8/10, P(2nd | 1st) = 5/8.
    assert conditional_acceptance([2, 3, 5]) == (0.8, 0.625)


@given(histograms)
def test_conditional_acceptances_are_probabilities_and_rebuild_tau(histogram: list[int]) -> None:
    acceptance = conditional_acceptance(histogram)
    assert all(0.0 <= p <= 1.0 for p in acceptance)
    expected, reach = 1.0, 1.0
    for p in acceptance:
        reach *= p
        expected += reach
    assert math.isclose(expected, acceptance_length(histogram), rel_tol=1e-9)


@given(st.lists(histograms, min_size=1, max_size=5))
def test_adding_histograms_keeps_rounds_and_accepted_tokens(several: list[list[int]]) -> None:
    total = add_histograms(several)
    assert sum(total) == sum(map(sum, several))
    assert sum(k * n for k, n in enumerate(total)) == sum(k * n for h in several for k, n in enumerate(h))


def test_a_ratio_weighs_prompts_by_their_work_not_by_their_number() -> None:
    # 100 tokens at 4x and 10 tokens at 1x: all tokens over all seconds, not the mean of 4 and 1.
    assert speed_ratio([Tally(100, 1.0, 100, 4.0), Tally(10, 1.0, 10, 1.0)]) == pytest.approx(2.5)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8), st.floats(0.5, 5.0), st.integers(0, 2**31))
def test_the_interval_holds_the_estimate_and_collapses_when_all_prompts_agree(
        seconds: list[float], ratio: float, seed: int) -> None:
    tallies = [Tally(10, s, 10, s * ratio) for s in seconds]
    interval = interval_of(tallies, seed)
    assert interval.low == pytest.approx(ratio)
    assert interval.high == pytest.approx(ratio)


def test_the_interval_is_the_same_for_the_same_seed() -> None:
    tallies = synthetic(np.random.default_rng(1), 8, 2.0)
    assert interval_of(tallies, 7) == interval_of(tallies, 7)
    assert interval_of(tallies, 7) != interval_of(tallies, 8)


def test_one_prompt_has_no_interval_to_speak_of() -> None:
    interval = interval_of([Tally(10, 1.0, 10, 3.0)])
    assert interval.low == interval.high == pytest.approx(3.0)


def test_a_prompt_without_tokens_does_not_count() -> None:
    assert interval_of([Tally(10, 1.0, 10, 3.0), Tally(10, 1.0, 10, 2.0)]) == ratio_interval(
        2.5, np.array([Tally(10, 1.0, 10, 3.0), Tally(10, 1.0, 10, 2.0), Tally(0, 1.0, 10, 2.0)]))


@pytest.mark.parametrize("num", [2, 4, 8, 24])
def test_the_95_percent_interval_covers_the_truth_about_95_times_in_a_hundred(num: int) -> None:
    rng = np.random.default_rng(num)
    truth, trials = 2.5, 400
    covered = sum(
        interval.low <= truth <= interval.high
        for interval in (interval_of(synthetic(rng, num, truth), i) for i in range(trials)))
    # 400 trials at 95 %: standard error 1.1 points. A percentile interval covers at most 50 % at 2 prompts, 87 % at 4.
    assert 0.915 <= covered / trials <= 0.985


def test_student_quantiles_equal_the_printed_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 100: 1.984}
    for degrees, value in table.items():
        assert student_quantile(0.975, degrees) == pytest.approx(value, abs=6e-4)


def test_the_interval_of_tau_ignores_prompts_without_rounds_and_is_a_point_for_one_prompt() -> None:
    rounds = np.array([[10.0, 20.0], [10.0, 30.0], [0.0, 0.0]])
    interval = acceptance_interval(rounds)
    assert interval == acceptance_interval(rounds[:2])
    assert interval.low < 3.5 < interval.high
    point = acceptance_interval(rounds[:1])
    assert (point.low, point.high) == (3.0, 3.0)


def test_an_interval_that_is_looked_at_after_every_pair_misses_the_truth_once_in_twenty_at_most() -> None:
    random, missed = np.random.default_rng(0), 0
    for _ in range(400):
        logs = list(random.normal(0.0, 0.3, 60))
        looks = (anytime_interval(logs[:num], logs[:num]) for num in range(2, 61))
        missed += any(not look.low <= 1.0 <= look.high for look in looks)
    assert missed <= 0.05 * 400 + 3 * np.sqrt(400 * 0.05 * 0.95)
    # One of 95 % at a fixed number of pairs, looked at as often, is wrong in a third of all measurements.
    fixed = 0
    for _ in range(400):
        logs = random.normal(0.0, 0.3, 60)
        fixed += any(abs(logs[:num].mean()) > student_quantile(0.975, num - 1) * logs[:num].std(ddof=1)
                     / np.sqrt(num) for num in range(2, 61))
    assert fixed > 100


def test_many_pairs_of_few_prompts_are_no_narrower_than_their_prompts() -> None:
    logs = [0.5, 0.9] * 50
    few = anytime_interval(logs, [0.5, 0.9])
    assert few.low < 1.0 < few.high
    assert anytime_interval(logs, logs).low > 1.5
