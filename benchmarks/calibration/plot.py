"""A drafter's confidence against what was accepted: along the path, and of a single step."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.calibration.measure import CalibrationReport, Curve
from benchmarks.figure_style import BASELINE_BLUE, OTHER_GREY, SETTINGS, new_figure, save, title


def draw(report: CalibrationReport, out: Path) -> list[Path]:
    """Write `calibration.png` and `calibration.svg`."""
    with matplotlib.rc_context(SETTINGS):
        return save(figure(report), out, "calibration")


def figure(report: CalibrationReport) -> Figure:
    """Two panels: the product of confidences along a path, and the confidence of a step whose parent was accepted."""
    drawn, (path, step) = new_figure(10.0, 5.2, 2)
    _panel(path, report.path, "confidence along the path (product)")
    _panel(step, report.step, "confidence of one step, its parent accepted")
    path.set_ylabel("share accepted")
    step.legend(loc="upper left")
    where = report.environment
    title(drawn, f"Above 0.1, confidence misses acceptance by {report.path.error_likely:.2f} along a path and by "
                 f"{report.step.error_likely:.2f} in a step",
          f"{report.drafter} for {report.target}: {report.rounds} rounds of {report.prompts} prompts ({report.tokens} "
          f"tokens), trees {report.shape.label()}, temperature {report.temperature:g}; under each bin its nodes, bars "
          f"95 % (Wilson); {where.dtype}, torch {where.torch}, {where.date[:10]}")
    return drawn


def _panel(axes: Axes, curve: Curve, label: str) -> None:
    axes.plot([0, 1], [0, 1], "--", color=OTHER_GREY, linewidth=1.2, label="calibrated")
    filled = [one for one in curve.bins if one.count]
    below = [one.share - one.accepted_low for one in filled]
    above = [one.accepted_high - one.share for one in filled]
    axes.errorbar([one.confidence for one in filled], [one.share for one in filled], yerr=[below, above], fmt="o-",
                  color=BASELINE_BLUE, capsize=3, label="measured")
    for one in filled:
        axes.annotate(str(one.count), ((one.low + one.high) / 2, -0.06), ha="center", fontsize=8, color=OTHER_GREY)
    axes.set(xlabel=label, xlim=(0, 1), ylim=(-0.1, 1.02))
