"""Shared by the benchmark and tune stages: loading, the units to measure, and the measuring loop.

The loop is resumable per unit: a unit whose entry is in the ledger is not measured again. Prompts, order, seeds and
eliminations follow from the spec alone, so a resumed run measures what an uninterrupted one would have.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from eyrie_api.artifacts import digest_model
from eyrie_api.decisions.near_ties import is_lossless
from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.benchmark import BenchmarkSpec
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.reports import BenchmarkReport, CellReport
from eyrie_api.v1alpha1.stages import BenchmarkStage, ProveStage, TuneStage
from eyrie_workers.conversations.suites import Prompt, load_suite
from eyrie_workers.drafters.registry import open_drafter
from eyrie_workers.jsonl_ledger import EntryT, JsonlLedger
from eyrie_workers.machine.environment import cpu_count, environment
from eyrie_workers.machine.machine_lock import ProcessorTime, interference, machine_lock
from eyrie_workers.measurement.benchmark.losslessness import Divergence, explain
from eyrie_workers.measurement.benchmark.reports import baseline_rate, cell_report
from eyrie_workers.measurement.benchmark.samples import BASELINE, Entry
from eyrie_workers.measurement.benchmark.transformers_baseline import TransformersBaseline
from eyrie_workers.measurement.benchmark.variants import Bench, Unit, unit_seed
from eyrie_workers.measurement.variant import Variant
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.stage_program import Stage
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import load_target, resolve
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.templates import ChatTokenizer

LEDGER = "cells.jsonl"
REPORT = "report.json"

Suites = dict[str, list[Prompt]]

_SHORTEST_ANSWER = 16
"""Tokens that must fit behind a prompt; a shorter answer would measure mostly prefill."""


@dataclass(frozen=True)
class Session:
    """Everything loaded that a measurement needs."""

    bench: Bench
    target: TargetModel
    target_path: Path
    tokenizer: ChatTokenizer
    suites: Suites
    """All prompts of every suite, in the order of `load_suite`."""

    spec: BenchmarkSpec
    dtype: str

    def units(self, prompts: Iterable[tuple[int, Prompt]], temperatures: Sequence[float],
              repeats: int) -> list[Unit]:
        """Every prompt at every temperature, `repeats` times. The number of a prompt is its turn (`Unit.turn`)."""
        return [
            Unit(prompt=prompt, prompt_ids=ids, temperature=temperature, repeat=repeat, turn=turn + repeat)
            for turn, prompt in prompts
            for ids in (tuple(self.tokenizer.render(list(prompt.messages), list(prompt.tools) or None)),)
            for repeat in range(repeats)
            for temperature in temperatures
        ]


def read_suites(spec: BenchmarkStage | TuneStage | ProveStage, stage: Stage) -> Suites:
    """All usable prompts of every suite. Cheap; called before waiting for the machine lock or loading a model.

    Raises InvalidInput for a suite that cannot be read, or of which no prompt fits the target.
    """
    held_out = Path(spec.held_out_file) if spec.held_out_file else None
    suites = {suite.name: load_suite(suite, held_out, spec.benchmark.seed) for suite in spec.benchmark.suites}
    path = resolve(spec.target)
    return prompts_that_fit(suites, ChatTokenizer(path), read_config(path).max_position_embeddings, stage)


def prompts_that_fit(suites: Suites, tokenizer: ChatTokenizer, context: int, stage: Stage) -> Suites:
    """The prompts that leave room for an answer in the target's context; an event reports those left out.

    Raises InvalidInput when nothing of a suite is left.
    """
    kept: Suites = {}
    for name, prompts in suites.items():
        lengths = [len(tokenizer.render(list(prompt.messages), list(prompt.tools) or None)) for prompt in prompts]
        kept[name] = [prompt for prompt, length in zip(prompts, lengths, strict=True)
                      if length + _SHORTEST_ANSWER <= context]
        if not kept[name]:
            raise InvalidInput(f"benchmark.suites: no prompt of suite {name!r} fits the target's context of {context} "
                               f"tokens: the shortest has {min(lengths)} with this tokenizer",
                               "name other suites, with shorter prompts")
        if len(kept[name]) < len(prompts):
            stage.event("PromptsTooLong", f"{len(prompts) - len(kept[name])} of {len(prompts)} prompts of suite {name} "
                        f"leave no room for an answer in the target's context of {context} tokens and are left out",
                        warning=True)
    return kept


def open_session(spec: BenchmarkStage | TuneStage, suites: Suites, max_concurrency: int = 1) -> Session:
    """Load target and drafter."""
    torch.set_num_threads(spec.benchmark.threads or torch.get_num_threads())
    path = resolve(spec.target)
    tokenizer = ChatTokenizer(path)
    target = load_target(path, spec.target.dtype)
    engine = Engine(target, open_drafter(Path(spec.drafter_dir), target), max_concurrency=max_concurrency)
    bench = Bench(engine, seed=spec.benchmark.seed, max_new_tokens=spec.benchmark.max_new_tokens,
                  stop_ids=tuple(tokenizer.eos_ids))
    return Session(bench, target, path, tokenizer, suites, spec.benchmark, spec.target.dtype)


def open_ledger(stage: Stage, spec: Frozen, name: str = LEDGER) -> JsonlLedger[Entry]:
    """A stage's ledger of entries; an event reports what it already holds."""
    return open_ledger_for(Entry, stage, spec, name)


def open_ledger_for(kind: type[EntryT], stage: Stage, spec: Frozen, name: str = LEDGER) -> JsonlLedger[EntryT]:
    """A ledger of the stage; an event reports what it already holds."""
    ledger = JsonlLedger(stage.out_dir / name, kind, digest_model(spec))
    if ledger.set_aside is not None:
        stage.event("LedgerSetAside", f"{name} belonged to another spec and was kept as {ledger.set_aside.name}",
                    warning=True)
    if ledger.entries:
        stage.event("Resumed", f"{len(ledger.entries)} finished measurements found in {name}")
    return ledger


@contextmanager
def measuring(stage: Stage) -> Iterator[None]:
    """Hold the machine lock; events report a wait for it, and afterwards other work that ran on the machine.

    Models are loaded inside too: one benchmark must not load its models while another is being timed.
    """
    waiting = False

    def while_waiting() -> None:
        nonlocal waiting
        if not waiting:
            stage.event("Waiting", "another process measures on this machine; waiting for it to finish")
        waiting = True
        stage.pause_point()

    with machine_lock(while_waiting):
        before = ProcessorTime.now()
        yield
        disturbed = interference(before, ProcessorTime.now(), cpu_count(), os.getloadavg()[0])
    if disturbed:
        stage.event("MachineBusy", disturbed, warning=True)


@dataclass
class Progress:
    """Counts answers of all variants, and reports the rate."""

    stage: Stage
    total: int = 0
    done: int = 0

    def resumed(self, entry: Entry) -> None:
        """Count an entry of an earlier run; not reported, because it would distort the rate."""
        self.done += len(entry.samples)

    def measured(self, entry: Entry) -> None:
        """Count and report a new entry."""
        self.done += len(entry.samples)
        self.stage.progress(self.done, max(self.done, self.total), "answers", f"{entry.suite}/{entry.prompt_id}")


def round_robin(suites: Suites) -> list[tuple[int, Prompt]]:
    """Prompts of the suites in turn, with turn numbers that alternate both within a suite and between suites."""
    longest = max(map(len, suites.values()))
    return [
        (row + column, prompts[row])
        for row in range(longest) for column, prompts in enumerate(suites.values()) if row < len(prompts)
    ]


def measure_units(session: Session, units: Sequence[Unit], variants: Sequence[Variant], ledger: JsonlLedger[Entry],
                  progress: Progress) -> list[Entry]:
    """Measure every unit in every variant, unless the ledger has its entry. Returns entries in the order of units."""
    names = {variant.title for variant in variants}
    known = {entry.key: entry for entry in ledger.entries if names <= entry.samples.keys()}
    for unit in units:
        if unit.key in known:
            progress.resumed(known[unit.key])
    entries = []
    for unit in units:
        entry = known.get(unit.key)
        if entry is None:
            entry = session.bench.measure(unit, variants, progress.stage.pause_point)
            ledger.append(entry)
            progress.measured(entry)
        entries.append(entry)
    return entries


def report_cells(session: Session, entries: Sequence[Entry], units: Sequence[Unit],
                 variant: Variant) -> tuple[CellReport, ...]:
    """One cell per suite and temperature for a drafted variant, with a line for every divergence."""
    assert variant.tree is not None
    cells = []
    for suite in session.suites:
        for temperature in session.spec.temperatures:
            found = [
                divergence for unit, entry in zip(units, entries, strict=True)
                if (unit.prompt.suite, unit.temperature) == (suite, temperature)
                and (divergence := _divergence(session, unit, entry, variant)) is not None
            ]
            lines = [one.line(session.dtype) for one in found]
            wrong = {one.prompt_id for one in found if not one.is_tie(session.dtype)}
            ties = {one.prompt_id for one in found} - wrong  # a prompt may be repeated: each repeat must be a near-tie
            cells.append(cell_report(entries, suite, temperature, variant.tree, lines, len(ties), session.spec.seed))
    return tuple(cells)


def _divergence(session: Session, unit: Unit, entry: Entry, variant: Variant) -> Divergence | None:
    return explain(
        session.target, unit.prompt.id, unit.prompt_ids, entry.samples[BASELINE].token_ids,
        entry.samples[variant.title].token_ids, temperature=unit.temperature, seed=unit_seed(unit, session.spec.seed))


def benchmark_report(session: Session, spec: BenchmarkStage | TuneStage, entries: Sequence[Entry],
                     cells: tuple[CellReport, ...], compared: TransformersBaseline | None,
                     seconds: float) -> BenchmarkReport:
    """The report of one checkpoint from its cells. compared: the undrafted engine against `transformers`, if timed."""
    return BenchmarkReport(
        checkpoint=spec.checkpoint, candidate=spec.candidate, path=spec.drafter_dir, cells=cells,
        lossless=all(is_lossless(cell.prompts, cell.identical, cell.near_ties) for cell in cells),
        speedup=sum(cell.speedup for cell in cells) / len(cells), baseline_tokens_per_s=baseline_rate(entries),
        transformers_generate_tokens_per_s=compared.transformers_tokens_per_s if compared else None,
        transformers_baseline_tokens_per_s=compared.tokens_per_s if compared else None,
        transformers_prompts=compared.prompts if compared else 0, environment=environment(session.dtype),
        seconds=seconds)
