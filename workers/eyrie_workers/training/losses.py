"""What the drafter is asked to match: the target's own next-token distribution over the draft vocabulary; and how much
each prediction weighs in the loss.

The teacher is `softmax(last @ lm_head.T)`, renormalised over the draft vocabulary, which is what the drafter could at
best reach (EAGLE-3, arXiv:2503.01840 section 3.1). Where the target's own first choice lies outside that vocabulary a
draft token cannot be right; such positions are left out rather than taught to guess.

A step's loss is a mean over the predictions that were really supervised, at each unrolled step by itself, and the steps
are weighed by `decay ** s`. Dividing by all positions of a batch, prompts and padding included, would make the learning
rate depend on how talkative the prompts are. Two means are offered:

    token      every prediction of a step weighs the same
    sequence   every document of a step weighs the same, however long its answer

All counts are over the whole batch of a step, on all processes, so that the loss does not depend on how the batch was
split. The losses themselves are in `training.soft_target_loss`.

    R rows, N predictions, D draft vocabulary, V target vocabulary, H hidden, S steps
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eyrie_workers.training.matmul import matmul, pad_rows

Normalisation = Literal["token", "sequence"]

# Logits of the target are made this many elements at a time: 1 Mi floats are 4 MiB.
_MAX_LOGITS = 1 << 20


@dataclass(frozen=True)
class TargetTable:
    """What the target says at each asked position: a table, looked up by every step that asks.

    probabilities  [R, D]  softmax over the draft vocabulary.
    mass           [R]     the target's probability of the whole draft vocabulary.
    inside         [R]     bool: the target's first choice over all of V is in the draft vocabulary.
    choice         [R]     int64: the target's first choice, a draft id where `inside`, meaningless elsewhere.
    """

    probabilities_RD: Tensor
    mass_R: Tensor
    inside_R: Tensor
    choice_R: Tensor

    def to(self, device: torch.device) -> "TargetTable":
        """The same table on a device."""
        return TargetTable(self.probabilities_RD.to(device), self.mass_R.to(device), self.inside_R.to(device),
                       self.choice_R.to(device))


@torch.no_grad()
def compute_target_table(last_RH: Tensor, lm_head_VH: Tensor, draft_ids_D: Tensor, t2d_V: Tensor,
                         weigh: bool = True) -> TargetTable:
    """The teacher's distributions at the positions whose final states are given.

    last_RH      [R, H]  states after the target's final norm; R may be 0.
    lm_head_VH   [V, H]  the target's output matrix.
    draft_ids_D  [D]     target ids of the draft vocabulary, ascending.
    t2d_V        [V]     bool membership.
    weigh        whether `mass` is wanted; without it, 1 everywhere.

    The vocabulary is gone through in blocks, of which the first choice and the draft ids' logits are kept: [R, V] is
    never made, and most of the target's matrix is read once.
    """
    num_rows, draft_vocab, device = last_RH.shape[0], draft_ids_D.numel(), last_RH.device
    table_RD = torch.empty(num_rows, draft_vocab, device=device)
    most_R = torch.full((num_rows,), -torch.inf, device=device)
    first_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
    total_R = torch.full((num_rows,), -torch.inf, device=device)
    rows, size = pad_rows(last_RH, lm_head_VH.dtype), max(1024, _MAX_LOGITS // max(1, num_rows) // 1024 * 1024)
    ends = torch.searchsorted(draft_ids_D, torch.arange(0, lm_head_VH.shape[0] + size, size, device=device)).tolist()
    for number, block_VH in enumerate(lm_head_VH.split(size)):
        logits_RV = matmul(rows, block_VH.T)[:num_rows].float()
        block_most_R, block_first_R = logits_RV.max(-1)
        first_R = torch.where(block_most_R > most_R, block_first_R + number * size, first_R)
        most_R = torch.maximum(most_R, block_most_R)
        ids = draft_ids_D[ends[number]: ends[number + 1]] - number * size
        table_RD[:, ends[number]: ends[number + 1]] = (
            logits_RV if ids.numel() == logits_RV.shape[1] else logits_RV.index_select(1, ids))
        if weigh:
            total_R = torch.logaddexp(total_R, logits_RV.logsumexp(-1))
    mass_R = (table_RD.logsumexp(-1) - total_R).exp_() if weigh else torch.ones(num_rows, device=device)
    torch.softmax(table_RD, -1, out=table_RD)
    return TargetTable(table_RD, mass_R, t2d_V[first_R],
                   torch.searchsorted(draft_ids_D, first_R).clamp_(max=max(0, draft_vocab - 1)))


def step_weights(ttt_length: int, decay: float) -> list[float]:
    """Weights of the unrolled steps: `decay ** s`, scaled to sum 1 so that the learning rate keeps its meaning."""
    raw = [decay**step for step in range(ttt_length)]
    return [weight / sum(raw) for weight in raw]


def shares(step_N: Tensor, document_N: Tensor, counts_N: Tensor, ttt_length: int, decay: float,
           normalisation: Normalisation, total: Callable[[Tensor], Tensor]) -> Tensor:
    """[N] float32: what each prediction's loss is multiplied by; over all processes they sum to 1.

    step_N      the unrolled step of each prediction, < `ttt_length`.
    document_N  its document, >= 0.
    counts_N    bool: whether it is supervised; the others' share is 0.
    total       sums a tensor over all processes.
    """
    counted = counts_N.to(torch.float64)
    asked_S, supervised_S = (torch.bincount(step_N, weights=weight, minlength=ttt_length)
                             for weight in (torch.ones_like(counted), counted))
    one_N = counted
    if normalisation == "sequence":
        cell_N = document_N * ttt_length + step_N
        per_cell = torch.bincount(cell_N, weights=counted)
        one_N = counted / per_cell.clamp(min=1.0)[cell_N]
        supervised_S = torch.bincount(step_N, weights=one_N, minlength=ttt_length)  # documents of the step
    asked_S, supervised_S = total(torch.stack([asked_S, supervised_S])).unbind(0)
    weights = step_weights(max(1, int((asked_S > 0).sum())), decay)
    weight_S = torch.zeros_like(asked_S)
    weight_S[: len(weights)] = torch.tensor(weights, dtype=weight_S.dtype)
    return (one_N * (weight_S / supervised_S.clamp(min=1.0))[step_N]).float()
