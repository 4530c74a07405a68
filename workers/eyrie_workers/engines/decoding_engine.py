"""The engines that stages measure in: answer requests under load, per variant, with accepted counts.

Two implementations of one interface: the reference engine in this process (`EmbeddedEngine`), and SGLang, one server
per variant, over HTTP (`sglang.managed_engine`). Benchmark and tune measure through this interface, so that a figure
belongs to the engine that will serve.

A variant is a `DrafterUse` by name: a drafter with a setting, n-gram lookup, or no speculation. All variants of an
engine share target, dtype and limits, and receive the same requests, so two of them differ in speculation alone.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eyrie_api.artifacts import code_version
from eyrie_api.contract.reports import EngineUsed
from eyrie_api.contract.tuning import DrafterUse, Setting
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_workers.drafters.family import UNTRAINED, open_method
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.speculation.requests import Request
from eyrie_workers.targets.model import TargetModel

WARMUP_TOKENS = 16  # of an answer that is not timed: enough rounds to run every matrix shape of a variant


@dataclass(frozen=True)
class Answer:
    """What an engine generated for one request. Seconds are wall time since the request was sent."""

    id: str
    token_ids: tuple[int, ...]
    """With the stop id, when one was generated."""

    accepted_histogram: tuple[int, ...]
    """[k]: rounds in which k draft tokens were accepted. Without speculation every round accepts none."""

    seconds: float
    ttft_s: float
    whole: bool
    """False: the run ended before the answer did (see `DecodingEngine.generate`)."""

    accepted: tuple[int, ...] = ()
    """Draft tokens accepted in each round, in order; empty for an engine that reports the histogram alone."""

    @property
    def rounds(self) -> int:
        """Target passes after the prefill."""
        return sum(self.accepted_histogram)


@dataclass(frozen=True)
class EngineRun:
    """The answers to some requests, in their order, and the cost of all together."""

    answers: tuple[Answer, ...]
    seconds: float
    """Wall time."""

    cpu_seconds: float
    """CPU time of the processes that computed them."""


class DecodingEngine(Protocol):
    """An engine with named variants. Not thread-safe."""

    def describe(self) -> EngineUsed:
        ...

    def refusal(self, setting: Setting, temperature: float) -> str | None:
        """Why the engine cannot decode with this setting at this temperature; None when it can."""
        ...

    @property
    def same_samples(self) -> bool:
        """Whether a sampled answer (temperature > 0) depends on its request and seed alone, so that variants can be
        compared token by token. Greedy answers always can."""
        ...

    @property
    def num_resident(self) -> int | None:
        """How many variants can be ready at the same time; None for any number. Further ones replace others."""
        ...

    @property
    def restarts(self) -> int:
        """Servers that ended while they were measured and were started again."""
        ...

    def start(self, uses: Mapping[str, DrafterUse]) -> dict[str, EyrieError]:
        """Make these variants available, and release those not named. Returns the errors of those that cannot start.

        Variants of the same name and use are kept as they are. Raises InvalidInput when not one variant fits the
        machine's memory.
        """
        ...

    def generate(self, variant: str, requests: Sequence[Request], concurrency: int, *,
                 truncate: bool = False) -> EngineRun:
        """Answer requests with `concurrency` of them decoded at once: a closed loop, in their order.

        truncate   end the run when no request waits and a slot is empty, so that all of it ran at `concurrency`;
                   answers still being decoded are cut off (`Answer.whole`)

        Raises EngineFailed when the engine cannot answer, InvalidInput for a request that it cannot decode.
        """
        ...

    def stop(self) -> None:
        """Release all variants."""
        ...


class EmbeddedEngine:
    same_samples = True
    num_resident = None
    restarts = 0

    def __init__(self, target: TargetModel, dtype: str, max_concurrency: int = 1) -> None:
        """An engine without variants; `start` opens their drafters."""
        self.target = target
        self.dtype = dtype
        self.max_concurrency = max_concurrency
        self._uses: dict[str, DrafterUse] = {}
        self._engines: dict[str | None, Engine] = {}

    def describe(self) -> EngineUsed:
        return EngineUsed(kind="embedded", version=code_version(), dtype=self.dtype,
                          device=str(self.target.device))

    def refusal(self, setting: Setting, temperature: float) -> str | None:
        """As in `DecodingEngine`: it decodes every setting at every temperature."""
        return None

    def start(self, uses: Mapping[str, DrafterUse]) -> dict[str, EyrieError]:
        """As in `DecodingEngine`; drafters stay loaded."""
        failed: dict[str, EyrieError] = {}
        self._uses = {}
        # `off` last: it uses a drafter's engine where there is one, so that both variants use one cache.
        for name, use in sorted(uses.items(), key=lambda named: named[1].setting.method == "off"):
            try:
                self.reference(use)
            except EyrieError as error:
                failed[name] = error
            else:
                self._uses[name] = use
        return failed

    def reference(self, use: DrafterUse) -> Engine:
        """The engine that decodes this use. Raises what `drafters.family.open_method` raises."""
        method = use.setting.method
        key = method if method in UNTRAINED else use.drafter_dir
        if method == "off":
            key = next(iter(self._engines), None)
        if key not in self._engines:
            directory = Path(use.drafter_dir) if use.drafter_dir is not None else None
            self._engines[key] = Engine(self.target, open_method(method, directory, self.target),
                                        max_concurrency=self.max_concurrency)
        return self._engines[key]

    def generate(self, variant: str, requests: Sequence[Request], concurrency: int, *,
                 truncate: bool = False) -> EngineRun:
        if concurrency > self.max_concurrency:
            raise InvalidInput(f"concurrency {concurrency} is above the engine's {self.max_concurrency}",
                               "open the engine with a higher max_concurrency")
        use = self._uses[variant]
        engine = self.reference(use)
        engine.tree = tree = use.setting.tree
        waiting = list(reversed(requests))
        slots = min(concurrency, len(requests))
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        depth = tree.num_steps if tree is not None else 0
        rounds: dict[str, list[int]] = {request.id: [] for request in requests}
        submitted: dict[str, float] = {}
        first_token_s: dict[str, float] = {}
        seconds_of: dict[str, float] = {}
        began, cpu_began = time.perf_counter(), time.process_time()
        while waiting or len(seconds_of) < len(requests):
            while waiting and engine.num_running + engine.num_waiting < slots:
                submitted[waiting[-1].id] = time.perf_counter()
                engine.submit(waiting.pop())
            # A slot that cannot be refilled ends a truncated run: what follows would run at a lower concurrency.
            if truncate and engine.num_running + engine.num_waiting < slots:
                break
            for progress in engine.step():
                tokens[progress.id] += progress.token_ids
                first_token_s.setdefault(progress.id, time.perf_counter() - submitted[progress.id])
                rounds[progress.id] += progress.accepted
                if progress.generation is not None:
                    first_token_s[progress.id] = progress.generation.first_token_s
                    seconds_of[progress.id] = progress.generation.total_s
        ended = time.perf_counter()
        cpu_seconds = time.process_time() - cpu_began
        for request in requests:
            engine.cancel(request.id)
        return EngineRun(
            answers=tuple(Answer(
                id=request.id, token_ids=tuple(tokens[request.id]), accepted=tuple(rounds[request.id]),
                accepted_histogram=tuple(rounds[request.id].count(accepted) for accepted in range(depth + 1)),
                seconds=seconds_of.get(request.id, ended - submitted[request.id]), whole=request.id in seconds_of,
                ttft_s=first_token_s.get(request.id, ended - submitted[request.id])) for request in requests),
            seconds=ended - began, cpu_seconds=cpu_seconds)

    def stop(self) -> None:
        self._uses, self._engines = {}, {}
