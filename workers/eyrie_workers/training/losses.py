"""Target distributions of the loss, and the weight of each prediction in it.

The drafter is trained on the softmax of the target's logits (`targets.operators`), renormalised over the draft
vocabulary: the best distribution it can represent (EAGLE-3, arXiv:2503.01840 section 3.1). Where the target's most
probable token is outside that vocabulary, no draft token can match it; such positions are left out of the loss.

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
from typing import Literal, Protocol

import torch
from torch import Tensor

from eyrie_workers.targets.device import CPU
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.operators import OutputHead
from eyrie_workers.training.matmul import matmul_as, pad_rows

Normalisation = Literal["token", "sequence"]

# Elements of the target's logits computed at a time. 1 Mi floats are 4 MiB, near a core's last cache; a GPU needs
# products large enough for all its multiprocessors, and 64 Mi floats are 256 MiB.
_MAX_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 26}


class TargetTable(Protocol):
    """The target's distribution at each needed position: a table, looked up by every unrolled step.

    mass    [R]  the target's probability of the whole draft vocabulary.
    inside  [R]  bool: the target's most probable token over all of V is in the draft vocabulary.
    choice  [R]  int64: the target's most probable token, a draft id where `inside`, undefined elsewhere.
    """

    @property
    def mass_R(self) -> Tensor: ...

    @property
    def inside_R(self) -> Tensor: ...

    @property
    def choice_R(self) -> Tensor: ...

    def rows(self, index_N: Tensor) -> Tensor:
        """[N, D] the softmax over the draft vocabulary of some rows."""


@dataclass(frozen=True)
class DenseTable:
    """A `TargetTable` that holds every probability: [R, D]."""

    probabilities_RD: Tensor
    mass_R: Tensor
    inside_R: Tensor
    choice_R: Tensor

    def rows(self, index_N: Tensor) -> Tensor:
        """[N, D]"""
        return self.probabilities_RD.index_select(0, index_N)


@dataclass(frozen=True)
class TargetHead:
    """The target's output head, and which of its rows the drafter predicts.

    output      of the target; its matrix is [V, H]
    ids_D       [D] int64 target ids of the draft vocabulary, ascending, on the matrix's device.
    member_V    [V] bool membership, on the matrix's device.
    vocabulary  the same on the CPU: the host does not wait for a GPU to know them.
    """

    output: OutputHead
    ids_D: Tensor
    member_V: Tensor
    vocabulary: DraftVocabulary

    @staticmethod
    def of(output: OutputHead, vocabulary: DraftVocabulary) -> "TargetHead":
        """On the device of the matrix, in its dtype."""
        device = output.weight_VH.device
        return TargetHead(output, vocabulary.ids.to(device), vocabulary.t2d.to(device),
                          DraftVocabulary(vocabulary.ids.cpu(), vocabulary.vocab_size))

    def draft_ids_before(self, size: int) -> list[int]:
        """How many draft ids lie before each block of `size` columns, and before the end."""
        starts = torch.arange(0, self.output.weight_VH.shape[0] + size, size, device=self.vocabulary.ids.device)
        counts: list[int] = torch.searchsorted(self.vocabulary.ids, starts).tolist()
        return counts


@torch.no_grad()
def compute_target_table(last_RH: Tensor, head: TargetHead, weigh: bool = True) -> DenseTable:
    """The target's distributions at the positions whose final states are given.

    last_RH      [R, H]  states after the target's final norm; R may be 0.
    weigh        whether `mass` is computed; otherwise it is 1 everywhere.

    The vocabulary is processed in blocks, of which the running maximum, the running log-sum-exp and the logits of the
    draft ids are kept: [R, V] is never built, and the target's matrix is read once.
    """
    num_rows, draft_vocab, device = last_RH.shape[0], head.ids_D.numel(), last_RH.device
    table_RD = torch.empty(num_rows, draft_vocab, device=device)
    most_R = torch.full((num_rows,), -torch.inf, device=device)
    first_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
    total_R = torch.full((num_rows,), -torch.inf, device=device)
    # Products in the output matrix's dtype; maximum, log-sum-exp and softmax in float32.
    rows = pad_rows(last_RH, head.output.weight_VH.dtype)
    size = max(1024, _MAX_LOGITS[device.type] // max(1, num_rows) // 1024 * 1024)
    ends = head.draft_ids_before(size)
    for number, block_VH in enumerate(head.output.weight_VH.split(size)):
        logits_RV = head.output.capped(matmul_as(rows, block_VH.T, torch.float32)[:num_rows])
        block_most_R, block_first_R = logits_RV.max(-1)
        # Strictly greater: of equal logits in two blocks the earlier block's token is kept.
        first_R = torch.where(block_most_R > most_R, block_first_R + number * size, first_R)
        most_R = torch.maximum(most_R, block_most_R)
        # Draft ids are ascending, so those of this block are one slice of the table.
        ids = head.ids_D[ends[number]: ends[number + 1]] - number * size
        table_RD[:, ends[number]: ends[number + 1]] = (
            logits_RV if ids.numel() == logits_RV.shape[1] else logits_RV.index_select(1, ids))
        if weigh:
            total_R = torch.logaddexp(total_R, logits_RV.logsumexp(-1))
    mass_R = (table_RD.logsumexp(-1) - total_R).exp_() if weigh else torch.ones(num_rows, device=device)
    torch.softmax(table_RD, -1, out=table_RD)
    return DenseTable(table_RD, mass_R, head.member_V[first_R],
                      torch.searchsorted(head.ids_D, first_R).clamp_(max=max(0, draft_vocab - 1)))


def step_weights(ttt_length: int, decay: float) -> list[float]:
    """Weights of the unrolled steps: `decay ** s`, scaled to sum 1, so that the learning rate does not depend on S."""
    raw = [decay**step for step in range(ttt_length)]
    return [weight / sum(raw) for weight in raw]


def shares(step_N: Tensor, document_N: Tensor, num_documents: int, counts_N: Tensor, ttt_length: int, decay: float,
           normalisation: Normalisation, total: Callable[[Tensor], Tensor]) -> Tensor:
    """[N] float32: the factor of each prediction's loss; over all processes they sum to 1.

    step_N      the unrolled step of each prediction, < `ttt_length`.
    document_N  its document, < `num_documents`.
    counts_N    bool: whether it is supervised; the share of the others is 0.
    total       sums a tensor over all processes; called once by every process, also without predictions.

    Everything stays on the device: the host does not wait for a count.
    """
    # float64: sums over a whole batch are divided by one another below.
    counted = counts_N.to(torch.float64)
    predicted_S, supervised_S = (sum_by(step_N, weight, ttt_length) for weight in (torch.ones_like(counted), counted))
    unit_N = counted
    if normalisation == "sequence":
        cell_N = document_N * ttt_length + step_N
        per_cell = sum_by(cell_N, counted, num_documents * ttt_length)
        unit_N = counted / per_cell.clamp(min=1.0)[cell_N]
        supervised_S = (per_cell > 0).view(-1, ttt_length).sum(0, dtype=torch.float64)  # documents of the step
    predicted_S, supervised_S = total(torch.stack([predicted_S, supervised_S])).unbind(0)
    # Weights over the steps that exist in this batch: with short answers the last ones may have no root anywhere.
    num_steps = (predicted_S > 0).sum().clamp(min=1)
    weight_S = _weights_by_steps(ttt_length, decay, counted.device).index_select(0, num_steps.view(1) - 1)[0]
    return (unit_N * (weight_S / supervised_S.clamp(min=1.0))[step_N]).float()


def _weights_by_steps(ttt_length: int, decay: float, device: torch.device) -> Tensor:
    """[S, S] float64: row s holds the weights where s + 1 steps exist."""
    weights = [step_weights(steps, decay) + [0.0] * (ttt_length - steps) for steps in range(1, ttt_length + 1)]
    return torch.tensor(weights, dtype=torch.float64, device=CPU).to(device, non_blocking=True)


def sum_by(index_N: Tensor, weight_N: Tensor, size: int) -> Tensor:
    """[size] sum of the weights of each index. `bincount` does the same, and reads its size back from a GPU."""
    return weight_N.new_zeros(size).index_add_(0, index_N, weight_N)
