"""Selection of the best checkpoint and ranking of the others. Pure.

Checkpoints are ranked by the mean over suites of the mean over temperatures, so that every suite has the same weight
whatever its number of prompts or temperatures. (The blog post "Making an EAGLE fly" selects likewise, "based on the
best average performance across all benchmarks, not peak performance on any single one".) A checkpoint that changed the
target's output ranks below all that did not. `eyrie_api.database.results` reads the reports.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.reports import BenchmarkReport, CellReport, LeaderboardEntry


@dataclass(frozen=True)
class Measured:
    """One benchmark report and its origin."""

    job_id: str
    family: str
    target: str
    tuned: bool
    """The report is `TuneReport.final`: measured with the tuned draft tree."""

    report: BenchmarkReport


def suite_means(report: BenchmarkReport) -> dict[str, float]:
    """Suite -> mean speed-up over its temperatures, in the order of the cells."""
    by_suite: dict[str, list[float]] = {}
    for cell in report.cells:
        by_suite.setdefault(cell.suite, []).append(cell.speedup)
    return {suite: fmean(values) for suite, values in by_suite.items()}


def mean_speedup(report: BenchmarkReport) -> float:
    """Mean over suites and temperatures, by which checkpoints are ranked. Raises InvalidInput for a report without
    cells."""
    means = suite_means(report)
    if not means:
        raise InvalidInput(f"benchmark report of {report.checkpoint!r} has no cells",
                           "benchmark it on at least one suite and temperature")
    return fmean(means.values())


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
        raise InvalidInput("no benchmark report to choose from", "retry the job from the benchmark stage")
    by_name = sorted(reports, key=lambda report: report.checkpoint)
    return max(by_name, key=_preference)


def select_for_proof(reports: Sequence[BenchmarkReport], *, rivals: bool) -> BenchmarkReport:
    """The report of the checkpoint to tune and prove: the best of the job's own, or with `rivals` the best of all."""
    return select_best([one for one in reports if one.dropped is None and (rivals or not one.rival)])


def rank(measured: Iterable[Measured]) -> tuple[LeaderboardEntry, ...]:
    """Leaderboard entries, best first, numbered from 1."""
    ordered = sorted(measured, key=lambda one: (one.job_id, one.report.checkpoint, not one.tuned))
    ordered.sort(key=lambda one: _preference(one.report), reverse=True)
    return tuple(_entry(one, place) for place, one in enumerate(ordered, start=1))


def _entry(one: Measured, place: int) -> LeaderboardEntry:
    report, cells = one.report, one.report.cells
    return LeaderboardEntry(
        job_id=one.job_id, checkpoint=report.checkpoint, candidate=report.candidate, family=one.family,
        target=one.target, tree=cells[0].tree, tau=fmean(cell.tau for cell in cells),
        tokens_per_s=fmean(cell.tokens_per_s for cell in cells), speedup=mean_speedup(report),
        speedup_greedy=_mean(cell for cell in cells if cell.temperature == 0.0),
        speedup_sampled=_mean(cell for cell in cells if cell.temperature > 0.0),
        lossless=report.lossless, tuned=one.tuned, rival=report.rival, suites=suite_means(report), rank=place)


def _mean(cells: Iterable[CellReport]) -> float | None:
    values = [cell.speedup for cell in cells]
    return fmean(values) if values else None
