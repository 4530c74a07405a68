"""Training by Eyrie, SpecForge 0.2.0 and speculators 0.9.0 on the published model: `make bench-peers JOB=published`.

The first answers of `make demo-published`'s target to that job's prompts, each a row; the same drafter, and what
differs between the programs, as in `bench`. Everything is evaluated by Eyrie's engine on that job's suites, greedily.

- *equal epochs*, one seed, the middle rate: also what a program's rate, memory and bytes are taken from.
- *equal time*: each program takes as many epochs as it computes in four minutes, by that rate, and its schedule
  ends there. Every learning rate with one seed; then the best of each program with the other seeds.

Time is that of optimizer steps with the loading of their batches: not of starts, evaluations and exports. Each run is
a line of a ledger; killed, the command goes on. The runs of equal epochs, which come first, need an idle machine; later
ones have a fixed number of epochs.

    python -m benchmarks.peers.published [--short] [--out .eyrie/bench/peers_published.json]
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.fits import Counted, Ratio, tau, tau_ratio
from benchmarks.experiments.report import markdown_table
from benchmarks.peers.bench import DIFFERENCES, EYRIE, SPECFORGE, SPECULATORS, TREE, TTT, Bench, Case
from benchmarks.peers.workload import Row
from benchmarks.published.demo import TARGET, local_job
from benchmarks.published.target import make
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import EyrieError, report_error
from eyrie_workers.data.rows import AnsweredRow
from eyrie_workers.machine import environment

NAMES = (EYRIE, SPECFORGE, SPECULATORS)
DRAFT_VOCAB = 8192
"""About what `make demo-published` chooses."""

EPOCHS, TIME = "equal epochs", "equal time"


class Run(Frozen):
    """One training of one program."""

    kind: str
    name: str
    rate: float
    seed: int
    epochs: float
    spent: dict[str, Any]
    counted: tuple[Counted, ...]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.published", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few rows, seconds and prompts: a test of the command")
    parser.add_argument("--out", type=Path, default=Path(".eyrie/bench/peers_published.json"))
    parser.add_argument("--peers", type=Path, default=Path(".eyrie/peers"), help="directory of the peers' environments")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    options = parser.parse_args(argv)
    full = {"rows": 300, "epochs": 2.0, "seconds": 240.0, "prompts": 12, "seeds": 3, "rates": (5e-4, 1e-3, 2e-3)}
    short = {"rows": 12, "epochs": 3.0, "seconds": 40.0, "prompts": 1, "seeds": 2, "rates": (1e-3, 2e-3)}
    for name, value in (short if options.short else full).items():
        setattr(options, name, value)
    if options.short:  # rows and runs of its own, which the full form does not go on with
        options.out = options.out.with_name(f"{options.out.stem}-short.json")
    return options


def case(num_rows: int) -> Case:
    """The published job's first answers, each a row."""
    job = local_job(TARGET)

    def rows(answered: Sequence[AnsweredRow]) -> list[Row]:
        return [Row(of.prompt_ids + of.answer_ids, (False,) * len(of.prompt_ids) + (True,) * len(of.answer_ids))
                for of in answered]

    return Case(target=TargetSpec(model=str(TARGET.resolve())), regenerate=job.regenerate, suites=job.benchmark.suites,
                data=job.data.model_copy(update={"max_conversations": num_rows}), draft_vocab=DRAFT_VOCAB, rows=rows)


class Ledger:
    """The runs that were done, and those that are."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._requests, self._file = bench, bench.requests(), bench.home / "runs.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.runs = [Run.model_validate_json(line) for line in lines]

    def run(self, kind: str, name: str, rate: float, seed: int, epochs: float) -> Run:
        """Train and decode, unless that was done."""
        for run in self.runs:
            if (run.kind, run.name, run.rate, run.seed) == (kind, name, rate, seed):
                return run
        spent = self._bench.train_mix(name, seed, rate=rate, epochs=epochs)
        run = Run(kind=kind, name=name, rate=rate, seed=seed, epochs=epochs, spent=spent,
                  counted=tuple(self._bench.judge(name, spent, self._requests)))
        shutil.rmtree(Path(spent["drafter"]).parent)
        with self._file.open("a") as file:
            file.write(run.model_dump_json() + "\n")
        self.runs.append(run)
        print(f"{kind}, {name}, rate {rate:g}, seed {seed}: {epochs:.2f} epochs, {spent['loop_s']:.0f} s, "
              f"{spent['real_tokens_per_s']:.0f} tokens/s, tau {tau(run.counted):.3f}", flush=True)
        return run


def measure(options: argparse.Namespace) -> tuple[dict[str, list[Run]], dict[str, Run], dict[str, Any]]:
    """By program the runs of equal time at its best rate, one per seed, and that of equal epochs; and the rows."""
    torch.set_num_threads(options.threads)
    make(TARGET)
    bench = Bench(options, case(options.rows))
    rows = bench.make_mix(NAMES)
    ledger, middle = Ledger(bench), options.rates[len(options.rates) // 2]
    even = {name: ledger.run(EPOCHS, name, middle, 0, options.epochs) for name in NAMES}
    pace = {name: options.seconds * run.spent["real_tokens_per_s"] * options.epochs / run.spent["real_tokens"]
            for name, run in even.items()}
    first = [ledger.run(TIME, name, rate, 0, pace[name]) for rate in options.rates for name in NAMES]
    best = {name: max((run for run in first if run.name == name), key=lambda run: tau(run.counted)).rate
            for name in NAMES}
    timed = {name: [next(run for run in first if (run.name, run.rate) == (name, best[name]))] for name in NAMES}
    for seed in range(1, options.seeds):
        for name in NAMES:
            timed[name].append(ledger.run(TIME, name, best[name], seed, pace[name]))
    return timed, even, rows


def evaluate(timed: dict[str, list[Run]], even: dict[str, Run], bytes_per_token: dict[str, float]) -> list[str]:
    """The tables and the ratios to both peers. Pure."""
    suites = list(dict.fromkeys(of.suite for of in even[EYRIE].counted))

    def taus(counted: Sequence[Counted]) -> list[str]:
        return [f"{tau(counted):.3f}", *(f"{tau([of for of in counted if of.suite == suite]):.2f}" for suite in suites)]

    rows = [[name, f"{even[name].rate:g}", f"{run.spent['real_tokens_per_s']:.0f}",
             f"{run.spent['peak_rss_above_imports_mb']:.0f}", f"{bytes_per_token[name]:.0f}", *taus(run.counted)]
            for name, run in even.items()]
    times = [[name, str(run.seed), f"{run.spent['loop_s']:.0f}", f"{run.epochs:.2f}", *taus(run.counted)]
             for name, runs in timed.items() for run in runs]
    return [f"Equal epochs ({even[EYRIE].epochs:g}):", "",
            *markdown_table(("program", "learning rate", "real tokens/s", "MB above imports", "bytes a token", "tau",
                             *suites), rows), "", "Equal time:", "",
            *markdown_table(("program", "seed", "seconds", "epochs", "tau", *suites), times), "",
            *(f"{kind}, tau over {peer}'s: {ratio.text}" for kind, peer, ratio in ratios(timed, even))]


def ratios(timed: dict[str, list[Run]], even: dict[str, Run]) -> list[tuple[str, str, Ratio]]:
    """Eyrie's tau over each peer's, of all seeds together."""
    return [(kind, peer, tau_ratio([run.counted for run in of[EYRIE]], [run.counted for run in of[peer]]))
            for kind, of in ((TIME, timed), (EPOCHS, {name: [run] for name, run in even.items()}))
            for peer in NAMES if peer != EYRIE]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write and print; returns the exit code."""
    options = parse(argv)
    try:
        timed, even, rows = measure(options)
    except EyrieError as error:
        return report_error(error)
    text = evaluate(timed, even, rows["bytes_per_real_token"])
    options.out.write_text(json.dumps({
        "table": text, "rows": rows, "short": options.short, "seconds": options.seconds, "rates": options.rates,
        "ttt_length": TTT, "draft_vocab_size": DRAFT_VOCAB, "drafted": TREE.model_dump(), "differences": DIFFERENCES,
        "runs": [run.model_dump(mode="json", exclude={"counted"}) for runs in (*timed.values(), even.values())
                 for run in runs], "environment": environment("float32").model_dump(mode="json")}, indent=1) + "\n")
    print("\n".join([*text, str(options.out)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
