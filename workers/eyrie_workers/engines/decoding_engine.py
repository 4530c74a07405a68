"""The interface of the engines that stages measure in: answer requests under load, per variant, with accepted counts.

Two implementations: `embedded` (the reference engine, in this process) and `sglang.managed_engine` (one server per
variant, over HTTP). Benchmark and tune measure through this interface, so that a figure belongs to the engine that will
serve.

A variant is a `DrafterUse` by name: a drafter with a setting, n-gram lookup, or no speculation. All variants of an
engine share target, dtype and limits, and receive the same requests, so two of them differ in speculation alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.v1alpha1.reports import EngineUsed
from eyrie_api.v1alpha1.tuning import DrafterUse, Setting
from eyrie_workers.speculation.requests import Request

Variants = Mapping[str, DrafterUse]
"""The drafter and setting of each variant, by the variant's name."""


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
        """Kind, version, dtype, device and limits; `restarts` counts those so far."""
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

    def start(self, uses: Variants) -> dict[str, EyrieError]:
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

    def drain(self) -> None:
        """Wait until nothing is being decoded, and forget cached prefixes and texts, in all available variants."""
        ...

    def stop(self) -> None:
        """Release all variants."""
        ...


def check_temperatures(engine: DecodingEngine, settings: Sequence[Setting], temperatures: Sequence[float],
                       field: str) -> None:
    """Raises InvalidInput for the first temperature at which the engine refuses one of the settings."""
    for temperature in temperatures:
        for setting in settings:
            why = engine.refusal(setting, temperature)
            if why is not None:
                raise InvalidInput(f"{field} contains {temperature:g}: {why}",
                                   f"set {field} to [0], or engine.kind to embedded")
