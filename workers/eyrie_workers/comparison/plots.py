"""The figures of a comparison: speed-up by variant, acceptance by position, tau against the cost of a round, by load.

A family has one colour and a kind of shape one marker in all figures, so EAGLE-1, EAGLE-2 and the chain are
recognisable as one checkpoint.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eyrie_workers.comparison.forms import OFF
from eyrie_workers.comparison.report import CompareReport, Figures, VariantReport
from eyrie_workers.comparison.tables import MIN_ROUNDS, well_founded
from eyrie_workers.figure_style import (
    BASELINE_BLUE,
    BEST_GREEN,
    OTHER_GREY,
    REDDISH_PURPLE,
    SETTINGS,
    SKY_BLUE,
    WARM_ORANGE,
    new_figure,
    save,
    title,
)

_COLOURS = (WARM_ORANGE, BASELINE_BLUE, BEST_GREEN, REDDISH_PURPLE, "#E69F00", SKY_BLUE)
_MARKERS = {"chain": "o", "tree": "^", "static tree": "s", "off": "_"}
_LINES = {"chain": "-", "tree": "--", "static tree": ":", "off": "-"}


def draw(report: CompareReport, out: Path) -> list[Path]:
    """Write every figure as PNG and SVG; returns the paths."""
    with matplotlib.rc_context(SETTINGS):
        return [path for name, figure in figures_of(report).items() for path in save(figure(), out, name)]


def figures_of(report: CompareReport) -> dict[str, Callable[[], Figure]]:
    """Every figure by name, to be drawn under `figure_style.SETTINGS`."""
    figures: dict[str, Callable[[CompareReport], Figure]] = {
        "speedup": speedups, "acceptance": acceptance, "round-cost": round_cost}
    if len(report.concurrencies) > 1:
        figures["concurrency"] = by_concurrency
    return {name: partial(figure, report) for name, figure in figures.items()}


def colours(report: CompareReport) -> dict[str, str]:
    """A colour for every family, independent of rank."""
    families = sorted({one.variant.family for one in report.variants} - {OFF, "ngram"})
    return {OFF: OTHER_GREY, "ngram": "#777777"} | dict(
        zip(families, (*_COLOURS, matplotlib.rcParams["text.color"]) * len(families), strict=False))


def speedups(report: CompareReport) -> Figure:
    """Every variant with its interval, best above, a panel for each temperature."""
    drafted = [one for one in report.variants if one.variant.title != OFF]
    temperatures, first = report.temperatures, report.concurrencies[0]
    figure, panels = new_figure(4.6 * len(temperatures) + 2.2, 0.36 * len(drafted) + 2.4, len(temperatures))
    of = colours(report)
    for axes, temperature in zip(panels, temperatures, strict=True):
        for place, one in enumerate(drafted):
            figures = one.at(first, temperature)
            _interval(axes, figures, len(drafted) - place, of[one.variant.family], _MARKERS[one.variant.kind])
        axes.axvline(1.0, color=OTHER_GREY, linewidth=1.5)
        axes.set(xlabel="speed-up over no drafter")
        axes.set_title(f"temperature {temperature:g}", fontsize=12, fontweight="normal")
        axes.set_yticks(range(len(drafted), 0, -1), [_label(one) for one in drafted])
        axes.grid(visible=False, axis="y")
    title(
        figure,
        _finding(report),
        f"95 % intervals over {drafted[0].at(first, temperatures[0]).blocks} answers per "
        f"variant, {_load(first)}; circle chain, triangle tree, square static tree; one colour "
        f"one family; {_shapes(report)}; {_where(report)}",
    )
    return figure


def _interval(axes: Axes, figures: Figures, y: float, colour: str, marker: str) -> None:
    low, high = figures.speedup_interval.low, figures.speedup_interval.high
    axes.plot([low, high], [y, y], color=colour, linewidth=2.2)
    axes.plot([figures.speedup], [y], marker, color=colour, markersize=8)


def _finding(report: CompareReport) -> str:
    winner = report.named(report.winner)
    assert winner is not None
    if winner.variant.title == OFF:
        return "No variant is surely faster than no drafter"
    ties = sum(pair.outcome == "indistinguishable" for pair in report.contests if pair.one == winner.variant.title)
    others = f", indistinguishable from {ties} other{'s' if ties > 1 else ''}" if ties else ", ahead of all others"
    return f"{winner.variant.title} is {winner.overall.speedup:.2f}x as fast as no drafter{others}"


def acceptance(report: CompareReport) -> Figure:
    """Conditional acceptance at each position, a variant a line, a panel for each temperature."""
    drafted = [one for one in report.variants if one.variant.title != OFF]
    first, of = report.concurrencies[0], colours(report)
    figure, panels = new_figure(4.4 * len(report.temperatures) + 3.4, 5.0, len(report.temperatures))
    for axes, temperature in zip(panels, report.temperatures, strict=True):
        for one in drafted:
            figures = one.at(first, temperature)
            shown = well_founded(figures.acceptance, figures.accepted_histogram)
            axes.plot(range(1, len(shown) + 1), shown, _LINES[one.variant.kind], color=of[one.variant.family],
                      marker=_MARKERS[one.variant.kind], markersize=6, linewidth=1.6, label=_label(one))
        axes.set_title(f"temperature {temperature:g}", fontsize=12, fontweight="normal")
        axes.set(xlabel="position in the draft", ylim=(0, 1.03))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("P(accepted | the one before was)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=10)
    best = max(drafted, key=lambda one: one.overall.tau)
    title(figure, f"{best.variant.title} is accepted furthest: {best.overall.tau:.2f} tokens per target pass",
          f"positions reached in at least {MIN_ROUNDS} rounds; in a tree a position is accepted when any of its nodes "
          f"is; a round in which nothing was proposed counts as refused; {_shapes(report)}; {_load(first)}; "
          f"{_where(report)}")
    return figure


def round_cost(report: CompareReport) -> Figure:
    """tau over the cost of a round, with lines of equal speed-up; the bar to the left is the drafting."""
    figure, (axes,) = new_figure(9.5, 5.8)
    of = colours(report)
    drafted = [one for one in report.variants if one.variant.title != OFF]
    widest = max(1.15 * max(one.overall.round_cost for one in drafted), 1.5)
    highest = max(1.12 * max(one.overall.tau for one in drafted), 2.0)
    for speed in _iso(highest):
        end = min(widest, highest / speed)
        axes.plot([0.0, end], [0.0, speed * end], color=OTHER_GREY, alpha=0.5, linewidth=1.0, zorder=1)
        axes.annotate(f"{speed:g}x", (end, speed * end), fontsize=9, alpha=0.75, xytext=(2, 2),
                      textcoords="offset points")
    for one in drafted:
        f = one.overall
        axes.plot([f.round_cost - f.draft_share, f.round_cost], [f.tau, f.tau], color=of[one.variant.family],
                  linewidth=1.6)
        axes.plot([f.round_cost], [f.tau], _MARKERS[one.variant.kind], color=of[one.variant.family], markersize=8)
    least = min(one.overall.round_cost - one.overall.draft_share for one in drafted)
    axes.set(xlim=(min(0.9, 0.95 * least), widest), ylim=(0.9, highest),
             xlabel="cost of a round, in passes of the undrafted target", ylabel="tokens per round (tau)")
    _annotate(axes, drafted)
    best = max(drafted, key=lambda one: one.overall.tau / one.overall.round_cost)
    title(figure, f"{best.variant.title} gets most for what a round costs: {best.overall.tau:.2f} tokens for "
                  f"{best.overall.round_cost:.2f} passes",
          f"grey lines: equal speed-up while decoding (prompts not counted); the bar left of a point is the drafting; "
          f"{_load(report.concurrencies[0])}, all suites and temperatures; {_where(report)}")
    return figure


def _iso(most: float) -> list[float]:
    return [speed for speed in (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0) if speed <= most]


def _annotate(axes: Axes, drafted: Sequence[VariantReport]) -> None:
    """Names next to points; those of near points are spread vertically, each with a line to its point."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    wide, high = 0.16 * (right - left), 0.042 * (top - bottom)  # of a name, about
    taken: list[tuple[float, float]] = []
    for one in sorted(drafted, key=lambda one: (one.overall.tau, -one.overall.round_cost)):
        x, y = one.overall.round_cost, one.overall.tau
        at = y
        while any(abs(at - other) < high and abs(x - where) < wide for where, other in taken):
            at += high / 4
        taken.append((x, at))
        line = {"arrowstyle": "-", "color": OTHER_GREY, "linewidth": 0.6} if at != y else None
        axes.annotate(
            one.variant.title,
            (x, y),
            xytext=(x + 0.012 * (right - left), at),
            textcoords="data",
            fontsize=10,
            va="center",
            arrowprops=line,
        )


def by_concurrency(report: CompareReport) -> Figure:
    """Speed-up with intervals at every load."""
    figure, (axes,) = new_figure(10.0, 5.4)
    of, loads = colours(report), report.concurrencies
    drafted = [one for one in report.variants if one.variant.title != OFF]
    for number, one in enumerate(drafted):
        figures = [one.at(load) for load in loads]
        # Side by side, so that intervals at one load do not hide each other.
        xs = np.arange(len(loads)) + (number - (len(drafted) - 1) / 2) * 0.6 / max(1, len(drafted))
        values = [f.speedup for f in figures]
        reach = [[f.speedup - f.speedup_interval.low for f in figures],
                 [f.speedup_interval.high - f.speedup for f in figures]]
        axes.errorbar(xs, values, yerr=reach, fmt=_MARKERS[one.variant.kind], linestyle=_LINES[one.variant.kind],
                      linewidth=0.9, elinewidth=1.6, capsize=2, color=of[one.variant.family], label=_label(one))
    axes.axhline(1.0, color=OTHER_GREY, linewidth=1.5)
    axes.set_xticks(range(len(loads)), [str(load) for load in loads])
    axes.set(xlabel="requests decoded at once", ylabel="speed-up over no drafter")
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside right center", fontsize=10)
    leaders = [max(report.variants, key=lambda one: one.at(load).speedup) for load in loads]
    words = (f"{leaders[0].variant.title} leads at every load" if len({one.variant.title for one in leaders}) == 1 else
             "; ".join(f"{one.variant.title} leads at {load}" for load, one in zip(loads, leaders, strict=True)))
    title(figure, words, f"95 % intervals over blocks; all suites, mean over temperatures; {_where(report)}")
    return figure


def _label(one: VariantReport) -> str:
    return one.variant.title


def _shapes(report: CompareReport) -> str:
    """Every kind of shape once, with its numbers."""
    return ", ".join(dict.fromkeys(one.variant.shape for one in report.variants if one.variant.title != OFF))


def _load(concurrency: int) -> str:
    return "one request at a time" if concurrency == 1 else f"{concurrency} requests at once"


def _where(report: CompareReport) -> str:
    e = report.environment
    return (f"{report.target}, {report.budget.label()} of training each; {e.hardware}, {e.threads} threads, {e.dtype}, "
            f"torch {e.torch}, {e.date[:10]}")
