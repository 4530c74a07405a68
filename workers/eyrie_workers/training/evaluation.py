"""How good a drafter would be, told without serving it: on captured rows it never trained on.

A hit at step s is the drafter's first choice equal to the target's, with the true tokens before it. From hits follow

    accuracy[s]     share of hits among roots alive at step s
    acceptance[d]   share of hits at d among roots whose steps 0 .. d-1 all hit: the chance that greedy decoding
                    accepts draft token d+1 once it has accepted d
    theoretical speed-up = 1 + sum over d of the product of acceptance[0..d]

the last being the tokens per target pass of a chain if drafting and verifying many were free: what ranks checkpoints
before anything is served. Counts are kept, not ratios, so that batches add up exactly.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.training.objective import Objective, Outcome


@dataclass(frozen=True)
class Evaluation:
    """Per step: how many were asked, hit, still all right before this step, and all right with it."""

    asked: tuple[int, ...]
    hit: tuple[int, ...]
    right_before: tuple[int, ...]
    right_after: tuple[int, ...]
    loss: float

    @property
    def accuracy(self) -> tuple[float, ...]:
        """Agreement with the target's first choice at each step; 0 where nothing was asked."""
        return tuple(hit / max(1, asked) for hit, asked in zip(self.hit, self.asked, strict=True))

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Conditional on every earlier step having hit; 0 where no root came that far."""
        return tuple(after / max(1, before)
                     for after, before in zip(self.right_after, self.right_before, strict=True))

    @property
    def theoretical_speedup(self) -> float:
        """1 + sum of cumulative acceptance: between 1 and S + 1."""
        return 1.0 + sum(accumulate(self.acceptance, mul))


def count_hits(hits: Sequence[Tensor], ttt_length: int) -> list[tuple[int, int, int, int]]:
    """Counts (asked, hit, right before, right after) of one batch for each of `ttt_length` steps."""
    counts = []
    right = torch.ones_like(hits[0]) if hits else torch.zeros(0, dtype=torch.bool)
    for step in range(ttt_length):
        hit = hits[step] if step < len(hits) else torch.zeros(0, dtype=torch.bool)
        right = right[: hit.numel()]
        after = right & hit
        counts.append((hit.numel(), int(hit.sum()), int(right.sum()), int(after.sum())))
        right = after
    return counts


class HitCounts:
    """The counts of an evaluation under way."""

    def __init__(self, ttt_length: int) -> None:
        self._ttt_length = ttt_length
        self._totals = [(0, 0, 0, 0)] * ttt_length
        self._loss_sum, self._weight = 0.0, 0

    def add(self, outcome: Outcome) -> None:
        """One judged batch."""
        counts = count_hits(outcome.hits, self._ttt_length)
        self._totals = [tuple(a + b for a, b in zip(total, count, strict=True))  # type: ignore[misc]
                        for total, count in zip(self._totals, counts, strict=True)]
        self._loss_sum += float(outcome.loss) * outcome.supervised
        self._weight += outcome.supervised

    def evaluation(self, total: Callable[[Tensor], Tensor] = lambda x: x) -> Evaluation:
        """Of all batches. The loss is the mean over supervised token predictions' batches.

        total  sums over all processes, each of which gives its own batches.
        """
        sums = total(torch.tensor([*(float(count) for counts in self._totals for count in counts), self._loss_sum,
                                   float(self._weight)], dtype=torch.float64))
        table = sums[:-2].round().to(torch.int64).view(self._ttt_length, 4).T.tolist()
        asked, hit, before, after = (tuple(column) for column in table)
        return Evaluation(asked, hit, before, after, float(sums[-2] / sums[-1].clamp(min=1.0)))


@torch.no_grad()
def evaluate(objective: Objective, batches: Iterable[PackedBatch], ttt_length: int,
             total: Callable[[Tensor], Tensor] = lambda x: x) -> Evaluation:
    """Run the objective over held-out batches; `total` as in `HitCounts.evaluation`."""
    counts = HitCounts(ttt_length)
    for documents in batches:
        counts.add(objective(documents))
    return counts.evaluation(total)
