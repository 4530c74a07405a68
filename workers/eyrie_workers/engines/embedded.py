"""The reference engine as a `DecodingEngine`: in this process, one `Engine` per drafter over one target.

Settings of the same drafter share its engine and are switched between runs, so any number of variants is available.
Sampling noise is keyed by position: a sampled answer is the same in every variant.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from eyrie_api.artifacts import code_version
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.reports import EngineUsed
from eyrie_api.v1alpha1.tuning import DrafterUse, Setting
from eyrie_workers.drafters.registry import UNTRAINED, open_method
from eyrie_workers.engines.decoding_engine import Answer, EngineRun, Variants
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.targets.model import TargetModel


class EmbeddedEngine:
    """Implements `DecodingEngine`."""

    same_samples = True
    num_resident = None

    def __init__(self, target: TargetModel, dtype: str, max_concurrency: int = 1) -> None:
        """An engine without variants; `start` opens their drafters."""
        self.target = target
        self.dtype = dtype
        self.max_concurrency = max_concurrency
        self._uses: dict[str, DrafterUse] = {}
        self._engines: dict[str | None, Engine] = {}

    def describe(self) -> EngineUsed:
        """As in `DecodingEngine`."""
        return EngineUsed(kind="embedded", version=code_version(), dtype=self.dtype,
                          device=str(self.target.device))

    def refusal(self, setting: Setting, temperature: float) -> str | None:
        """As in `DecodingEngine`: it decodes every setting at every temperature."""
        return None

    def start(self, uses: Variants) -> dict[str, EyrieError]:
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
        """The engine that decodes this use. Raises what `drafters.registry.open_method` raises."""
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
        """As in `DecodingEngine`."""
        if concurrency > self.max_concurrency:
            raise InvalidInput(f"concurrency {concurrency} is above the engine's {self.max_concurrency}",
                               "open the engine with a higher max_concurrency")
        use = self._uses[variant]
        return decode(self.reference(use), use.setting.tree, requests, concurrency, truncate=truncate)

    def drain(self) -> None:
        """As in `DecodingEngine`: every run leaves the engine idle, and nothing is cached between requests."""

    def stop(self) -> None:
        """As in `DecodingEngine`."""
        self._uses, self._engines = {}, {}


def decode(engine: Engine, tree: DraftTreeShape | None, requests: Sequence[Request], concurrency: int, *,
           truncate: bool = False) -> EngineRun:
    """`DecodingEngine.generate` on one engine with one draft tree. The engine is idle afterwards."""
    engine.tree = tree
    waiting = list(reversed(requests))
    slots = min(concurrency, len(requests))
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    histograms = {request.id: [0] * (1 + (tree.num_steps if tree is not None else 0)) for request in requests}
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
            for accepted in progress.accepted:
                histograms[progress.id][accepted] += 1
            if progress.generation is not None:
                first_token_s[progress.id] = progress.generation.first_token_s
                seconds_of[progress.id] = progress.generation.total_s
    ended = time.perf_counter()
    cpu_seconds = time.process_time() - cpu_began
    for request in requests:
        engine.cancel(request.id)
    return EngineRun(
        answers=tuple(Answer(
            id=request.id, token_ids=tuple(tokens[request.id]), accepted_histogram=tuple(histograms[request.id]),
            seconds=seconds_of.get(request.id, ended - submitted[request.id]), whole=request.id in seconds_of,
            ttft_s=first_token_s.get(request.id, ended - submitted[request.id])) for request in requests),
        seconds=ended - began, cpu_seconds=cpu_seconds)
