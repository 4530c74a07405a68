"""Whether a series of samples grows, and whether a percentile became worse: pure functions of numbers.

`judge_growth` leaves out a warm-up, and estimates the slope of the rest by Theil and Sen (the median of the slopes
between all pairs; Sen 1968, doi:10.1080/01621459.1968.10480934) with the interval of Kendall's statistic. Samples that
follow each other are not independent and that interval is too narrow for them, hence two more conditions: the growth
exceeds a threshold, and the second half of the rest grows as well. A leak does; a cache that filled late does not.

`is_above` compares what a program holds at rest with what it held before: of a short run, in which slopes say nothing.

`judge_latency` compares the 99th percentiles of the last and the first third by a bootstrap over windows of time, since
a burst makes neighbouring requests slow together.
"""

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP = 0.25
"""Share of the time that is left out: programs are imported, caches and pools fill."""

_MAX_POINTS = 240
"""Longer series are reduced to the medians of as many bins: the number of pairs is quadratic."""

_MIN_POINTS = 8
_Z95 = 1.959964
_RESAMPLES = 400
MIN_WINDOWS = 4
"""Windows in a third, below which percentiles are not compared."""

WORSE_BY = 1.5
WORSE_BY_S = 0.05
"""The last third is worse when its 99th percentile is above the first third's by this factor, with the lower end of the
interval, and by this many seconds."""


@dataclass(frozen=True)
class Slope:
    """A slope in units per second, with its interval of 95 %."""

    per_s: float
    low: float
    high: float


@dataclass(frozen=True)
class Growth:
    """The judgement of one series."""

    first: float
    """Median of the first tenth after the warm-up."""

    grown: float
    """The slope times the time that was judged."""

    low: float
    high: float
    threshold: float
    late: float
    """The same for the second half alone: lower end of its interval."""

    is_finding: bool


@dataclass(frozen=True)
class Worsening:
    """The judgement of latencies."""

    first_p99_s: float
    last_p99_s: float
    ratio_low: float
    ratio_high: float
    is_finding: bool


def theil_sen(times: Sequence[float], values: Sequence[float]) -> Slope:
    """The slope of `values` over `times`, which increase. Raises ValueError with fewer than two points."""
    if len(times) < 2:
        raise ValueError("a slope needs two points")
    slopes = sorted((values[b] - values[a]) / (times[b] - times[a])
                    for a, b in itertools.combinations(range(len(times)), 2))
    n, pairs = len(times), len(slopes)
    half = _Z95 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low, high = int((pairs - half) / 2), math.ceil((pairs + half) / 2)
    return Slope(statistics.median(slopes), slopes[max(0, low)], slopes[min(pairs - 1, high)])


def judge_growth(times: Sequence[float], values: Sequence[float], *, share: float, least: float) -> Growth | None:
    """Whether the series grows; None when there are too few samples.

    share, least   the threshold: this share of the first value, and at least `least`
    """
    begin = times[0] + WARM_UP * (times[-1] - times[0]) if times else 0.0
    kept = [(at, value) for at, value in zip(times, values, strict=True) if at >= begin]
    points = _binned(kept)
    if len(points) < _MIN_POINTS:
        return None
    first = statistics.median(value for _at, value in points[:max(1, len(points) // 10)])
    slope, span = theil_sen(*zip(*points, strict=True)), points[-1][0] - points[0][0]
    late = theil_sen(*zip(*points[len(points) // 2:], strict=True))
    threshold = max(share * first, least)
    return Growth(first, slope.per_s * span, slope.low * span, slope.high * span, threshold, late.low * span / 2,
                  slope.per_s * span > threshold and slope.low > 0 and late.low > 0)


def is_above(before: Sequence[float], value: float, share: float, least: float) -> bool:
    """Whether `value` exceeds the largest of `before` by more than this share of it, and by more than `least`."""
    return value - max(before) > max(share * max(before), least)


def judge_latency(times: Sequence[float], seconds: Sequence[float], window_s: float, seed: int) -> Worsening | None:
    """Whether the last third of the requests' time is clearly slower; None when there are too few windows."""
    if not times:
        return None
    begin = times[0] + WARM_UP * (times[-1] - times[0])
    third = (times[-1] - begin) / 3
    parts: list[list[list[float]]] = []
    for start in (begin, begin + 2 * third):
        windows: dict[int, list[float]] = {}
        for at, took in zip(times, seconds, strict=True):
            if start <= at <= start + third:
                windows.setdefault(int((at - start) / window_s), []).append(took)
        parts.append(list(windows.values()))
    first, last = parts
    if min(len(first), len(last)) < MIN_WINDOWS:
        return None
    rng = random.Random(seed)
    ratios = sorted(_resampled(last, rng) / _resampled(first, rng) for _ in range(_RESAMPLES))
    low, high = ratios[int(0.025 * _RESAMPLES)], ratios[int(0.975 * _RESAMPLES)]
    before, after = _p99([one for part in first for one in part]), _p99([one for part in last for one in part])
    return Worsening(before, after, low, high, low > WORSE_BY and after - before > WORSE_BY_S)


def _binned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    size = math.ceil(len(points) / _MAX_POINTS)
    return [(statistics.median(at for at, _value in part), statistics.median(value for _at, value in part))
            for part in (points[start:start + size] for start in range(0, len(points), size))] if size > 1 else points


def _resampled(windows: list[list[float]], rng: random.Random) -> float:
    return _p99([one for part in rng.choices(windows, k=len(windows)) for one in part])


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(0.99 * len(values)) - 1)]
