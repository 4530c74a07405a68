"""Target distributions of the loss, and the weight of each prediction in it.

The drafter is trained on `softmax(last @ lm_head.T)`, renormalised over the draft vocabulary: the best distribution it
can represent (EAGLE-3, arXiv:2503.01840 section 3.1). Where the target's most probable token is outside that
vocabulary, no draft token can match it; such positions are left out of the loss.

A step's loss is a mean over its supervised predictions, for each unrolled step separately, and the steps are weighted
by `decay ** s`. Dividing by all positions of a batch, prompts and padding included, would make the effective learning
rate depend on the length of the prompts. Two means are available:

    token      every prediction of a step has the same weight
    sequence   every document of a step has the same weight, however long its answer

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

# Elements of the target's logits computed at a time: 1 Mi floats are 4 MiB.
_MAX_LOGITS = 1 << 20


@dataclass(frozen=True)
class TargetTable:
    """The target's distribution at each needed position: a table, looked up by every unrolled step.

    probabilities  [R, D]  softmax over the draft vocabulary.
    mass           [R]     the target's probability of the whole draft vocabulary.
    inside         [R]     bool: the target's most probable token over all of V is in the draft vocabulary.
    choice         [R]     int64: the target's most probable token, a draft id where `inside`, undefined elsewhere.
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
    """The target's distributions at the positions whose final states are given.

    last_RH      [R, H]  states after the target's final norm; R may be 0.
    lm_head_VH   [V, H]  the target's output matrix.
    draft_ids_D  [D]     target ids of the draft vocabulary, ascending.
    t2d_V        [V]     bool membership.
    weigh        whether `mass` is computed; otherwise it is 1 everywhere.

    The vocabulary is processed in blocks, of which the running maximum, the running log-sum-exp and the logits of the
    draft ids are kept: [R, V] is never built, and the target's matrix is read once.
    """
    num_rows, draft_vocab, device = last_RH.shape[0], draft_ids_D.numel(), last_RH.device
    table_RD = torch.empty(num_rows, draft_vocab, device=device)
    most_R = torch.full((num_rows,), -torch.inf, device=device)
    first_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
    total_R = torch.full((num_rows,), -torch.inf, device=device)
    # Products in the output matrix's dtype; maximum, log-sum-exp and softmax in float32.
    rows, size = pad_rows(last_RH, lm_head_VH.dtype), max(1024, _MAX_LOGITS // max(1, num_rows) // 1024 * 1024)
    ends = torch.searchsorted(draft_ids_D, torch.arange(0, lm_head_VH.shape[0] + size, size, device=device)).tolist()
    for number, block_VH in enumerate(lm_head_VH.split(size)):
        logits_RV = matmul(rows, block_VH.T)[:num_rows].float()
        block_most_R, block_first_R = logits_RV.max(-1)
        # Strictly greater: of equal logits in two blocks the earlier block's token is kept.
        first_R = torch.where(block_most_R > most_R, block_first_R + number * size, first_R)
        most_R = torch.maximum(most_R, block_most_R)
        # Draft ids are ascending, so those of this block are one slice of the table.
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
    """Weights of the unrolled steps: `decay ** s`, scaled to sum 1, so that the learning rate does not depend on S."""
    raw = [decay**step for step in range(ttt_length)]
    return [weight / sum(raw) for weight in raw]


def shares(step_N: Tensor, document_N: Tensor, counts_N: Tensor, ttt_length: int, decay: float,
           normalisation: Normalisation, total: Callable[[Tensor], Tensor]) -> Tensor:
    """[N] float32: the factor of each prediction's loss; over all processes they sum to 1.

    step_N      the unrolled step of each prediction, < `ttt_length`.
    document_N  its document, >= 0.
    counts_N    bool: whether it is supervised; the share of the others is 0.
    total       sums a tensor over all processes; called once by every process, also without predictions.
    """
    # float64: sums over a whole batch are divided by one another below.
    counted = counts_N.to(torch.float64)
    predicted_S, supervised_S = (torch.bincount(step_N, weights=weight, minlength=ttt_length)
                             for weight in (torch.ones_like(counted), counted))
    unit_N = counted
    if normalisation == "sequence":
        cell_N = document_N * ttt_length + step_N
        per_cell = torch.bincount(cell_N, weights=counted)
        unit_N = counted / per_cell.clamp(min=1.0)[cell_N]
        supervised_S = torch.bincount(step_N, weights=unit_N, minlength=ttt_length)  # documents of the step
    predicted_S, supervised_S = total(torch.stack([predicted_S, supervised_S])).unbind(0)
    # Weights over the steps that exist in this batch: with short answers the last ones may have no root anywhere.
    weights = step_weights(max(1, int((predicted_S > 0).sum())), decay)
    weight_S = torch.zeros_like(predicted_S)
    weight_S[: len(weights)] = torch.tensor(weights, dtype=weight_S.dtype)
    return (unit_N * (weight_S / supervised_S.clamp(min=1.0))[step_N]).float()
