"""Whether throughput is linear in acceptance length.

The authors of the claim "plotted average acceptance length against throughput across all 16 models in our sweep. The
result was a near-perfect linear correlation" - from which it concluded that hyperparameters matter only through
accuracy.

Expected: with one draft-tree shape every round costs the same c seconds and yields tau tokens, so throughput is tau /
c, a straight line through the origin. Deviations here: prefill, which no drafter shortens, and drafters of another
width, whose rounds have another cost.

Drafters of one architecture and different quality (`timing.ladder`) answer the same prompts with one chain, timed
side by side with the undrafted engine. A line is fitted to (tau, tokens per second); r2 says how much of the
differences in speed acceptance explains. Its interval comes from resampling prompts, all variants together.

    python -m benchmarks.experiments.acceptance_throughput [--short] --out DIR
"""

import sys
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from benchmarks.experiments.fits import Line, fit_line, resampled
from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.timing import TEMPERATURES, Rung, fields_of, ladder, speedups, tau_and_speed, time_all
from benchmarks.experiments.workspace import CHAIN, Workspace
from benchmarks.figure_style import BASELINE_BLUE, BEST_GREEN, OTHER_GREY, WARM_ORANGE, new_figure, title
from eyrie_api.contract.model import Interval
from eyrie_workers.measure.intervals import FloatArray

NAME = "acceptance_throughput"
CLAIM = "Acceptance length against throughput over 16 drafters: \"a near-perfect linear correlation\"."
_NEARLY_PERFECT = 0.95


def measure(workspace: Workspace) -> ExperimentResult:
    """Time the ladder."""
    rungs = ladder(workspace)
    turns = time_all(workspace, rungs)
    return evaluate(rungs, {t: fields_of(turns, [rung.name for rung in rungs], t) for t in TEMPERATURES})


def line_of(sums: FloatArray) -> Line:
    """Tokens per second over tau, the line through all drafters."""
    taus, speeds = tau_and_speed(sums)
    return fit_line(taus.tolist(), speeds.tolist())


def evaluate(rungs: Sequence[Rung], fields: dict[float, FloatArray]) -> ExperimentResult:
    """The result from the timings. Pure.

    fields  by temperature: [N prompts, undrafted and rungs, 4]
    """
    lines = {t: line_of(of.sum(0)) for t, of in fields.items()}
    spans = {t: resampled(of, lambda sums: line_of(sums).r2) for t, of in fields.items()}
    slopes = {t: resampled(of, lambda sums: line_of(sums).slope) for t, of in fields.items()}
    table = []
    for place, rung in enumerate(rungs):
        row = [rung.name]
        for of in fields.values():
            taus, speeds = tau_and_speed(of.sum(0))
            row += [f"{taus[place]:.2f}", f"{speeds[place]:.0f}", f"{speedups(of.sum(0))[place]:.2f}"]
        table.append(row)
    return ExperimentResult(
        found=[_first(lines, spans), *(_text(t, lines[t], slopes[t], fields[t]) for t in fields)],
        measured=f"{len(rungs)} EAGLE-3 checkpoints of five training runs, {len(next(iter(fields.values())))} held-out "
                 f"prompts, chain {CHAIN.label()}, concurrency 1, prefill included; every prompt through the undrafted "
                 "engine and every checkpoint in turn; 95 % intervals over prompts.",
        limits=("One seed per run; the ladder was made steep on purpose, and a steeper one makes a higher r2.",
                "Other shapes and other families have rounds of other costs: they lie on lines of their own."),
        columns=("checkpoint", *(f"{what}, T={t:g}" for t in fields for what in ("tau", "tokens/s", "speed-up"))),
        table=table, figure=lambda: figure(rungs, fields, lines), timed=True)


def _first(lines: dict[float, Line], spans: dict[float, Interval]) -> str:
    worst = min(line.r2 for line in lines.values())
    details = ", ".join(f"r2 {lines[t].r2:.3f} ({spans[t].low:.3f} to {spans[t].high:.3f}) at temperature {t:g}"
                     for t in lines)
    return f"{'Linear' if worst >= _NEARLY_PERFECT else 'Not near-perfectly linear'}: {details}."


def _text(temperature: float, line: Line, slope: Interval, fields: FloatArray) -> str:
    sums = fields.sum(0)
    even = (float(sums[0, 0] / sums[0, 1]) - line.intercept) / line.slope if line.slope else float("nan")
    return (f"Temperature {temperature:g}: each token of tau is worth {line.slope:.0f} tokens/s ({slope.low:.0f} to "
            f"{slope.high:.0f}); by the line a drafter breaks even with none at tau {even:.2f}.")


def figure(rungs: Sequence[Rung], fields: dict[float, FloatArray], lines: dict[float, Line]) -> Figure:
    """Speed over tau, one marker per run."""
    drawn, panels = new_figure(10.5, 4.8, len(fields))
    names = list(dict.fromkeys(rung.run for rung in rungs))
    looks = [(BEST_GREEN, "o"), (WARM_ORANGE, "s"), (BASELINE_BLUE, "^"), ("#CC79A7", "D"), ("#56B4E9", "v")]
    for axes, (temperature, of) in zip(panels, fields.items(), strict=True):
        taus, speeds = tau_and_speed(of.sum(0))
        for name, (colour, marker) in zip(names, looks, strict=True):
            chosen = [i for i, rung in enumerate(rungs) if rung.run == name]
            axes.scatter(taus[chosen], speeds[chosen], color=colour, marker=marker, s=55, label=name, zorder=3)
        ends = np.array([taus.min(), taus.max()])
        axes.plot(ends, [lines[temperature].at(float(x)) for x in ends], color=OTHER_GREY,
                  label=f"r2 {lines[temperature].r2:.3f}")
        undrafted = of.sum(0)[0, 0] / of.sum(0)[0, 1]
        axes.axhline(undrafted, color=matplotlib.rcParams["text.color"], linestyle=":", linewidth=1.2,
                     label="no drafter")
        axes.set_title(f"temperature {temperature:g}", fontsize=12, fontweight="normal")
        axes.set(xlabel="tokens per target pass (tau)")
        axes.legend(loc="upper left", fontsize=9)
    panels[0].set_ylabel("tokens per second")
    least = min(line.r2 for line in lines.values())
    title(drawn, f"Acceptance explains at least {least:.0%} of the differences in speed",
          f"chain {CHAIN.label()}, {len(rungs)} checkpoints, concurrency 1")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
