"""Ledger entries to the reports of the contract. Pure.

Repeats of a prompt are summed first: a prompt has the same weight in the bootstrap however often it was repeated, and
it counts as identical only if every repeat is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.reports import CellReport
from eyrie_workers.intervals import (
    Tally,
    acceptance_length,
    add_histograms,
    conditional_acceptance,
    speed_interval,
    speed_ratio,
)
from eyrie_workers.measurement.benchmark.samples import BASELINE, Entry, Sample, first_difference

PromptKey = tuple[str, str]


@dataclass(frozen=True)
class PromptResult:
    """One prompt at one temperature: all repeats of the baseline and of one drafted variant."""

    baseline: tuple[Sample, ...]
    drafted: tuple[Sample, ...]

    @property
    def identical(self) -> bool:
        """Whether drafting changed no token in any repeat."""
        return all(first_difference(b.token_ids, d.token_ids) is None
                   for b, d in zip(self.baseline, self.drafted, strict=True))

    @property
    def tally(self) -> Tally:
        """Tokens and seconds of both variants."""
        return Tally(
            tokens=_tokens(self.drafted), seconds=sum(s.seconds for s in self.drafted),
            baseline_tokens=_tokens(self.baseline), baseline_seconds=sum(s.seconds for s in self.baseline))


def by_prompt(entries: Iterable[Entry], variant: str, temperature: float) -> dict[PromptKey, PromptResult]:
    """Results of one variant at one temperature. Prompts that the variant has not answered are left out."""
    grouped: dict[PromptKey, list[Entry]] = {}
    for entry in entries:
        if entry.temperature == temperature and variant in entry.samples:
            grouped.setdefault((entry.suite, entry.prompt_id), []).append(entry)
    return {
        key: PromptResult(tuple(e.samples[BASELINE] for e in group), tuple(e.samples[variant] for e in group))
        for key, group in grouped.items()
    }


def cell_report(entries: Sequence[Entry], suite: str, temperature: float, tree: DraftTreeShape,
                divergences: Sequence[str] = (), near_ties: int = 0, seed: int = 0, *,
                compared: bool = True) -> CellReport:
    """One suite at one temperature. Raises ValueError when nothing was measured there."""
    results = list(by_prompt((e for e in entries if e.suite == suite), tree.label(), temperature).values())
    if not results:
        raise ValueError(f"nothing was measured for suite {suite!r} at temperature {temperature}")
    drafted = [sample for result in results for sample in result.drafted]
    baseline = [sample for result in results for sample in result.baseline]
    tallies = [result.tally for result in results]
    histogram = add_histograms([sample.accepted_histogram for sample in drafted])
    return CellReport(
        suite=suite, temperature=temperature, tree=tree, prompts=len(results), tokens=_tokens(drafted),
        tau=acceptance_length(histogram), acceptance=conditional_acceptance(histogram), accepted_histogram=histogram,
        tokens_per_s=_rate(drafted), baseline_tokens_per_s=_rate(baseline), speedup=speed_ratio(tallies),
        speedup_interval=speed_interval([tallies], seed), ttft_s=median(s.ttft_s for s in drafted),
        baseline_ttft_s=median(s.ttft_s for s in baseline), identical=sum(result.identical for result in results),
        near_ties=near_ties, compared=compared, divergences=tuple(divergences))


def baseline_rate(entries: Sequence[Entry]) -> float:
    """Tokens per second of the undrafted variant over everything measured."""
    return _rate([entry.samples[BASELINE] for entry in entries])


def _tokens(samples: Iterable[Sample]) -> int:
    return sum(len(sample.token_ids) for sample in samples)


def _rate(samples: Sequence[Sample]) -> float:
    return _tokens(samples) / sum(sample.seconds for sample in samples)
