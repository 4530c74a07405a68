"""The order in which variants under measurement take their turns, and the statistics of what they did.

Acceptance lengths, speed ratios and their confidence intervals, from counts and seconds. Pure.

Order. Every variant answers a prompt (or a block of prompts) before the next prompt begins, so a machine that slows
down for a minute slows all variants alike. The order changes from turn to turn, counterbalanced for two effects:

    drift      turns come in mirrored pairs (A B C, then C B A): over a pair every variant has the same mean position,
               so a linear slow-down or warm-up cancels
    position   each pair begins two variants later than the one before, so over n turns (2n for an odd n) each of n
               variants runs equally often at every position and after different neighbours, whose caches it meets

Acceptance. One round verifies a draft tree and emits the accepted draft tokens plus the bonus token, so
tau = 1 + accepted / rounds (the convention of the EAGLE papers and of vLLM). A histogram of accepted lengths holds
everything else: P(at least k+1 accepted | at least k accepted) is the acceptance at position k. For a tree the same
formula counts whether *any* child of the accepted node continued the path.

Speed. A variant's speed is all its tokens over all its seconds; a speed-up is the ratio of two variants that answered
the same prompts, interleaved. Its uncertainty comes from the choice of prompts, so prompts are resampled, both variants
of a prompt together (a paired bootstrap).

Small samples. A percentile bootstrap cannot leave the range of its prompts: with four of them it covers at most
1 - 2 * 2**-4 = 87 %, and a demonstration has four. Instead the bootstrap gives the standard error of the logarithm of
the ratio, corrected by sqrt(n / (n-1)), and Student's t gives the width ("t interval with bootstrap standard error",
Hesterberg, arXiv:1411.5279). Two prompts yield a very wide interval, as they should. One prompt gives no estimate of
the variation between prompts: its interval is the point.

Optional stopping. A measurement that ends as soon as its interval is clear of a threshold looks at the interval again
and again, and one of 95 % that is valid at a fixed number of observations misses the truth far more often than once in
twenty. `anytime_interval` is a confidence sequence: with probability 95 % it contains the truth at every number of
observations at once. It inverts the sequential t-test with a normal prior on the effect over the standard deviation
(Lai, Annals of Statistics 4, 1976, "On confidence sequences"; the Bayes factor of Rouder et al., Psychonomic Bulletin
& Review 16, 2009; that it stays valid when data are looked at as they come: Hendriksen, de Heide and Gruenwald,
arXiv:1807.09077, and Wang and Ramdas, arXiv:2310.03722). Exact for normal observations of unknown variance.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, zip_longest
from statistics import fmean, stdev
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from eyrie_api.contract.model import Interval

T = TypeVar("T")


def interleaved(variants: Sequence[T], turn: int) -> list[T]:
    """The variants in the order of the `turn`-th prompt or block; turns count from 0."""
    start = (turn - turn % 2) % len(variants)
    order = [*variants[start:], *variants[:start]]
    return order[::-1] if turn % 2 else order


_RESAMPLES = 2000  # the Monte-Carlo error of a standard error is then 1.6 %
_LEVEL = 0.95
_MOST_DRAWS = 4_000_000  # in memory at once: 32 MB, whatever the number of prompts

FloatArray = npt.NDArray[np.float64]


class Tally(NamedTuple):
    """Tokens and seconds of both variants for one prompt at one temperature (sums over repeats)."""

    tokens: int
    seconds: float
    baseline_tokens: int
    baseline_seconds: float


def acceptance_length(histogram: Sequence[int]) -> float:
    """tau of a histogram whose index k counts the rounds that accepted k draft tokens. 1.0 without any round."""
    rounds = sum(histogram)
    return 1.0 + sum(k * count for k, count in enumerate(histogram)) / rounds if rounds else 1.0


def conditional_acceptance(histogram: Sequence[int]) -> tuple[float, ...]:
    """P(>= k+1 accepted | >= k accepted) for each position k, as far as any round got."""
    at_least = [sum(histogram[k:]) for k in range(len(histogram))]
    return tuple(further / reached for reached, further in pairwise(at_least) if reached)


def add_histograms(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Sum by index; shorter ones count as zero beyond their end."""
    return tuple(sum(column) for column in zip_longest(*histograms, fillvalue=0))


def speed_ratio(tallies: Sequence[Tally]) -> float:
    """Tokens per second of the drafted variant over those of the undrafted variant, over all prompts."""
    drafted = sum(t.tokens for t in tallies) / sum(t.seconds for t in tallies)
    return drafted / (sum(t.baseline_tokens for t in tallies) / sum(t.baseline_seconds for t in tallies))


def ratio_interval(value: float, fields: FloatArray, seed: int = 0) -> Interval:
    """95 % interval of a ratio of two quotients of sums, prompts resampled. With a single prompt it is the point.

    value    the ratio, over all prompts
    fields   [N, 4]   each prompt's tokens and seconds (or such) in one variant and in the other. A prompt without
                      tokens has no rate and does not count.
    """
    fields = fields[(fields > 0).all(axis=1)]
    if len(fields) < 2:
        return Interval(low=value, high=value)
    error = standard_error(fields, lambda sums: (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]), seed)
    return interval_around(value, error, len(fields))


def standard_error(fields: FloatArray, statistic: Callable[[FloatArray], FloatArray], seed: int = 0) -> float:
    """Bootstrap standard error of the logarithm of a positive statistic of sums over prompts.

    fields      [N, F]   each prompt's contribution to the sums; N >= 2
    statistic   sums [R, F] to values [R], all positive
    """
    num_prompts = len(fields)
    random = np.random.default_rng(seed)
    values = []
    for start in range(0, _RESAMPLES, rows := max(1, _MOST_DRAWS // num_prompts)):
        draws = random.integers(0, num_prompts, size=(min(rows, _RESAMPLES - start), num_prompts))
        # Resampling by counts: how often each prompt was drawn, [R, N], times [N, F] gives all sums in one product.
        places = (draws + num_prompts * np.arange(len(draws))[:, None]).ravel()
        counts = np.bincount(places, minlength=draws.size).reshape(draws.shape)
        values.append(statistic(counts.astype(np.float64) @ fields))
    # The bootstrap's variance is that of N draws from N prompts, too small by (N - 1) / N.
    return float(np.log(np.concatenate(values)).std()) * math.sqrt(num_prompts / (num_prompts - 1))


def acceptance_interval(rounds: FloatArray, seed: int = 0) -> Interval:
    """95 % interval of tau, prompts resampled. rounds: [N, 2], as `rounds_and_accepted`.

    Prompts without a round (answers of one token) do not count. A point for fewer than two prompts.
    """
    drawn = rounds[rounds[:, 0] > 0]
    sums = drawn.sum(0)
    tau = 1.0 + float(sums[1] / sums[0]) if len(drawn) else 1.0
    if len(drawn) < 2:
        return Interval(low=tau, high=tau)
    return interval_around(tau, standard_error(drawn, lambda sums: 1.0 + sums[:, 1] / sums[:, 0], seed), len(drawn))


def rounds_and_accepted(histograms: Iterable[Sequence[int]]) -> FloatArray:
    """[N, 2]: rounds and accepted draft tokens of each prompt."""
    return np.array([(sum(histogram), sum(k * count for k, count in enumerate(histogram)))
                     for histogram in histograms], dtype=np.float64).reshape(-1, 2)


def interval_around(value: float, error: float, num_prompts: int) -> Interval:
    """95 % t interval around a positive value; `error` is the standard error of its logarithm over the prompts."""
    reach = math.exp(student_quantile(0.5 + _LEVEL / 2.0, num_prompts - 1) * error)
    return Interval(low=value / reach, high=value * reach)


_PRIOR_VARIANCE = 2.0
"""Of the effect over the standard deviation. A larger one decides large effects after fewer observations, and widens
the interval of many: by 3 % at 50 against 1.0."""

FEWEST_PAIRS = 5  # with that prior, fewer have no finite interval

_WIDEST = math.log(1000.0)  # half a width in logarithms: too few observations say nothing, and JSON has no infinity


@dataclass(frozen=True)
class MeasuredBlock:
    tokens: int
    seconds: float
    rates: Mapping[tuple[str, str], float]
    """Tokens per second of each complete answer, by its prompt and request."""


def paired_logs(pairs: Iterable[tuple[int, MeasuredBlock, MeasuredBlock]]) -> tuple[list[float], list[float]]:
    """Logarithms of the speed ratio of two variants: of every rung, and of every prompt over its repetitions.

    pairs   a rung, which may have several blocks, and the block of both variants
    """
    by_rung, by_prompt = dict[int, list[float]](), dict[str, list[float]]()
    for rung, ours, theirs in pairs:
        by_rung.setdefault(rung, []).append(math.log(ours.tokens / ours.seconds / (theirs.tokens / theirs.seconds)))
        for (prompt, request), rate in ours.rates.items():
            if (prompt, request) in theirs.rates:
                by_prompt.setdefault(prompt, []).append(math.log(rate / theirs.rates[prompt, request]))
    return [*map(fmean, by_rung.values())], [*map(fmean, by_prompt.values())]


def anytime_interval(logs: Sequence[float], by_prompt: Sequence[float]) -> Interval:
    """Interval of exp(mean of `logs`) that may be looked at after every observation: 95 % at all looks together.

    logs        logarithms of ratios, one per pair of measurements, in their order
    by_prompt   the same ratios by prompt, each the mean over its repetitions: many pairs of few prompts are not
                evidence about others, so the wider of the two intervals counts
    """
    reach = max(_anytime_reach(logs), _anytime_reach(by_prompt))
    return Interval(low=math.exp(fmean(logs) - reach), high=math.exp(fmean(logs) + reach))


def _anytime_reach(values: Sequence[float]) -> float:
    """Half the width of the confidence sequence of a mean: the t at which the Bayes factor against it is
    1 / (1 - level), in standard errors."""
    num = len(values)
    if num < 2:
        return _WIDEST
    grown = 1.0 + num * _PRIOR_VARIANCE
    factor = (math.sqrt(grown) / (1.0 - _LEVEL)) ** (2.0 / num)
    if factor >= grown:
        return _WIDEST
    t = math.sqrt((num - 1) * (factor - 1.0) / (1.0 - factor / grown))
    return min(_WIDEST, t * stdev(values) / math.sqrt(num))


@cache
def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t for 0.5 <= probability < 1, by bisection of the exact distribution function."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = 0.5 * (low + high)
        if _student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _student_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0: the finite trigonometric sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(degrees))
    cos2 = math.cos(theta) ** 2
    odd = degrees % 2
    total, term = 0.0, math.cos(theta) if odd else 1.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cos2 * k / (k + 1)
    if odd:
        return 0.5 + (theta + math.sin(theta) * total) / math.pi
    return 0.5 + 0.5 * math.sin(theta) * total
