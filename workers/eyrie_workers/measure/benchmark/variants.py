"""The same prompt through several variants of one engine, one after the other, and what that records.

A variant is the engine with a draft-tree shape, or without drafting (`tree=None`): the same weights, dtype and limits,
so two variants differ in speculation alone. All variants answer a prompt before the next prompt begins, in an order
that changes from prompt to prompt (`eyrie_workers.measure.intervals`).

The whole request is timed at concurrency 1, prefill included (the drafter's prefill too, in a drafted variant). Wall
time gives tokens per second; the CPU time of the engine's processes is recorded as a cross-check for a busy machine.
One `Sample` per variant, one `Entry` per unit: a line of the ledger.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.contract.model import Frozen
from eyrie_workers.data.suites import Prompt
from eyrie_workers.engines.decoding_engine import DecodingEngine
from eyrie_workers.measure.intervals import interleaved
from eyrie_workers.speculation.requests import Request


class Variant(Frozen):
    """One configuration under measurement. All variants of a measurement share target, prompts, seeds and noise."""

    title: str
    """Its name in ledgers and reports; unique within a measurement."""

    tree: DraftTreeShape | None


def drafted(tree: DraftTreeShape) -> Variant:
    """The measured drafter in one draft-tree shape, named after the shape."""
    return Variant(title=tree.label(), tree=tree)


BASELINE = "baseline"
UNDRAFTED = Variant(title=BASELINE, tree=None)

UnitKey = tuple[str, str, float, int]
"""Suite, prompt id, temperature, repeat: identifies a unit, and the entry with its answers."""


class Sample(Frozen):
    """The answer of one variant to one unit, with its timing."""

    token_ids: tuple[int, ...]
    seconds: float
    """Wall time of the whole request, prefill included."""

    cpu_seconds: float
    """CPU time of the engine's processes for the whole request."""

    ttft_s: float
    rounds: int
    accepted_histogram: tuple[int, ...]
    accepted: tuple[int, ...] = ()
    """As in `engines.decoding_engine.Answer`."""


class Entry(Frozen):
    """One unit answered by every variant: a line of the ledger."""

    suite: str
    prompt_id: str
    temperature: float
    repeat: int
    samples: dict[str, Sample]
    """By the variant's title; the baseline is always present."""

    @property
    def key(self) -> UnitKey:
        return (self.suite, self.prompt_id, self.temperature, self.repeat)


WARMUP_TOKENS = 16  # enough rounds to run every matrix shape of a variant


@dataclass(frozen=True)
class Unit:
    """What all variants answer before the next unit begins: a prompt at a temperature, in the n-th repeat."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    temperature: float
    repeat: int
    turn: int  # which order the variants answer in (`measure.intervals.interleaved`)

    @property
    def key(self) -> UnitKey:
        return (self.prompt.suite, self.prompt.id, self.temperature, self.repeat)


def unit_seed(unit: Unit, seed: int) -> int:
    """Noise seed of a unit: equal for all variants, different for every prompt and repeat."""
    text = f"{seed}:{unit.prompt.suite}:{unit.prompt.id}:{unit.repeat}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def make_request(unit: Unit, *, seed: int, max_new_tokens: int, stop_ids: Sequence[int]) -> Request:
    return Request(
        id=f"{unit.prompt.suite}/{unit.prompt.id}", prompt_ids=list(unit.prompt_ids), max_new_tokens=max_new_tokens,
        sampling=SamplingSpec(temperature=unit.temperature), seed=unit_seed(unit, seed), stop_ids=tuple(stop_ids))


def entry_of(unit: Unit, samples: dict[str, Sample]) -> Entry:
    return Entry(suite=unit.prompt.suite, prompt_id=unit.prompt.id, temperature=unit.temperature, repeat=unit.repeat,
                 samples=samples)


@dataclass
class Bench:
    """An engine, whose variants have the names that `Variant.title` gives, and what all its measurements share."""

    engine: DecodingEngine
    seed: int
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    repeated: bool = False
    """A unit was measured once more, because a server ended in it."""

    def warm_up(self, units: Sequence[Unit], variants: Sequence[Variant], between: Callable[[], None]) -> None:
        """Answer the beginning of some prompts in every variant without timing: kernels are selected, memory is
        mapped."""
        for variant in variants:  # one after the other: where servers replace each other, each is started once
            for unit in units:
                between()
                request = make_request(unit, seed=self.seed, stop_ids=self.stop_ids,
                                       max_new_tokens=min(self.max_new_tokens, WARMUP_TOKENS))
                self.engine.generate(variant.title, [request], 1)

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
        return entry_of(unit, samples)

    def time(self, unit: Unit, variant: Variant) -> Sample:
        request = make_request(unit, seed=self.seed, max_new_tokens=self.max_new_tokens, stop_ids=self.stop_ids)
        run = self.engine.generate(variant.title, [request], 1)
        (answer,) = run.answers
        return Sample(
            token_ids=answer.token_ids, seconds=run.seconds, cpu_seconds=run.cpu_seconds, ttft_s=answer.ttft_s,
            rounds=answer.rounds, accepted_histogram=answer.accepted_histogram, accepted=answer.accepted)
