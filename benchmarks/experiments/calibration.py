"""Whether confidence predicts acceptance, as EAGLE-2 assumes.

The claim: EAGLE-2 "rests its improvement on one empirical fact: the draft model is well-calibrated", its
confidence "closely approximates the token's actual acceptance rate, with small error" (arXiv:2406.16858, section 3.2).
If that fails, a tree grown by confidence has its nodes in the wrong places.

Two families answer the same prompts with wide trees of which every node is recorded (`benchmarks.calibration`).
A node's own confidence is compared with its acceptance, where its parent was accepted. Two results: the expected
calibration error, and whether a bin of more confident nodes is accepted less often (whether confidence *orders* nodes,
which is all that tree growth needs).

    python -m benchmarks.experiments.calibration [--short] --out DIR
"""

import sys
from collections.abc import Mapping
from itertools import pairwise

from matplotlib.figure import Figure

from benchmarks.calibration.measure import Curve, RankCount, curve, ranks
from benchmarks.calibration.measure import measure as measure_nodes
from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.workspace import COMPARED, Workspace
from benchmarks.figure_style import BASELINE_BLUE, BEST_GREEN, OTHER_GREY, new_figure, title
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.measure.tuner.profile import whole_tree

NAME = "calibration"
CLAIM = ("The draft model is well-calibrated: its confidence \"closely approximates the token's actual acceptance "
         "rate, with small error\".")
TEMPERATURES = (0.0, 1.0)
SHAPE = whole_tree(4, 4)
_PROMPTS = 4  # of each suite: thousands of nodes, whose bins tell more than their intervals
_SMALL_ERROR = 0.05
_FEW = 30
"""Nodes below which a bin is not used for the order."""

CurveKey = tuple[str, float]
"""Family and temperature."""


def measure(workspace: Workspace) -> ExperimentResult:
    """Measure every family at every temperature."""
    store = workspace.store(workspace.rows())
    found: dict[CurveKey, tuple[Curve, tuple[RankCount, ...]]] = {}
    prompts = workspace.prompts(min(_PROMPTS, workspace.scale.prompts))
    for family in COMPARED:
        drafter = open_drafter(workspace.train(store, family=family).last, workspace.target)
        for temperature in TEMPERATURES:
            requests = [workspace.request(prompt, temperature) for prompt in prompts]
            nodes, rounds, _ = measure_nodes(workspace.target, drafter, requests, SHAPE)
            found[family, temperature] = (
                curve([(node.step, node.accepted) for node in nodes if node.parent_accepted]), ranks(nodes))
            print(f"{family}, T={temperature:g}: {len(nodes)} nodes in {rounds} rounds", flush=True)
    return evaluate(found, len(prompts))


def bias(of: Curve) -> float:
    """Mean confidence minus the share accepted: positive for overconfidence."""
    return sum(one.count * (one.confidence - one.share) for one in of.bins) / max(1, of.count)


def ordered(of: Curve) -> bool:
    """Whether no bin with enough nodes is surely accepted less often than the bin below: their intervals overlap."""
    bins = [one for one in of.bins if one.count >= _FEW]
    return all(low.accepted_low <= high.accepted_high for low, high in pairwise(bins))


def evaluate(found: Mapping[CurveKey, tuple[Curve, tuple[RankCount, ...]]], prompts: int) -> ExperimentResult:
    """The result from the curves. Pure."""
    curves = {variant: of for variant, (of, _) in found.items()}
    table = [[family, f"{temperature:g}", str(of.count), f"{of.error:.3f}", f"{of.error_likely:.3f}",
              f"{bias(of):+.3f}", "yes" if ordered(of) else "no",
              ", ".join(f"{one.accepted / max(1, one.count):.2f}" for one in by_rank)]
             for (family, temperature), (of, by_rank) in found.items()]
    return ExperimentResult(
        found=[_first(curves), _order(curves)],
        measured=f"{prompts} held-out prompts, one at a time, trees {SHAPE.label()} of which every node is kept; one "
                 "seed; ten equal bins of confidence, 95 % intervals by Wilson; bars below 30 nodes are drawn and not "
                 "judged.",
        limits=("Nodes of one tree share their luck: intervals are somewhat too narrow.",
                "Drafters of minutes of training; longer training sharpens confidences, and may sharpen them too far."),
        columns=("family", "T", "guesses", "ECE", "ECE above 0.1", "confidence less acceptance", "ordered",
                 "right by rank"),
        table=table, figure=lambda: figure(curves))


def _first(curves: Mapping[CurveKey, Curve]) -> str:
    errors = [of.error_likely for of in curves.values()]
    small = [error <= _SMALL_ERROR for error in errors]
    verdict = "holds" if all(small) else "holds in part" if any(small) else "does not hold"
    details = "; ".join(f"{family} at temperature {t:g} {of.error_likely:.3f} "
                     f"({'too sure' if bias(of) > 0 else 'too shy'})" for (family, t), of in curves.items())
    return (f"The claim {verdict}: above a confidence of 0.1 it misses acceptance by {min(errors):.2f} to "
            f"{max(errors):.2f}: {details}.")


def _order(curves: Mapping[CurveKey, Curve]) -> str:
    wrong = [f"{family} at temperature {t:g}" for (family, t), of in curves.items() if not ordered(of)]
    return ("No bin of more confident guesses is surely right less often than the one below, and order is all that "
            "growing a tree needs." if not wrong else
            f"More confident guesses are surely right less often in some bin: {', '.join(wrong)}.")


def figure(curves: Mapping[CurveKey, Curve]) -> Figure:
    """Share accepted over confidence."""
    drawn, panels = new_figure(10.0, 5.0, len(TEMPERATURES))
    for axes, temperature in zip(panels, TEMPERATURES, strict=True):
        axes.plot([0, 1], [0, 1], "--", color=OTHER_GREY, linewidth=1.2, label="calibrated")
        for family, colour, marker in zip(COMPARED, (BEST_GREEN, BASELINE_BLUE), "os", strict=True):
            bins = [one for one in curves[family, temperature].bins if one.count]
            reach = [[one.share - one.accepted_low for one in bins], [one.accepted_high - one.share for one in bins]]
            axes.errorbar([one.confidence for one in bins], [one.share for one in bins], reach, color=colour,
                          marker=marker, capsize=3, label=family)
        axes.set_title(f"temperature {temperature:g}", fontsize=12, fontweight="normal")
        axes.set(xlabel="confidence of a guess, its parent accepted", xlim=(0, 1), ylim=(0, 1.02))
    panels[0].set_ylabel("share accepted")
    panels[0].legend(loc="upper left")
    worst = max(of.error_likely for of in curves.values())
    title(drawn, f"Above 0.1, confidence misses acceptance by at most {worst:.2f} on average",
          f"trees {SHAPE.label()}, every node kept; bars 95 % (Wilson)")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
