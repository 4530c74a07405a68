"""One block of prompts through one setting at one concurrency, timed while every slot is busy.

A closed loop: as soon as an answer ends the next prompt is admitted, so that the load stays what its name says. When
nobody waits any more and a slot stays empty the block ends, and what is still being decoded is cut off and counts as
far as it came: the tail of a block would be measured at a lower load than it claims. Prefill counts, in every setting.
At concurrency 1 nothing is cut.

What an answer holds does not depend on the setting, so every token of every setting is compared with the undrafted
answer to the same request, cut ones as far as both go.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.tuning import Setting
from eyrie_workers.conversations.suites import Prompt
from eyrie_workers.drafters.registry import UNTRAINED, open_method
from eyrie_workers.measurement.benchmark.session import Session
from eyrie_workers.measurement.benchmark.variants import make_request
from eyrie_workers.speculation.engine import Engine, Request

_WARMUP_TOKENS = 16  # as in `variants`


class BlockRun(Frozen):
    """What one setting did with one block: a line of the tuner's ledger."""

    concurrency: int
    temperature: float
    rung: int
    variant: str
    """`Setting.label`."""

    seconds: float
    tokens: int
    accepted_histogram: tuple[int, ...]
    answers: dict[str, tuple[int, ...]]
    """By request, whole or as far as they came."""

    whole: tuple[str, ...]
    """The requests that were answered to their end."""

    @property
    def key(self) -> tuple[int, float, int, str]:
        """Which measurement this is."""
        return (self.concurrency, self.temperature, self.rung, self.variant)


@dataclass(frozen=True)
class Track:
    """What all blocks share: the engines by who drafts, and the prompts they go round on."""

    session: Session
    engines: Mapping[str, Engine]
    prompts: Sequence[Prompt]

    def requests(self, concurrency: int, temperature: float, rung: int) -> list[Request]:
        """The block of a rung: the next prompts, going round; another time round draws other noise."""
        size = block_size(concurrency)
        return self.some_requests(self.prompts, temperature, rung * size, size)

    def some_requests(self, prompts: Sequence[Prompt], temperature: float, start: int, num: int) -> list[Request]:
        """`num` requests from the `start`-th prompt on, going round."""
        bench, asked = self.session.bench, []
        for index in range(start, start + num):
            again, place = divmod(index, len(prompts))
            (unit,) = self.session.units([(0, prompts[place])], [temperature], 1)
            request = make_request(replace(unit, repeat=again), seed=bench.seed, max_new_tokens=bench.max_new_tokens,
                                   stop_ids=bench.stop_ids)
            asked.append(replace(request, id=f"{request.id} ({again})"))
        return asked

    def run(self, setting: Setting, concurrency: int, temperature: float, rung: int) -> BlockRun:
        """Measure one setting on one block."""
        return run_block(self.engines, setting, self.requests(concurrency, temperature, rung), concurrency, rung)

    def warm_up(self, setting: Setting, concurrency: int, temperatures: Sequence[float]) -> None:
        """The beginning of a block, untimed: kernels are chosen, memory is mapped."""
        for temperature in temperatures:
            short = [replace(request, max_new_tokens=_WARMUP_TOKENS)
                     for request in self.requests(concurrency, temperature, 0)[:concurrency]]
            run_block(self.engines, setting, short, concurrency, 0)


def block_size(concurrency: int) -> int:
    """Prompts of a block. Two make a pair of suites at concurrency 1; above, every slot is filled twice."""
    return 2 * concurrency


def open_engines(session: Session) -> dict[str, Engine]:
    """One engine per way of drafting, over the same target and with as many slots as the session's; off shares the
    drafter's."""
    own = session.bench.engine
    return {"off": own, "drafter": own} | {
        method: Engine(session.target, open_method(method, None, session.target), max_concurrency=own.max_concurrency)
        for method in UNTRAINED}


def run_block(engines: Mapping[str, Engine], setting: Setting, requests: Sequence[Request], concurrency: int,
              rung: int) -> BlockRun:
    """Ask a block; the engine is idle again afterwards."""
    engine = engines[setting.method]
    engine.tree = setting.tree
    waiting = list(reversed(requests))
    slots = min(concurrency, len(requests))
    answers: dict[str, list[int]] = {request.id: [] for request in requests}
    whole: list[str] = []
    histogram = [0] * (_depth(setting.tree) + 1)
    began = time.perf_counter()
    while True:
        while waiting and engine.num_running + engine.num_waiting < slots:
            engine.submit(waiting.pop())
        if engine.num_running + engine.num_waiting < slots:
            break
        for progress in engine.step():
            answers[progress.id] += progress.token_ids
            for accepted in progress.accepted:
                histogram[accepted] += 1
            if progress.generation is not None:
                whole.append(progress.id)
    seconds = time.perf_counter() - began
    for request in requests:
        engine.cancel(request.id)
    return BlockRun(
        concurrency=concurrency, temperature=requests[0].sampling.temperature, rung=rung, variant=setting.label(),
        seconds=seconds, tokens=sum(map(len, answers.values())), accepted_histogram=tuple(histogram),
        answers={name: tuple(tokens) for name, tokens in answers.items()}, whole=tuple(whole))


def _agree(one: Sequence[int], other: Sequence[int], both_whole: bool) -> bool:
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared] and (not both_whole or len(one) == len(other))


def _depth(tree: DraftTreeShape | None) -> int:
    return tree.num_steps if tree is not None else 0


def agreeing(one: BlockRun, other: BlockRun) -> int:
    """How many requests got the same answer from two settings, as far as both answers go."""
    return sum(_agree(tokens, other.answers[name], name in one.whole and name in other.whole)
               for name, tokens in one.answers.items())
