"""Who asks what, when: the order of a load test as a function of its spec. Pure.

Closed loop: `level` users, each asking again as soon as it is answered; what a server does at a given concurrency.
Open loop: questions arrive at a mean rate with exponential gaps, answered or not; what users do to a server. All
variants meet the same questions in the same order, and in an open loop at the same moments.

A level is measured in blocks, variant after variant, in an order that changes from block to block and from level to
level (`eyrie_workers.interleaving`), so a machine that slows down or warms up does so for all variants.

Prompts are drawn from the categories in turn (chat, math, chat, math, ...), each category from its beginning and round
again, and the next repeat goes on where the last one ended. Warm-up draws from the far end, so that a server that
keeps the prompts it has read (prefix caching) has not read these because of us.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from eyrie_api.v1alpha1.load import LoadSpec
from eyrie_workers.interleaving import interleaved
from eyrie_workers.load.client import LoadRequest
from eyrie_workers.load.endpoints import LoadPrompt


@dataclass(frozen=True)
class Level:
    """So many users, or so many requests a second."""

    mode: Literal["closed", "open"]
    value: float

    @property
    def users(self) -> int:
        """Connections a closed loop needs."""
        return int(self.value)

    def words(self) -> str:
        """For people."""
        unit = "requests/s" if self.mode == "open" else "user" if self.value == 1 else "users"
        return f"{self.value:g} {unit}"


@dataclass(frozen=True)
class Block:
    """One variant at one level, once."""

    level: Level
    variant: str
    warmup: tuple[LoadRequest, ...]
    questions: tuple[LoadRequest, ...]


def levels(spec: LoadSpec) -> list[Level]:
    """Every level once, ascending, closed loops first."""
    return [*(Level("closed", value) for value in sorted(set(spec.concurrencies))),
            *(Level("open", value) for value in sorted(set(spec.rates_per_s)))]


def num_requests(spec: LoadSpec, level: Level) -> int:
    """Requests of one block. Every user of a closed loop asks twice at least, or the level would be the ramp to it."""
    return max(spec.requests, 2 * level.users) if level.mode == "closed" else spec.requests


def draw(prompts: Sequence[LoadPrompt], start: int, num: int) -> list[LoadPrompt]:
    """`num` prompts from place `start` of the endless round through the categories; negative places count back."""
    categories: dict[str, list[LoadPrompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    columns = list(categories.values())
    places = (divmod(place, len(columns)) for place in range(start, start + num))
    return [columns[column][row % len(columns[column])] for row, column in places]


def blocks(prompts: Sequence[LoadPrompt], variants: Sequence[str], spec: LoadSpec) -> Iterator[Block]:
    """The whole test in order."""
    turn = count()
    for level in levels(spec):
        num = num_requests(spec, level)
        for repeat in range(spec.repeats):
            order = interleaved(variants, next(turn))
            drawn = draw(prompts, repeat * num, num)
            due = arrivals(spec, level, repeat, num) if level.mode == "open" else [None] * num
            questions = tuple(LoadRequest(prompt, repeat, index, at)
                              for index, (prompt, at) in enumerate(zip(drawn, due, strict=True)))
            warmup = tuple(LoadRequest(prompt, repeat, -1 - index) for index, prompt in enumerate(
                draw(prompts, -spec.warmup_requests, spec.warmup_requests))) if repeat == 0 else ()
            yield from (Block(level, variant, warmup, questions) for variant in order)


def arrivals(spec: LoadSpec, level: Level, repeat: int, num: int) -> list[float]:
    """When the questions of an open loop arrive, in seconds from the beginning: a Poisson process, by the seed."""
    chance = random.Random(f"{spec.seed}/{level.value}/{repeat}")
    at, times = 0.0, []
    for _ in range(num):
        times.append(at)
        at += chance.expovariate(level.value)
    return times


def total_requests(prompts: Sequence[LoadPrompt], variants: Sequence[str], spec: LoadSpec) -> int:
    """Requests of the whole test, warm-up included."""
    return sum(len(block.warmup) + len(block.questions) for block in blocks(prompts, variants, spec))
