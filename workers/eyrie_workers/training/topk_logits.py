"""Target distributions from stored top-k logits (`features.topk_logits`), as the table that training reads.

The table stays as sparse as it is stored. Its dense rows exist for one chunk of predictions at a time, on the device
that computes the loss.

    R needed positions, N predictions, D draft vocabulary
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie_workers.features.shard_format import TopKLogits
from eyrie_workers.features.topk_logits import rebuild_distribution


@dataclass(frozen=True)
class TopKTable:
    """A `training.losses.TargetTable` of the top-k logits of the R needed positions."""

    topk_logits: TopKLogits
    draft_vocab_size: int

    @property
    def mass_R(self) -> Tensor:
        """The target's probability of the whole draft vocabulary."""
        return self.topk_logits.mass

    @property
    def inside_R(self) -> Tensor:
        """Whether the target's most probable token is in the draft vocabulary: -1 marks one that is not."""
        return self.topk_logits.choice >= 0

    @property
    def choice_R(self) -> Tensor:
        """The target's most probable token; an arbitrary one where it is outside the draft vocabulary."""
        return self.topk_logits.choice.clamp_min(0).to(torch.int64)

    def rows(self, index_N: Tensor) -> Tensor:
        """[N, D]"""
        return rebuild_distribution(self.topk_logits.map(lambda x: x.index_select(0, index_N)), self.draft_vocab_size)
