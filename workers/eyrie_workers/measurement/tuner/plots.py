"""Figures of the tuner: shapes (depth down, width across), the operating map, predictions against measurements."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from eyrie_api.figures.job_figures import TunedShape, shapes_of
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.reports import TuneReport
from eyrie_api.v1alpha1.tuning import OFF, OperatingMap, Setting, Trial
from eyrie_workers.figure_style import (
    BASELINE_BLUE,
    BEST_GREEN,
    OTHER_GREY,
    SEQUENCE,
    SETTINGS,
    WARM_ORANGE,
    new_figure,
    save,
    title,
)
from eyrie_workers.measurement.benchmark.plots import describe_environment

Outcome = tuple[Setting, int, float, float]
"""Setting, concurrency, predicted speed-up, measured speed-up."""

_MOST_LINES = 5  # settings drawn over concurrency: more are not distinguishable


def heat_maps(report: TuneReport) -> Figure:
    """Speed-up by num_steps and top_k. Chains have their own number of draft tokens and appear in every panel."""
    shapes = shapes_of(report)
    tokens = sorted({one.tree.num_draft_tokens for one in shapes if one.tree.top_k > 1}) or [0]
    depths = sorted({one.tree.num_steps for one in shapes})
    widths = sorted({one.tree.top_k for one in shapes})
    figure, panels = new_figure(max(6.5, 1.5 * len(widths) * len(tokens) + 2.5), 0.9 * len(depths) + 2.4, len(tokens))
    low, high = min(one.speedup for one in shapes), max(one.speedup for one in shapes)
    image = None
    for axes, num_tokens in zip(panels, tokens, strict=True):
        shown = {(one.tree.num_steps, one.tree.top_k): one for one in shapes
                 if one.tree.top_k == 1 or one.tree.num_draft_tokens == num_tokens}
        grid = np.array([[shown[d, w].speedup if (d, w) in shown else np.nan for w in widths] for d in depths])
        image = axes.imshow(grid, cmap=SEQUENCE, vmin=low, vmax=high, aspect="auto")
        _annotate(axes, report.winner, shown, depths, widths, (low + high) / 2)
        axes.set_xticks(range(len(widths)), [f"{w}" if w > 1 else "1 (chain)" for w in widths])
        axes.set_yticks(range(len(depths)), [str(d) for d in depths])
        axes.set_xlabel("top_k")
        axes.grid(visible=False)
        if num_tokens:
            axes.set_title(f"num_draft_tokens {num_tokens}", fontsize=12, fontweight="normal")
    panels[0].set_ylabel("num_steps")
    assert image is not None
    figure.colorbar(image, ax=panels, label="speed-up over no drafter", shrink=0.9)
    winner = next(one for one in shapes if one.tree == report.winner)
    title(figure, f"{_kind(winner.tree)} {winner.tree.label()} is the drafter's best: {winner.speedup:.2f}x at tau "
                  f"{winner.tau:.1f}{_other_kind(shapes, report.winner)}",
          "lowest concurrency, mean over temperatures; * measured, others predicted; a chain verifies num_steps + 1 "
          f"tokens; {describe_environment(report)}")
    return figure


def _annotate(axes: Axes, best: DraftTreeShape, shown: dict[tuple[int, int], TunedShape], depths: list[int],
              widths: list[int], middle: float) -> None:
    for row, depth in enumerate(depths):
        for column, width in enumerate(widths):
            one = shown.get((depth, width))
            if one is None:
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor="#EEEEEE", hatch="//",
                                         edgecolor="#CCCCCC", linewidth=0))
                continue
            axes.text(column, row, f"{one.speedup:.2f}x{'*' if one.measured else ''}\ntau {one.tau:.1f}", ha="center",
                      va="center", fontsize=10, color="black" if one.speedup > middle else "white")
            if one.tree == best:
                axes.add_patch(Rectangle((column - 0.47, row - 0.47), 0.94, 0.94, fill=False, edgecolor=WARM_ORANGE,
                                         linewidth=3.5))


def _kind(tree: DraftTreeShape) -> str:
    return "Chain" if tree.top_k == 1 else "Tree"


def _other_kind(shapes: Sequence[TunedShape], winner: DraftTreeShape) -> str:
    """The best shape of the other kind, and its speed-up."""
    chain_won = winner.top_k == 1
    others = [one for one in shapes if (one.tree.top_k == 1) != chain_won]
    if not others:
        return ""
    best = max(others, key=lambda one: one.speedup)
    return f"; the best {'tree' if chain_won else 'chain'}, {best.tree.label()}, reaches {best.speedup:.2f}x"


def operating_map(chart: OperatingMap, trials: Sequence[Trial], detail: str) -> Figure:
    """Speed-up over off by concurrency: the map's choices, and the other measured settings."""
    figure, (axes,) = new_figure(8.5, 5.2)
    chosen = list(dict.fromkeys(point.setting for point in chart.points if point.setting != OFF))
    others = [trial.setting for trial in sorted(trials, key=lambda trial: -(trial.speedup or 0.0))
              if trial.speedup is not None and trial.setting not in (OFF, *chosen)]
    drawn = [*chosen, *dict.fromkeys(others)][:_MOST_LINES]
    colours = [BEST_GREEN, BASELINE_BLUE, WARM_ORANGE, "#CC79A7", "#56B4E9"]
    for setting, colour, marker in zip(drawn, colours, "osD^v", strict=False):
        of = sorted((t for t in trials if t.setting == setting), key=lambda t: t.concurrency)
        axes.plot([t.concurrency for t in of], [t.predicted_speedup for t in of], "--", color=colour, linewidth=1.2)
        seen = [t for t in of if t.speedup is not None]
        if seen:
            values = [t.speedup or 0.0 for t in seen]
            reach = [[max(0.0, v - t.speedup_interval.low) if t.speedup_interval else 0.0
                      for v, t in zip(values, seen, strict=True)],
                     [max(0.0, t.speedup_interval.high - v) if t.speedup_interval else 0.0
                      for v, t in zip(values, seen, strict=True)]]
            axes.errorbar([t.concurrency for t in seen], values, yerr=reach, fmt=marker, color=colour, capsize=3,
                          label=setting.label(), zorder=3)
    axes.axhline(1.0, color=OTHER_GREY, linewidth=1.5, label="off")
    axes.scatter([point.concurrency for point in chart.points], [point.speedup for point in chart.points], s=190,
                 facecolors="none", edgecolors="black", zorder=4, label="the map's choice")
    if chart.crossover is not None:
        axes.axvline(chart.crossover, color="#444444", linestyle=":", linewidth=1.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks([point.concurrency for point in chart.points], [str(point.concurrency) for point in chart.points])
    axes.set(xlabel="requests decoded at once", ylabel="tokens per second over no speculation")
    axes.legend(loc="best", fontsize=10)
    title(figure, "Speculation pays at every load examined" if chart.crossover is None else
          f"Speculation stops paying at concurrency {chart.crossover}",
          f"points measured with 95 % intervals, dashed lines predicted; {detail}")
    return figure


def predicted_against_measured(outcomes: Sequence[Outcome], detail: str) -> Figure:
    """Predicted against measured speed-up: one point per setting and concurrency."""
    figure, (axes,) = new_figure(6.5, 6.0)
    loads = sorted({concurrency for _, concurrency, _, _ in outcomes})
    for concurrency, colour, marker in zip(loads, (BEST_GREEN, WARM_ORANGE, BASELINE_BLUE, OTHER_GREY) * len(loads),
                                           "osD^" * len(loads), strict=False):
        points = [(p, m) for setting, rows, p, m in outcomes if rows == concurrency and setting != OFF]
        axes.scatter([p for p, _ in points], [m for _, m in points], c=colour, marker=marker, s=44, alpha=0.8,
                     label=f"concurrency {concurrency}", zorder=3)
    ends = [min(min(p, m) for _, _, p, m in outcomes), max(max(p, m) for _, _, p, m in outcomes)]
    axes.plot(ends, ends, color="#444444", linewidth=1.2)
    axes.set(xlabel="predicted speed-up over no speculation", ylabel="measured")
    axes.legend(loc="upper left", fontsize=10)
    errors = sorted(abs(p / m - 1.0) for setting, _, p, m in outcomes if setting != OFF)
    title(figure, f"Predictions are off by {errors[len(errors) // 2]:.1%} (median of {len(errors)})", detail)
    return figure


def draw_tuner_comparison(report: TuneReport, outcomes: Sequence[Outcome], directory: Path) -> list[Path]:
    """Write the figures of a comparison of the tuner with the exhaustive grid; returns their paths."""
    assert report.map is not None
    detail = describe_environment(report)
    with matplotlib.rc_context(SETTINGS):
        figures = {"predictions": predicted_against_measured(outcomes, detail), "shapes": heat_maps(report),
                   "operating-map": operating_map(report.map, report.trials, detail)}
        return [path for name, figure in figures.items() for path in save(figure, directory, name)]
