"""Mixes several sources into one stream by weight.

Each position of the mix is drawn among the sources that still have rows, with their weights, by a generator seeded by
the spec: the same spec gives the same order, and any prefix of the mix has the same expected shares. When a source is
exhausted, the others take its share. Unreadable rows are passed through and do not count as a position, so a source
with many of them keeps its share of usable rows.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import TypeVar

from eyrie_api.v1alpha1.reports import QuarantinedRow

T = TypeVar("T")


def mix(streams: Sequence[Iterator[T | QuarantinedRow]], weights: Sequence[float], seed: int) \
        -> Iterator[T | QuarantinedRow]:
    """Rows of all streams in one, lazily; rows of one stream keep their order."""
    rng = Random(f"mix:{seed}")
    live = list(range(len(streams)))
    while live:
        source = rng.choices(live, [weights[number] for number in live])[0]
        for row in streams[source]:
            yield row
            if not isinstance(row, QuarantinedRow):
                break
        else:
            live.remove(source)
