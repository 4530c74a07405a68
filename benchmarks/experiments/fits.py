"""The statistics of experiments: tau with intervals, ratios of taus, straight lines, ranks. Pure.

There are two sources of variation: the prompts, and the seed a drafter was trained with. Prompts are resampled (every
drafter decoded the same prompts, so comparisons are paired); seeds are few and are shown individually, with their
standard deviation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from eyrie_api.contract.model import Frozen, Interval
from eyrie_workers.measure.intervals import FloatArray, acceptance_interval, interval_around, standard_error
from eyrie_workers.speculation.requests import Generation

_RESAMPLES = 2000


class Counted(Frozen):
    """One prompt, decoded with a drafter."""

    suite: str
    prompt: str
    tokens: int
    rounds: int
    accepted: int


def counted_of(answer: Generation) -> Counted:
    """The rounds of one answer; its id is `suite/prompt`."""
    return Counted(suite=answer.id.split("/")[0], prompt=answer.id, tokens=len(answer.token_ids), rounds=answer.rounds,
                   accepted=sum(k * count for k, count in enumerate(answer.accepted_histogram)))


def tau(counted: Sequence[Counted]) -> float:
    """Tokens per target pass over all prompts, bonus token included."""
    rounds = sum(one.rounds for one in counted)
    return 1.0 + sum(one.accepted for one in counted) / rounds if rounds else 1.0


def tau_interval(counted: Sequence[Counted]) -> Interval:
    """95 % interval of `tau`, prompts resampled."""
    return acceptance_interval(np.array([(one.rounds, one.accepted) for one in counted], dtype=np.float64))


@dataclass(frozen=True)
class Ratio:
    """One tau over another, over the same prompts."""

    value: float
    interval: Interval

    @property
    def text(self) -> str:
        """`+12.3 % (4.5 to 20.6)`."""
        low, high = ((edge - 1.0) * 100 for edge in (self.interval.low, self.interval.high))
        return f"{(self.value - 1.0) * 100:+.1f} % ({low:+.1f} to {high:+.1f})"

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 1 out."""
        return not self.interval.low <= 1.0 <= self.interval.high


def tau_ratio(first: Sequence[Sequence[Counted]], second: Sequence[Sequence[Counted]]) -> Ratio:
    """tau of `first` over tau of `second`. Each is several runs (seeds) over the same prompts, which are added."""
    asked = {tuple(one.prompt for one in run) for run in (*first, *second)}
    if len(asked) != 1:
        raise ValueError("runs over different prompts cannot be compared")
    columns = [_added(first), _added(second)]
    fields = np.concatenate(columns, axis=1)

    def statistic(sums: FloatArray) -> FloatArray:
        return np.asarray((1.0 + sums[:, 0] / sums[:, 1]) / (1.0 + sums[:, 2] / sums[:, 3]))

    value = float(statistic(fields.sum(0, keepdims=True))[0])
    return Ratio(value, interval_around(value, standard_error(fields, statistic), len(fields)))


def _added(runs: Sequence[Sequence[Counted]]) -> FloatArray:
    """[N, 2]: accepted and rounds of each prompt, over all runs."""
    return np.array([(sum(run[i].accepted for run in runs), sum(run[i].rounds for run in runs))
                     for i in range(len(runs[0]))], dtype=np.float64)


@dataclass(frozen=True)
class Line:
    """Least squares: y = slope x + intercept."""

    slope: float
    intercept: float
    r2: float

    def at(self, x: float) -> float:
        """Its value at x."""
        return self.slope * x + self.intercept


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The line through some points; r2 is 0 where they do not spread."""
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    dx, dy = x - x.mean(), y - y.mean()
    if not (dx @ dx) or not (dy @ dy):
        return Line(0.0, float(y.mean()), 0.0)
    slope = float(dx @ dy / (dx @ dx))
    return Line(slope, float(y.mean() - slope * x.mean()), float((dx @ dy) ** 2 / ((dx @ dx) * (dy @ dy))))


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, ties sharing their mean rank. 0 where one side is constant."""
    ranks = [[sum(other < value for other in of) + (sum(other == value for other in of) - 1) / 2 for value in of]
             for of in (xs, ys)]
    means = [fmean(of) if of else 0.0 for of in ranks]
    products = sum((a - means[0]) * (b - means[1]) for a, b in zip(*ranks, strict=True))
    squares = [sum((value - mean) ** 2 for value in of) for of, mean in zip(ranks, means, strict=True)]
    return products / (squares[0] * squares[1]) ** 0.5 if all(squares) else 0.0


def resampled(fields: FloatArray, statistic: Callable[[FloatArray], float], seed: int = 0) -> Interval:
    """95 % percentile interval of a statistic of sums over prompts.

    fields     [N, ...]   what each of N prompts adds
    statistic  of the sums [...]; it may be bounded (r2, a rank correlation), so no t interval is put around it
    """
    random = np.random.default_rng(seed)
    num = len(fields)
    values = [statistic(fields[random.integers(0, num, num)].sum(0)) for _ in range(_RESAMPLES)]
    low, high = np.percentile(values, (2.5, 97.5))
    return Interval(low=float(low), high=float(high))
