"""What the drafter is asked to match: the target's own next-token distribution, restricted to the draft vocabulary.

Forward KL with a soft teacher, as EAGLE-3 trains (arXiv:2503.01840 section 3.1; the reference uses the cross-entropy,
which differs from KL by the teacher's entropy, a constant). The teacher is `softmax(last @ lm_head.T)` renormalised
over the draft vocabulary, which is what the drafter could at best reach. Where the target's own first choice lies
outside that vocabulary a draft token cannot be right; such positions are left out rather than taught to guess.

The mean is over positions that were really supervised, at each unrolled step by itself. Dividing by all positions
of a batch, prompts and padding included, would make the learning rate depend on how talkative the prompts are.

    R rows, D draft vocabulary, V target vocabulary, H hidden, S steps
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Full-vocabulary logits are made this many elements at a time: 64 Mi floats are 256 MiB, whatever the vocabulary.
_MAX_LOGITS = 1 << 26


@dataclass(frozen=True)
class Teacher:
    """What the target says at each supervised position.

    probabilities  [R, D]  softmax over the draft vocabulary.
    inside         [R]     bool: the target's first choice over all of V is in the draft vocabulary.
    choice         [R]     int64: the target's first choice, a draft id where `inside`, meaningless elsewhere.
    """

    probabilities_RD: Tensor
    inside_R: Tensor
    choice_R: Tensor

    @torch.no_grad()
    def take(self, index_R: Tensor) -> "Teacher":
        """The rows named by `index_R`, in that order."""
        return Teacher(self.probabilities_RD.index_select(0, index_R), self.inside_R.index_select(0, index_R),
                       self.choice_R.index_select(0, index_R))


@torch.no_grad()
def teach(last_RH: Tensor, lm_head_VH: Tensor, draft_ids_D: Tensor, t2d_V: Tensor) -> Teacher:
    """The teacher's distributions at the positions whose final states are given.

    last_RH      [R, H]  states after the target's final norm.
    lm_head_VH   [V, H]  the target's output matrix.
    draft_ids_D  [D]     target ids of the draft vocabulary, ascending.
    t2d_V        [V]     bool membership.
    """
    num_rows, (vocab_size, _) = last_RH.shape[0], lm_head_VH.shape
    whole = draft_ids_D.numel() == vocab_size
    probabilities, inside, choice = [], [], []
    for chunk in last_RH.to(lm_head_VH.dtype).split(max(1, min(num_rows, _MAX_LOGITS // vocab_size))):
        logits_RV = (chunk @ lm_head_VH.T).float()
        first_R = logits_RV.argmax(-1)
        logits_RD = logits_RV if whole else logits_RV.index_select(1, draft_ids_D)
        probabilities.append(logits_RD.softmax(-1))
        inside.append(t2d_V[first_R])
        choice.append(torch.searchsorted(draft_ids_D, first_R).clamp_(max=draft_ids_D.numel() - 1))
    return Teacher(torch.cat(probabilities), torch.cat(inside), torch.cat(choice))


def step_loss(logits_RD: Tensor, teacher: Teacher) -> Tensor:
    """Cross-entropy of one unrolled step, a mean over the rows whose teacher chooses inside the draft vocabulary.

    logits_RD  [R, D]  the drafter's logits; R may be 0.
    returns    scalar  nats per supervised token; exactly 0 (with zero gradients) when no row counts.
    """
    weight_R = teacher.inside_R.to(torch.float32)
    loss_R = F.cross_entropy(logits_RD.float(), teacher.probabilities_RD, reduction="none")
    return (loss_R * weight_R).sum() / weight_R.sum().clamp_(min=1.0)


def step_weights(ttt_length: int, decay: float) -> list[float]:
    """Weights of the unrolled steps: `decay ** s`, scaled to sum 1 so that the learning rate keeps its meaning."""
    raw = [decay**step for step in range(ttt_length)]
    return [weight / sum(raw) for weight in raw]


def total_loss(losses: Sequence[Tensor], decay: float) -> Tensor:
    """The weighted mean of the steps' losses."""
    weights = step_weights(len(losses), decay)
    return torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum()
