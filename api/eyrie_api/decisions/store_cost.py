"""What a job's use of its object store costs: objects, requests, bytes read, and the time that bytes stay. Pure.

Counted is what grows with the job: answers, hidden states and exported drafters, in parts as the store transfers them.
Not counted are single small files, and the uploads of unfinished work, which depend on how often a pod is killed.
States stay from capture to the end of the job, and after it until `eyrie storage --clean` removes them: a plan says
what each month costs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eyrie_api.artifacts.store_prices import StorePrices
from eyrie_api.v1alpha1.model import Interval
from eyrie_api.v1alpha1.plan import StagePlan, StoreUse

_HOURS_PER_MONTH = 730.0
_SMALL_FILES = 4
"""Manifest, log, events and spec of a stage."""


@dataclass(frozen=True)
class ObjectStore:
    """Where the jobs of a cluster exchange files."""

    prices: StorePrices | None
    """None: nothing is known of them."""

    ranged: bool
    """Hidden states stay there and are read by ranges (`placement.work.states`)."""

    part_bytes: int
    """Of one request."""

    def parts(self, size_bytes: float) -> int:
        """Requests that read so many bytes."""
        return math.ceil(size_bytes / self.part_bytes)

    def put_requests(self, size_bytes: float) -> int:
        """Requests that write one object: one, or its parts with their beginning and their end."""
        parts = self.parts(size_bytes)
        return parts + 2 if parts > 1 else 1


@dataclass(frozen=True)
class StageTransfer:
    """What one stage writes and reads."""

    objects: int = 0
    put_requests: int = 0
    get_requests: int = 0
    read_bytes: int = 0


def with_store_use(stages: tuple[StagePlan, ...], transfers: Mapping[str, StageTransfer],
                   store: ObjectStore) -> tuple[StagePlan, ...]:
    """The stages with their use of the store. What a stage wrote stays until the last one; while it is being written,
    half of it on average is there."""
    found, before = [], 0
    for one in stages:
        moved = transfers.get(one.stage, StageTransfer())
        objects = moved.objects + _SMALL_FILES
        puts, gets = moved.put_requests + _SMALL_FILES, moved.get_requests + _SMALL_FILES
        held = before + one.bytes_on_disk / 2

        def money(hours: float, held: float = held, puts: int = puts, gets: int = gets,
                  read: int = moved.read_bytes) -> float | None:
            prices = store.prices
            return None if prices is None else (
                held / 1e12 * hours / _HOURS_PER_MONTH * prices.storage + puts / 1e6 * prices.put
                + gets / 1e6 * prices.get + read / 1e12 * prices.traffic)

        low, high = ((one.hours_range.low, one.hours_range.high) if one.hours_range is not None
                     else (one.hours, one.hours))
        least, most = money(low), money(high)
        found.append(one.model_copy(update={"store": StoreUse(
            objects=objects, put_requests=puts, get_requests=gets, read_bytes=moved.read_bytes, cost=money(one.hours),
            cost_range=None if least is None or most is None else Interval(low=least, high=most))}))
        before += one.bytes_on_disk
    return tuple(found)


def month_cost(stored_bytes: int, store: ObjectStore) -> float | None:
    """Of what a job leaves in the store, for a month."""
    return None if store.prices is None else stored_bytes / 1e12 * store.prices.storage
