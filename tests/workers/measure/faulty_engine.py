"""The embedded engine's server with a fault planted in it, each of a kind that plain greedy requests of one user do not
meet.

    python -m tests.workers.measure.faulty_engine FAULT <arguments of eyrie_workers.engines.server>
"""

import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from eyrie_workers.engines import responses, server
from eyrie_workers.speculation import cache, engine, verify


def stale_keys() -> None:
    """A row that moves into a freed slot finds the keys of the row that left."""
    cache.KVCache.copy_slot = lambda *_: None  # type: ignore[method-assign]


def wrong_slot() -> None:
    """From the second row on, committed keys are read from the slot of the row before."""
    attend = cache.TreeAttention.__call__

    def shifted(self: Any, layer: int, heads: Any) -> Any:
        kept = self._cache.layer(layer)
        if self._num_rows > 2:
            kept[1:self._num_rows, :8] = kept[:self._num_rows - 1, :8].clone()
        return attend(self, layer, heads)

    cache.TreeAttention.__call__ = shifted  # type: ignore[method-assign]


def mask_off_by_one() -> None:
    """In a batch a node does not see the last committed token."""
    mask = cache.TreeAttention._mask
    cache.TreeAttention._mask = (  # type: ignore[method-assign]
        lambda self, starts, seen, depths, window: mask(self, starts - int(len(starts) > 2), seen, depths, window))


def swapped_requests() -> None:
    """The tokens of two rows are exchanged where three are decoded."""
    take = engine.Engine._take
    held: list[list[int]] = []

    def exchanged(self: Any, row: Any, tokens: list[int]) -> list[int]:
        if self.num_running == 3:
            held.append(tokens)
            tokens = held.pop(0) if len(held) > 1 else tokens
        return take(self, row, tokens)

    engine.Engine._take = exchanged  # type: ignore[method-assign]


def argmax_at_temperature_1() -> None:
    """Tokens are the most probable ones whatever the temperature."""
    verify._sample = lambda logits, *_: logits.argmax(dim=-1)


def late_stop() -> None:
    """A stop string is found with the token after the one that completes it."""
    push = responses.StopMatcher.push

    def late(self: Any, text: str) -> str:
        if not self._stops:
            return push(self, text)
        pending, self.pending = getattr(self, "pending", ""), text
        return push(self, pending)

    responses.StopMatcher.push = late  # type: ignore[method-assign]


def lost_piece() -> None:
    """A stream loses the second of its pieces."""
    chunks = server.ActiveRequest.chunks

    async def without_second(self: Any) -> AsyncIterator[dict[str, Any]]:
        number = 0
        async for chunk in chunks(self):
            number += 1
            if number != 2:
                yield chunk

    server.ActiveRequest.chunks = without_second  # type: ignore[method-assign]


IN_A_BATCH: dict[str, Callable[[], None]] = {
    "stale keys": stale_keys, "wrong slot": wrong_slot, "mask off by one": mask_off_by_one,
    "swapped requests": swapped_requests}
"""Met by plain requests next to others."""

OF_A_SHAPE: dict[str, Callable[[], None]] = {
    "late stop": late_stop, "lost piece": lost_piece, "argmax at temperature 1": argmax_at_temperature_1}
"""Met by no plain greedy request."""

FAULTS: dict[str, Callable[[], None]] = {"none": lambda: None, **IN_A_BATCH, **OF_A_SHAPE}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    sys.exit(server.main(sys.argv[1:]))
