"""Which of a hybrid target's layers a drafter should read.

The authors of the claim trained a drafter for Olmo 3, whose layers alternate between sliding windows and full
attention, and "shifted the target layers to land on full attention layers specifically. This is a small change ... But
it matters. Full attention layers are more informative." It gives no figure.

A random target cannot show this, so a small hybrid one is trained first (`benchmarks.quickstart.pretrain`, course
quickstart-hybrid: 16 layers, of every four the last attends to everything, the others to 24 tokens, with conversations
of some 150). Then drafters are trained that differ in the three layers they read, from one capture:

    full       the outputs of full-attention layers         4, 8, 12
    before     the layer before each                        3, 7, 11
    after      the layer after each                         5, 9, 13
    default    where an even target would be read           2, 8, 13
    low, high  the three lowest, the three highest          1, 2, 3 and 13, 14, 15

(`hidden_states` indices: 0 is the embedding.) `before` and `after` are one layer away from `full`, so the depth is
nearly equal, and both are outputs of windowed layers. They differ in the residual stream: the contribution of the
full-attention layer is present one layer later and absent one layer earlier. If the *kind* of the layer matters, `full`
is better than both; if only its contribution does, `after` is as good.

    python -m benchmarks.experiments.layer_choice [--short] --out DIR
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure

from benchmarks.experiments.fits import Counted, Ratio, tau, tau_ratio
from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.workspace import CHAIN, FULL, Workspace
from benchmarks.figure_style import BASELINE_BLUE, BEST_GREEN, OTHER_GREY, new_figure, title
from benchmarks.quickstart import pretrain
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.targets import JobTarget
from eyrie_workers.targets.config import choose_aux_layers

NAME = "layer_choice"
CLAIM = "On a hybrid target, read full-attention layers: they \"are more informative\"."
CHOICES: dict[str, tuple[int, ...]] = {
    "full": (4, 8, 12), "before": (3, 7, 11), "after": (5, 9, 13), "default": (2, 8, 13), "low": (1, 2, 3),
    "high": (13, 14, 15)}
_SHORT_TOKENS = 60_000
_SEEDS = 2

Runs = Mapping[str, Sequence[Sequence[Counted]]]
"""By choice: one run per seed."""


def hybrid_target(work: Path, *, short: bool) -> Path:
    """The hybrid target, trained in the work directory unless it is there."""
    out = work / pretrain.QUICKSTART_HYBRID
    course = pretrain.COURSES[pretrain.QUICKSTART_HYBRID]
    if short:
        course = replace(course, recipe=replace(course.recipe, tokens=_SHORT_TOKENS))
    state = work / f"{pretrain.QUICKSTART_HYBRID}-work"
    state.mkdir(parents=True, exist_ok=True)
    pretrain.run(course, out, state)
    return out


def measure(workspace: Workspace) -> ExperimentResult:
    """Train the target, then a drafter for every choice and seed."""
    target = hybrid_target(workspace.work, short=workspace.scale != FULL)
    job = workspace.job.model_copy(update={"target": JobTarget(model=str(target))})
    workspace = Workspace(workspace.work, workspace.scale, job)
    layers_read = tuple(sorted({layer for layers in CHOICES.values() for layer in layers}))
    store = workspace.store(workspace.rows(), aux_layers=layers_read)
    runs: dict[str, list[Sequence[Counted]]] = {}
    accuracy: dict[str, list[float]] = {}
    for seed in range(min(_SEEDS, workspace.scale.seeds)):
        for name, layers in CHOICES.items():
            trained = workspace.train(store, seed=seed, drafter=DrafterSpec(aux_layers=layers))
            runs.setdefault(name, []).append(workspace.decode(trained.last))
            accuracy.setdefault(name, []).append(trained.report.checkpoints[-1].accuracy[0])
            print(f"seed {seed}, {name} {layers}: tau {tau(runs[name][-1]):.3f}", flush=True)
    shape = pretrain.COURSES[pretrain.QUICKSTART_HYBRID].shape
    chosen = choose_aux_layers(shape.num_layers, shape.layer_types).aux_layers
    return evaluate(runs, accuracy, chosen)


def evaluate(runs: Runs, accuracy: Mapping[str, Sequence[float]], chosen: tuple[int, ...]) -> ExperimentResult:
    """The result from the counts. Pure.

    chosen  Eyrie's default layers for such a target
    """
    ratios = {name: tau_ratio(runs["full"], runs[name]) for name in CHOICES if name != "full"}
    table = [[name, ", ".join(map(str, layers)), f"{fmean(map(tau, runs[name])):.2f}",
              ", ".join(f"{tau(run):.2f}" for run in runs[name]), f"{fmean(accuracy[name]):.3f}",
              "" if name == "full" else ratios[name].text]
             for name, layers in sorted(CHOICES.items(), key=lambda item: -fmean(map(tau, runs[item[0]])))]
    seeds, prompts = len(runs["full"]), len(runs["full"][0])
    return ExperimentResult(
        found=[_first(runs, ratios), f"Eyrie's own choice for this target is {', '.join(map(str, chosen))}."],
        measured=f"A hybrid target of 16 layers (windows of 24 tokens in three of four) trained for this; {seeds} "
                 f"seeds per choice, one capture, {prompts} held-out prompts, greedy, chain {CHAIN.label()}; 95 % "
                 "intervals over prompts, paired, seeds added.",
        limits=("A target of 13 M parameters trained for minutes, windows scaled down with it; Olmo 3 has 64 layers "
                "and windows of 4096.",
                "Few seeds: a difference as small as their scatter is none."),
        columns=("choice", "layers", "tau", "by seed", "first-step accuracy", "tau of full over it"), table=table,
        figure=lambda: figure(runs))


def _first(runs: Runs, ratios: Mapping[str, Ratio]) -> str:
    pairs = [[tau(a) - tau(b) for a, b in zip(runs["full"], runs[name], strict=True)] for name in ("before", "after")]
    scatter = max((stdev(apart) for apart in pairs if len(apart) > 1), default=0.0)
    beats = [ratios[name].clear and ratios[name].value > 1.0 and fmean(apart) > scatter
             for name, apart in zip(("before", "after"), pairs, strict=True)]
    verdict = {
        (True, True): "The kind of layer matters",
        (True, False): "Passing through full attention matters, the kind of the layer read does not",
        (False, True): "Reading full attention beats reading after it, not before it",
        (False, False): "The claim does not show here"}[beats[0], beats[1]]
    details = "; ".join(f"over {name} {ratio.text}" for name, ratio in ratios.items())
    return f"{verdict}: tau when reading full-attention layers, {details}."


def figure(runs: Runs) -> Figure:
    """tau by choice, every seed a point."""
    drawn, (axes,) = new_figure(8.5, 4.6)
    names = sorted(CHOICES, key=lambda name: fmean(map(tau, runs[name])))
    for place, name in enumerate(names):
        taus = [tau(run) for run in runs[name]]
        axes.barh(place, fmean(taus) - 1.0, left=1.0, color=BEST_GREEN if name == "full" else BASELINE_BLUE, height=0.6)
        axes.plot(taus, [place] * len(taus), "o", color=OTHER_GREY, zorder=3)
    axes.set_yticks(range(len(names)), [f"{name} ({', '.join(map(str, CHOICES[name]))})" for name in names])
    axes.set(xlabel="tokens per target pass (tau); the bar begins at 1, which is no drafter")
    title(drawn, "Which three layers of a hybrid target a drafter reads",
          f"greedy, chain {CHAIN.label()}; points are seeds; layers 4, 8, 12 have full attention")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
