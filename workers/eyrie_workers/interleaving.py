"""The order in which variants under measurement take their turns. Pure.

Every variant answers a prompt (or a block of prompts) before the next prompt begins, so a machine that slows down for a
minute slows all variants alike. The order changes from turn to turn, counterbalanced for two effects:

    drift      turns come in mirrored pairs (A B C, then C B A): over a pair every variant has the same mean position,
               so a linear slow-down or warm-up cancels
    position   each pair begins two variants later than the one before, so over n turns (2n for an odd n) each of n
               variants runs equally often at every position and after different neighbours, whose caches it meets

Two variants alternate: A B, B A, A B, ...
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def interleaved(variants: Sequence[T], turn: int) -> list[T]:
    """The variants in the order of the `turn`-th prompt or block; turns count from 0."""
    start = (turn - turn % 2) % len(variants)
    order = [*variants[start:], *variants[:start]]
    return order[::-1] if turn % 2 else order
