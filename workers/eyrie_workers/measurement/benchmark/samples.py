"""What a measurement records: one sample per variant, one entry per unit. Pure values; an entry is a ledger line."""

from collections.abc import Sequence

from eyrie_api.v1alpha1.model import Frozen
from eyrie_workers.measurement.variant import undrafted

BASELINE = "baseline"
UNDRAFTED = undrafted(BASELINE)

UnitKey = tuple[str, str, float, int]
"""Suite, prompt id, temperature, repeat: identifies a unit, and the entry with its answers."""


class Sample(Frozen):
    """The answer of one variant to one unit, with its timing."""

    token_ids: tuple[int, ...]
    seconds: float
    """Wall time of the whole request, prefill included."""

    cpu_seconds: float
    """CPU time of the engine's processes for the whole request."""

    ttft_s: float
    rounds: int
    accepted_histogram: tuple[int, ...]


class Entry(Frozen):
    """One unit answered by every variant: a line of the ledger."""

    suite: str
    prompt_id: str
    temperature: float
    repeat: int
    samples: dict[str, Sample]
    """By the variant's title; the baseline is always present."""

    @property
    def key(self) -> UnitKey:
        """The key of the unit."""
        return (self.suite, self.prompt_id, self.temperature, self.repeat)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index of the first token that differs (a missing token differs from any); None when identical."""
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return position
    return None if len(first) == len(second) else min(len(first), len(second))
