"""Whether the target must generate the training answers itself.

The sources claim so: "you need to regenerate the final assistant turn using your actual model ... The response might be
worse than the original one from the dataset. It does not matter", because a drafter learns to predict the target.

The same prompts of the quickstart corpus are continued in two ways: by the corpus (the *original* answers, which the
target itself was trained on: as close to the target as foreign text can be) and by the target at temperature 0.7. In
both cases the target's hidden states and distributions on the text train the drafter; only the *contexts* differ. Equal
prompts, steps and tokens per step; several seeds; tau over the same held-out prompts, greedily and sampled.

A confounder: answers of other lengths have other numbers of supervised tokens for equal tokens. Both are reported.

    python -m benchmarks.experiments.on_policy [--short] --out DIR
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure

from benchmarks.experiments.fits import Counted, Ratio, tau, tau_ratio
from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.workspace import CHAIN, Workspace
from benchmarks.figure_style import BASELINE_BLUE, OTHER_GREY, new_figure, title
from benchmarks.quickstart.corpus.streams import conversations
from eyrie_api.contract.reports import TrainReport
from eyrie_workers.data.rows import ROWS, AnsweredRow, read_rows
from eyrie_workers.targets.templates import ChatTokenizer

NAME = "on_policy"
CLAIM = "\"You need to regenerate the final assistant turn using your actual model.\""
TEMPERATURES = (0.0, 1.0)
REGENERATED, ORIGINAL = "regenerated", "original"

Runs = Mapping[tuple[str, float], Sequence[Sequence[Counted]]]
"""By kind of answers and temperature: one run per seed."""


def original_rows(rows: Iterator[AnsweredRow], tokenizer: ChatTokenizer) -> Iterator[AnsweredRow]:
    """The same rows with the corpus's own answers, ending where the target would end."""
    known: dict[int, list[dict[str, object]]] = {}
    source = enumerate(conversations(10**9, 0), start=1)
    tools: dict[int, list[dict[str, object]] | None] = {}
    for row in rows:
        while row.line not in known:
            for line, conversation in islice(source, 64):
                known[line], tools[line] = conversation["messages"], conversation.get("tools")
        whole = tokenizer.render(known[row.line], tools[row.line], add_generation_prompt=False)
        prompt = list(row.prompt_ids)
        if whole[:len(prompt)] != prompt:
            raise ValueError(f"row {row.id} does not begin as line {row.line} of the corpus does")
        answer = whole[len(prompt):]
        ends = [place for place, token in enumerate(answer) if token in tokenizer.eos_ids]
        answer = answer[:ends[0] + 1]
        yield row.model_copy(update={"answer_ids": tuple(answer), "finish_reason": "stop", "ids_exact": False,
                                     "text": tokenizer.decode(answer)})


def off_policy_rows(workspace: Workspace, rows: Path) -> Path:
    """A directory of rows with the original answers."""
    made = original_rows(read_rows(rows / ROWS), workspace.tokenizer)
    return workspace.given_rows("original", [row.model_dump_json().encode() + b"\n" for row in made], rows)


def measure(workspace: Workspace) -> ExperimentResult:
    """Train and decode on both kinds of answers."""
    rows = workspace.rows()
    stores = {REGENERATED: workspace.store(rows), ORIGINAL: workspace.store(off_policy_rows(workspace, rows))}
    runs: dict[tuple[str, float], list[Sequence[Counted]]] = {}
    reports: dict[str, TrainReport] = {}
    for seed in range(workspace.scale.seeds):
        for kind, store in stores.items():
            trained = workspace.train(store, seed=seed)
            reports[kind] = trained.report
            for temperature in TEMPERATURES:
                counted = workspace.decode(trained.last, CHAIN, temperature)
                runs.setdefault((kind, temperature), []).append(counted)
                print(f"seed {seed}, {kind}, T={temperature:g}: tau {tau(counted):.3f}", flush=True)
    return evaluate(runs, reports)


def evaluate(runs: Runs, reports: Mapping[str, TrainReport]) -> ExperimentResult:
    """The result from the counts. Pure."""
    ratios = {t: tau_ratio(runs[REGENERATED, t], runs[ORIGINAL, t]) for t in TEMPERATURES}
    seeds, prompts = len(runs[REGENERATED, 0.0]), len(runs[REGENERATED, 0.0][0])
    table = []
    for kind in (REGENERATED, ORIGINAL):
        row = [kind, str(reports[kind].tokens), str(reports[kind].supervised_tokens)]
        for temperature in TEMPERATURES:
            taus = [tau(run) for run in runs[kind, temperature]]
            row.append(f"{fmean(taus):.2f} ({', '.join(f'{value:.2f}' for value in taus)})")
        table.append(row)
    return ExperimentResult(
        found=[_first(ratios), *(_seeds_text(runs, t) for t in TEMPERATURES)],
        measured=f"{seeds} seeds, equal prompts, {reports[REGENERATED].steps} steps of 1024 tokens each; {prompts} "
                 f"held-out prompts; chain {CHAIN.label()}; 95 % intervals over prompts, paired, seeds added.",
        limits=("The target was trained on the very generator that wrote the original answers: foreign text (a data "
                "set by other models) is further off, and should cost more.",
                "The teacher is the target in both cases; foreign answers as labels are not tried."),
        columns=("answers", "tokens", "of them supervised", *(f"tau, T={t:g} (seeds)" for t in TEMPERATURES)),
        table=table, figure=lambda: figure(runs))


def _first(ratios: Mapping[float, Ratio]) -> str:
    clear = [ratio for ratio in ratios.values() if ratio.clear and ratio.value > 1.0]
    verdict = "The claim holds" if len(clear) == len(ratios) else "The claim holds in part" if clear else \
        "The claim does not show here"
    details = ", ".join(f"{ratio.text} at temperature {t:g}" for t, ratio in ratios.items())
    return f"{verdict}: tau after training on regenerated instead of original answers {details}."


def _seeds_text(runs: Runs, temperature: float) -> str:
    apart = [tau(a) - tau(b) for a, b in zip(runs[REGENERATED, temperature], runs[ORIGINAL, temperature], strict=True)]
    spread = f", sd {stdev(apart):.2f}" if len(apart) > 1 else ""
    return (f"Seed by seed at temperature {temperature:g}, regenerated less original: "
            f"{', '.join(f'{value:+.2f}' for value in apart)} (mean {fmean(apart):+.2f}{spread}).")


def figure(runs: Runs) -> Figure:
    """tau by kind of answers, every seed a line."""
    drawn, panels = new_figure(8.5, 4.6, len(TEMPERATURES))
    for axes, temperature in zip(panels, TEMPERATURES, strict=True):
        pairs = list(zip(runs[ORIGINAL, temperature], runs[REGENERATED, temperature], strict=True))
        for first, second in pairs:
            axes.plot([0, 1], [tau(first), tau(second)], color=OTHER_GREY, marker="o", linewidth=1.2)
        means = [fmean(tau(pair[side]) for pair in pairs) for side in (0, 1)]
        axes.plot([0, 1], means, color=BASELINE_BLUE, marker="D")
        axes.set_xticks([0, 1], [ORIGINAL, REGENERATED])
        axes.set_xlim(-0.4, 1.4)
        axes.set_title(f"temperature {temperature:g}", fontsize=12, fontweight="normal")
    panels[0].set_ylabel("tokens per target pass (tau)")
    title(drawn, "Trained on the corpus's answers, and on the target's own",
          f"chain {CHAIN.label()}; grey: one seed, blue: their mean; equal prompts, steps and tokens")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
