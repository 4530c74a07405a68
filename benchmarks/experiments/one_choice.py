"""What one choice of a recipe is worth, all others at their defaults, and what the mixture of the data is.

The sources say that data decides and settings do little ("More diverse data, more epochs, better dataset curation -
these will move the needle far more than any architectural tweak"). Two groups, each with its own base:

    recipe   half of the conversations: the defaults, and one setting of training or of the drafter changed at a time
    data     as many conversations as the rarest source has: of all sources, and of each source alone

Within a group every drafter takes equal steps of equal tokens from the same seed, and all decode the same prompts, so
ratios of tau are paired. The defaults of a family should be the best row, or one whose interval includes it.

    python -m benchmarks.experiments.one_choice [--short] [--job demo|published] --out DIR
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.experiments.fits import Counted, Ratio, tau, tau_ratio
from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.timing import TEMPERATURES
from benchmarks.experiments.workspace import CHAIN, Settings, Workspace
from benchmarks.figure_style import BEST_GREEN, WARM_ORANGE, new_figure, ratios, title
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_workers.data.rows import ROWS
from eyrie_workers.targets.config import read_config

NAME = "one_choice"
CLAIM = ("\"More diverse data, more epochs, better dataset curation - these will move the needle far more than any "
         "architectural tweak.\"")
RECIPE, DATA = "defaults", "all sources"
"""The bases of the two groups."""

_STEPS = 0.75
"""Of the scale's: these are the most drafters of any experiment."""

Runs = Mapping[str, Mapping[str, Mapping[float, Sequence[Counted]]]]
"""Base, choice (the base itself first), temperature."""


@dataclass(frozen=True)
class Choice:
    """What differs from the defaults."""

    train: Settings = field(default_factory=dict)
    drafter: DrafterSpec = field(default_factory=DrafterSpec)


def recipe(learning_rate: float, vocab_size: int) -> dict[str, Choice]:
    """The choices of the first group, the defaults first. Pure."""
    return {
        RECIPE: Choice(),
        **{f"learning rate {rate:g}": Choice({"learning_rate": rate})
           for rate in (learning_rate / 8, learning_rate / 4, learning_rate / 2, learning_rate * 2)},
        "all positions unrolled": Choice({"unrolled_fraction": 1.0}),
        "no phase of single steps": Choice({"single_step_ratio": 0.0}),
        f"draft vocabulary {vocab_size // 12}": Choice(drafter=DrafterSpec(draft_vocab_size=vocab_size // 12)),
        "whole vocabulary": Choice(drafter=DrafterSpec(draft_vocab_size=vocab_size)),
        "EAGLE-3.1 norms": Choice(drafter=DrafterSpec(fc_norm=True, norm_output=True)),
        "loss lk_hybrid": Choice({"loss": "lk_hybrid"}),
        "cosine schedule": Choice({"schedule": "cosine"}),
    }


def sources_of(workspace: Workspace, rows: Path) -> dict[str, Path]:
    """As many conversations of every source as the rarest has; the base, of all of them, first. Empty where there is
    one source."""
    lines = (rows / ROWS).read_bytes().splitlines(keepends=True)
    named = [json.loads(line)["source_name"] for line in lines]
    if len(set(named)) == 1:
        return {}
    num = min(Counter(named).values())
    return {DATA: workspace.rows(num)} | {f"{source} alone": workspace.given_rows(
        f"{source}-{num}", [line for line, name in zip(lines, named, strict=True) if name == source][:num], rows)
        for source in sorted(set(named))}


def measure(workspace: Workspace) -> ExperimentResult:
    """Train and decode every choice of both groups."""
    steps = round(_STEPS * workspace.scale.steps)
    rate = workspace.learning_rate("eagle3")
    half = workspace.rows(workspace.scale.conversations // 2)
    groups = {
        RECIPE: {name: (half, choice) for name, choice in recipe(rate, read_config(workspace.path).vocab_size).items()},
        DATA: {name: (rows, Choice()) for name, rows in sources_of(workspace, workspace.rows()).items()},
    }
    runs: dict[str, dict[str, dict[float, Sequence[Counted]]]] = {}
    for base, choices in groups.items():
        for name, (rows, choice) in choices.items():
            drafter = workspace.train(workspace.store(rows), drafter=choice.drafter, checkpoints=1,
                                      settings={"max_steps": steps, **choice.train}).last
            runs.setdefault(base, {})[name] = {t: workspace.decode(drafter, temperature=t) for t in TEMPERATURES}
            taus = ", ".join(f"{tau(counted):.3f} at temperature {t:g}" for t, counted in runs[base][name].items())
            print(f"{name}: tau {taus}", flush=True)
    return evaluate(runs, steps)


def evaluate(runs: Runs, steps: int) -> ExperimentResult:
    """The result from the counts. Pure."""
    some = runs[RECIPE][RECIPE][TEMPERATURES[0]]
    suites = list(dict.fromkeys(of.suite for of in some))
    table = [[name, *(f"{tau(run[t]):.3f}" + ("" if name == base else f", {ratio(runs, base, name, t).text}")
                      for t in TEMPERATURES),
              *(f"{tau([of for of in run[TEMPERATURES[0]] if of.suite == suite]):.2f}" for suite in suites)]
             for base, group in runs.items() for name, run in group.items()]
    return ExperimentResult(
        found=[text(runs, base, t) for base in runs for t in TEMPERATURES],
        measured=f"EAGLE-3, one seed, {steps} steps of 1024 tokens for every drafter, {len(some)} held-out prompts, "
                 f"chain {CHAIN.label()}; ratios are to the first row of the group, with 95 % intervals over prompts, "
                 "paired.",
        limits=("One seed: drafters of equal recipes and different seeds differ too, and no interval here has that.",
                "Equal steps: a choice that needs more of them, or makes a step cheaper, is not credited."),
        columns=("choice", *(f"tau, T={t:g}" for t in TEMPERATURES), *(f"{suite}, T=0" for suite in suites)),
        table=table, figure=lambda: figure(runs))


def ratio(runs: Runs, base: str, name: str, temperature: float) -> Ratio:
    """tau of a choice over that of its base."""
    return tau_ratio([runs[base][name][temperature]], [runs[base][base][temperature]])


def text(runs: Runs, base: str, temperature: float) -> str:
    """Which choices of a group are clearly better or worse than its base."""
    of_names = {name: ratio(runs, base, name, temperature) for name in runs[base] if name != base}
    better, worse = ([f"{name} {of.text}" for name, of in sorted(of_names.items(), key=lambda item: -item[1].value)
                      if of.clear and (of.value > 1.0) is above] for above in (True, False))
    return (f"Against {base} at temperature {temperature:g}: better {', '.join(better) or 'nothing'}; worse "
            f"{', '.join(worse) or 'nothing'}; {len(of_names) - len(better) - len(worse)} of {len(of_names)} without a "
            "clear difference.")


def figure(runs: Runs) -> Figure:
    """Each choice's tau over its base's, greedy and sampled."""
    drawn, panels = new_figure(11.0, 4.8, len(runs), share_y=False)
    for axes, (base, group) in zip(panels, runs.items(), strict=True):
        for temperature, colour, shift in zip(TEMPERATURES, (BEST_GREEN, WARM_ORANGE), (-0.12, 0.12), strict=True):
            of_names = {name: ratio(runs, base, name, temperature) for name in group if name != base}
            ratios(axes, {name: (of.value, of.interval) for name, of in of_names.items()}, colour, shift=shift,
                   label=f"temperature {temperature:g}")
        axes.set(xlabel=f"tau over that of {base}")
    panels[0].legend(loc="best", fontsize=9)
    title(drawn, "What one choice is worth, and what the data are",
          f"chain {CHAIN.label()}; 95 % intervals over prompts")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
