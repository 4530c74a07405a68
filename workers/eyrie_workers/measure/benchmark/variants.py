"""The same prompt through several variants of one engine, one after the other, and what that records.

A variant is the engine with a draft-tree shape, or without drafting (`tree=None`): the same weights, dtype and limits,
so two variants differ in speculation alone. All variants answer a prompt before the next prompt begins, in an order
that changes from prompt to prompt (`eyrie_workers.measure.intervals`).

The whole request is timed at concurrency 1, prefill included (the drafter's prefill too, in a drafted variant). Wall
time gives tokens per second; the CPU time of the engine's processes is recorded as a cross-check for a busy machine.
One `Sample` per variant, one `Entry` per unit: a line of the ledger. `session.Session` measures them.
"""

import hashlib
from dataclasses import dataclass

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.model import Frozen
from eyrie_workers.data.suites import Prompt

BASELINE = "baseline"


class Variant(Frozen):
    """One configuration under measurement: the measured drafter in one draft-tree shape, or no drafting. All variants
    of a measurement share target, prompts, seeds and noise."""

    tree: DraftTreeShape | None = None

    @property
    def title(self) -> str:
        """Its name in ledgers and reports; unique within a measurement."""
        return BASELINE if self.tree is None else self.tree.label()


UNDRAFTED = Variant()

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

    def seed(self, seed: int) -> int:
        """Of the noise: equal for all variants, different for every prompt and repeat."""
        text = f"{seed}:{self.prompt.suite}:{self.prompt.id}:{self.repeat}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

    def entry(self, samples: dict[str, Sample]) -> Entry:
        return Entry(suite=self.prompt.suite, prompt_id=self.prompt.id, temperature=self.temperature,
                     repeat=self.repeat, samples=samples)
