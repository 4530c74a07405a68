"""What is recorded of a measurement: one sample per variant, one entry per question. Pure values, the ledger's
lines."""

from collections.abc import Sequence
from dataclasses import dataclass

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.model import Frozen

BASELINE = "baseline"

UnitKey = tuple[str, str, float, int]
"""Suite, prompt id, temperature, repeat: what makes two entries answers to the same question."""


@dataclass(frozen=True)
class Variant:
    """The engine with one draft-tree shape, or undrafted."""

    tree: DraftTreeShape | None

    @property
    def name(self) -> str:
        """`baseline`, or the shape's label."""
        return self.tree.label() if self.tree else BASELINE


class Sample(Frozen):
    """What one variant did with one question."""

    token_ids: tuple[int, ...]
    seconds: float
    """Wall time of the whole request, prefill included."""

    cpu_seconds: float
    """Process CPU time of the same."""

    ttft_s: float
    rounds: int
    accepted_histogram: tuple[int, ...]


class Entry(Frozen):
    """One question answered by every variant: a line of the ledger."""

    suite: str
    prompt_id: str
    temperature: float
    repeat: int
    samples: dict[str, Sample]
    """By the variant's name; always with the baseline."""

    @property
    def key(self) -> UnitKey:
        """Which question this answers."""
        return (self.suite, self.prompt_id, self.temperature, self.repeat)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index of the first token that differs (a missing token differs from any); None when identical."""
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return position
    return None if len(first) == len(second) else min(len(first), len(second))
