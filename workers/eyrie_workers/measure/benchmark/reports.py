"""Ledger entries to the reports of the contract.

Repeats of a prompt are summed first: a prompt has the same weight in the bootstrap however often it was repeated, and
it counts as identical only if every repeat is.
"""

from collections.abc import Iterable, Sequence
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
from eyrie_workers.measure.benchmark.variants import BASELINE, Entry, Sample, Unit, Variant
from eyrie_workers.measure.intervals import Tally


def cell_report(entries: Sequence[Entry], suite: str, temperature: float, tree: DraftTreeShape,
                divergences: Sequence[str] = (), near_ties: int = 0, seed: int = 0, *,
                compared: bool = True) -> CellReport:
    """One suite at one temperature. Prompts that the variant has not answered are left out. Raises ValueError when
    nothing was measured there."""
    # All repeats of each prompt: the drafted answer, and that of the baseline.
    repeats: dict[str, list[tuple[Sample, Sample]]] = {}
    for entry in entries:
        if (entry.suite, entry.temperature) == (suite, temperature) and tree.label() in entry.samples:
            repeats.setdefault(entry.prompt_id, []).append((entry.samples[tree.label()], entry.samples[BASELINE]))
    if not repeats:
        raise ValueError(f"nothing was measured for suite {suite!r} at temperature {temperature}")
    drafted, baseline = ([pair[side] for pairs in repeats.values() for pair in pairs] for side in (0, 1))
    tallies = [Tally(_tokens(ours), sum(sample.seconds for sample in ours),
                     _tokens(theirs), sum(sample.seconds for sample in theirs))
               for ours, theirs in (zip(*pairs, strict=True) for pairs in repeats.values())]
    histogram = intervals.add_histograms([sample.accepted_histogram for sample in drafted])
    speedup = intervals.speed_ratio(tallies)
    return CellReport(
        suite=suite, temperature=temperature, tree=tree, prompts=len(repeats), tokens=_tokens(drafted),
        tau=intervals.acceptance_length(histogram), acceptance=intervals.conditional_acceptance(histogram),
        accepted_histogram=histogram,
        tokens_per_s=rate(drafted), baseline_tokens_per_s=rate(baseline), speedup=speedup,
        speedup_interval=intervals.ratio_interval(speedup, np.array(tallies), seed),
        ttft_s=median(s.ttft_s for s in drafted),
        baseline_ttft_s=median(s.ttft_s for s in baseline),
        identical=sum(all(ours.token_ids == theirs.token_ids for ours, theirs in pairs) for pairs in repeats.values()),
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
            compared = temperature == 0.0 or session.engine.same_samples
            differing: list[Divergence] = []
            for unit, entry in measured if compared else ():
                plain, drafted = entry.samples[BASELINE].token_ids, entry.samples[variant.title].token_ids
                # The judge of the session is loaded only when an answer differs.
                if (unit.prompt.suite, unit.temperature) == (suite, temperature) and plain != drafted:
                    divergence = explain(session.judge, unit.prompt.id, unit.prompt_ids, plain, drafted,
                                         temperature=temperature, seed=unit.seed(session.spec.seed))
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
        engine=session.engine.describe(), environment=environment(session.dtype), seconds=seconds)
