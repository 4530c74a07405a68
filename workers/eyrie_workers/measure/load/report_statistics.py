"""The statistics of a load report, computed from request results. Pure.

Throughput is all output tokens over the wall-clock time of the level's blocks; the speed of one user is the mean over
requests of tokens over end-to-end time. Acceptance is summed over the histograms of the requests, so other requests to
the server do not affect it.

Uncertainty comes from the choice of prompts: prompts are resampled, all requests of a prompt in both variants together
(`intervals`). Wall-clock time cannot be resampled by prompt, so the interval of a throughput ratio takes its width from
the tokens and the response time of each prompt: in a closed loop of c users throughput is c * tokens / response time,
except for the ramp-down. In an open loop arrivals determine the throughput until the server is saturated, and the
width is then too large.

Where variants answer the same block of requests right after one another (`run.run_load`), a closed loop is compared by
these pairs of blocks: the ratio is the geometric mean over pairs, and its interval, over pairs and over the prompts of
a block, stays valid when the test ends as soon as it is clear (`intervals.anytime_interval`). A neighbour that takes
the processor for a few seconds widens it; resampling prompts does not see that.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from eyrie_api.contract.load import LoadCell, LoadComparison, LoadLevel, LoadSpec, Quantiles, ServiceLevel
from eyrie_api.contract.model import Interval
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.decisions.evidence import Standing, first_token_standing, speedup_standing
from eyrie_workers.measure import intervals
from eyrie_workers.measure.load.client import RequestResult
from eyrie_workers.measure.load.completion_stream import FloatArray
from eyrie_workers.measure.load.schedule import RequestLevel

PromptKey = tuple[str, str]


@dataclass(frozen=True)
class LevelResults:
    variant: str
    level: RequestLevel
    results: tuple[RequestResult, ...]
    seconds: float
    """Wall-clock time of the blocks, from the first request to the end of the last response."""

    cpu_s: float
    """CPU time of the load generator during the blocks."""

    block_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of each block by its repeat, where the variants answered it right after one another; empty: they did
    not."""

    def __add__(self, more: "LevelResults") -> "LevelResults":
        """With the results of more blocks of the same variant and level."""
        return LevelResults(self.variant, self.level, self.results + more.results, self.seconds + more.seconds,
                            self.cpu_s + more.cpu_s, {**self.block_s, **more.block_s})


def quantiles(values: FloatArray) -> Quantiles | None:
    """Mean and quantiles; None without values."""
    if len(values) == 0:
        return None
    p50, p90, p99 = (float(q) for q in np.quantile(values, (0.5, 0.9, 0.99)))
    return Quantiles(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


def meets_slo(result: RequestResult, slo: ServiceLevel) -> bool:
    """Whether a request met every bound that is set. A failed request meets none."""
    if result.failure is not None:
        return False
    mean_gap = float(result.gaps_s.mean()) if len(result.gaps_s) else 0.0
    pairs = ((result.ttft_s, slo.ttft_s), (mean_gap, slo.inter_token_s), (result.end_to_end_s, slo.end_to_end_s))
    return all(value is not None and value <= bound for value, bound in pairs if bound is not None)


def load_cell(results: Sequence[RequestResult], seconds: float, spec: LoadSpec, *, drafting: bool) -> LoadCell:
    """Statistics of one variant at one level, of one category or all. `drafting`: whether the variant drafts."""
    completed = [result for result in results if result.failure is None]
    failed = Counter(result.failure for result in results if result.failure is not None)
    tokens = sum(result.tokens for result in completed)
    rates, num_rated = _rates(completed)
    histograms = [result.histogram for result in completed if result.histogram is not None] if drafting else []
    histogram, tau_interval = intervals.add_histograms(histograms), None
    if has_rounds := sum(histogram) > 0:
        by_prompt: dict[PromptKey, list[tuple[int, ...]]] = {}
        for result in completed:
            if result.histogram is not None and sum(result.histogram) > 0:
                by_prompt.setdefault((result.category, result.prompt_id), []).append(result.histogram)
        around = intervals.acceptance_interval(intervals.rounds_and_accepted(
            map(intervals.add_histograms, by_prompt.values())), spec.seed)
        tau_interval = around.model_copy(update={"low": max(1.0, around.low)})
    return LoadCell(
        requests=len(results), completed=len(completed), failed=dict(sorted(failed.items())), output_tokens=tokens,
        seconds=seconds, tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        tokens_per_s_per_user=rates / num_rated if num_rated else 0.0,
        ttft_s=quantiles(np.array([result.ttft_s for result in completed if result.ttft_s is not None])),
        inter_token_s=quantiles(np.concatenate([result.gaps_s for result in completed]) if completed else np.zeros(0)),
        end_to_end_s=quantiles(np.array([result.end_to_end_s for result in completed])),
        goodput_per_s=sum(meets_slo(result, spec.slo) for result in results) / seconds
        if spec.slo is not None and seconds > 0 else None,
        tau=intervals.acceptance_length(histogram) if has_rounds else None,
        tau_interval=tau_interval,
        acceptance=intervals.conditional_acceptance(histogram), accepted_histogram=histogram)


def level_report(level: LevelResults, spec: LoadSpec) -> LoadLevel:
    categories = dict.fromkeys(result.category for result in level.results)
    # An engine that does not draft may report rounds too, all without accepted tokens, and a single response of one
    # that drafts may have none accepted: all responses are considered.
    drafting = any(result.proposed or (result.histogram is not None and len(result.histogram) > 1)
                   for result in level.results)
    return LoadLevel(
        variant=level.variant, mode=level.level.mode, level=level.level.value,
        total=load_cell(level.results, level.seconds, spec, drafting=drafting),
        by_category={
            name: load_cell([r for r in level.results if r.category == name], level.seconds, spec, drafting=drafting)
            for name in categories},
        generator_cpu_share=level.cpu_s / level.seconds if level.seconds > 0 else None)


def comparison(variant: LevelResults, baseline: LevelResults, spec: LoadSpec) -> LoadComparison | None:
    """A variant compared with the baseline at one level; None unless both completed a common prompt."""
    # Results of both variants by prompt, without prompts that one variant never completed.
    by_prompt: dict[PromptKey, Pair] = {}
    for side, results in enumerate((variant.results, baseline.results)):
        for result in results:
            if result.failure is None:
                by_prompt.setdefault((result.category, result.prompt_id), ([], []))[side].append(result)
    pairs = [pair for pair in by_prompt.values() if pair[0] and pair[1]]
    if not pairs:
        return None
    ours, theirs = level_report(variant, spec), level_report(baseline, spec)
    throughput = ours.total.tokens_per_s / theirs.total.tokens_per_s if theirs.total.tokens_per_s else None
    user = _ratio(ours.total, theirs.total)
    if not throughput or not user:
        return None
    near = paired_ratios(variant, baseline)
    by_category = {name: _ratio(ours.by_category[name], theirs.by_category[name])
                   for name in ours.by_category.keys() & theirs.by_category.keys()}
    return LoadComparison(
        variant=variant.variant, baseline=baseline.variant, mode=variant.level.mode, level=variant.level.value,
        throughput_ratio=near.throughput if near else throughput,
        throughput_interval=near.throughput_interval if near else intervals.ratio_interval(throughput, _fields(
            pairs, lambda results: (float(sum(result.tokens for result in results)),
                                    sum(result.end_to_end_s for result in results))), spec.seed),
        pairs=near.pairs if near else 0, ttft_ratio=near.ttft if near else None,
        ttft_interval=near.ttft_interval if near else None,
        user_ratio=user, user_interval=intervals.ratio_interval(user, _fields(pairs, _rates), spec.seed),
        ttft_p99_ratio=ours.total.ttft_s.p99 / theirs.total.ttft_s.p99
        if ours.total.ttft_s is not None and theirs.total.ttft_s is not None and theirs.total.ttft_s.p99 > 0 else None,
        by_category={name: by_category[name] for name in ours.by_category if by_category.get(name)},
        compared=len(pairs), identical=_num_identical(pairs))


@dataclass(frozen=True)
class PairedRatios:
    """Geometric means over pairs of blocks, with intervals that are valid at every look."""

    pairs: int
    throughput: float
    throughput_interval: Interval
    ttft: float | None
    ttft_interval: Interval | None


def paired_ratios(variant: LevelResults, baseline: LevelResults) -> PairedRatios | None:
    """A variant against the baseline by pairs of blocks; None where they were not near in time, or are too few for an
    interval."""
    throughput, ttft = list[float](), list[float]()
    speed_of, wait_of = dict[PromptKey, list[float]](), dict[PromptKey, list[float]]()
    ours, theirs = _by_block(variant), _by_block(baseline)
    for repeat in sorted(variant.block_s.keys() & baseline.block_s.keys()):
        mine, its = ours.get(repeat, {}), theirs.get(repeat, {})
        tokens = [sum(result.tokens for result in side.values()) for side in (mine, its)]
        if not all(tokens):
            continue
        throughput.append(math.log(tokens[0] / variant.block_s[repeat] / (tokens[1] / baseline.block_s[repeat])))
        waits = []
        for index in mine.keys() & its.keys():
            first, second = mine[index], its[index]
            prompt = (first.category, first.prompt_id)
            if (fast := _rates([first])[0]) and (slow := _rates([second])[0]):
                speed_of.setdefault(prompt, []).append(math.log(fast / slow))
            if first.ttft_s and second.ttft_s:
                waits.append(math.log(first.ttft_s / second.ttft_s))
                wait_of.setdefault(prompt, []).append(waits[-1])
        ttft += [fmean(waits)] if waits else []
    if len(throughput) < intervals.FEWEST_PAIRS:
        return None

    def around(logs: list[float], of_prompts: dict[PromptKey, list[float]]) -> Interval:
        return intervals.anytime_interval(logs, list(map(fmean, of_prompts.values())))

    return PairedRatios(
        len(throughput), math.exp(fmean(throughput)), around(throughput, speed_of),
        math.exp(fmean(ttft)) if ttft else None, around(ttft, wait_of) if ttft else None)


def typical_ttft_s(level: LevelResults) -> float:
    """Median time to first token; infinite where none was measured."""
    waits = quantiles(np.array([result.ttft_s for result in level.results if result.ttft_s is not None]))
    return math.inf if waits is None else waits.p50


def load_standing(policy: PromotionPolicy, ratios: PairedRatios, candidate: LevelResults,
                  baseline: LevelResults) -> Standing:
    """A load at which the candidate drafts: its speed-up and, once that has passed, its time to first token."""
    speed = speedup_standing(policy, ratios.throughput, ratios.throughput_interval)
    if speed != "passed" or ratios.ttft is None:
        return speed
    later_s = typical_ttft_s(candidate) - typical_ttft_s(baseline)
    return first_token_standing(policy, ratios.ttft, ratios.ttft_interval, later_s)


def _by_block(level: LevelResults) -> dict[int, dict[int, RequestResult]]:
    found: dict[int, dict[int, RequestResult]] = {}
    for result in level.results:
        if result.failure is None:
            found.setdefault(result.repeat, {})[result.index] = result
    return found


def crossover(comparisons: Iterable[LoadComparison]) -> float | None:
    """Closed loop: the concurrency at which the first variant's aggregate throughput falls below the baseline's.

    Between two levels the ratio is interpolated linearly over the logarithm of the concurrency. The lowest level when
    the throughput is lower already there, None when it is lower at no level.
    """
    closed = [c for c in comparisons if c.mode == "closed"]
    points = sorted((c.level, c.throughput_ratio) for c in closed if c.variant == closed[0].variant)
    for index, (level, ratio) in enumerate(points):
        if ratio >= 1.0:
            continue
        if index == 0:
            return level
        before, above = points[index - 1]
        share = (above - 1.0) / (above - ratio)
        return math.exp(math.log(before) + share * (math.log(level) - math.log(before)))
    return None


def _ratio(ours: LoadCell, theirs: LoadCell) -> float | None:
    if theirs.tokens_per_s_per_user == 0 or ours.tokens_per_s_per_user == 0:
        return None
    return ours.tokens_per_s_per_user / theirs.tokens_per_s_per_user


Pair = tuple[list[RequestResult], list[RequestResult]]


def _num_identical(pairs: Iterable[Pair]) -> int:
    """Number of prompts with equal outputs in all repeats."""
    identical = 0
    for ours, theirs in pairs:
        # The seed depends on repeat and index, so only results of the same scheduled request can be equal.
        by_request = {(result.repeat, result.index): result for result in theirs}
        matching = [(result, by_request[key]) for result in ours
                    if (key := (result.repeat, result.index)) in by_request]
        # By token ids where both servers return them, otherwise by text.
        identical += bool(matching) and all(
            first.ids_digest == second.ids_digest if first.ids_digest is not None and second.ids_digest is not None
            else first.digest == second.digest for first, second in matching)
    return identical


def _rates(results: Sequence[RequestResult]) -> tuple[float, float]:
    """Sum of the requests' tokens per second, and the number of requests."""
    rates = [result.tokens / result.end_to_end_s for result in results if result.end_to_end_s > 0]
    return sum(rates), float(len(rates))


def _fields(pairs: Iterable[Pair], summed: Callable[[Sequence[RequestResult]], tuple[float, float]]) -> FloatArray:
    """Of `intervals.ratio_interval`: two sums over the results of each prompt, for both variants."""
    return np.array([(*summed(ours), *summed(theirs)) for ours, theirs in pairs], dtype=np.float64)
