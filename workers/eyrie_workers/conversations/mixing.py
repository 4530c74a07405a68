"""Several sources in one stream, each with its share.

Each place in the mix is drawn among the sources that still have rows, with their weights, by a generator seeded by the
spec: the same spec gives the same order, and the mix can be cut anywhere without favouring the first source. A source
that runs out leaves its share to the others. Unreadable rows pass through beside the mix and take no place in it, so a
source with many of them keeps its share of what is usable.
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
        chosen = rng.choices(live, [weights[number] for number in live])[0]
        for row in streams[chosen]:
            yield row
            if not isinstance(row, QuarantinedRow):
                break
        else:
            live.remove(chosen)
