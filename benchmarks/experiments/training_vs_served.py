"""Whether training metrics predict which checkpoint serves best.

The claim: "Our training curves looked incredible", a theoretical boost beyond 4x, then "the reality check"; "be
careful about your training metrics. Benchmark your checkpoints on real tasks, on a real engine". Its best checkpoint by
served speed was not its last.

Two questions about the checkpoints of `timing.ladder`, which share data and seed and differ in what they were trained
for: does a metric of training *rank* them as serving does (Spearman's correlation with served tau, and with served
speed-up), and is its *level* true (theoretical speed-up against the speed-up measured)? The metrics are those every run
logs on held-out captured rows: loss, accuracy of the first step, mean accuracy over the steps, theoretical speed-up.

Loss and accuracy of the first step cover one position: a drafter that was trained on one step alone has the best of
both and serves worse. The ladder has such a drafter on purpose.

    python -m benchmarks.experiments.training_vs_served [--short] --out DIR
"""

import sys
from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure

from benchmarks.experiments.fits import rank_correlation, resampled
from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.timing import Rung, fields_of, ladder, speedups, tau_and_speed, time_all
from benchmarks.experiments.workspace import CHAIN, Workspace
from benchmarks.figure_style import BASELINE_BLUE, BEST_GREEN, OTHER_GREY, WARM_ORANGE, new_figure, title
from eyrie_api.contract.model import Interval
from eyrie_api.contract.reports import CheckpointReport
from eyrie_workers.measure.intervals import FloatArray

NAME = "training_vs_served"
CLAIM = ("Training metrics promised more than serving gave (beyond 4x against about 2x), and the last checkpoint was "
         "not the best: \"be careful about your training metrics\".")
METRICS = ("loss", "first-step accuracy", "mean accuracy", "theoretical speed-up")


def metrics_of(checkpoint: CheckpointReport) -> dict[str, float]:
    """The training metrics of a checkpoint; higher is better, so the loss is negated."""
    return dict(zip(METRICS, (-checkpoint.loss, checkpoint.accuracy[0], fmean(checkpoint.accuracy),
                              checkpoint.theoretical_speedup), strict=True))


def measure(workspace: Workspace) -> ExperimentResult:
    """Time the ladder, greedily: training's metrics are about first choices."""
    rungs = ladder(workspace)
    return evaluate(rungs, fields_of(time_all(workspace, rungs), [rung.name for rung in rungs], 0.0))


def evaluate(rungs: Sequence[Rung], fields: FloatArray) -> ExperimentResult:
    """The result from training metrics and served figures. Pure.

    fields  [N prompts, undrafted and rungs, 4]
    """
    logged = {name: [metrics_of(rung.checkpoint)[name] for rung in rungs] for name in METRICS}
    taus, served = tau_and_speed(fields.sum(0))[0].tolist(), speedups(fields.sum(0)).tolist()
    by_tau = {name: rank_correlation(values, taus) for name, values in logged.items()}
    spans = {name: resampled(fields, lambda sums, values=values: rank_correlation(  # type: ignore[misc]
        values, tau_and_speed(sums)[0].tolist())) for name, values in logged.items()}
    table = [[rung.name, *(f"{logged[name][i]:.3f}" for name in METRICS), f"{taus[i]:.2f}", f"{served[i]:.2f}"]
             for i, rung in enumerate(rungs)]
    return ExperimentResult(
        found=[_first(by_tau, spans), _choice(rungs, logged, served),
               _level(logged["theoretical speed-up"], taus, served), _inverted(rungs, logged, served)],
        measured=f"{len(rungs)} EAGLE-3 checkpoints of five runs (one seed), {len(fields)} held-out prompts, greedy, "
                 f"chain {CHAIN.label()}, timed side by side; loss is shown negated; 95 % intervals over prompts.",
        limits=("Every run is judged on the held-out rows of its own data, as users see it: a few rows where data are "
                "few.",
                "Held-out rows and served prompts come from the same generator: the seed's surprise, other data in "
                "production, cannot show here.",
                "The ladder is steep, which flatters every rank correlation."),
        columns=("checkpoint", *METRICS, "served tau", "served speed-up"), table=table,
        figure=lambda: figure(rungs, logged, taus, served), timed=True)


def _first(by_tau: dict[str, float], spans: dict[str, Interval]) -> str:
    order = sorted(by_tau, key=lambda name: -by_tau[name])
    details = "; ".join(f"{name} {by_tau[name]:.2f} ({spans[name].low:.2f} to {spans[name].high:.2f})"
                        for name in order)
    return f"Rank correlation with served tau: {details}."


def _choice(rungs: Sequence[Rung], logged: dict[str, list[float]], served: list[float]) -> str:
    best = max(served)
    lost = {name: 1.0 - served[max(range(len(rungs)), key=values.__getitem__)] / best
            for name, values in logged.items()}
    losses = ", ".join(f"{name} {share:.1%}" for name, share in lost.items())
    return (f"Fastest served: {rungs[served.index(best)].name} ({best:.2f}x). Choosing by a training metric instead "
            f"would have cost: {losses}.")


def _level(theoretical: list[float], taus: list[float], served: list[float]) -> str:
    over_tau, over_served = (fmean(a / b for a, b in zip(theoretical, of, strict=True)) for of in (taus, served))
    return (f"Level: theoretical speed-up was on average {over_tau:.2f} times served tau (seven positions against a "
            f"chain of five) and {over_served:.2f} times the served speed-up.")


def _inverted(rungs: Sequence[Rung], logged: dict[str, list[float]], served: list[float]) -> str:
    """The pair that the first step's accuracy orders most wrongly."""
    accuracy = logged["first-step accuracy"]
    pairs = [(served[b] / served[a], a, b) for a in range(len(rungs)) for b in range(len(rungs))
             if accuracy[a] > accuracy[b] and served[a] < served[b]]
    if not pairs:
        return "First-step accuracy orders no pair of checkpoints wrongly."
    ratio, a, b = max(pairs)
    possible = len(rungs) * (len(rungs) - 1) // 2
    return (f"First-step accuracy orders {len(pairs)} of {possible} pairs wrongly; the worst: {rungs[a].name} "
            f"({accuracy[a]:.3f}) serves {served[a]:.2f}x, {rungs[b].name} ({accuracy[b]:.3f}) {served[b]:.2f}x, "
            f"{ratio - 1:.0%} faster.")


def figure(rungs: Sequence[Rung], logged: dict[str, list[float]], taus: list[float], served: list[float]) -> Figure:
    """Theoretical speed-up and first-step accuracy against what was served."""
    drawn, panels = new_figure(10.5, 4.8, 2, share_y=True)
    names = list(dict.fromkeys(rung.run for rung in rungs))
    looks = [(BEST_GREEN, "o"), (WARM_ORANGE, "s"), (BASELINE_BLUE, "^"), ("#CC79A7", "D"), ("#56B4E9", "v")]
    for axes, metric in zip(panels, ("theoretical speed-up", "first-step accuracy"), strict=True):
        for name, (colour, marker) in zip(names, looks, strict=True):
            chosen = [i for i, rung in enumerate(rungs) if rung.run == name]
            axes.scatter([logged[metric][i] for i in chosen], [served[i] for i in chosen], color=colour, marker=marker,
                         s=55, label=name, zorder=3)
        axes.set(xlabel=f"{metric}, in training")
        axes.set_title(f"rank correlation with tau {rank_correlation(logged[metric], taus):.2f}, "
                       f"with speed-up {rank_correlation(logged[metric], served):.2f}",
                       fontsize=11, fontweight="normal")
    panels[0].axhline(1.0, color=OTHER_GREY, linestyle=":")
    panels[0].set_ylabel("served speed-up")
    panels[0].legend(loc="upper left", fontsize=9)
    title(drawn, "What training says of a checkpoint, and what it serves",
          f"greedy, chain {CHAIN.label()}, {len(rungs)} checkpoints; speed-up over the undrafted engine")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
