"""From samples to the figures of a load report. Pure.

Throughput is all output tokens over the wall clock of the level's blocks; what one user feels is the mean over requests
of tokens over end-to-end time. Acceptance is summed over the histograms of the requests, whatever else the server has
answered before.

Uncertainty comes from the choice of prompts: prompts are resampled, all requests of a prompt in both variants together
(`intervals`). Wall clock cannot be resampled by prompt, so the interval of a throughput ratio takes its
width from the tokens and the seconds each prompt spent being answered: in a closed loop of c users throughput is
c * tokens / those seconds, but for the ramp down. In an open loop arrivals set the throughput until the server falls
behind, and that width is wider than the truth.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from eyrie_api.v1alpha1.load import LoadCell, LoadComparison, LoadLevel, LoadSpec, Quantiles, ServiceLevel
from eyrie_api.v1alpha1.model import Interval
from eyrie_workers.intervals import (
    acceptance_length,
    add_histograms,
    conditional_acceptance,
    interval_around,
    standard_error,
)
from eyrie_workers.load.client import RequestResult
from eyrie_workers.load.completion_stream import FloatArray
from eyrie_workers.load.schedule import Level

PromptKey = tuple[str, str]


@dataclass(frozen=True)
class LevelResults:
    """All blocks of one variant at one level."""

    variant: str
    level: Level
    samples: tuple[RequestResult, ...]
    seconds: float
    """Wall clock of the blocks, from the first request sent to the last answer."""

    cpu_s: float
    """Processor time of the generator in them."""


def quantiles(values: FloatArray) -> Quantiles | None:
    """Mean and quantiles; None of nothing."""
    if len(values) == 0:
        return None
    p50, p90, p99 = (float(q) for q in np.quantile(values, (0.5, 0.9, 0.99)))
    return Quantiles(mean=float(values.mean()), p50=p50, p90=p90, p99=p99)


def keeps(sample: RequestResult, slo: ServiceLevel) -> bool:
    """Whether a request kept every bound that is given. A failed one kept none."""
    if sample.failure is not None:
        return False
    mean_gap = float(sample.gaps_s.mean()) if len(sample.gaps_s) else 0.0
    pairs = ((sample.ttft_s, slo.ttft_s), (mean_gap, slo.inter_token_s), (sample.end_to_end_s, slo.end_to_end_s))
    return all(value is not None and value <= bound for value, bound in pairs if bound is not None)


def drafts(samples: Iterable[RequestResult]) -> bool:
    """Whether a variant drafts. An engine that does not may still count its rounds, all of which accepted nothing;
    and a
    single answer of one that does may have accepted nothing. So all answers are asked."""
    return any(s.proposed or (s.histogram is not None and len(s.histogram) > 1) for s in samples)


def cell(samples: Sequence[RequestResult], seconds: float, spec: LoadSpec, *, drafting: bool) -> LoadCell:
    """Figures of the requests of one variant at one level, of one category or all. `drafting`: whether the variant
    does."""
    good = [sample for sample in samples if sample.failure is None]
    failed: dict[str, int] = {}
    for sample in samples:
        if sample.failure is not None:
            failed[sample.failure] = failed.get(sample.failure, 0) + 1
    tokens = sum(sample.tokens for sample in good)
    histograms = [sample.histogram for sample in good if sample.histogram is not None] if drafting else []
    histogram = add_histograms(histograms)
    told = sum(histogram) > 0
    return LoadCell(
        requests=len(samples), completed=len(good), failed=dict(sorted(failed.items())), output_tokens=tokens,
        seconds=seconds, tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        tokens_per_s_per_user=_user_rate(good),
        ttft_s=quantiles(np.array([sample.ttft_s for sample in good if sample.ttft_s is not None])),
        inter_token_s=quantiles(np.concatenate([sample.gaps_s for sample in good]) if good else np.zeros(0)),
        end_to_end_s=quantiles(np.array([sample.end_to_end_s for sample in good])),
        goodput_per_s=sum(keeps(sample, spec.slo) for sample in samples) / seconds
        if spec.slo is not None and seconds > 0 else None,
        tau=acceptance_length(histogram) if told else None,
        tau_interval=_tau_interval(good, spec.seed) if told else None,
        acceptance=conditional_acceptance(histogram), accepted_histogram=histogram)


def level_report(seen: LevelResults, spec: LoadSpec) -> LoadLevel:
    """One variant at one level, with its categories."""
    categories = dict.fromkeys(sample.category for sample in seen.samples)
    drafting = drafts(seen.samples)
    return LoadLevel(
        variant=seen.variant, mode=seen.level.mode, level=seen.level.value,
        total=cell(seen.samples, seen.seconds, spec, drafting=drafting),
        by_category={name: cell([s for s in seen.samples if s.category == name], seen.seconds, spec, drafting=drafting)
                     for name in categories},
        generator_cpu_share=seen.cpu_s / seen.seconds if seen.seconds > 0 else None)


def comparison(variant: LevelResults, baseline: LevelResults, spec: LoadSpec) -> LoadComparison | None:
    """A variant against the baseline at one level; None unless both answered some prompt."""
    pairs = _by_prompt(variant.samples, baseline.samples)
    if not pairs:
        return None
    ours, theirs = level_report(variant, spec), level_report(baseline, spec)
    throughput = ours.total.tokens_per_s / theirs.total.tokens_per_s if theirs.total.tokens_per_s else None
    user = _ratio(ours.total, theirs.total)
    if not throughput or not user:
        return None
    compared, identical = _identical(pairs.values())
    by_category = {name: _ratio(ours.by_category[name], theirs.by_category[name])
                   for name in ours.by_category.keys() & theirs.by_category.keys()}
    return LoadComparison(
        variant=variant.variant, baseline=baseline.variant, mode=variant.level.mode, level=variant.level.value,
        throughput_ratio=throughput, throughput_interval=_interval(throughput, pairs.values(), _work, spec.seed),
        user_ratio=user, user_interval=_interval(user, pairs.values(), _rates, spec.seed),
        ttft_p99_ratio=ours.total.ttft_s.p99 / theirs.total.ttft_s.p99
        if ours.total.ttft_s is not None and theirs.total.ttft_s is not None and theirs.total.ttft_s.p99 > 0 else None,
        by_category={name: by_category[name] for name in ours.by_category if by_category.get(name)},
        compared=compared, identical=identical)


def crossover(comparisons: Iterable[LoadComparison]) -> float | None:
    """Closed loop: where the first non-baseline variant's aggregate throughput falls below the baseline's.

    Between two levels the ratio is taken to move in a straight line over the logarithm of the concurrency. Already
    below at the lowest level: that level. None when it does not fall below within the levels.
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


def _user_rate(good: Sequence[RequestResult]) -> float:
    rates = [sample.tokens / sample.end_to_end_s for sample in good if sample.end_to_end_s > 0]
    return sum(rates) / len(rates) if rates else 0.0


def _ratio(ours: LoadCell, theirs: LoadCell) -> float | None:
    if theirs.tokens_per_s_per_user == 0 or ours.tokens_per_s_per_user == 0:
        return None
    return ours.tokens_per_s_per_user / theirs.tokens_per_s_per_user


Pair = tuple[list[RequestResult], list[RequestResult]]


def _by_prompt(ours: Sequence[RequestResult], theirs: Sequence[RequestResult]) -> dict[PromptKey, Pair]:
    """Answers of both variants by prompt; prompts that one variant never answered left out."""
    pairs: dict[PromptKey, Pair] = {}
    for side, samples in enumerate((ours, theirs)):
        for sample in samples:
            if sample.failure is None:
                pairs.setdefault((sample.category, sample.prompt_id), ([], []))[side].append(sample)
    return {key: pair for key, pair in pairs.items() if pair[0] and pair[1]}


def _identical(pairs: Iterable[Pair]) -> tuple[int, int]:
    """Prompts both answered, and those of them all of whose answers are the same."""
    compared = identical = 0
    for ours, theirs in pairs:
        compared += 1
        # With a seed by repeat and place, only answers to the same question can be the same.
        by_question = {(sample.repeat, sample.index): sample for sample in theirs}
        together = [(sample, by_question[key]) for sample in ours
                    if (key := (sample.repeat, sample.index)) in by_question]
        identical += bool(together) and all(_same(one, other) for one, other in together)
    return compared, identical


def _same(one: RequestResult, other: RequestResult) -> bool:
    if one.ids_digest is not None and other.ids_digest is not None:
        return one.ids_digest == other.ids_digest
    return one.digest == other.digest


def _work(samples: Sequence[RequestResult]) -> tuple[float, float]:
    """Tokens, and the seconds they were waited for."""
    return float(sum(sample.tokens for sample in samples)), sum(sample.end_to_end_s for sample in samples)


def _rates(samples: Sequence[RequestResult]) -> tuple[float, float]:
    """Sum of the requests' tokens per second, and their number."""
    rates = [sample.tokens / sample.end_to_end_s for sample in samples if sample.end_to_end_s > 0]
    return sum(rates), float(len(rates))


def _interval(value: float, pairs: Iterable[Pair], summed: Callable[[Sequence[RequestResult]], tuple[float, float]],
              seed: int) -> Interval:
    """Interval of a ratio of quotients of sums. One prompt says nothing about others: its interval is the point."""
    fields = np.array([(*summed(ours), *summed(theirs)) for ours, theirs in pairs], dtype=np.float64)
    fields = fields[(fields > 0).all(axis=1)]  # a prompt answered with nothing has no rate
    if len(fields) < 2:
        return Interval(low=value, high=value)
    error = standard_error(fields, lambda sums: (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]), seed)
    return interval_around(value, error, len(fields))


def _tau_interval(good: Sequence[RequestResult], seed: int) -> Interval:
    """Of the acceptance length, prompts resampled. It cannot be below 1."""
    by_prompt: dict[PromptKey, list[tuple[int, ...]]] = {}
    for sample in good:
        if sample.histogram is not None and sum(sample.histogram) > 0:
            by_prompt.setdefault((sample.category, sample.prompt_id), []).append(sample.histogram)
    summed = [add_histograms(histograms) for histograms in by_prompt.values()]
    value = acceptance_length(add_histograms(summed))
    if len(summed) < 2:
        return Interval(low=value, high=value)
    fields = np.array([(sum(k * n for k, n in enumerate(h)), sum(h)) for h in summed], dtype=np.float64)
    error = standard_error(fields, lambda sums: 1.0 + sums[:, 0] / sums[:, 1], seed)
    around = interval_around(value, error, len(summed))
    return Interval(low=max(1.0, around.low), high=around.high)
