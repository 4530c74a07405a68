"""Ledger entries to the reports of the contract.

Repeats of a prompt are summed first: a prompt has the same weight in the bootstrap however often it was repeated, and
it counts as identical only if every repeat is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.reports import BenchmarkReport, CellReport
from eyrie_api.contract.stages import BenchmarkStage, TuneStage
from eyrie_api.decisions.near_ties import is_lossless
from eyrie_workers.machine import environment
from eyrie_workers.measure import intervals
from eyrie_workers.measure.benchmark.losslessness import Divergence, explain
from eyrie_workers.measure.benchmark.repetition import repeated_share, tau_of_new_text
from eyrie_workers.measure.benchmark.session import Session
from eyrie_workers.measure.benchmark.variants import BASELINE, Entry, Sample, Unit, Variant, unit_seed
from eyrie_workers.measure.intervals import Tally

PromptKey = tuple[str, str]


@dataclass(frozen=True)
class PromptResult:
    """One prompt at one temperature: all repeats of the baseline and of one drafted variant."""

    baseline: tuple[Sample, ...]
    drafted: tuple[Sample, ...]

    @property
    def identical(self) -> bool:
        """Whether drafting changed no token in any repeat."""
        return all(b.token_ids == d.token_ids for b, d in zip(self.baseline, self.drafted, strict=True))

    @property
    def tally(self) -> Tally:
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
    histogram = intervals.add_histograms([sample.accepted_histogram for sample in drafted])
    speedup = intervals.speed_ratio(tallies)
    return CellReport(
        suite=suite, temperature=temperature, tree=tree, prompts=len(results), tokens=_tokens(drafted),
        tau=intervals.acceptance_length(histogram), acceptance=intervals.conditional_acceptance(histogram),
        accepted_histogram=histogram,
        tokens_per_s=rate(drafted), baseline_tokens_per_s=rate(baseline), speedup=speedup,
        speedup_interval=intervals.ratio_interval(speedup, np.array(tallies), seed),
        ttft_s=median(s.ttft_s for s in drafted),
        baseline_ttft_s=median(s.ttft_s for s in baseline), identical=sum(result.identical for result in results),
        near_ties=near_ties, compared=compared, divergences=tuple(divergences),
        repeated_share=repeated_share(drafted), tau_of_new_text=tau_of_new_text(drafted))


def _tokens(samples: Iterable[Sample]) -> int:
    return sum(len(sample.token_ids) for sample in samples)


def rate(samples: Sequence[Sample]) -> float:
    """Tokens per second over all seconds."""
    return _tokens(samples) / sum(sample.seconds for sample in samples)


def report_cells(session: Session, measured: Sequence[tuple[Unit, Entry]],
                 variant: Variant) -> tuple[CellReport, ...]:
    """One cell per suite and temperature for a drafted variant, with a line for every divergence."""
    assert variant.tree is not None
    cells, entries = [], [entry for _, entry in measured]
    for suite in session.suites:
        for temperature in session.spec.temperatures:
            compared = temperature == 0.0 or session.bench.engine.same_samples
            differing: list[Divergence] = []
            for unit, entry in measured if compared else ():
                plain, drafted = entry.samples[BASELINE].token_ids, entry.samples[variant.title].token_ids
                # The judge of the session is loaded only when an answer differs.
                if (unit.prompt.suite, unit.temperature) == (suite, temperature) and plain != drafted:
                    divergence = explain(session.judge, unit.prompt.id, unit.prompt_ids, plain, drafted,
                                         temperature=temperature, seed=unit_seed(unit, session.spec.seed))
                    assert divergence is not None
                    differing.append(divergence)
            lines = [divergence.line(session.dtype) for divergence in differing]
            wrong = {divergence.prompt_id for divergence in differing if not divergence.is_tie(session.dtype)}
            # A prompt may be repeated: each repeat must be a near-tie.
            ties = {divergence.prompt_id for divergence in differing} - wrong
            cells.append(cell_report(entries, suite, temperature, variant.tree, lines, len(ties), session.spec.seed,
                                     compared=compared))
    return tuple(cells)


def benchmark_report(session: Session, spec: BenchmarkStage | TuneStage, entries: Sequence[Entry],
                     cells: tuple[CellReport, ...], seconds: float) -> BenchmarkReport:
    return BenchmarkReport(
        checkpoint=spec.checkpoint, candidate=spec.candidate, path=spec.drafter_dir, cells=cells,
        lossless=all(is_lossless(cell.prompts, cell.identical, cell.near_ties) for cell in cells if cell.compared),
        speedup=sum(cell.speedup for cell in cells) / len(cells),
        baseline_tokens_per_s=rate([entry.samples[BASELINE] for entry in entries]),
        engine=session.bench.engine.describe(), environment=environment(session.dtype), seconds=seconds)
