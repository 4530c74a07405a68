"""Blocks of prompts through one setting at one concurrency, and the benchmark's higher concurrencies in blocks.

A closed loop: as soon as an answer ends the next request is admitted, so the concurrency stays constant. The block ends
when no request waits and a slot is empty; answers still being decoded are truncated and their tokens so far are
counted, because the tail of a block would run at a lower concurrency than reported. Prefill is timed in every setting.
At concurrency 1 no answer is truncated.

An answer does not depend on the setting, so every answer is compared token by token with the undrafted answer to the
same request, truncated answers up to the shorter length.

Where a server ends in a block, another starts and answers it, after half a minute or more: the blocks that are compared
are no longer near in time. They are measured again in all settings, once per concurrency (`MeasuredBlocks.turns`).

`ConcurrentBenchmark` mixes the prompts of all suites, as when tuning races settings: at each rung every temperature's
block is answered with and without the drafter, in an order that changes from rung to rung, until the confidence
sequence of their ratio (`intervals.anytime_interval`) decides, as in the proof, or each prompt was asked twice per
repeat, in ten blocks at least. Suites are not reported separately: a block holds few prompts of each. Only first turns
are asked, because a later turn of one conversation would have to wait for its first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from statistics import fmean
from typing import TypeVar

from pydantic import Field

from eyrie_api.contract.benchmark import BenchmarkSpec
from eyrie_api.contract.model import Frozen, Interval
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.contract.reports import ConcurrencyReport
from eyrie_api.contract.tuning import OFF, Setting
from eyrie_api.decisions.evidence import speedup_standing
from eyrie_workers.data.suites import Prompt
from eyrie_workers.engines.decoding_engine import WARMUP_TOKENS, DecodingEngine
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.measure import intervals
from eyrie_workers.measure.benchmark.losslessness import explain
from eyrie_workers.measure.benchmark.session import Session
from eyrie_workers.measure.intervals import FEWEST_PAIRS, MeasuredBlock
from eyrie_workers.speculation.requests import Request
from eyrie_workers.stage_program import Stage

RUNGS_PER_START = 4  # measured before a server is replaced by another, whose start takes half a minute to minutes

BlockT = TypeVar("BlockT")

BlockRunKey = tuple[int, float, int, str]  # concurrency, temperature, rung, variant


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

    answer_s: dict[str, float] = Field(default_factory=dict)
    """Seconds of each answer."""

    @property
    def key(self) -> BlockRunKey:
        return (self.concurrency, self.temperature, self.rung, self.variant)

    @property
    def measured(self) -> MeasuredBlock:
        return MeasuredBlock(self.tokens, self.seconds, {
            (name.rpartition(" ")[0], name): len(self.answers[name]) / self.answer_s[name]
            for name in self.whole if self.answer_s.get(name)})


@dataclass
class MeasuredBlocks:
    """Blocks of prompts in the session's engine, whose variants have the names that `Setting.label` gives. Each is
    measured once: the ledger has those of earlier runs, of a repeated one the last."""

    session: Session
    prompts: Sequence[Prompt]
    ledger: JsonlLedger[BlockRun]
    runs: dict[BlockRunKey, BlockRun] = field(init=False)
    repeated: set[int] = field(default_factory=set)
    """Concurrencies at which blocks were repeated, because a server ended."""

    def __post_init__(self) -> None:
        self.runs = {run.key: run for run in self.ledger.entries}

    @property
    def engine(self) -> DecodingEngine:
        return self.session.engine

    def requests(self, concurrency: int, temperature: float, rung: int) -> list[Request]:
        """The block of a rung: the next prompts, cyclically; a repeated prompt gets another noise seed."""
        size = block_size(concurrency)
        return self.some_requests(self.prompts, temperature, rung * size, size)

    def some_requests(self, prompts: Sequence[Prompt], temperature: float, start: int, num: int) -> list[Request]:
        """`num` requests from the `start`-th prompt on, cyclically."""
        requests = []
        for index in range(start, start + num):
            repeat, place = divmod(index, len(prompts))
            (unit,) = self.session.units([(0, prompts[place])], [temperature], 1)
            request = self.session.request(replace(unit, repeat=repeat))
            requests.append(replace(request, id=f"{request.id} ({repeat})"))
        return requests

    def warm_up(self, setting: Setting, concurrency: int, temperatures: Sequence[float]) -> None:
        """Run the beginning of a block without timing it: kernels are selected, memory is mapped."""
        for temperature in temperatures:
            short = [replace(request, max_new_tokens=WARMUP_TOKENS)
                     for request in self.requests(concurrency, temperature, 0)[:concurrency]]
            self.engine.generate(setting.label(), short, concurrency, truncate=True)

    def measure(self, setting: Setting, concurrency: int, temperature: float, rung: int) -> BlockRun:
        """One block. The setting's variant must be started unless the ledger has the block."""
        key = (concurrency, temperature, rung, setting.label())
        if key in self.runs:
            return self.runs[key]
        run = self.engine.generate(
            setting.label(), self.requests(concurrency, temperature, rung), concurrency, truncate=True)
        depth = setting.tree.num_steps if setting.tree is not None else 0
        histograms = [(0,) * (depth + 1), *(answer.accepted_histogram for answer in run.answers)]
        block = BlockRun(
            concurrency=concurrency, temperature=temperature, rung=rung, variant=setting.label(), seconds=run.seconds,
            tokens=sum(len(answer.token_ids) for answer in run.answers),
            accepted_histogram=intervals.add_histograms(histograms),
            answers={answer.id: answer.token_ids for answer in run.answers},
            whole=tuple(answer.id for answer in run.answers if answer.whole),
            answer_s={answer.id: answer.seconds for answer in run.answers})
        self.ledger.append(block)
        self.runs[key] = block
        return block

    def turns(self, active: Sequence[Setting], concurrency: int, blocks: Sequence[tuple[float, int]], first_turn: int,
              all_ready: bool) -> Iterator[tuple[Setting, tuple[float, int]]]:
        """`turns` of blocks, each a temperature and a rung, to be measured as they come; where a server ended in them,
        once more."""
        restarts = self.engine.restarts
        yield from turns(active, blocks, first_turn, all_ready)
        if all_ready and self.engine.restarts > restarts and concurrency not in self.repeated:
            self.repeated.add(concurrency)
            for setting in active:
                for temperature, rung in blocks:
                    self.runs.pop((concurrency, temperature, rung, setting.label()), None)
            yield from turns(active, blocks, first_turn, all_ready)


def block_size(concurrency: int) -> int:
    """Requests of a block: two at concurrency 1, so that two suites contribute; above, every slot is filled twice."""
    return 2 * concurrency


def comparable(first: BlockRun, second: BlockRun, request_id: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two answers to a request: truncated ones up to the shorter one, complete ones whole, because they must also
    end at the same token."""
    two = first.answers[request_id], second.answers[request_id]
    if request_id in first.whole and request_id in second.whole:
        return two
    shared = min(map(len, two))
    return two[0][:shared], two[1][:shared]


def num_identical(first: BlockRun, second: BlockRun) -> int:
    """Number of requests that both settings answered identically, up to the shorter answer."""
    return sum(ours == theirs for ours, theirs in (comparable(first, second, name) for name in first.answers))


def turns(active: Sequence[Setting], blocks: Sequence[BlockT], first_turn: int,
          all_ready: bool) -> list[tuple[Setting, BlockT]]:
    """The order in which settings answer blocks.

    first_turn   of `measure.intervals.interleaved`
    all_ready    every setting can be measured at any time. Otherwise making one ready replaces another, so each answers
                 all blocks before the next; off answers the first half before the others and the second half after
                 them, so that a drift of the machine cancels.
    """
    if all_ready:
        return [(setting, block) for turn, block in enumerate(blocks, first_turn)
                for setting in intervals.interleaved(active, turn)]
    half = (len(blocks) + 1) // 2
    others = intervals.interleaved([setting for setting in active if setting != OFF], first_turn)
    return [*((OFF, block) for block in blocks[:half]), *((setting, block) for setting in others for block in blocks),
            *((OFF, block) for block in blocks[half:])]


class ConcurrentBenchmark:
    """Pairs of blocks of one drafted setting and of no drafter, at the concurrencies above 1."""

    def __init__(self, spec: BenchmarkSpec, setting: Setting, blocks: MeasuredBlocks, min_speedup: float) -> None:
        self._spec, self._setting, self._blocks = spec, setting, blocks
        self._policy = PromotionPolicy(min_speedup=min_speedup)
        # Pairs of each temperature, at most.
        num_requests = 2 * len(blocks.prompts) * spec.repeats
        self._most = {concurrency: max(2 * FEWEST_PAIRS, math.ceil(num_requests / block_size(concurrency)))
                      for concurrency in spec.concurrencies if concurrency > 1}

    @property
    def is_measured(self) -> bool:
        return not any(map(self._next_blocks, self._most))

    def measure(self, stage: Stage) -> None:
        """Measure what the ledger does not have. The variants must be started under the names of `Setting.label`."""
        resident = self._blocks.engine.num_resident
        all_ready = resident is None or resident >= 2
        total = 2 * len(self._spec.temperatures) * sum(self._most.values())
        for concurrency in self._most:
            for setting in (OFF, self._setting) if all_ready else ():
                stage.pause_point()
                self._blocks.warm_up(setting, concurrency, self._spec.temperatures)
            while blocks := self._next_blocks(concurrency, 1 if all_ready else RUNGS_PER_START):
                for setting, (temperature, rung) in self._blocks.turns(
                        (OFF, self._setting), concurrency, blocks, blocks[0][1], all_ready):
                    stage.pause_point()
                    self._blocks.measure(setting, concurrency, temperature, rung)
                    stage.progress(len(self._blocks.runs), total, "blocks",
                                   f"{setting.label()}, {concurrency} at once")

    def reports(self) -> tuple[ConcurrencyReport, ...]:
        """One report per concurrency and temperature. Where an answer differs, the reference implementation of the
        target explains it."""
        return tuple(self._report(concurrency, temperature) for concurrency in self._most
                     for temperature in self._spec.temperatures)

    def is_clear(self, ratio: float, interval: Interval) -> bool:
        """Whether the interval decides against `min_speedup`."""
        return speedup_standing(self._policy, ratio, interval) != "open"

    def _next_blocks(self, concurrency: int, num_rungs: int = 1) -> list[tuple[float, int]]:
        """Temperatures and rungs that are to be measured next."""
        open_at = {}
        for temperature in self._spec.temperatures:
            pairs, most = self._pairs(concurrency, temperature), self._most[concurrency]
            if len(pairs) < FEWEST_PAIRS or (len(pairs) < most and not self.is_clear(*speedup(pairs))):
                open_at[temperature] = range(len(pairs), min(len(pairs) + num_rungs, most))
        return sorted(((temperature, rung) for temperature, rungs in open_at.items() for rung in rungs),
                      key=lambda block: block[1])

    def _pairs(self, concurrency: int, temperature: float) -> list[tuple[BlockRun, BlockRun]]:
        """The rungs that were answered with the drafter and without."""
        runs = self._blocks.runs
        both = ((runs.get((concurrency, temperature, rung, self._setting.label())),
                 runs.get((concurrency, temperature, rung, OFF.label()))) for rung in range(self._most[concurrency]))
        return [(ours, theirs) for ours, theirs in takewhile(all, both) if ours is not None and theirs is not None]

    def _report(self, concurrency: int, temperature: float) -> ConcurrencyReport:
        pairs = self._pairs(concurrency, temperature)
        drafted, plain = ([pair[side] for pair in pairs] for side in (0, 1))
        ratio, interval = speedup(pairs)
        compared = temperature == 0.0 or self._blocks.engine.same_samples
        session, lines, ties = self._blocks.session, list[str](), 0
        for ours, theirs in pairs if compared else ():
            for request in self._blocks.requests(ours.concurrency, ours.temperature, ours.rung):
                answer, undrafted = comparable(ours, theirs, request.id)
                if answer != undrafted:
                    divergence = explain(session.judge, request.id, request.prompt_ids, undrafted, answer,
                                         temperature=ours.temperature, seed=request.seed)
                    assert divergence is not None
                    lines.append(divergence.line(session.dtype))
                    ties += divergence.is_tie(session.dtype)
        return ConcurrencyReport(
            concurrency=concurrency, temperature=temperature, requests=sum(len(run.answers) for run in drafted),
            tau=intervals.acceptance_length(intervals.add_histograms([run.accepted_histogram for run in drafted])),
            tokens_per_s=rate(drafted), baseline_tokens_per_s=rate(plain), speedup=ratio,
            speedup_interval=interval, identical=sum(num_identical(*pair) for pair in pairs), near_ties=ties,
            compared=compared, divergences=tuple(lines))


def speedup(pairs: Sequence[tuple[BlockRun, BlockRun]]) -> tuple[float, Interval]:
    """The ratio of two settings by pairs of blocks, geometric mean, and its interval."""
    logs = intervals.paired_logs((ours.rung, ours.measured, theirs.measured) for ours, theirs in pairs)
    return math.exp(fmean(logs[0])), intervals.anytime_interval(*logs)


def rate(runs: Sequence[BlockRun]) -> float:
    """Tokens per second over all seconds."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
