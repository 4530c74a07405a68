"""What a head that reads the drafted tokens adds to a block of marginals.

DFlash drafts a block in one pass, so that a later token does not know the earlier ones. Domino's GRU, DFlash2's
selector (with its convolutions and without them), LiLiCorr's comparison of candidates and DSpark's Markov head read
them. All are trained on the same states for the same steps, at their families' own learning rate, and draft the same
chain.

    python -m benchmarks.experiments.block_heads [--short] [--job demo|published] --out DIR
"""

import sys
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.experiments.families import DRAFTERS
from benchmarks.experiments.fits import Counted, Ratio, tau, tau_interval, tau_ratio
from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.workspace import Workspace
from benchmarks.figure_style import new_figure, ratios, title
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.families import FAMILIES

NAME = "block_heads"
CLAIM = ("On Qwen3-8B, GSM8K, one user, DFlash2 is served at 5.06x, Domino at 4.87x, DSpark at 4.86x and DFlash at "
         "4.59x (NVIDIA/Model-Optimizer#2342).")
MARGINALS = "dflash"

Runs = Mapping[str, Sequence[Sequence[Counted]]]


def measure(workspace: Workspace) -> ExperimentResult:
    """Train each drafter of blocks with every seed, and count its rounds."""
    store, depth = workspace.store(workspace.rows()), min(workspace.job.train.ttt_length, 5)
    chain = DraftTreeShape(num_steps=depth, top_k=1, num_draft_tokens=depth + 1)
    runs: dict[str, list[Sequence[Counted]]] = {}
    for seed in range(workspace.scale.seeds):
        for name, drafter in DRAFTERS.items():
            if FAMILIES[drafter.family].drafts_blocks:
                trained = workspace.train(store, family=drafter.family, drafter=drafter, seed=seed, checkpoints=1)
                runs.setdefault(name, []).append(workspace.decode(trained.last, chain))
                print(f"{name}, seed {seed}: tau {tau(runs[name][-1]):.3f}", flush=True)
    return evaluate(runs, workspace.scale.steps, depth)


def over_marginals(runs: Runs) -> dict[str, Ratio]:
    """tau of each head over that of the marginals, all seeds together."""
    return {name: tau_ratio(of, runs[MARGINALS]) for name, of in runs.items() if name != MARGINALS}


def evaluate(runs: Runs, steps: int, depth: int) -> ExperimentResult:
    """The result from the counts, one per seed. Pure."""
    gains, some = over_marginals(runs), runs[MARGINALS][0]
    suites = list(dict.fromkeys(of.suite for of in some))
    rows = []
    for name, of in runs.items():
        together, interval = [counted for run in of for counted in run], tau_interval(of[0])
        rows.append([name, ", ".join(f"{tau(run):.3f}" for run in of), f"{interval.low:.2f}-{interval.high:.2f}",
                     *(f"{tau([one for one in together if one.suite == suite]):.2f}" for suite in suites),
                     gains[name].text if name in gains else "-"])
    return ExperimentResult(
        found=[f"{name}: tau {gain.text} over {MARGINALS}'s." for name, gain in gains.items()],
        measured=f"{len(runs[MARGINALS])} seeds, {steps} steps of 1024 tokens, {len(some)} held-out prompts, greedy, "
                 f"chain {depth}/1/{depth + 1}; 95 % intervals over prompts, paired.",
        limits=("Equal steps, not equal time.",
                "Domino and DSpark let the settled token's position propose, the others do not."),
        columns=("drafter", "tau by seed", "interval, first seed", *suites, f"over {MARGINALS}"), table=rows,
        figure=lambda: figure(gains))


def figure(gains: Mapping[str, Ratio]) -> Figure:
    """tau of each head over that of the marginals."""
    drawn, (axes,) = new_figure(8.0, 3.2)
    ratios(axes, {name: (of.value, of.interval) for name, of in gains.items()})
    axes.set(xlabel=f"tau over {MARGINALS}'s")
    title(drawn, "What reading the drafted tokens is worth to a block", "equal steps, greedy; 95 % intervals")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
