"""Figures of benchmark reports: throughput by checkpoint and suite, acceptance by position, tau against throughput."""

from collections.abc import Sequence
from statistics import mean

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eyrie_api.v1alpha1.reports import BenchmarkReport, CellReport, TuneReport
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


def throughput(reports: Sequence[BenchmarkReport]) -> Figure:
    """Tokens per second by suite; the undrafted engine blue, the best checkpoint green, the others grey."""
    reports = sorted(reports, key=lambda report: (report.candidate, _step(report.checkpoint)))
    best = best_of(reports)
    temperatures = sorted({cell.temperature for cell in best.cells})
    suites = list(dict.fromkeys(cell.suite for cell in best.cells))
    figure, panels = new_figure(4.4 * len(temperatures) + 3.2, 5.2, len(temperatures))
    width = 0.84 / (len(reports) + 1)
    for axes, temperature in zip(panels, temperatures, strict=True):
        baseline = [mean(_cell(r, s, temperature).baseline_tokens_per_s for r in reports) for s in suites]
        xs = np.arange(len(suites))
        axes.bar(xs, baseline, width, color=BASELINE_BLUE, label="no drafter", hatch="//", edgecolor="white")
        for number, report in enumerate(reports, start=1):
            cells = [_cell(report, suite, temperature) for suite in suites]
            colour = BEST_GREEN if report is best else OTHER_GREY
            label = report.checkpoint + (" (best on average)" if report is best else "")
            bars = axes.bar(xs + number * width, [c.tokens_per_s for c in cells], width, color=colour,
                            edgecolor="white", label=label)
            if report is best:
                axes.bar_label(bars, [f"{c.speedup:.1f}x" for c in cells], fontsize=10, fontweight="bold")
        axes.set_xticks(xs + width * len(reports) / 2, suites)
        axes.set_title(f"temperature {temperature:g}", fontsize=12, fontweight="normal")
        axes.grid(visible=False, axis="x")
    panels[0].set_ylabel("tokens per second")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=10)
    title(figure, f"{best.checkpoint} is {best.speedup:.1f}x as fast as no drafter, on average over "
                  f"{len(suites)} suites",
          f"tree {best.cells[0].shape} (num_steps/top_k/num_draft_tokens), "
          f"{sum(c.prompts for c in best.cells)} answers per checkpoint, each checkpoint interleaved with its own "
          "baseline (shown: their mean; speed-ups: over its own); " + describe_environment(best))
    return figure


def _step(checkpoint: str) -> int:
    tail = checkpoint.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0


def _cell(report: BenchmarkReport, suite: str, temperature: float) -> CellReport:
    return next(cell for cell in report.cells if (cell.suite, cell.temperature) == (suite, temperature))


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


def acceptance_against_throughput(reports: Sequence[BenchmarkReport], tune: TuneReport | None) -> Figure:
    """tau against tokens per second: every cell of every checkpoint, every shape of the grid."""
    figure, (axes,) = new_figure(8.0, 5.4)
    cells = [cell for report in reports for cell in report.cells]
    groups: list[tuple[str, str, str, list[tuple[float, float]]]] = [
        ("checkpoints, greedy", OTHER_GREY, "o", [(c.tau, c.tokens_per_s) for c in cells if c.temperature == 0]),
        ("checkpoints, sampled", OTHER_GREY, "x", [(c.tau, c.tokens_per_s) for c in cells if c.temperature > 0]),
    ]
    if tune:
        groups += [
            ("chains of the grid", WARM_ORANGE, "o",
             [(c.tau, c.tokens_per_s) for c in tune.cells if c.tree.top_k == 1]),
            ("trees of the grid", BASELINE_BLUE, "s",
             [(c.tau, c.tokens_per_s) for c in tune.cells if c.tree.top_k > 1]),
        ]
    for label, colour, marker, points in groups:
        if points:
            xs, ys = zip(*points, strict=True)
            axes.scatter(xs, ys, c=colour, marker=marker, s=64, label=label, zorder=3)
    if tune:
        for cell in tune.cells:
            axes.annotate(cell.tree.label(), (cell.tau, cell.tokens_per_s), fontsize=8, xytext=(5, 4),
                          textcoords="offset points", color="#444444")
    axes.set(xlabel="acceptance length tau (tokens per target pass, bonus token included)", ylabel="tokens per second")
    axes.legend(loc="upper left", fontsize=10)
    sources = "; checkpoints and the grid were measured in separate runs on other prompts" if tune and reports else ""
    title(figure, _relation([point for _, _, _, points in groups for point in points]),
          describe_environment(tune or reports[0]) + sources)
    return figure


def _relation(points: Sequence[tuple[float, float]]) -> str:
    if len(points) < 3 or len({x for x, _ in points}) < 2 or len({y for _, y in points}) < 2:
        return "Acceptance length against throughput"
    r = float(np.corrcoef(np.array(points).T)[0, 1])
    verdict = ("longer acceptance is faster, almost in proportion" if r > 0.9 else
               "longer acceptance is faster, but not by itself" if r > 0.4 else
               "acceptance length does not determine speed here: the cost of drafting and verifying does")
    return f"{verdict[0].upper()}{verdict[1:]} (r = {r:.2f}, {len(points)} measurements)"
