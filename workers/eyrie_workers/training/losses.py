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
split. The losses themselves are in `training.softloss`.

    R rows, N predictions, D draft vocabulary, V target vocabulary, H hidden, S steps
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eyrie_workers.training.products import padded, product

Normalisation = Literal["token", "sequence"]

# Full-vocabulary logits are made this many elements at a time: 4 Mi floats are 16 MiB.
_MAX_LOGITS = 1 << 22


@dataclass(frozen=True)
class Teacher:
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


@torch.no_grad()
def teach(last_RH: Tensor, lm_head_VH: Tensor, draft_ids_D: Tensor, t2d_V: Tensor) -> Teacher:
    """The teacher's distributions at the positions whose final states are given.

    last_RH      [R, H]  states after the target's final norm; R may be 0.
    lm_head_VH   [V, H]  the target's output matrix.
    draft_ids_D  [D]     target ids of the draft vocabulary, ascending.
    t2d_V        [V]     bool membership.
    """
    (num_rows, _), (vocab_size, _), draft_vocab = last_RH.shape, lm_head_VH.shape, draft_ids_D.numel()
    whole, device = draft_vocab == vocab_size, last_RH.device
    taught = Teacher(torch.empty(num_rows, draft_vocab, device=device), torch.ones(num_rows, device=device),
                     torch.empty(num_rows, dtype=torch.bool, device=device),
                     torch.empty(num_rows, dtype=torch.int64, device=device))
    size = max(64, _MAX_LOGITS // vocab_size // 32 * 32)
    for start in range(0, num_rows, size):
        rows = slice(start, min(start + size, num_rows))
        logits_RV = product(padded(last_RH[rows], lm_head_VH.dtype), lm_head_VH.T)[: rows.stop - start].float()
        most_R, first_R = logits_RV.max(-1)
        logits_RD = logits_RV if whole else logits_RV.index_select(1, draft_ids_D)
        torch.softmax(logits_RD, -1, out=taught.probabilities_RD[rows])
        if not whole:
            inner_R, outer_R = (logits.sub_(most_R[:, None]).exp_().sum(-1) for logits in (logits_RD, logits_RV))
            taught.mass_R[rows] = inner_R / outer_R
        taught.inside_R[rows] = t2d_V[first_R]
        taught.choice_R[rows] = torch.searchsorted(draft_ids_D, first_R).clamp_(max=draft_vocab - 1)
    return taught


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
