"""The report of a comparison: its models, and their computation from ledger entries. Pure.

Definitions. tau, acceptance and speed-up are those of `v1alpha1.reports`. Blocks are resampled, all temperatures of a
block together (`intervals`). A *round* is a target pass and the drafting before it:

    draft_ms      proposing and settling, per round
    draft_share   the same in passes of the undrafted target at the same load
    round_cost    the whole round in such passes; tau / round_cost is the speed-up while decoding

Two variants are compared in pairs on the blocks that both answered, which resolves smaller differences than two
overlapping intervals against off. They are *indistinguishable* when the interval of their ratio contains 1.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from eyrie_api.v1alpha1.model import Frozen, Interval
from eyrie_api.v1alpha1.reports import Environment
from eyrie_workers.comparison.forms import OFF
from eyrie_workers.comparison.measuring import Entry, VariantRun
from eyrie_workers.comparison.plan import Budget
from eyrie_workers.intervals import (
    FloatArray,
    Tally,
    acceptance_length,
    add_histograms,
    conditional_acceptance,
    interval_around,
    mean_speed_ratio,
    speed_interval,
    standard_error,
)
from eyrie_workers.measurement.benchmark.blocks import num_identical
from eyrie_workers.measurement.benchmark.variants import Variant

Outcome = Literal["faster", "slower", "indistinguishable"]
Verdict = Literal["holds", "does not hold here", "indistinguishable", "not measured"]


class Figures(Frozen):
    """One variant over some blocks."""

    concurrency: int
    suite: str | None = None
    """None: all suites together."""

    temperature: float | None = None
    """None: the mean over temperatures of the speed-up; everything else over all of them."""

    blocks: int
    requests: int
    identical: int
    """Requests answered as the undrafted engine answered them, token by token."""

    tokens: int
    tau: float
    tau_interval: Interval
    acceptance: tuple[float, ...]
    accepted_histogram: tuple[int, ...]
    tokens_per_s: float
    off_tokens_per_s: float
    speedup: float
    speedup_interval: Interval
    draft_ms: float
    draft_share: float
    round_cost: float
    nodes_per_round: float
    """Nodes verified per row and round, root included."""


class Trained(Frozen):
    """One family's drafter and the cost of its training."""

    family: str
    checkpoint: str
    """Its directory."""

    digest: str
    parameters: int
    epochs: float
    steps: int
    tokens: int
    """Packed tokens trained on."""

    seconds: float
    """Seconds of optimiser steps, without loading and evaluation."""

    cpu_seconds: float | None
    """Processor seconds of the whole stage; None when a run was killed, because its share is unknown."""

    tokens_per_s: float
    draft_vocab_size: int
    layers: tuple[int, ...]
    """Indices into `hidden_states` of the layers it reads."""

    feature_bytes: int
    """Bytes of captured states it needs: its layers at every position, distillation targets at supervised ones."""

    first_accuracy: float
    """Accuracy of the first drafting step on held-out captured rows."""


class VariantReport(Frozen):
    """One variant."""

    rank: int
    variant: Variant
    lossless: bool
    """Every answer equals the undrafted one."""

    overall: Figures
    """All suites and temperatures, at the first concurrency; determines the rank."""

    figures: tuple[Figures, ...]
    """By concurrency; by concurrency and temperature; by those and suite."""

    def at(self, concurrency: int, temperature: float | None = None, suite: str | None = None) -> Figures:
        """One of the figures. Raises StopIteration for what was not measured."""
        return next(one for one in self.figures
                    if (one.concurrency, one.temperature, one.suite) == (concurrency, temperature, suite))


class PairComparison(Frozen):
    """Two variants on the same blocks, all suites and temperatures, at one concurrency."""

    one: str
    other: str
    concurrency: int
    ratio: float
    """Speed of `one` over that of `other`."""

    interval: Interval
    outcome: Outcome
    tau_ratio: float
    tau_interval: Interval


class Row(Frozen):
    """A row of the published table of three versions, and the same row measured."""

    aspect: str
    seed: tuple[str, str, str]
    here: tuple[str, str, str]


class Claim(Frozen):
    """A published claim against the measurement."""

    aspect: str
    seed: str
    here: str
    verdict: Verdict


class CompareReport(Frozen):
    """The whole comparison."""

    target: str
    target_parameters: int
    budget: Budget
    store_tokens: int
    store_bytes: int
    conversations: int
    suites: tuple[str, ...]
    temperatures: tuple[float, ...]
    concurrencies: tuple[int, ...]
    max_new_tokens: int
    variants: tuple[VariantReport, ...]
    """Best first."""

    trained: tuple[Trained, ...]
    failed: dict[str, str]
    """Families whose training failed, and why."""

    contests: tuple[PairComparison, ...]
    """The best against every other variant, and the pairs that claims are about."""

    rows: tuple[Row, ...] = ()
    claims: tuple[Claim, ...] = ()
    verdict: str = ""
    winner: str = OFF
    """The variant to serve; `off` when no variant's interval lies above 1."""

    seconds: dict[str, float]
    """Wall time by stage."""

    notes: tuple[str, ...] = ()
    """Limits of the figures."""

    environment: Environment

    def named(self, title: str) -> VariantReport | None:
        """The variant of this title, if it was compared."""
        return next((one for one in self.variants if one.variant.title == title), None)

    def comparison(self, one: str, other: str) -> PairComparison | None:
        """`one` against `other` at the first concurrency, from either direction."""
        for pair in self.contests:
            if pair.concurrency == self.concurrencies[0]:
                if (pair.one, pair.other) == (one, other):
                    return pair
                if (pair.one, pair.other) == (other, one):
                    return swapped(pair)
        return None


def swapped(pair: PairComparison) -> PairComparison:
    """The same comparison with `one` and `other` exchanged."""
    back: dict[Outcome, Outcome] = {"faster": "slower", "slower": "faster", "indistinguishable": "indistinguishable"}
    return PairComparison(one=pair.other, other=pair.one, concurrency=pair.concurrency, ratio=1.0 / pair.ratio,
                   interval=_turned(pair.interval), outcome=back[pair.outcome], tau_ratio=1.0 / pair.tau_ratio,
                   tau_interval=_turned(pair.tau_interval))


def _turned(interval: Interval) -> Interval:
    return Interval(low=1.0 / interval.high, high=1.0 / interval.low)


class MeasuredBlocks:
    """The ledger entries of a comparison, and the figures computed from them."""

    def __init__(self, entries: Sequence[Entry], seed: int = 0) -> None:
        self.entries, self._seed = entries, seed
        self.concurrencies = list(dict.fromkeys(entry.concurrency for entry in entries))
        self.temperatures = sorted({entry.temperature for entry in entries})
        self.suites = list(dict.fromkeys(entry.suite for entry in entries))

    def select(self, concurrency: int, temperature: float | None = None, suite: str | None = None) -> list[Entry]:
        """Entries at a concurrency; of all temperatures and suites where none is given."""
        return [entry for entry in self.entries
                if entry.concurrency == concurrency and temperature in (None, entry.temperature)
                and suite in (None, entry.suite)]

    def compared(self, one: str, other: str, entries: Iterable[Entry]) -> tuple[float, Interval]:
        """Speed of one variant over the other's: the mean over temperatures, and its interval."""
        by_temperature: dict[float, dict[tuple[str, int], Tally]] = {}
        for entry in entries:
            ours, theirs = entry.runs[one], entry.runs[other]
            by_temperature.setdefault(entry.temperature, {})[entry.suite, entry.index] = Tally(
                ours.block.tokens, ours.block.seconds, theirs.block.tokens, theirs.block.seconds)
        groups = [[tallies[key] for key in sorted(tallies)] for _, tallies in sorted(by_temperature.items())]
        return mean_speed_ratio(groups), speed_interval(groups, self._seed)

    def tau(self, one: str, other: str, entries: Iterable[Entry]) -> tuple[float, Interval]:
        """tau of one variant over the other's, and its interval; temperatures pooled."""
        rows: dict[tuple[str, int], FloatArray] = {}
        for entry in entries:
            counts = [count for title in (one, other) for count in _counts(entry.runs[title])]
            key = (entry.suite, entry.index)
            rows[key] = rows.get(key, np.zeros(4)) + np.array(counts, dtype=np.float64)
        fields = np.stack(list(rows.values()))
        value = float(_tau_ratio(fields.sum(0)[None])[0])
        if len(fields) < 2:
            return value, Interval(low=value, high=value)
        return value, interval_around(value, standard_error(fields, _tau_ratio, self._seed), len(fields))

    def figures(self, title: str, concurrency: int, temperature: float | None = None,
                suite: str | None = None) -> Figures:
        """One variant over the blocks of a load, a temperature, a suite."""
        entries = self.select(concurrency, temperature, suite)
        ours, off = [entry.runs[title] for entry in entries], [entry.runs[OFF] for entry in entries]
        histogram = add_histograms([run.block.accepted_histogram for run in ours])
        speedup, interval = self.compared(title, OFF, entries)
        rounds = max(1, sum(run.rounds for run in ours))
        off_round = sum(run.verify_s for run in off) / max(1, sum(run.rounds for run in off))
        draft_s = sum(run.draft_s for run in ours) / rounds
        verify_s = sum(run.verify_s for run in ours) / rounds
        return Figures(
            concurrency=concurrency, suite=suite, temperature=temperature, blocks=len(entries),
            requests=sum(len(run.block.answers) for run in ours),
            identical=sum(num_identical(run.block, plain.block) for run, plain in zip(ours, off, strict=True)),
            tokens=sum(run.block.tokens for run in ours), tau=acceptance_length(histogram),
            tau_interval=self.tau(title, OFF, entries)[1],
            acceptance=conditional_acceptance(histogram), accepted_histogram=histogram,
            tokens_per_s=_rate(ours), off_tokens_per_s=_rate(off), speedup=speedup, speedup_interval=interval,
            draft_ms=1e3 * draft_s, draft_share=draft_s / off_round, round_cost=(draft_s + verify_s) / off_round,
            nodes_per_round=sum(run.nodes for run in ours) / rounds)

    def variant(self, variant: Variant) -> VariantReport:
        """The report of one variant; `rank` assigns its rank."""
        title = variant.title
        figures = tuple(
            self.figures(title, concurrency, temperature, suite)
            for concurrency in self.concurrencies
            for temperature, suite in [(None, None), *((t, None) for t in self.temperatures),
                                       *((None, s) for s in self.suites),
                                       *((t, s) for t in self.temperatures for s in self.suites)])
        overall = figures[0]
        return VariantReport(rank=1, variant=variant, overall=overall, figures=figures,
                             lossless=all(one.identical == one.requests for one in figures))

    def pair(self, one: str, other: str, concurrency: int) -> PairComparison:
        """Two variants on the same blocks."""
        entries = self.select(concurrency)
        ratio, interval = self.compared(one, other, entries)
        tau_ratio, tau_interval = self.tau(one, other, entries)
        return PairComparison(one=one, other=other, concurrency=concurrency, ratio=ratio, interval=interval,
                       outcome=outcome(interval), tau_ratio=tau_ratio, tau_interval=tau_interval)


def outcome(interval: Interval) -> Outcome:
    """The outcome given the interval of a ratio. A point interval, from a single block, decides nothing."""
    if interval.low == interval.high:
        return "indistinguishable"
    return "faster" if interval.low > 1.0 else "slower" if interval.high < 1.0 else "indistinguishable"


def rank(variants: Iterable[VariantReport]) -> tuple[VariantReport, ...]:
    """Best first: lossless before others, then by speed at the first concurrency, then by title."""
    ordered = sorted(variants, key=lambda one: (not one.lossless, -one.overall.speedup, one.variant.title))
    return tuple(one.model_copy(update={"rank": place}) for place, one in enumerate(ordered, start=1))


def choose(variants: Sequence[VariantReport]) -> str:
    """The variant to serve: the first lossless one whose speed-up interval lies above 1; else off."""
    for one in variants:
        if one.variant.title != OFF and one.lossless and outcome(one.overall.speedup_interval) == "faster":
            return one.variant.title
    return OFF


def pair_comparisons(measured_blocks: MeasuredBlocks, ranked: Sequence[VariantReport],
                     pairs: Iterable[tuple[str, str]]) -> tuple[PairComparison, ...]:
    """The best drafted variant against every other, and `pairs`, at the first concurrency; each pair once."""
    titles = [one.variant.title for one in ranked]
    drafted = [title for title in titles if title != OFF]
    wanted = [(drafted[0], title) for title in titles if title != drafted[0]] if drafted else []
    wanted += [pair for pair in pairs if set(pair) <= set(titles)]
    unique = {frozenset(pair): pair for pair in reversed(wanted)}
    first = measured_blocks.concurrencies[0]
    return tuple(measured_blocks.pair(*pair, first) for pair in reversed(unique.values()))


def _counts(run: VariantRun) -> tuple[float, float]:
    """Tokens from rounds, and rounds. Off has tau 1, with or without a round."""
    histogram = run.block.accepted_histogram
    rounds = sum(histogram)
    return float(rounds + sum(k * count for k, count in enumerate(histogram))), float(rounds)


def _tau_ratio(sums: FloatArray) -> FloatArray:
    """[R, 4] tokens and rounds of two variants to the ratio of their taus, [R]."""
    # Sums are at least 1, so that a variant without rounds has tau 1.
    ones = np.maximum(sums, 1.0)
    ratio: FloatArray = (ones[:, 0] / ones[:, 1]) / (ones[:, 2] / ones[:, 3])
    return ratio


def _rate(runs: Sequence[VariantRun]) -> float:
    return sum(run.block.tokens for run in runs) / sum(run.block.seconds for run in runs)
