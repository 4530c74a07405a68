"""One block of prompts through one setting at one concurrency, timed while every slot is busy.

A closed loop: as soon as an answer ends the next request is admitted, so the concurrency stays constant. The block ends
when no request waits and a slot is empty; answers still being decoded are truncated and their tokens so far are
counted, because the tail of a block would run at a lower concurrency than reported. Prefill is timed in every setting.
At concurrency 1 no answer is truncated.

An answer does not depend on the setting, so every answer is compared token by token with the undrafted answer to the
same request, truncated answers up to the shorter length.
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

_WARMUP_TOKENS = 16  # as in `measurement.benchmark.variants`


class BlockRun(Frozen):
    """One setting on one block: a line of the tuner's ledger."""

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
    def key(self) -> tuple[int, float, int, str]:
        """Identifies the measurement."""
        return (self.concurrency, self.temperature, self.rung, self.variant)


@dataclass(frozen=True)
class BlockRunner:
    """Runs blocks: one engine per drafting method over one target, and the prompts that blocks are taken from."""

    session: Session
    engines: Mapping[str, Engine]
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
        return run_block(self.engines, setting, self.requests(concurrency, temperature, rung), concurrency, rung)

    def warm_up(self, setting: Setting, concurrency: int, temperatures: Sequence[float]) -> None:
        """Run the beginning of a block without timing it: kernels are selected, memory is mapped."""
        for temperature in temperatures:
            short = [replace(request, max_new_tokens=_WARMUP_TOKENS)
                     for request in self.requests(concurrency, temperature, 0)[:concurrency]]
            run_block(self.engines, setting, short, concurrency, 0)


def block_size(concurrency: int) -> int:
    """Requests of a block: two at concurrency 1, so that two suites contribute; above, every slot is filled twice."""
    return 2 * concurrency


def open_engines(session: Session) -> dict[str, Engine]:
    """One engine per drafting method, over the same target and with as many slots as the session's. `off` shares the
    drafter's engine."""
    own = session.bench.engine
    return {"off": own, "drafter": own} | {
        method: Engine(session.target, open_method(method, None, session.target), max_concurrency=own.max_concurrency)
        for method in UNTRAINED}


def run_block(engines: Mapping[str, Engine], setting: Setting, requests: Sequence[Request], concurrency: int,
              rung: int) -> BlockRun:
    """Run a block. The engine is idle afterwards."""
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
        # A slot that cannot be refilled ends the block: what follows would run at a lower concurrency.
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


def _identical(first: Sequence[int], second: Sequence[int], both_whole: bool) -> bool:
    # Truncated answers are compared up to the shorter one; complete ones must also end at the same token.
    shared = min(len(first), len(second))
    return first[:shared] == second[:shared] and (not both_whole or len(first) == len(second))


def _depth(tree: DraftTreeShape | None) -> int:
    return tree.num_steps if tree is not None else 0


def num_identical(first: BlockRun, second: BlockRun) -> int:
    """Number of requests that both settings answered identically, up to the shorter answer."""
    return sum(_identical(tokens, second.answers[name], name in first.whole and name in second.whole)
               for name, tokens in first.answers.items())
