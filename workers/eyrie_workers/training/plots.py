"""Training curves: agreement per TTT step, conditional acceptance per position, theoretical speed-up per depth.

These are training metrics; `measurement.benchmark.plots` draws what the engine measured.
"""

import re
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eyrie_api.v1alpha1.reports import TrainReport
from eyrie_workers.figure_style import SEQUENCE, new_figure, title
from eyrie_workers.job_record import Series

Curve = list[tuple[float, float]]


def steps_of(series: Series, metric: str) -> list[Curve]:
    """The curves `<metric>/<n>`, in order of n; points in order of training step."""
    pattern = re.compile(rf"{re.escape(metric)}/(\d+)")
    found = {int(match[1]): points for name, points in series.items() if (match := pattern.fullmatch(name))}
    return [[(float(step), value) for step, value in found[n]] for n in sorted(found)]


def checkpoint_curves(report: TrainReport, field: str) -> list[Curve]:
    """One curve per TTT step through a report's checkpoints, of a per-step field of `CheckpointReport`."""
    rows: list[tuple[int, Sequence[float]]] = [(c.step, getattr(c, field)) for c in report.checkpoints]
    depth = min((len(values) for _, values in rows), default=0)
    return [[(float(step), values[n]) for step, values in rows] for n in range(depth)]


def cumulative_speedup(conditional: Sequence[Curve]) -> list[Curve]:
    """Expected tokens per target pass for depths 1, 2, ...: 1 + sum over positions of cumulative acceptance."""
    curves: list[Curve] = []
    steps = [x for x, _ in conditional[0]] if conditional else []
    running = dict.fromkeys(steps, 1.0)
    total = dict.fromkeys(steps, 1.0)
    for curve in conditional:
        for x, value in curve:
            if x in running:
                running[x] *= value
                total[x] += running[x]
        curves.append([(x, total[x]) for x in steps])
    return curves


def learning_curves(candidate: str, curves: Sequence[Curve], detail: str) -> Figure:
    """Top-1 agreement with the target at each TTT step, over training."""
    ends = [curve[-1][1] for curve in curves]
    figure, (axes,) = new_figure()
    _draw(axes, curves, "TTT step")
    axes.set(xlabel="optimiser step", ylabel="top-1 agreement with the target", ylim=(0, 1))
    title(figure, f"{candidate}: agreement ends at {ends[0]:.0%} on the first drafted token and {ends[-1]:.0%} on the "
                  f"{_ordinal(len(ends))}", detail)
    return figure


def acceptance_curves(candidate: str, curves: Sequence[Curve], detail: str) -> Figure:
    """P(position d accepted | position d - 1 accepted), over training."""
    ends = [curve[-1][1] for curve in curves]
    figure, (axes,) = new_figure()
    _draw(axes, curves, "position")
    axes.set(xlabel="optimiser step", ylabel="P(accepted | the one before was)", ylim=(0, 1))
    change = ends[-1] - ends[0]
    verdict = "holds with depth" if abs(change) < 0.03 else "falls with depth" if change < 0 else "rises with depth"
    title(figure, f"{candidate}: conditional acceptance {verdict}, {ends[0]:.0%} at the first position and "
                  f"{ends[-1]:.0%} at the {_ordinal(len(ends))}", detail)
    return figure


def speedup_curves(candidate: str, curves: Sequence[Curve], detail: str) -> Figure:
    """Tokens per target pass if drafting and verifying were free, one curve per depth."""
    figure, (axes,) = new_figure()
    _draw(axes, curves, "depth")
    axes.set(xlabel="optimiser step", ylabel="theoretical speed-up (tokens per target pass)")
    axes.set_ylim(bottom=1.0)
    ends = [curve[-1][1] for curve in curves]
    gain = ends[-1] - ends[-2] if len(ends) > 1 else 0.0
    title(figure, f"{candidate}: at most {ends[-1]:.1f}x at depth {len(ends)} if drafting were free"
                  + (f"; the last step of depth adds {gain:.2f}" if len(ends) > 1 else ""), detail)
    return figure


def _draw(axes: Axes, curves: Sequence[Curve], name: str) -> None:
    colours = matplotlib.colormaps[SEQUENCE]
    for number, curve in enumerate(curves):
        xs, ys = zip(*curve, strict=True)
        shade = colours(0.9 * number / max(1, len(curves) - 1))
        # Few points are checkpoints and get markers; many are a logged curve.
        axes.plot(xs, ys, color=shade, marker="o" if len(xs) <= 12 else None, label=f"{name} {number + 1}")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _ordinal(number: int) -> str:
    return f"{number}" + {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
