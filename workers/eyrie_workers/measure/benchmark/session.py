"""What the benchmark, tune and prove stages share: prompts, engine, ledger, and the loop that measures prompts.

The loop is resumable per unit: a unit whose entry is in the ledger is not measured again. Prompts, order, seeds and
eliminations follow from the spec alone, so a resumed run measures what an uninterrupted one would have.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

import torch

from eyrie_api.artifacts import digest_model, write_model
from eyrie_api.contract.benchmark import BenchmarkSpec
from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.stages import BenchmarkStage, MeasuringStage, StageReport, TuneStage
from eyrie_api.contract.targets import Dtype
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.errors import InvalidInput
from eyrie_workers.data.suites import Prompt, load_suite
from eyrie_workers.engines.decoding_engine import WARMUP_TOKENS, DecodingEngine, EmbeddedEngine
from eyrie_workers.engines.parent_death_signal import adopt_orphans
from eyrie_workers.engines.server_keeper import keeper
from eyrie_workers.jsonl_ledger import EntryT, JsonlLedger
from eyrie_workers.machine import GpuReading, ProcessorTime, cpu_count, gpu_interference, interference, machine_lock
from eyrie_workers.measure.benchmark.variants import BASELINE, Entry, Sample, Unit, UnitKey, Variant
from eyrie_workers.measure.intervals import interleaved
from eyrie_workers.sglang.local_hardware import gpu_groups, own_gpus, visible_gpus
from eyrie_workers.sglang.managed_engine import SglangEngine
from eyrie_workers.sglang.servers import ServerHistory, ServerPlan
from eyrie_workers.speculation.requests import Request
from eyrie_workers.stage_program import Result, Stage
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import load_target, resolve
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.targets.state_source import StateSource, open_judge
from eyrie_workers.targets.templates import ChatTokenizer

LEDGER = "cells.jsonl"
REPORT = "report.json"

Suites = dict[str, list[Prompt]]


def reported(report: StageReport, stage: Stage, files: Iterable[Path] = ()) -> Result:
    """The result of a stage, whose report is a file of its artifact too."""
    write_model(stage.out_dir / REPORT, report)
    return Result(report, list(dict.fromkeys([*files, stage.out_dir / REPORT])))


_UNITS_PER_START = 16
"""Units that a variant answers before another replaces its server, whose start takes half a minute to minutes. A killed
stage repeats at most so many."""

_SHORTEST_ANSWER = 16  # tokens that must fit behind a prompt; a shorter answer would measure mostly prefill


@dataclass
class Session:
    """Everything loaded that a measurement needs. The engine's variants have the names that `Variant.title` gives."""

    engine: DecodingEngine
    target_path: Path
    tokenizer: ChatTokenizer
    suites: Suites  # all prompts of every suite, in the order of `load_suite`
    spec: BenchmarkSpec
    dtype: Dtype
    repeated: bool = False
    """A unit was measured once more, because a server ended in it."""

    @cached_property
    def context_length(self) -> int:
        """Longest text of the target in tokens."""
        return read_config(self.target_path).max_position_embeddings

    @cached_property
    def target(self) -> TargetModel:
        """The reference implementation of the target: the embedded engine's own, otherwise loaded at first use."""
        if isinstance(self.engine, EmbeddedEngine):
            return self.engine.target
        return load_target(self.target_path, self.dtype)

    @cached_property
    def judge(self) -> StateSource | None:
        """What the target's own choices are read from where answers differ: its reference implementation, or else its
        model in transformers; None where SGLang alone reads its weights."""
        if isinstance(self.engine, EmbeddedEngine) or "target" in self.__dict__:
            return self.target
        return open_judge(self.target_path, self.dtype)

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

    def next_turn(self, unit: Unit, answer: Sequence[int]) -> Unit | None:
        """The unit of the user's next turn, after this answer to `unit`.

        None after the last turn, and where no room is left for an answer.
        """
        prompt = unit.prompt
        if not prompt.further:
            return None
        messages = (*prompt.messages, {"role": "assistant", "content": self.tokenizer.decode(answer)},
                    {"role": "user", "content": prompt.further[0]})
        number = sum(message["role"] == "user" for message in messages)
        name = f"{prompt.id.removesuffix(f'/turn-{number - 1}')}/turn-{number}"
        ids = tuple(self.tokenizer.render(list(messages), list(prompt.tools) or None))
        if len(ids) + _SHORTEST_ANSWER > self.context_length:
            return None
        return replace(unit, prompt_ids=ids,
                       prompt=replace(prompt, id=name, messages=messages, further=prompt.further[1:]))

    def request(self, unit: Unit) -> Request:
        return Request(
            id=f"{unit.prompt.suite}/{unit.prompt.id}", prompt_ids=list(unit.prompt_ids),
            max_new_tokens=self.spec.max_new_tokens, sampling=SamplingSpec(temperature=unit.temperature),
            seed=unit.seed(self.spec.seed), stop_ids=tuple(self.tokenizer.eos_ids))

    def warm_up(self, units: Sequence[Unit], variants: Sequence[Variant], between: Callable[[], None]) -> None:
        """Answer the beginning of some prompts in every variant without timing: kernels are selected, memory is
        mapped."""
        for variant in variants:  # one after the other: where servers replace each other, each is started once
            for unit in units:
                between()
                request = self.request(unit)
                short = replace(request, max_new_tokens=min(request.max_new_tokens, WARMUP_TOKENS))
                self.engine.generate(variant.title, [short], 1)

    def measure(self, unit: Unit, variants: Sequence[Variant], between: Callable[[], None]) -> Entry:
        """Answer one unit in every variant, in the order of its turn; once more, the first time that a server ends in
        it, since its start would lie between the answers that are compared."""
        samples, restarts = {}, self.engine.restarts
        for variant in interleaved(variants, unit.turn):
            between()
            samples[variant.title] = self.time(unit, variant)
        if self.engine.restarts > restarts and not self.repeated:
            self.repeated = True
            return self.measure(unit, variants, between)
        return unit.entry(samples)

    def time(self, unit: Unit, variant: Variant) -> Sample:
        run = self.engine.generate(variant.title, [self.request(unit)], 1)
        (answer,) = run.answers
        return Sample(
            token_ids=answer.token_ids, seconds=run.seconds, cpu_seconds=run.cpu_seconds, ttft_s=answer.ttft_s,
            rounds=answer.rounds, accepted_histogram=answer.accepted_histogram, accepted=answer.accepted)


def read_suites(spec: MeasuringStage, stage: Stage) -> Suites:
    """All usable prompts of every suite. Cheap; called before waiting for the machine lock or loading a model. Raises
    InvalidInput for a suite that cannot be read, or of which no prompt fits the target."""
    held_out = Path(spec.held_out_file) if spec.held_out_file else None
    suites = {suite.name: load_suite(suite, held_out, spec.benchmark.seed, spec.reads)
              for suite in spec.benchmark.suites}
    path = resolve(spec.target)
    return prompts_that_fit(suites, ChatTokenizer(path), read_config(path).max_position_embeddings, stage)


def prompts_that_fit(suites: Suites, tokenizer: ChatTokenizer, context: int, stage: Stage) -> Suites:
    """The prompts that leave room for an answer in the target's context; an event reports those left out. Raises
    InvalidInput when nothing of a suite is left."""
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


def uses_of(spec: MeasuringStage, settings: Mapping[str, Setting]) -> dict[str, DrafterUse]:
    """The variants of the stage's drafter with these settings, by name."""
    return {name: DrafterUse(drafter_dir=spec.drafter_dir if setting.method == "drafter" else None, setting=setting)
            for name, setting in settings.items()}


@contextmanager
def open_session(spec: BenchmarkStage | TuneStage, suites: Suites, possible: Mapping[str, DrafterUse], stage: Stage,
                 max_concurrency: int = 1) -> Iterator[Session]:
    """An engine of the stage's kind, without variants yet; stopped when the block is left, unless its servers are kept
    after a block without an error (`measuring`).

    possible   every variant that will be started

    Raises InvalidInput for a temperature at which the engine cannot decode one of them, before anything starts.
    """
    torch.set_num_threads(spec.benchmark.threads or torch.get_num_threads())
    path = resolve(spec.target)
    tokenizer = ChatTokenizer(path)
    engine: DecodingEngine
    if spec.engine.kind == "embedded":
        engine = EmbeddedEngine(load_target(path, spec.target.dtype), spec.target.dtype, max_concurrency)
    else:
        groups = gpu_groups(visible_gpus(), spec.engine.tp_size, spec.engine.num_gpus)
        plan = ServerPlan("sglang", spec.target, spec.max_concurrency or max_concurrency, engine=spec.engine,
                          gpu_groups=groups)
        engine = SglangEngine(plan, dict(possible), stage.out_dir / "servers", stage,
                              ServerHistory(stage.out_dir, digest_model(spec)))
    temperatures = {"benchmark.temperatures": spec.benchmark.temperatures}
    if isinstance(spec, TuneStage):
        temperatures["tune.temperatures"] = spec.tune.temperatures
    for field, values in temperatures.items():
        for temperature, use in product(values, possible.values()):
            if (why := engine.refusal(use.setting, temperature)) is not None:
                raise InvalidInput(f"{field} contains {temperature:g}: {why}",
                                   f"set {field} to [0], or engine.kind to embedded")
    try:
        yield Session(engine, path, tokenizer, suites, spec.benchmark, spec.target.dtype)
    except BaseException:
        engine.stop()
        raise
    if keeper().connection is None:
        engine.stop()


def start_all(session: Session, uses: Mapping[str, DrafterUse]) -> None:
    """Start all of a measurement's variants. Raises the error of the first that cannot start."""
    for error in session.engine.start(uses).values():
        raise error


def open_ledger(kind: type[EntryT], stage: Stage, spec: Frozen, name: str) -> JsonlLedger[EntryT]:
    """A ledger of the stage; an event reports what it already holds."""
    ledger = JsonlLedger(stage.out_dir / name, kind, digest_model(spec))
    if ledger.set_aside is not None:
        stage.event("LedgerSetAside", f"{name} belonged to another spec and was kept as {ledger.set_aside.name}",
                    warning=True)
    if ledger.entries:
        stage.event("Resumed", f"{len(ledger.entries)} finished measurements found in {name}")
    return ledger


@contextmanager
def measuring(stage: Stage) -> Iterator[list[str]]:
    """Hold the machine lock; events report a wait for it, and afterwards other work that ran on the machine.

    Yields a list that has that finding when the block was left.

    Models are loaded inside too: one benchmark must not load its models while another is being timed.

    Servers that the stage before has kept are taken over with its lock; those that run when the block is left without
    an error are kept in the same way.
    """
    waiting = False

    def while_waiting() -> None:
        nonlocal waiting
        if not waiting:
            stage.event("Waiting", "another process measures on this machine; waiting for it to finish")
        waiting = True
        stage.pause_point()

    adopt_orphans()  # a killed server's processes
    gpus, own = () if os.environ.get("EYRIE_DEVICE") == "cpu" else visible_gpus(), own_gpus()

    def reading() -> tuple[ProcessorTime | None, GpuReading | None]:
        return ProcessorTime.now(servers_s=keeper().cpu_seconds()), GpuReading.now(gpus, keeper().pid)

    with machine_lock(while_waiting, gpus=own, held=keeper().take()) as lock:
        before, found = reading(), list[str]()
        yield found
        after = reading()
        disturbed = "; ".join(filter(None, (interference(before[0], after[0], cpu_count(), os.getloadavg()[0]),
                                            gpu_interference(before[1], after[1]))))
        keeper().keep(lock)
    if disturbed:
        found.append(disturbed)
        stage.event("MachineBusy", disturbed, warning=True)


def round_robin(suites: Suites) -> list[tuple[int, Prompt]]:
    """Prompts of the suites in turn, with turn numbers that alternate both within a suite and between suites."""
    longest = max(map(len, suites.values()))
    return [
        (row + column, prompts[row])
        for row in range(longest) for column, prompts in enumerate(suites.values()) if row < len(prompts)
    ]


def measure_units(session: Session, units: Sequence[Unit], variants: Sequence[Variant], ledger: JsonlLedger[Entry],
                  stage: Stage) -> list[tuple[Unit, Entry]]:
    """Measure every unit in every variant, unless the ledger has its entry; then the later turns of its prompt.

    A later turn follows the undrafted answer in every variant, so that all variants answer the same texts. Returns
    every unit with its entry, in the order of `units`.
    """
    known = _known(ledger, variants)
    # Entries of an earlier run are counted and not reported, because they would distort the rate.
    total, done = len(units) * len(variants), sum(len(known[unit.key].samples) for unit in units if unit.key in known)

    def add(entry: Entry) -> None:
        nonlocal done
        known[entry.key] = entry
        ledger.append(entry)
        done += len(entry.samples)
        stage.progress(done, max(done, total), "answers", f"{entry.suite}/{entry.prompt_id}")

    resident = session.engine.num_resident
    wave = list(units) if resident is not None and resident < len(variants) else []
    number = 0
    # Making one variant ready replaces another: each variant answers `_UNITS_PER_START` units before the next, in an
    # order that is mirrored from part to part, so that a drift of the machine cancels and every second part begins with
    # the variant that is ready. Later turns come in waves of their own.
    while wave:
        missing = [unit for unit in wave if unit.key not in known]
        for start in range(0, len(missing), _UNITS_PER_START):
            part = missing[start:start + _UNITS_PER_START]
            samples: dict[UnitKey, dict[str, Sample]] = {unit.key: {} for unit in part}
            for variant in interleaved(variants, number):
                for unit in part:
                    stage.pause_point()
                    samples[unit.key][variant.title] = session.time(unit, variant)
            for unit in part:
                add(unit.entry(samples[unit.key]))
            number += 1
        later = (session.next_turn(unit, known[unit.key].samples[BASELINE].token_ids) for unit in wave)
        wave = [unit for unit in later if unit is not None]
    measured = []
    for first in units:
        for unit in _conversation(session, first, known):
            if unit.key not in known:
                add(session.measure(unit, variants, stage.pause_point))
            measured.append((unit, known[unit.key]))
    return measured


def is_measured(session: Session, units: Sequence[Unit], variants: Sequence[Variant],
                ledger: JsonlLedger[Entry]) -> bool:
    """Whether the ledger has all entries, so that `measure_units` needs no engine."""
    known = _known(ledger, variants)
    return all(unit.key in known for first in units for unit in _conversation(session, first, known))


def _known(ledger: JsonlLedger[Entry], variants: Sequence[Variant]) -> dict[UnitKey, Entry]:
    names = {variant.title for variant in variants}
    return {entry.key: entry for entry in ledger.entries if names <= entry.samples.keys()}


def _conversation(session: Session, first: Unit, known: Mapping[UnitKey, Entry]) -> Iterator[Unit]:
    """A unit and the later turns of its prompt, each once the entry of the one before is known."""
    unit: Unit | None = first
    while unit is not None:
        yield unit
        entry = known.get(unit.key)
        unit = None if entry is None else session.next_turn(unit, entry.samples[BASELINE].token_ids)
