"""Which family of drafters a target is served fastest with, at equal data and equal time of training.

The field's order differs by target: DSpark reports acceptance lengths of 27 to 31 % above EAGLE-3's and 16 to 18 %
above DFlash's, while for other targets EAGLE-3 leads. Every family that starts from nothing is trained here on the same
states for the same seconds, at its own learning rate, and drafts a chain as long as the job's unrolled depth: tau by
suite, and whole requests of one user timed side by side, prefill included. The four fastest are trained with two more
seeds.

*Predicted*: the speed-up that the cost model of plans (`planning.needed_tau`) has with the measured tau, by its default
rates of a CPU. *Carried over*: the same for other targets on an H100, if a drafter of the family had that tau there:
weights read and products at the rates of data sheets, with the family's own drafting. That shows what the cost of
drafting does to the order, and nothing about tau of those targets.

The seconds of training are those of a machine that does nothing else.

    python -m benchmarks.experiments.families [--short] [--job demo|published] --out DIR
"""

import sys
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import get_args

import numpy as np
from matplotlib.figure import Figure

from benchmarks.experiments.fits import Counted, tau, tau_interval
from benchmarks.experiments.program import main
from benchmarks.experiments.report import ExperimentResult
from benchmarks.experiments.timing import Rung, fields_of, speedups, time_all
from benchmarks.experiments.workspace import Trained, Workspace
from benchmarks.figure_style import new_figure, ratios, title
from benchmarks.plans import LLAMA_8B, OLMO_32B, QWEN_235B, served_by_sglang
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import CausalHead, DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Interval
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_api.planning.facts import target_facts
from eyrie_api.planning.hardware import ASSUMED, Rates, gpu_rates
from eyrie_api.planning.needed_tau import planned_speedup
from eyrie_api.planning.plan_work import TargetFacts
from eyrie_api.planning.sweep import expand
from eyrie_workers.measure.intervals import FloatArray, interval_around, standard_error

NAME = "families"
CLAIM = ("DSpark accepts 27 to 31 % more than EAGLE-3 and 16 to 18 % more than DFlash; for other targets EAGLE-3 "
         "leads, and no family leads everywhere.")
LARGER = {"8B": (LLAMA_8B, 1, 2.0), "32B": (OLMO_32B, 2, 2.0), "235B mixture": (served_by_sglang(QWEN_235B), 4, 1.0)}
"""Targets, their GPUs, and bytes of a weight."""

DRAFTERS = {name: DrafterSpec(family=name) for name, row in FAMILIES.items() if not row.of_target} | {
    f"dflash + {head}": DrafterSpec(family="dflash", causal_head=head) for head in get_args(CausalHead)}
_USERS = (1, 64)
_BEST, _MORE_SEEDS = 4, (1, 2)


def carried(drafter: DrafterSpec, tau_here: float, depth: int, target: TargetFacts, num_gpus: int, weight_bytes: float,
            users: int) -> float:
    """Speed-up of a chain with this tau on H100s. Pure."""
    rates = gpu_rates(ASSUMED, "expected", num_gpus=num_gpus, tp_size=num_gpus, batch=users, weight_bytes=weight_bytes,
                      active_share=target.active_parameters / target.parameters)
    return predicted(drafter, tau_here, depth, target, users, rates)


def predicted(drafter: DrafterSpec, tau_here: float, depth: int, target: TargetFacts, users: int,
              rates: Rates) -> float:
    """Speed-up of a chain with this tau, by the cost model. Pure."""
    (candidate,) = expand(JobSpec(
        target=TargetSpec(model=target.source), data=DataSpec(sources=(DataSource(path="any"),)),
        drafter=drafter, train=TrainSpec(ttt_length=depth)))
    return planned_speedup(target, target.trained_drafter(candidate), depth, tau_here, users, rates)


def measure(workspace: Workspace) -> ExperimentResult:
    """Train every family, time them side by side, and train the fastest with more seeds."""
    store, seconds = workspace.store(workspace.rows()), workspace.scale.seconds
    depth = min(workspace.job.train.ttt_length, 5)
    chain = DraftTreeShape(num_steps=depth, top_k=1, num_draft_tokens=depth + 1)

    def trained(name: str, seed: int) -> Trained:
        return workspace.train(store, family=DRAFTERS[name].family, drafter=DRAFTERS[name], seed=seed, checkpoints=1,
                               settings={"max_steps": None, "max_seconds": seconds})

    first = {name: trained(name, 0) for name in DRAFTERS}
    rungs = [Rung(name, name, of.last, of.report.checkpoints[-1]) for name, of in first.items()]
    fields = fields_of(time_all(workspace, rungs, chain), list(first), 0.0)
    runs: dict[str, list[Sequence[Counted]]] = {name: [workspace.decode(of.last, chain)] for name, of in first.items()}
    fastest = sorted(zip(speedups(fields.sum(0)).tolist(), first, strict=True), reverse=True)[:_BEST]
    for seed in _MORE_SEEDS:
        for _, name in fastest:
            runs[name].append(workspace.decode(trained(name, seed).last, chain))
            print(f"{name}, seed {seed}: tau {tau(runs[name][-1]):.3f}", flush=True)
    drafters = {name: DRAFTERS[name].model_copy(update={"draft_vocab_size": of.report.vocabulary.draft_vocab_size})
                for name, of in first.items()}
    here = {name: predicted(drafter, tau(runs[name][0]), depth, target_facts(workspace.path), 1, Rates())
            for name, drafter in drafters.items()}
    return evaluate(runs, fields, here, {name: of.report.checkpoints[-1].step for name, of in first.items()}, depth,
                    seconds)


def evaluate(runs: Mapping[str, Sequence[Sequence[Counted]]], fields: FloatArray, here: Mapping[str, float],
             steps: Mapping[str, int], depth: int, seconds: float) -> ExperimentResult:
    """The result from counts and timings. Pure.

    runs    by family, one per seed          fields  [N prompts, undrafted and families, 4]
    here    the cost model's speed-up for this target on a CPU, by its default rates
    """
    speeds = dict(zip(runs, with_intervals(fields), strict=True))
    order = sorted(runs, key=lambda name: -speeds[name][0])
    suites = list(dict.fromkeys(of.suite for of in runs[order[0]][0]))
    moved = {(name, larger, users): carried(DRAFTERS[name], tau(runs[name][0]), depth, *LARGER[larger], users=users)
             for name in runs for larger in LARGER for users in _USERS}
    table = [[name, f"{speeds[name][0]:.2f} ({speeds[name][1].low:.2f}-{speeds[name][1].high:.2f})",
              f"{here[name]:.2f}", _tau(runs[name]),
              *(f"{tau([of for of in runs[name][0] if of.suite == suite]):.2f}" for suite in suites),
              ", ".join(f"{tau(run):.2f}" for run in runs[name][1:]) or "-", str(steps[name]),
              *(" / ".join(f"{moved[name, larger, users]:.2f}" for users in _USERS) for larger in LARGER)]
             for name in order]
    return ExperimentResult(
        found=[_first(order, speeds), _seeds(runs), *(_carried(runs, moved, larger) for larger in LARGER)],
        measured=f"Trained {seconds:g} s each on the same states, each family at its own learning rate; chain "
                 f"{depth}/1/{depth + 1}, greedy; speed-up of one user over the undrafted engine on {len(fields)} "
                 f"prompts, tau on {len(runs[order[0]][0])}; 95 % intervals over prompts.",
        limits=("The rates are the families' defaults, measured on the shipped target.",
                "Draft trees are left out; Medusa, Hydra and DFlash gain most from them.",
                "Figures carried over assume this tau; a larger target has drafters of another tau, and launches, "
                "attention and sampling are not in the cost model, in which each token of a mixture draws its experts "
                "on its own."),
        columns=("family", "speed-up", "predicted", "tau", *suites, "tau, further seeds", "steps", *(
            f"{larger}, {' / '.join(map(str, _USERS))} at once" for larger in LARGER)),
        table=table, figure=lambda: figure(order, speeds), timed=True)


def with_intervals(fields: FloatArray) -> list[tuple[float, Interval]]:
    """Each family's speed-up, prompts resampled."""
    values = speedups(fields.sum(0)).tolist()

    def of(place: int) -> Interval:
        def statistic(sums: FloatArray) -> FloatArray:
            of_variants = sums.reshape(len(sums), *fields.shape[1:])
            speed = of_variants[..., 0] / of_variants[..., 1]
            return np.asarray(speed[:, 1 + place] / speed[:, 0])

        return interval_around(values[place], standard_error(fields.reshape(len(fields), -1), statistic), len(fields))

    return [(value, of(place)) for place, value in enumerate(values)]


def _tau(runs: Sequence[Sequence[Counted]]) -> str:
    interval = tau_interval(runs[0])
    return f"{tau(runs[0]):.2f} ({interval.low:.2f}-{interval.high:.2f})"


def _first(order: Sequence[str], speeds: Mapping[str, tuple[float, Interval]]) -> str:
    best = speeds[order[0]]
    alike = [name for name in order[1:] if speeds[name][1].high >= best[1].low]
    return (f"Fastest served: {order[0]} with {best[0]:.2f}x ({best[1].low:.2f} to {best[1].high:.2f}); "
            f"intervals that overlap with its own: {', '.join(alike) or 'none'}; slowest {order[-1]} with "
            f"{speeds[order[-1]][0]:.2f}x.")


def _seeds(runs: Mapping[str, Sequence[Sequence[Counted]]]) -> str:
    spreads = [f"{name} {fmean(map(tau, of)):.2f} (sd {stdev(map(tau, of)):.3f})" for name, of in runs.items()
               if len(of) > 1]
    return f"tau over three seeds: {', '.join(spreads)}."


def _carried(runs: Mapping[str, Sequence[Sequence[Counted]]], moved: Mapping[tuple[str, str, int], float],
             larger: str) -> str:
    orders = [", ".join(f"{name} {moved[name, larger, users]:.2f}" for name in sorted(
        runs, key=lambda name: -moved[name, larger, users])[:3]) for users in _USERS]
    return (f"With these taus, {larger} on H100 by the cost model: "
            + "; ".join(f"{users} at once: {text}" for users, text in zip(_USERS, orders, strict=True)) + ".")


def figure(order: Sequence[str], speeds: Mapping[str, tuple[float, Interval]]) -> Figure:
    """Speed-up by family."""
    drawn, (axes,) = new_figure(8.5, 4.6)
    ratios(axes, {name: speeds[name] for name in order})
    axes.set(xlabel="speed-up over the undrafted engine, one user")
    title(drawn, "What each family is worth after equal time of training", "greedy; 95 % intervals over prompts")
    return drawn


if __name__ == "__main__":
    sys.exit(main(NAME, CLAIM, measure))
