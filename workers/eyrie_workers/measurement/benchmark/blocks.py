"""One block of prompts through one setting at one concurrency, timed while every slot is busy.

A closed loop: as soon as an answer ends the next request is admitted, so the concurrency stays constant. The block ends
when no request waits and a slot is empty; answers still being decoded are truncated and their tokens so far are
counted, because the tail of a block would run at a lower concurrency than reported. Prefill is timed in every setting.
At concurrency 1 no answer is truncated.

An answer does not depend on the setting, so every answer is compared token by token with the undrafted answer to the
same request, truncated answers up to the shorter length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.tuning import OFF, Setting
from eyrie_workers.conversations.suites import Prompt
from eyrie_workers.engines.decoding_engine import DecodingEngine, EngineRun
from eyrie_workers.interleaving import interleaved
from eyrie_workers.intervals import add_histograms
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.measurement.benchmark.session import Session
from eyrie_workers.measurement.benchmark.variants import make_request
from eyrie_workers.speculation.requests import Request

_WARMUP_TOKENS = 16  # as in `measurement.benchmark.variants`


BlockT = TypeVar("BlockT")

BlockRunKey = tuple[int, float, int, str]
"""Concurrency, temperature, rung, variant."""


class BlockRun(Frozen):
    """One setting on one block: a line of the ledger of blocks."""

    concurrency: int
    temperature: float
    rung: int
    variant: str
    """`Setting.label`."""

    seconds: float
    tokens: int
    accepted_histogram: tuple[int, ...]
    answers: dict[str, tuple[int, ...]]
    """By request id; possibly truncated."""

    whole: tuple[str, ...]
    """Ids of the requests whose answer is complete."""

    @property
    def key(self) -> BlockRunKey:
        """Identifies the measurement."""
        return (self.concurrency, self.temperature, self.rung, self.variant)


@dataclass(frozen=True)
class BlockRunner:
    """Runs blocks of prompts in the session's engine, whose variants have the names that `Setting.label` gives."""

    session: Session
    prompts: Sequence[Prompt]

    def requests(self, concurrency: int, temperature: float, rung: int) -> list[Request]:
        """The block of a rung: the next prompts, cyclically; a repeated prompt gets another noise seed."""
        size = block_size(concurrency)
        return self.some_requests(self.prompts, temperature, rung * size, size)

    def some_requests(self, prompts: Sequence[Prompt], temperature: float, start: int, num: int) -> list[Request]:
        """`num` requests from the `start`-th prompt on, cyclically."""
        bench, requests = self.session.bench, []
        for index in range(start, start + num):
            repeat, place = divmod(index, len(prompts))
            (unit,) = self.session.units([(0, prompts[place])], [temperature], 1)
            request = make_request(replace(unit, repeat=repeat), seed=bench.seed, max_new_tokens=bench.max_new_tokens,
                                   stop_ids=bench.stop_ids)
            requests.append(replace(request, id=f"{request.id} ({repeat})"))
        return requests

    def run(self, setting: Setting, concurrency: int, temperature: float, rung: int) -> BlockRun:
        """Measure one setting on one block."""
        run = self.session.bench.engine.generate(
            setting.label(), self.requests(concurrency, temperature, rung), concurrency, truncate=True)
        return block_run(setting, concurrency, temperature, rung, run)

    def warm_up(self, setting: Setting, concurrency: int, temperatures: Sequence[float]) -> None:
        """Run the beginning of a block without timing it: kernels are selected, memory is mapped."""
        for temperature in temperatures:
            short = [replace(request, max_new_tokens=_WARMUP_TOKENS)
                     for request in self.requests(concurrency, temperature, 0)[:concurrency]]
            self.session.bench.engine.generate(setting.label(), short, concurrency, truncate=True)


@dataclass(frozen=True)
class Blocks:
    """Measures blocks, each once: the ledger has those of earlier runs."""

    runner: BlockRunner
    ledger: JsonlLedger[BlockRun]
    runs: dict[BlockRunKey, BlockRun]

    @property
    def engine(self) -> DecodingEngine:
        """The engine that is measured."""
        return self.runner.session.bench.engine

    def measure(self, setting: Setting, concurrency: int, temperature: float, rung: int) -> BlockRun:
        """One block. The setting's variant must be started unless the ledger has the block."""
        key = (concurrency, temperature, rung, setting.label())
        if key not in self.runs:
            run = self.runner.run(setting, concurrency, temperature, rung)
            self.ledger.append(run)
            self.runs[key] = run
        return self.runs[key]


def block_size(concurrency: int) -> int:
    """Requests of a block: two at concurrency 1, so that two suites contribute; above, every slot is filled twice."""
    return 2 * concurrency


def block_run(setting: Setting, concurrency: int, temperature: float, rung: int, run: EngineRun) -> BlockRun:
    """A run as a line of the ledger."""
    depth = setting.tree.num_steps if setting.tree is not None else 0
    histogram = add_histograms([(0,) * (depth + 1), *(answer.accepted_histogram for answer in run.answers)])
    return BlockRun(
        concurrency=concurrency, temperature=temperature, rung=rung, variant=setting.label(), seconds=run.seconds,
        tokens=sum(len(answer.token_ids) for answer in run.answers), accepted_histogram=tuple(histogram),
        answers={answer.id: answer.token_ids for answer in run.answers},
        whole=tuple(answer.id for answer in run.answers if answer.whole))


def comparable(first: BlockRun, second: BlockRun, request_id: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two answers to a request: truncated ones up to the shorter one, complete ones whole, because they must also
    end at the same token."""
    one, other = first.answers[request_id], second.answers[request_id]
    if request_id in first.whole and request_id in second.whole:
        return one, other
    shared = min(len(one), len(other))
    return one[:shared], other[:shared]


def num_identical(first: BlockRun, second: BlockRun) -> int:
    """Number of requests that both settings answered identically, up to the shorter answer."""
    pairs = (comparable(first, second, name) for name in first.answers)
    return sum(one == other for one, other in pairs)


def turns(active: Sequence[Setting], blocks: Sequence[BlockT], first_turn: int,
          all_ready: bool) -> list[tuple[Setting, BlockT]]:
    """The order in which settings answer blocks.

    first_turn   of `interleaving.interleaved`
    all_ready    every setting can be measured at any time. Otherwise making one ready replaces another, so each answers
                 all blocks before the next; off answers the first half before the others and the second half after
                 them, so that a drift of the machine cancels.
    """
    if all_ready:
        return [(setting, block) for turn, block in enumerate(blocks, first_turn)
                for setting in interleaved(active, turn)]
    half = (len(blocks) + 1) // 2
    others = interleaved([setting for setting in active if setting != OFF], first_turn)
    return [*((OFF, block) for block in blocks[:half]), *((setting, block) for setting in others for block in blocks),
            *((OFF, block) for block in blocks[half:])]
