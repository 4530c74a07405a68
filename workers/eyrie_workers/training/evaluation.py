"""Predicts how good a drafter is without serving it: on captured rows that it was not trained on.

A hit at step s is the drafter's most probable token equal to the target's, given the true tokens before it. From hits:

    accuracy[s]     share of hits among roots alive at step s
    acceptance[d]   share of hits at d among roots whose steps 0 .. d-1 all hit: the probability that greedy decoding
                    accepts draft token d+1 once it has accepted d
    theoretical speed-up = 1 + sum over d of the product of acceptance[0..d]

The last is the tokens per target pass of a chain if drafting and verifying many tokens cost nothing; it ranks
checkpoints before any is served. Counts are accumulated, not ratios, so that batches and processes add up exactly.

Confidences (DSpark) are calibrated as they are read, one step after the other: the temperature of step s is the one
with the lowest cross-entropy of sigmoid(confidence / temperature) against hits, over roots whose steps before s all hit
(sequential temperature scaling, which SGLang 0.5.23 reads as `--speculative-dspark-confidence-sts-path`). They are
counted in bins.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.training.objective import Objective, Outcome


@dataclass(frozen=True)
class Evaluation:
    """Counts per step: predictions, hits, roots whose earlier steps all hit, and those of them that hit here too."""

    predicted: tuple[int, ...]
    hit: tuple[int, ...]
    hit_before: tuple[int, ...]
    hit_so_far: tuple[int, ...]
    loss: float
    temperatures: tuple[float, ...] = ()
    """Of the confidences of each step; empty for a drafter without."""

    @property
    def accuracy(self) -> tuple[float, ...]:
        """Agreement with the target's most probable token at each step; 0 without predictions."""
        return tuple(hit / max(1, predicted) for hit, predicted in zip(self.hit, self.predicted, strict=True))

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Conditional on every earlier step having hit; 0 where no root came that far."""
        return tuple(after / max(1, before)
                     for after, before in zip(self.hit_so_far, self.hit_before, strict=True))

    @property
    def theoretical_speedup(self) -> float:
        """1 + sum of cumulative acceptance: between 1 and S + 1."""
        return 1.0 + sum(accumulate(self.acceptance, mul))


_MOST, _PER_UNIT = 12, 4  # bins of confidences: the largest logit, and how many to a unit
_FEWEST = 50
"""Roots from which a temperature is fitted."""


def fit_temperatures(counts_SB2: Tensor) -> tuple[float, ...]:
    """The temperature of each step, between 1/5 and 5; 1 where there are too few roots.

    counts_SB2   [S, B, 2] roots, and those that hit, by bin of the logit
    """
    logits_B = torch.arange(counts_SB2.shape[1], dtype=torch.float64) / _PER_UNIT - _MOST
    tried_T = torch.logspace(-1, 1, 201, base=5, dtype=torch.float64)
    of_all, of_none = (F.softplus(sign * logits_B[:, None] / tried_T) for sign in (-1, 1))  # losses of a hit, of none
    fitted = []
    for roots_B, hits_B in counts_SB2.transpose(1, 2):
        loss_T = hits_B @ of_all + (roots_B - hits_B) @ of_none
        fitted.append(float(tried_T[loss_T.argmin()]) if float(roots_B.sum()) >= _FEWEST else 1.0)
    return tuple(fitted)


class HitCounts:
    """Sums over batches, in float64, which holds each count exactly."""

    def __init__(self, steps: int) -> None:
        """steps: of the objective."""
        self._totals_S4 = torch.zeros(steps, 4, dtype=torch.float64)  # in the order of an `Evaluation`'s fields
        self._loss_2 = torch.zeros(2, dtype=torch.float64)  # a sum, not a mean, and its weight: batches differ in size
        self._confidences_SB2 = torch.zeros(steps, 2 * _MOST * _PER_UNIT + 1, 2, dtype=torch.float64)

    def add(self, outcome: Outcome) -> None:
        self._loss_2 += torch.tensor([float(outcome.loss), 1.0], dtype=torch.float64) * outcome.supervised
        so_far: Tensor | None = None  # whether all steps of a root hit
        for step, hit in enumerate(outcome.hits):
            before = torch.ones_like(hit) if so_far is None else so_far[: hit.numel()]  # roots of a step are the first
            so_far = before & hit
            self._totals_S4[step] += torch.tensor([hit.numel(), *(int(x.sum()) for x in (hit, before, so_far))])
            if outcome.confidences:
                logits, counts_B2 = outcome.confidences[step][before], self._confidences_SB2[step]
                place = ((logits.clamp(-_MOST, _MOST) + _MOST) * _PER_UNIT).round().long().cpu()
                for column, of in enumerate((torch.ones_like(place), hit[before].cpu())):
                    counts_B2[:, column] += torch.bincount(place, of.double(), len(counts_B2))

    def evaluation(self, total: Callable[[Tensor], Tensor] = lambda x: x) -> Evaluation:
        """Of all batches. The loss is the batches' mean, weighted by their supervised token predictions.

        total  sums a tensor over all processes, each of which evaluated its own batches.
        """
        parts = (self._totals_S4, self._loss_2, self._confidences_SB2)
        sums = total(torch.cat([part.flatten() for part in parts]))  # one collective for all
        counts, loss, confidences = sums.split([part.numel() for part in parts])
        predicted, hit, before, after = map(tuple, counts.round().long().view(-1, 4).T.tolist())
        return Evaluation(predicted, hit, before, after, float(loss[0] / loss[1].clamp(min=1.0)),
                          fit_temperatures(confidences.view_as(self._confidences_SB2)) if confidences.any() else ())


@torch.no_grad()
def evaluate(objective: Objective[Any], batches: Iterable[PackedBatch],
             total: Callable[[Tensor], Tensor] = lambda x: x) -> Evaluation:
    """Run the objective over held-out batches; `total` as in `HitCounts.evaluation`."""
    counts = HitCounts(objective.steps)
    for documents in batches:
        counts.add(objective(documents))
    return counts.evaluation(total)
