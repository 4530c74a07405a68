"""Whether the learning rates of families, measured on a target of width 256, suit a wider one.

Adam's best rate falls with the width of the matrices that it trains (Yang et al., arXiv:2203.03466: as 1 / width), and
published EAGLE-3 training runs for targets of thousands use 5e-5 to 6e-4, where 2e-3 is best at 256. Every family that
SGLang serves is trained at its own rate and at that rate times 256 / width of this target, for equal steps on the same
rows, from the same seed. The shipped target, of width 256, has nothing to show here.

    python -m benchmarks.experiments.learning_rates [--short] --job published --out DIR
"""

import sys
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.experiments.fits import Counted, Ratio, tau, tau_ratio
from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.workspace import Workspace
from benchmarks.figure_style import new_figure, ratios, title
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.families import FAMILIES, sglang_families
from eyrie_workers.drafters.family import MEASURED_WIDTH, family_named
from eyrie_workers.targets.config import read_config

NAME = "learning_rates"
CLAIM = ("Adam's best learning rate falls with width: one that was measured on a small model is too high for a wide "
         "one.")

_STEPS = 0.75

Runs = Mapping[str, tuple[tuple[float, Sequence[Counted]], tuple[float, Sequence[Counted]]]]
"""By family: the rate and what its drafter accepted, at the family's own rate and at the scaled one."""


def measure(workspace: Workspace) -> ExperimentResult:
    """Train and decode every family at both rates."""
    width, depth = read_config(workspace.path).hidden_size, min(workspace.job.train.ttt_length, 5)
    chain = DraftTreeShape(num_steps=depth, top_k=1, num_draft_tokens=depth + 1)
    store, steps = workspace.store(workspace.rows(workspace.scale.conversations // 2)), workspace.scale.steps
    runs: dict[str, tuple[tuple[float, Sequence[Counted]], ...]] = {}
    for name in sglang_families():
        if FAMILIES[name].of_target:
            continue
        for rate in (own := family_named(name).learning_rate, own * MEASURED_WIDTH / width):
            drafter = workspace.train(store, family=name, checkpoints=1, settings={
                "learning_rate": rate, "max_steps": round(_STEPS * steps)}).last
            runs[name] = (*runs.get(name, ()), (rate, workspace.decode(drafter, chain)))
            print(f"{name}, learning rate {rate:g}: tau {tau(runs[name][-1][1]):.3f}", flush=True)
    return evaluate({name: (of[0], of[1]) for name, of in runs.items()}, width, round(_STEPS * steps), depth)


def ratio(runs: Runs, name: str) -> Ratio:
    """tau at the scaled rate over that at the family's own."""
    (_, own), (_, scaled) = runs[name]
    return tau_ratio([scaled], [own])


def evaluate(runs: Runs, width: int, steps: int, depth: int) -> ExperimentResult:
    """The result from the counts. Pure."""
    some = next(iter(runs.values()))[0][1]
    of_families = {name: ratio(runs, name) for name in runs}
    better, worse = ([name for name, of in of_families.items() if of.clear and (of.value > 1.0) is above]
                     for above in (True, False))
    return ExperimentResult(
        found=[f"At width {width} a rate of {MEASURED_WIDTH} / {width} of the family's own is clearly better for "
               f"{', '.join(better) or 'no family'}, clearly worse for {', '.join(worse) or 'no family'}.",
               *(f"{name}: tau {of.text} with {runs[name][1][0]:.2g} in place of {runs[name][0][0]:g}."
                 for name, of in of_families.items())],
        measured=f"One seed, {steps} steps of 1024 tokens, {len(some)} held-out prompts, greedy, chain {depth}/1/"
                 f"{depth + 1}; 95 % intervals over prompts, paired.",
        limits=("Two widths show a direction, not a power.", "One seed, and few steps: a longer run may prefer another "
                "rate."),
        columns=("family", "own rate", "tau", "scaled rate", "tau", "ratio"),
        table=[[name, f"{own[0]:g}", f"{tau(own[1]):.3f}", f"{scaled[0]:.2g}", f"{tau(scaled[1]):.3f}",
                of_families[name].text] for name, (own, scaled) in runs.items()],
        figure=lambda: figure(of_families))


def figure(of_families: Mapping[str, Ratio]) -> Figure:
    """tau at the scaled rate over that at the family's own."""
    drawn, (axes,) = new_figure(8.0, 4.0)
    ratios(axes, {name: (of.value, of.interval) for name, of in of_families.items()})
    axes.set(xlabel="tau at the scaled learning rate over tau at the family's own")
    title(drawn, "What a rate that falls with width is worth", "greedy; 95 % intervals over prompts")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
