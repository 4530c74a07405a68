"""Whether EAGLE-3 keeps improving with more data where EAGLE-1 stops.

The sources claim that data decides ("More diverse data, more epochs, better dataset curation - these will move the
needle far more than any architectural tweak"), and that this motivates EAGLE-3: in EAGLE-1 "the feature-prediction loss
becomes a bottleneck, so feeding it more training data stops helping", while EAGLE-3 without it "keeps improving as
training data grows" (EAGLE-3, arXiv:2503.01840, figure 1).

Amounts of conversations are nested (the first 100 of the first 200, ...), and every drafter takes *the same number of
optimizer steps of the same number of tokens*: with less data it sees the same texts more often. The cost of training is
therefore constant along the curve, and diversity varies. With equal epochs instead, more data would also mean more
steps, and the two effects could not be separated.

tau is decoded greedily with one chain. A family's *gain per doubling* is the slope of tau over log2 of the amount;
"caps" would show as a slope over the upper half of the amounts that is lower than EAGLE-3's and near nothing.

    python -m benchmarks.experiments.data_amount [--short] --out DIR
"""

import math
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from matplotlib.figure import Figure

from benchmarks.experiments.fits import Counted, fit_line, tau, tau_ratio
from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.workspace import CHAIN, COMPARED, Workspace
from benchmarks.figure_style import BASELINE_BLUE, BEST_GREEN, new_figure, title

NAME = "data_amount"
CLAIM = "EAGLE-1's feature loss caps it: more data stops helping; EAGLE-3 keeps improving as data grows."
_HALVINGS = 3

Point = tuple[str, int]
"""Family and amount of conversations."""


def amounts(most: int) -> list[int]:
    """`most` and its halves, ascending."""
    return [most >> halving for halving in reversed(range(_HALVINGS + 1))]


def measure(workspace: Workspace) -> ExperimentResult:
    """Train and decode every family with every amount and seed."""
    runs: dict[Point, list[Sequence[Counted]]] = {}
    simulated: dict[Point, list[float]] = {}
    for seed in range(workspace.scale.seeds):
        for amount in amounts(workspace.scale.conversations):
            store = workspace.store(workspace.rows(amount))
            for family in COMPARED:
                trained = workspace.train(store, seed=seed, family=family)
                counted = workspace.decode(trained.last)
                runs.setdefault((family, amount), []).append(counted)
                simulated.setdefault((family, amount), []).append(trained.report.checkpoints[-1].theoretical_speedup)
                print(f"seed {seed}, {family}, {amount} conversations: tau {tau(counted):.3f}", flush=True)
    return evaluate(runs, simulated, workspace.scale.steps)


def gain_per_doubling(runs: Mapping[Point, Sequence[Sequence[Counted]]], family: str, *, upper: bool) -> list[float]:
    """Slope of tau over log2 of the amount, seed by seed; `upper`: over the upper half of the amounts."""
    sizes = sorted(amount for name, amount in runs if name == family)
    sizes = sizes[len(sizes) // 2:] if upper else sizes
    seeds = len(runs[family, sizes[0]])
    return [fit_line([math.log2(size) for size in sizes], [tau(runs[family, size][seed]) for size in sizes]).slope
            for seed in range(seeds)]


def evaluate(runs: Mapping[Point, Sequence[Sequence[Counted]]], simulated: Mapping[Point, Sequence[float]],
          steps: int) -> ExperimentResult:
    """The result from the counts. Pure."""
    families = list(dict.fromkeys(family for family, _ in runs))
    sizes = sorted({amount for _, amount in runs})
    seeds, some = len(next(iter(runs.values()))), next(iter(runs.values()))[0]
    suites, table = list(dict.fromkeys(of.suite for of in some)), []
    for family, amount in runs:
        taus = [tau(run) for run in runs[family, amount]]
        table.append([family, str(amount), _spread(taus), ", ".join(f"{value:.2f}" for value in taus),
                      f"{fmean(simulated[family, amount]):.2f}", *(
                          f"{tau([of for run in runs[family, amount] for of in run if of.suite == suite]):.2f}"
                          for suite in suites)])
    return ExperimentResult(
        found=[_first(runs, families), *(_text(runs, family, sizes) for family in families)],
        measured=f"{seeds} seeds per point, {steps} steps of 1024 tokens whatever the amount, {len(some)} held-out "
                 f"prompts, greedy, chain {CHAIN.label()}; amounts are nested; each family at its own learning rate.",
        limits=("Equal steps: with little data this is many passes over it. At the seed's scale (500k samples) a curve "
                "may bend that is still straight here.",
                "The shipped target's templated text repeats itself: a few hundred conversations show most of it."),
        columns=("family", "conversations", "tau (sd over seeds)", "by seed", "theoretical speed-up", *suites),
        table=sorted(table, key=lambda row: (families.index(row[0]), int(row[1]))),
        figure=lambda: figure(runs, families, sizes))


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" + (f" ({stdev(values):.2f})" if len(values) > 1 else "")


def _first(runs: Mapping[Point, Sequence[Sequence[Counted]]], families: Sequence[str]) -> str:
    upper = {family: gain_per_doubling(runs, family, upper=True) for family in families}
    details = "; ".join(f"{family} {_spread(of)}" for family, of in upper.items())
    three, one = (upper[family] for family in COMPARED)
    apart = [a - b for a, b in zip(three, one, strict=True)]
    if len(apart) < 2:
        verdict = "One seed per point, so no verdict"
    elif fmean(apart) > 2 * stdev(apart) / math.sqrt(len(apart)):
        stops = fmean(one) < fmean(three) / 2
        verdict = "The claim holds here" if stops else "EAGLE-3 gains more, but EAGLE-1 goes on too"
    else:
        verdict = "The claim does not show here"
    return f"{verdict}: tau gained per doubling of data, over the upper amounts (sd over seeds): {details}."


def _text(runs: Mapping[Point, Sequence[Sequence[Counted]]], family: str, sizes: Sequence[int]) -> str:
    ratio = tau_ratio(runs[family, sizes[-1]], runs[family, sizes[0]])
    last = tau_ratio(runs[family, sizes[-1]], runs[family, sizes[-2]])
    return (f"{family}: tau {_spread([tau(run) for run in runs[family, sizes[0]]])} with {sizes[0]} conversations, "
            f"{_spread([tau(run) for run in runs[family, sizes[-1]]])} with {sizes[-1]}: {ratio.text}, the last "
            f"doubling {last.text}.")


def figure(runs: Mapping[Point, Sequence[Sequence[Counted]]], families: Sequence[str], sizes: Sequence[int]) -> Figure:
    """tau over the amount, every seed a point."""
    drawn, (axes,) = new_figure(8.5, 4.8)
    for family, colour, marker in zip(families, (BASELINE_BLUE, BEST_GREEN), "os", strict=False):
        taus = [[tau(run) for run in runs[family, size]] for size in sizes]
        axes.plot(sizes, [fmean(of) for of in taus], color=colour, label=family)
        for size, of in zip(sizes, taus, strict=True):
            axes.plot([size] * len(of), of, marker, color=colour, alpha=0.6)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="conversations trained on (equal steps everywhere)", ylabel="tokens per target pass (tau)")
    axes.legend(loc="lower right")
    title(drawn, "What more data gives at an equal cost of training",
          f"greedy, chain {CHAIN.label()}; points are seeds, lines their means")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
