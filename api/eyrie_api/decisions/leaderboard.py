"""Selection of the best checkpoint and ranking of the others. Pure.

Checkpoints are ranked by the mean over suites of the mean over temperatures, so that every suite has the same weight
whatever its number of prompts or temperatures. (The blog post "Making an EAGLE fly" selects likewise, "based on the
best average performance across all benchmarks, not peak performance on any single one".) A checkpoint that changed the
target's output ranks below all that did not. `eyrie_api.database.results` reads the reports.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from eyrie_api.contract.engine import EngineKind
from eyrie_api.contract.model import Interval
from eyrie_api.contract.reports import BenchmarkReport, CellReport, LeaderboardEntry
from eyrie_api.contract.status import LeaderboardChoices
from eyrie_api.errors import InvalidInput

_EMBEDDED: EngineKind = "embedded"  # reports without an engine are from before there was a choice
WITHOUT_DRAFTER = ("off", "ngram")
"""Families of the lines that have no drafter to serve."""


@dataclass(frozen=True)
class MeasuredCheckpoint:
    job_id: str
    family: str
    target: str
    tuned: bool
    """The report is `TuneReport.final`: measured with the tuned draft tree."""

    report: BenchmarkReport


def suite_means(report: BenchmarkReport, of: Callable[[CellReport], float] = lambda cell: cell.speedup) \
        -> dict[str, float]:
    """Suite -> mean over its temperatures of the speed-up, or of another figure, in the order of the cells."""
    by_suite: dict[str, list[float]] = {}
    for cell in report.cells:
        by_suite.setdefault(cell.suite, []).append(of(cell))
    return {suite: fmean(values) for suite, values in by_suite.items()}


def mean_speedup(report: BenchmarkReport) -> float:
    """Mean over suites and temperatures, by which checkpoints are ranked. Raises InvalidInput for a report without
    cells."""
    means = suite_means(report)
    if not means:
        raise InvalidInput(f"benchmark report of {report.checkpoint!r} has no cells",
                           "benchmark it on at least one suite and temperature")
    return fmean(means.values())


def speedup_by_concurrency(report: BenchmarkReport) -> dict[int, float]:
    """Requests decoded at once -> mean speed-up over temperatures, lowest first; 1 is `mean_speedup`."""
    by_concurrency: dict[int, list[float]] = {}
    for cell in report.concurrent:
        by_concurrency.setdefault(cell.concurrency, []).append(cell.speedup)
    return {1: mean_speedup(report)} | {number: fmean(speedups) for number, speedups in sorted(by_concurrency.items())}


def _preference(report: BenchmarkReport) -> tuple[bool, float, float]:
    # Lossless first; equal means are ordered by their slowest suite.
    return report.lossless, mean_speedup(report), min(suite_means(report).values())


def select_best(reports: Sequence[BenchmarkReport]) -> BenchmarkReport:
    """The report with the best mean among the lossless ones, or among all when none is lossless.

    A drafter that is not lossless is refused by promotion, not here: in bfloat16, near-ties of logits resolve
    differently, and a policy may allow that. Ties are broken by the slowest suite, then by name. Raises InvalidInput
    for no reports.
    """
    if not reports:
        raise InvalidInput("no benchmark report to choose from", "measure again: eyrie retry JOB --from benchmark")
    by_name = sorted(reports, key=lambda report: report.checkpoint)
    return max(by_name, key=_preference)


def select_for_proof(reports: Sequence[BenchmarkReport], *, rivals: bool) -> BenchmarkReport:
    """The report of the checkpoint to tune and prove: the best candidate, or with `rivals` the best drafter of all.
    N-gram look-up is not selected: tuning compares it whichever drafter is. Raises InvalidInput where none could be
    measured."""
    refused = [report for report in reports if report.dropped is not None and not report.rival]
    measured = [report for report in reports if report.dropped is None and (
        not report.rival or (rivals and _is_drafter(report)))]
    if refused and not measured:
        raise InvalidInput("; ".join(f"{report.checkpoint} could not be measured: {report.dropped}"
                                     for report in refused),
                           "give a drafter of this target, in a form that Eyrie reads (docs/drafters.md)")
    return select_best(measured)


def best_rival(reports: Sequence[BenchmarkReport], besides: str) -> BenchmarkReport | None:
    """The best rival with a drafter of its own, other than the selected checkpoint; None without one."""
    rivals = [report for report in reports if report.rival and report.checkpoint != besides and _is_drafter(report)]
    return select_best(rivals) if rivals else None


def _is_drafter(report: BenchmarkReport) -> bool:
    return report.dropped is None and report.family not in WITHOUT_DRAFTER


def no_drafter(checkpoint: str, measured: BenchmarkReport) -> BenchmarkReport:
    """The line of no drafter on the leaderboard: the baseline of another checkpoint's benchmark."""
    same = {"tau": 1.0, "speedup": 1.0, "speedup_interval": Interval(low=1.0, high=1.0), "near_ties": 0,
            "divergences": ()}
    cells = tuple(cell.model_copy(update=same | {
        "tree": None, "tokens": 0, "tau_of_new_text": None, "acceptance": (), "accepted_histogram": (),
        "tokens_per_s": cell.baseline_tokens_per_s, "ttft_s": cell.baseline_ttft_s, "identical": cell.prompts})
        for cell in measured.cells)
    concurrent = tuple(load.model_copy(update=same | {
        "tokens_per_s": load.baseline_tokens_per_s, "identical": load.requests}) for load in measured.concurrent)
    return measured.model_copy(update={
        "checkpoint": checkpoint, "candidate": checkpoint, "path": "", "cells": cells, "concurrent": concurrent,
        "family": "off", "rival": True, "lossless": True, "speedup": 1.0})


@dataclass(frozen=True)
class Selection:
    """Which measurements to rank by; None does not restrict."""

    suite: str | None = None
    temperature: float | None = None
    engine: EngineKind | None = None


def select(measured: Iterable[MeasuredCheckpoint], wanted: Selection) -> tuple[MeasuredCheckpoint, ...]:
    """The reports with the selected cells alone, without those that have none.

    A report stays `lossless` or not as a whole: a drafter that changes one suite's output is not lossless in another.
    With several requests at once the suites are mixed, so a selection by suite leaves those measurements out.
    """
    selected = []
    for checkpoint in measured:
        cells = tuple(cell for cell in checkpoint.report.cells if wanted.suite in (None, cell.suite)
                      and wanted.temperature in (None, cell.temperature))
        concurrent = tuple(cell for cell in checkpoint.report.concurrent if wanted.suite is None
                           and wanted.temperature in (None, cell.temperature))
        if cells and wanted.engine in (None, _engine(checkpoint)):
            report = checkpoint.report.model_copy(update={"cells": cells, "concurrent": concurrent})
            selected.append(replace(checkpoint, report=report))
    return tuple(selected)


def choices_of(measured: Sequence[MeasuredCheckpoint]) -> LeaderboardChoices:
    """What these results can be selected by."""
    cells = [cell for checkpoint in measured for cell in checkpoint.report.cells]
    return LeaderboardChoices(
        families=tuple(sorted({checkpoint.family for checkpoint in measured})),
        suites=tuple(dict.fromkeys(cell.suite for cell in cells)),
        temperatures=tuple(sorted({cell.temperature for cell in cells})),
        engines=tuple(sorted({_engine(checkpoint) for checkpoint in measured})))


def _engine(checkpoint: MeasuredCheckpoint) -> EngineKind:
    return _EMBEDDED if checkpoint.report.engine is None else checkpoint.report.engine.kind


def rank(measured: Iterable[MeasuredCheckpoint]) -> tuple[LeaderboardEntry, ...]:
    """Leaderboard entries, best first, numbered from 1."""
    ordered = sorted(measured, key=lambda each: (each.job_id, each.report.checkpoint, not each.tuned))
    ordered.sort(key=lambda each: _preference(each.report), reverse=True)
    return tuple(_entry(checkpoint, place) for place, checkpoint in enumerate(ordered, start=1))


def _entry(checkpoint: MeasuredCheckpoint, place: int) -> LeaderboardEntry:
    report, cells = checkpoint.report, checkpoint.report.cells
    # The means of the ends. A mean's standard error is at most the mean of the standard errors, and reaches it where
    # the measurements vary together, as those of one suite's prompts at two temperatures do.
    low, high = (fmean(suite_means(report, end).values()) for end in (
        lambda cell: cell.speedup_interval.low, lambda cell: cell.speedup_interval.high))
    return LeaderboardEntry(
        job_id=checkpoint.job_id, checkpoint=report.checkpoint, candidate=report.candidate, family=checkpoint.family,
        target=checkpoint.target, tree=cells[0].tree, tau=fmean(cell.tau for cell in cells),
        tokens_per_s=fmean(cell.tokens_per_s for cell in cells), speedup=mean_speedup(report),
        speedup_greedy=_mean(cell for cell in cells if cell.temperature == 0.0),
        speedup_sampled=_mean(cell for cell in cells if cell.temperature > 0.0),
        lossless=report.lossless, tuned=checkpoint.tuned, rival=report.rival, suites=suite_means(report),
        speedup_by_concurrency=speedup_by_concurrency(report), rank=place,
        speedup_interval=Interval(low=low, high=high))


def _mean(cells: Iterable[CellReport]) -> float | None:
    values = [cell.speedup for cell in cells]
    return fmean(values) if values else None
