"""Depth or width: which draft tree of a given size has the longest acceptance length.

The authors of the claim swept num_steps, top_k and num_draft_tokens in SGLang and found that "increasing depth (more
speculative steps) helps more than increasing width (higher top-k)" and that "doubling num_draft_tokens at the same
depth (6/4/24 vs 6/4/48) barely moved the needle"; its interpretation: "a well-trained EAGLE3 model naturally commits to
a single high-confidence path".

One drafter decodes the same held-out prompts with shapes that send the same number of nodes to verification, so the
cost of verification is equal: from a chain to a tree of one wide level. tau is counted at temperature 0 and 1. Two more
comparisons of the source: one step deeper at equal nodes, and twice the nodes at equal depth.

Acceptance is one factor of speed. The other, the cost of a drafter pass, grows with depth and hardly with width:
`benchmarks.decode` measures it, and `crossover` times whole requests. A deeper shape must gain more than its
additional passes cost.

    python -m benchmarks.experiments.depth_width [--short] --out DIR
"""

# tau is always of a shape: num_steps/top_k/num_draft_tokens

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.figure import Figure

from benchmarks.experiments.fits import Counted, tau, tau_interval, tau_ratio
from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.workspace import Workspace
from benchmarks.figure_style import BASELINE_BLUE, BEST_GREEN, OTHER_GREY, WARM_ORANGE, new_figure, title
from eyrie_api.contract.engine import DraftTreeShape

NAME = "depth_width"
CLAIM = ("\"Increasing depth helps more than increasing width\"; doubling num_draft_tokens at the same depth "
         "\"barely moved the needle\".")

BUDGETS = (8, 16)
DEPTHS = {8: ((7, 1), (5, 2), (4, 2), (3, 4), (2, 4), (1, 7)), 16: ((7, 2), (5, 2), (5, 4), (3, 4), (2, 4), (1, 15))}
"""(num_steps, top_k) at each number of nodes, from deep and narrow to flat and wide."""

DOUBLED = ((6, 4, 8), (6, 4, 16), (6, 4, 32))
TEMPERATURES = (0.0, 1.0)

Runs = Mapping[tuple[str, float], Sequence[Counted]]
"""By shape's label and temperature."""


def shapes() -> list[DraftTreeShape]:
    """All shapes that are decoded."""
    sizes = [(depth, width, nodes) for nodes in BUDGETS for depth, width in DEPTHS[nodes]]
    return [DraftTreeShape(num_steps=depth, top_k=width, num_draft_tokens=nodes)
            for depth, width, nodes in dict.fromkeys([*sizes, *DOUBLED])]


def of_budget(nodes: int) -> list[str]:
    """Labels of the shapes with so many nodes, deepest first."""
    return [f"{depth}/{width}/{nodes}" for depth, width in DEPTHS[nodes]]


def measure(workspace: Workspace) -> ExperimentResult:
    """Decode with every shape."""
    drafter = workspace.train(workspace.store(workspace.rows())).last
    runs: dict[tuple[str, float], Sequence[Counted]] = {}
    for temperature in TEMPERATURES:
        for shape in shapes():
            runs[shape.label(), temperature] = workspace.decode(drafter, shape, temperature)
            print(f"{shape.label()} T={temperature:g}: tau {tau(runs[shape.label(), temperature]):.3f}", flush=True)
    return evaluate(runs)


def evaluate(runs: Runs) -> ExperimentResult:
    """The result from the counts. Pure."""
    some = next(iter(runs.values()))
    return ExperimentResult(
        found=[_first(runs), *(_budget_text(runs, nodes, t) for nodes in BUDGETS for t in TEMPERATURES),
               *(_doubled_text(runs, t) for t in TEMPERATURES)],
        measured=f"One EAGLE-3 drafter (seed 0); {len(some)} prompts of {len({of.suite for of in some})} suites; "
                 "shapes are num_steps/top_k/num_draft_tokens; intervals are 95 % over prompts, paired.",
        limits=("One drafter and one small target; in the shipped one's templated text a single path is often right.",
                "At temperature 1 our drafters see part of the sampling noise ahead (speculation/noise.py), which "
                "favours chains more than SGLang's sampling would.",
                "Acceptance alone: what a deeper draft costs is not in tau."),
        columns=("shape", *(f"tau, T={t:g}" for t in TEMPERATURES)),
        table=[[shape.label(), *(_with_interval(runs[shape.label(), t]) for t in TEMPERATURES)] for shape in shapes()],
        figure=lambda: figure(runs))


def best(runs: Runs, nodes: int, temperature: float) -> str:
    """Label of the shape with the highest tau at a number of nodes."""
    return max(of_budget(nodes), key=lambda label: tau(runs[label, temperature]))


def depth_gain(runs: Runs, nodes: int, temperature: float) -> float:
    """tau of the deepest over that of the flattest shape of a budget."""
    labels = of_budget(nodes)
    return tau(runs[labels[0], temperature]) / tau(runs[labels[-1], temperature])


def _first(runs: Runs) -> str:
    gains = [depth_gain(runs, nodes, t) for nodes in BUDGETS for t in TEMPERATURES]
    bests = [best(runs, nodes, t) for nodes in BUDGETS for t in TEMPERATURES]
    chains = sum(int(label.split("/")[1]) == 1 for label in bests if label.endswith("/8"))
    deepest = all(label == of_budget(int(label.split("/")[2]))[0] for label in bests)
    holds = "holds" if deepest else "holds in part" if min(gains) > 1.0 else "does not hold"
    return (f"Depth against width at equal nodes {holds}: the deepest shape has {min(gains):.2f} to {max(gains):.2f} "
            f"times the tau of one wide level; but the best is {', '.join(dict.fromkeys(bests))} "
            f"(a chain in {chains} of {len(TEMPERATURES)} cases at 8 nodes), so some width beside depth "
            f"{'pays' if any(int(label.split('/')[1]) > 1 for label in bests) else 'does not pay'} in acceptance.")


def _budget_text(runs: Runs, nodes: int, temperature: float) -> str:
    labels = of_budget(nodes)
    top = best(runs, nodes, temperature)
    others = [tau_ratio([runs[top, temperature]], [runs[label, temperature]]) for label in (labels[0], labels[-1])]
    details = [f"{ratio.text} over {label}" for ratio, label in zip(others, (labels[0], labels[-1]), strict=True)
            if label != top]
    return (f"{nodes} nodes, temperature {temperature:g}: best {top} with tau {tau(runs[top, temperature]):.2f}; "
            + "; ".join(details) + ".")


def _doubled_text(runs: Runs, temperature: float) -> str:
    labels = ["/".join(map(str, shape)) for shape in DOUBLED]
    details = [f"{first} to {second} {tau_ratio([runs[second, temperature]], [runs[first, temperature]]).text}"
            for first, second in pairwise(labels)]
    return f"Twice the nodes at equal depth, temperature {temperature:g}: tau {'; '.join(details)}."


def _with_interval(counted: Sequence[Counted]) -> str:
    interval = tau_interval(counted)
    return f"{tau(counted):.2f} ({interval.low:.2f}-{interval.high:.2f})"


def figure(runs: Runs) -> Figure:
    """tau over depth at equal nodes."""
    drawn, panels = new_figure(10.5, 4.6, len(TEMPERATURES))
    colours = {8: WARM_ORANGE, 16: BASELINE_BLUE}
    for axes, temperature in zip(panels, TEMPERATURES, strict=True):
        for nodes in BUDGETS:
            labels = sorted(of_budget(nodes), key=lambda label: (int(label.split("/")[0]), -int(label.split("/")[1])))
            depths = [int(label.split("/")[0]) for label in labels]
            counted = [runs[label, temperature] for label in labels]
            taus = [tau(one) for one in counted]
            spans = [tau_interval(one) for one in counted]
            axes.errorbar(depths, taus, [[t - s.low for t, s in zip(taus, spans, strict=True)],
                                         [s.high - t for t, s in zip(taus, spans, strict=True)]],
                          color=colours[nodes], marker="o" if nodes == 8 else "s", capsize=3, label=f"{nodes} nodes")
            for depth, value, label in zip(depths, taus, labels, strict=True):
                axes.annotate(f"top-k {label.split('/')[1]}", (depth, value), xytext=(5, -12 if nodes == 8 else 7),
                              textcoords="offset points", fontsize=8, color=OTHER_GREY)
        axes.set_title(f"temperature {temperature:g}", fontsize=12, fontweight="normal")
        axes.set(xlabel="num_steps: deep to the right, wide to the left")
        axes.legend(loc="lower right")
    panels[0].set_ylabel("tokens per target pass (tau)")
    panels[0].axhline(1.0, color=BEST_GREEN, linewidth=1.0, linestyle=":")
    title(drawn, f"The best greedy tree of 8 nodes is {best(runs, 8, 0.0)}, of 16 nodes {best(runs, 16, 0.0)}",
          "95 % intervals over prompts; nodes sent to verification are equal along a line")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
