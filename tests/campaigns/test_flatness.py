"""The judgement of the soak campaign on series that are known."""

import random

import pytest

from benchmarks.campaigns.flatness import Growth, is_above, judge_growth, judge_latency, theil_sen

TIMES = [2.0 * number for number in range(400)]


def judged(values: list[float]) -> Growth:
    found = judge_growth(TIMES[:len(values)], values, share=0.1, least=8.0)
    assert found is not None
    return found


def noise(seed: int, size: float) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0.0, size) for _ in TIMES]


def test_a_line_has_its_slope_and_an_interval_around_it() -> None:
    slope = theil_sen(TIMES[:50], [3.0 + 0.5 * at for at in TIMES[:50]])
    assert slope.per_s == pytest.approx(0.5)
    assert slope.low == pytest.approx(0.5)
    assert slope.high == pytest.approx(0.5)


def test_one_sample_in_ten_that_is_far_off_hardly_moves_the_slope() -> None:
    values = [1000.0 if number % 10 == 0 else 0.1 * at for number, at in enumerate(TIMES)]
    assert theil_sen(TIMES[:200], values[:200]).per_s == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_a_series_that_grows_is_found_in_spite_of_noise(seed: int) -> None:
    found = judged([100.0 + 0.05 * at + wrong for at, wrong in zip(TIMES, noise(seed, 5.0), strict=True)])
    assert found.is_finding
    assert found.grown == pytest.approx(0.05 * 600, rel=0.15)


@pytest.mark.parametrize("seed", range(20))
def test_noise_around_a_level_is_not_growth(seed: int) -> None:
    assert not judged([100.0 + wrong for wrong in noise(seed, 20.0)]).is_finding


def test_a_constant_is_not_growth() -> None:
    found = judged([64.0] * len(TIMES))
    assert (found.grown, found.low, found.high, found.is_finding) == (0.0, 0.0, 0.0, False)


@pytest.mark.parametrize("step_at", [0.1, 0.4, 0.6, 0.62, 0.65, 0.9])
def test_a_step_that_is_followed_by_a_level_is_not_growth(step_at: float) -> None:
    step = step_at * TIMES[-1]
    values = [100.0 + 60.0 * (at > step) + wrong for at, wrong in zip(TIMES, noise(1, 1.0), strict=True)]
    assert not judged(values).is_finding


def test_growth_in_the_warm_up_alone_is_not_found() -> None:
    assert not judged([min(at, 0.2 * TIMES[-1]) for at in TIMES]).is_finding


def test_steady_growth_below_the_threshold_is_measured_and_not_found() -> None:
    found = judged([100.0 + 0.01 * at for at in TIMES])
    assert found.low > 0
    assert not found.is_finding


def test_too_few_samples_are_not_judged() -> None:
    assert judge_growth([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], share=0.1, least=0.0) is None
    assert judge_growth([], [], share=0.1, least=0.0) is None
    assert judge_latency([], [], 5.0, 1) is None
    assert judge_latency([0.0, 1.0, 2.0], [0.1, 0.1, 0.1], 5.0, 1) is None


def test_a_value_at_rest_is_above_those_before_beyond_share_and_least() -> None:
    assert not is_above([20.0, 100.0, 30.0], 110.0, 0.1, 8.0)
    assert is_above([20.0, 100.0, 30.0], 111.0, 0.1, 8.0)
    assert not is_above([10.0], 18.0, 0.1, 8.0)
    assert is_above([10.0], 19.0, 0.1, 8.0)


def requests(seed: int, slower: float) -> tuple[list[float], list[float]]:
    """Ten a second for 600 s, log-normal; from 400 s on `slower` times as slow."""
    rng = random.Random(seed)
    times = [number / 10 for number in range(6000)]
    return times, [rng.lognormvariate(-3.0, 0.5) * (slower if at > 400 else 1.0) for at in times]


@pytest.mark.parametrize("seed", range(3))
def test_a_last_third_three_times_as_slow_is_found(seed: int) -> None:
    found = judge_latency(*requests(seed, 3.0), 10.0, seed)
    assert found is not None
    assert found.is_finding
    assert found.ratio_low < 3.0 < found.ratio_high


@pytest.mark.parametrize("seed", range(3))
def test_latencies_of_one_distribution_are_steady(seed: int) -> None:
    found = judge_latency(*requests(seed, 1.0), 10.0, seed)
    assert found is not None
    assert not found.is_finding


def test_one_burst_of_slow_requests_is_not_clearly_worse() -> None:
    times, seconds = requests(1, 1.0)
    slow = [took + 2.0 * (500 < at < 504) for at, took in zip(times, seconds, strict=True)]
    found = judge_latency(times, slow, 10.0, 1)
    assert found is not None
    assert not found.is_finding
