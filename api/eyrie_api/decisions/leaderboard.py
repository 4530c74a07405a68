"""Which checkpoint is best, and in what order the others follow. Pure.

The second seed chose its checkpoint "based on the best average performance across all benchmarks, not peak performance
on any single one"; so do we: the mean over suites of the mean over temperatures, each suite counting the same however
many prompts or temperatures it has. A checkpoint that changed the target's output is never preferred to one that did
not. `eyrie_api.database.results` holds the query that feeds this.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.reports import BenchmarkReport, CellReport, LeaderboardEntry


@dataclass(frozen=True)
class Measured:
    """One benchmark report and where it comes from."""

    job_id: str
    family: str
    target: str
    tuned: bool
    """The report is `TuneReport.final`: measured with the tuned draft tree."""

    report: BenchmarkReport


def suite_means(report: BenchmarkReport) -> dict[str, float]:
    """Mean speed-up by suite, over its temperatures; in the order of the cells."""
    by_suite: dict[str, list[float]] = {}
    for cell in report.cells:
        by_suite.setdefault(cell.suite, []).append(cell.speedup)
    return {suite: fmean(values) for suite, values in by_suite.items()}


def mean_speedup(report: BenchmarkReport) -> float:
    """Average over suites and temperatures: what selection ranks by. Raises InvalidInput when nothing was measured."""
    means = suite_means(report)
    if not means:
        raise InvalidInput(f"benchmark report of {report.checkpoint!r} has no cells",
                           "benchmark it on at least one suite and temperature")
    return fmean(means.values())


def _preference(report: BenchmarkReport) -> tuple[bool, float, float]:
    # Lossless first; equal means are told apart by the worst suite, since a drafter must not hurt anyone.
    return report.lossless, mean_speedup(report), min(suite_means(report).values())


def select_best(reports: Sequence[BenchmarkReport]) -> BenchmarkReport:
    """The report with the best average among the lossless ones, or among all when none is lossless.

    Promotion, not selection, refuses a drafter that is not lossless: in bfloat16 near-ties differ everywhere, and a
    policy may allow it. Ties go to the better worst suite, then to the name. Raises InvalidInput when there is none.
    """
    if not reports:
        raise InvalidInput("no benchmark report to choose from", "retry the job from the benchmark stage")
    by_name = sorted(reports, key=lambda report: report.checkpoint)
    return max(by_name, key=_preference)


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
        lossless=report.lossless, tuned=one.tuned, suites=suite_means(report), rank=place)


def _mean(cells: Iterable[CellReport]) -> float | None:
    values = [cell.speedup for cell in cells]
    return fmean(values) if values else None
