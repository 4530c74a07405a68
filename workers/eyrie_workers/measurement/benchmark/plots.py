"""Acceptance by position, as a benchmark measured it in the engine."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eyrie_api.v1alpha1.reports import BenchmarkReport, TuneReport
from eyrie_workers.figure_style import BASELINE_BLUE, BEST_GREEN, OTHER_GREY, WARM_ORANGE, new_figure, title

MIN_ROUNDS = 8  # below it one round moves a point by more than a tenth


def describe_environment(report: BenchmarkReport | TuneReport) -> str:
    """The environment in one line."""
    e = report.environment
    threads = "1 thread" if e.threads == 1 else f"{e.threads} threads"
    return f"{e.hardware}, {threads}, {e.dtype}, torch {e.torch}, concurrency 1, {e.date[:10]}"


def best_of(reports: Sequence[BenchmarkReport]) -> BenchmarkReport:
    """The checkpoint with the best mean speed-up over suites and temperatures."""
    return max(reports, key=lambda report: report.speedup)


def acceptance_by_position(report: BenchmarkReport) -> Figure:
    """Conditional acceptance at each position in the engine, one line per suite."""
    temperatures = sorted({cell.temperature for cell in report.cells})
    figure, panels = new_figure(4.4 * len(temperatures) + 1.2, 4.8, len(temperatures))
    styles = [(BASELINE_BLUE, "o"), (WARM_ORANGE, "s"), (BEST_GREEN, "^"), ("#CC79A7", "D"), (OTHER_GREY, "v")]
    for axes, temperature in zip(panels, temperatures, strict=True):
        cells = [cell for cell in report.cells if cell.temperature == temperature]
        for cell, (colour, marker) in zip(cells, styles * len(cells), strict=False):
            shown = well_founded(cell.acceptance, cell.accepted_histogram)
            axes.plot(range(1, len(shown) + 1), shown, color=colour, marker=marker,
                      label=f"{cell.suite} (tau {cell.tau:.1f})")
        axes.set_title(f"temperature {temperature:g}", fontsize=12, fontweight="normal")
        axes.set(xlabel="position in the draft", ylim=(0, 1.03))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best", fontsize=10)
    panels[0].set_ylabel("P(accepted | the one before was)")
    first = [cell.acceptance[0] for cell in report.cells if cell.acceptance]
    best, worst = (pick(report.cells, key=lambda cell: cell.tau) for pick in (max, min))
    title(figure, f"{report.checkpoint}: the first draft token is accepted {min(first):.0%} to {max(first):.0%} of the "
                  f"time; longest in {best.suite} at T={best.temperature:g}, shortest in {worst.suite} at "
                  f"T={worst.temperature:g}" if first else f"{report.checkpoint}: nothing was drafted",
          f"tree {report.cells[0].shape}; positions reached in at least {MIN_ROUNDS} rounds; "
          + describe_environment(report))
    return figure


def well_founded(acceptance: Sequence[float], histogram: Sequence[int]) -> tuple[float, ...]:
    """Acceptance at the positions that at least `MIN_ROUNDS` rounds reached. histogram: of accepted lengths."""
    reached = [sum(histogram[k:]) for k in range(len(acceptance))]
    return tuple(p for p, rounds in zip(acceptance, reached, strict=True) if rounds >= MIN_ROUNDS)
