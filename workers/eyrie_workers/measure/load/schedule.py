"""The order of a load test: which endpoint receives which request at what time, as a function of the spec. Pure.

Closed loop: `level` users, each sending its next request as soon as the previous one is complete; measures a server at
a given concurrency. Open loop: requests arrive at a mean rate with exponential gaps, whether or not earlier ones are
complete; models independent users. All variants receive the same requests in the same order, in an open loop at the
same times.

A level is measured in blocks, variant after variant, in an order that changes from block to block and from level to
level (`eyrie_workers.measure.intervals`), so a machine that slows down or warms up does so for all variants.

Prompts are drawn from the categories in turn (chat, math, chat, math, ...), each category in order and cyclically, and
each repeat continues where the previous one ended. Warm-up draws prompts from the end, so that the prefix cache of a
server does not contain the first measured prompts.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Literal

from eyrie_api.contract.load import LoadSpec, fewest_requests
from eyrie_workers.data.suites import Prompt
from eyrie_workers.measure.intervals import interleaved
from eyrie_workers.measure.load.client import LoadRequest


@dataclass(frozen=True)
class RequestLevel:
    """A number of users, or of requests per second."""

    mode: Literal["closed", "open"]
    value: float

    @property
    def users(self) -> int:
        return int(self.value)

    def label(self) -> str:
        unit = "requests/s" if self.mode == "open" else "user" if self.value == 1 else "users"
        return f"{self.value:g} {unit}"


@dataclass(frozen=True)
class RequestBlock:
    level: RequestLevel
    repeat: int
    variant: str
    warmup: tuple[LoadRequest, ...]
    requests: tuple[LoadRequest, ...]


def levels(spec: LoadSpec) -> list[RequestLevel]:
    """All levels, ascending, closed loops first."""
    return [*(RequestLevel("closed", value) for value in sorted(set(spec.concurrencies))),
            *(RequestLevel("open", value) for value in sorted(set(spec.rates_per_s)))]


def num_requests(spec: LoadSpec, level: RequestLevel) -> int:
    return max(spec.requests, fewest_requests(level.users)) if level.mode == "closed" else spec.requests


def draw_prompts(prompts: Sequence[Prompt], start: int, num: int) -> list[Prompt]:
    """`num` prompts from position `start` of the endless cycle through the categories; negative: from its end."""
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.suite, []).append(prompt)
    columns = list(categories.values())
    positions = (divmod(position, len(columns)) for position in range(start, start + num))
    return [columns[column][row % len(columns[column])] for row, column in positions]


def blocks(prompts: Sequence[Prompt], variants: Sequence[str], spec: LoadSpec) -> Iterator[list[RequestBlock]]:
    """The blocks of all variants, repeat by repeat and level by level."""
    block_index = count()
    for level in levels(spec):
        num = num_requests(spec, level)
        for repeat in range(spec.repeats):
            order = interleaved(variants, next(block_index))
            drawn = draw_prompts(prompts, repeat * num, num)
            due = arrivals(spec, level, repeat, num) if level.mode == "open" else [None] * num
            requests = tuple(LoadRequest(prompt, repeat, index, at)
                             for index, (prompt, at) in enumerate(zip(drawn, due, strict=True)))
            warmup = tuple(LoadRequest(prompt, repeat, -1 - index) for index, prompt in enumerate(
                draw_prompts(prompts, -spec.warmup_requests, spec.warmup_requests))) if repeat == 0 else ()
            yield [RequestBlock(level, repeat, variant, warmup, requests) for variant in order]


def arrivals(spec: LoadSpec, level: RequestLevel, repeat: int, num: int) -> list[float]:
    """Arrival times of an open loop in seconds from the start of its block: a Poisson process with a fixed seed."""
    random_source = random.Random(f"{spec.seed}/{level.value}/{repeat}")
    gaps = (random_source.expovariate(level.value) for _ in range(num - 1))
    return list(accumulate(gaps, initial=0.0))


def total_requests(num_variants: int, spec: LoadSpec) -> int:
    """Number of requests of the test, warm-up included."""
    return num_variants * sum(spec.warmup_requests + spec.repeats * num_requests(spec, level) for level in levels(spec))
