"""Blocks of prompts through one setting at one concurrency, and the benchmark's higher concurrencies in blocks.

A closed loop: as soon as an answer ends the next request is admitted, so the concurrency stays constant. The block ends
when no request waits and a slot is empty; answers still being decoded are truncated and their tokens so far are
counted, because the tail of a block would run at a lower concurrency than reported. Prefill is timed in every setting.
At concurrency 1 no answer is truncated.

An answer does not depend on the setting, so every answer is compared token by token with the undrafted answer to the
same request, truncated answers up to the shorter length.

`ConcurrentBenchmark` mixes the prompts of all suites, as when tuning races settings: at each rung every temperature's
block is answered with and without the drafter, in an order that changes from rung to rung. Suites are not reported
separately: a block holds few prompts of each. Only first turns are asked, because a later turn of one conversation
would have to wait for its first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from pydantic import Field

from eyrie_api.contract.benchmark import BenchmarkSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.reports import ConcurrencyReport
from eyrie_api.contract.tuning import OFF, Setting
from eyrie_workers.data.suites import Prompt
from eyrie_workers.engines.decoding_engine import DecodingEngine
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.measure import intervals
from eyrie_workers.measure.benchmark.losslessness import explain
from eyrie_workers.measure.benchmark.session import Session
from eyrie_workers.measure.benchmark.variants import WARMUP_TOKENS, make_request
from eyrie_workers.measure.intervals import Tally
from eyrie_workers.speculation.requests import Request
from eyrie_workers.stage_program import Stage

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
    def rates(self) -> dict[tuple[str, str], float]:
        """Tokens per second of each complete answer, by the name of its prompt and the request's id."""
        return {(name.rpartition(" ")[0], name): len(self.answers[name]) / self.answer_s[name]
                for name in self.whole if self.answer_s.get(name)}


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
        run = self.session.bench.engine.generate(
            setting.label(), self.requests(concurrency, temperature, rung), concurrency, truncate=True)
        depth = setting.tree.num_steps if setting.tree is not None else 0
        histograms = [(0,) * (depth + 1), *(answer.accepted_histogram for answer in run.answers)]
        histogram = intervals.add_histograms(histograms)
        return BlockRun(
            concurrency=concurrency, temperature=temperature, rung=rung, variant=setting.label(), seconds=run.seconds,
            tokens=sum(len(answer.token_ids) for answer in run.answers), accepted_histogram=tuple(histogram),
            answers={answer.id: answer.token_ids for answer in run.answers},
            whole=tuple(answer.id for answer in run.answers if answer.whole),
            answer_s={answer.id: answer.seconds for answer in run.answers})

    def warm_up(self, setting: Setting, concurrency: int, temperatures: Sequence[float]) -> None:
        """Run the beginning of a block without timing it: kernels are selected, memory is mapped."""
        for temperature in temperatures:
            short = [replace(request, max_new_tokens=WARMUP_TOKENS)
                     for request in self.requests(concurrency, temperature, 0)[:concurrency]]
            self.session.bench.engine.generate(setting.label(), short, concurrency, truncate=True)


@dataclass(frozen=True)
class MeasuredBlocks:
    """Measures blocks, each once: the ledger has those of earlier runs."""

    runner: BlockRunner
    ledger: JsonlLedger[BlockRun]
    runs: dict[BlockRunKey, BlockRun]

    @property
    def engine(self) -> DecodingEngine:
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
    """The blocks of one drafted setting, and of no drafter, at the concurrencies above 1."""

    def __init__(self, spec: BenchmarkSpec, setting: Setting, blocks: MeasuredBlocks) -> None:
        self._spec, self._setting, self._blocks = spec, setting, blocks
        self._concurrencies = [concurrency for concurrency in spec.concurrencies if concurrency > 1]
        # Blocks of each temperature and variant: as many as ask every request once. One block has no interval.
        num_requests = len(blocks.runner.prompts) * spec.repeats
        self._rungs = {concurrency: max(2, math.ceil(num_requests / block_size(concurrency)))
                       for concurrency in self._concurrencies}

    @property
    def is_measured(self) -> bool:
        return all((concurrency, temperature, rung, setting.label()) in self._blocks.runs
                   for concurrency in self._concurrencies for temperature, rung in self._keys(concurrency)
                   for setting in (OFF, self._setting))

    def measure(self, stage: Stage) -> None:
        """Measure what the ledger does not have. The variants must be started under the names of `Setting.label`."""
        resident = self._blocks.engine.num_resident
        all_ready = resident is None or resident >= 2
        total = 2 * sum(len(self._keys(concurrency)) for concurrency in self._concurrencies)
        done = 0
        for concurrency in self._concurrencies:
            for setting in (OFF, self._setting) if all_ready else ():
                stage.pause_point()
                self._blocks.runner.warm_up(setting, concurrency, self._spec.temperatures)
            for setting, (temperature, rung) in turns((OFF, self._setting), self._keys(concurrency), 0,
                                                      all_ready):
                stage.pause_point()
                self._blocks.measure(setting, concurrency, temperature, rung)
                done += 1
                stage.progress(done, total, "blocks", f"{setting.label()}, {concurrency} at once")

    def reports(self) -> tuple[ConcurrencyReport, ...]:
        """One report per concurrency and temperature. Where an answer differs, the reference implementation of the
        target explains it."""
        return tuple(self._report(concurrency, temperature) for concurrency in self._concurrencies
                     for temperature in self._spec.temperatures)

    def _keys(self, concurrency: int) -> list[tuple[float, int]]:
        return [(temperature, rung) for rung in range(self._rungs[concurrency])
                for temperature in self._spec.temperatures]

    def _runs(self, setting: Setting, concurrency: int, temperature: float) -> list[BlockRun]:
        return [self._blocks.runs[concurrency, temperature, rung, setting.label()]
                for rung in range(self._rungs[concurrency])]

    def _report(self, concurrency: int, temperature: float) -> ConcurrencyReport:
        drafted = self._runs(self._setting, concurrency, temperature)
        plain = self._runs(OFF, concurrency, temperature)
        tallies = [Tally(ours.tokens, ours.seconds, theirs.tokens, theirs.seconds)
                   for ours, theirs in zip(drafted, plain, strict=True)]
        speedup = intervals.speed_ratio(tallies)
        compared = temperature == 0.0 or self._blocks.engine.same_samples
        session, lines, ties = self._blocks.runner.session, list[str](), 0
        for ours, theirs in zip(drafted, plain, strict=True) if compared else ():
            for request in self._blocks.runner.requests(ours.concurrency, ours.temperature, ours.rung):
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
            tokens_per_s=rate(drafted), baseline_tokens_per_s=rate(plain), speedup=speedup,
            speedup_interval=intervals.ratio_interval(speedup, np.array(tallies), self._spec.seed),
            identical=sum(num_identical(ours, theirs) for ours, theirs in zip(drafted, plain, strict=True)),
            near_ties=ties, compared=compared, divergences=tuple(lines))


def rate(runs: Sequence[BlockRun]) -> float:
    """Tokens per second over all seconds."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
