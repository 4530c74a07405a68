"""Captured documents as training reads them: laid end to end, nothing padded.

    T packed tokens, A aux layers, H hidden
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eyrie_workers.features.shard_format import Opinion


@dataclass(frozen=True)
class PackedDocuments:
    """Documents end to end, as captured.

    token_ids [T] int64   aux [T, A, H]   last [T, H] (after the target's final norm)   lengths of the documents
    opinion   the target's, at the taught positions, in place of `last` where the store keeps opinions
    """

    token_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor
    lengths: tuple[int, ...]
    opinion: Opinion | None = None

    def to(self, device: torch.device) -> "PackedDocuments":
        """These documents on a device, copied while the processor goes on where their memory is pinned."""
        if self.token_ids.device == device:
            return self
        opinion = None
        if self.opinion is not None:
            kept = (self.opinion.ids, self.opinion.logits, self.opinion.tail, self.opinion.mass, self.opinion.choice)
            opinion = Opinion(*(one.to(device, non_blocking=True) for one in kept))
        token_ids, loss_mask, aux, last = (one.to(device, non_blocking=True) for one in (
            self.token_ids, self.loss_mask, self.aux, self.last))
        return PackedDocuments(token_ids, loss_mask, aux, last, self.lengths, opinion)

    def with_layers(self, columns: Sequence[int]) -> "PackedDocuments":
        """These documents with some of their aux layers, by place."""
        if list(columns) == list(range(self.aux.shape[1])):
            return self
        return replace(self, aux=self.aux[:, list(columns)])


def join(rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> PackedDocuments:
    """Pack (token_ids [T], loss_mask [T], aux [T, A, H], last [T, H]) rows end to end."""
    token_ids, loss_mask, aux, last = zip(*rows, strict=True)
    return PackedDocuments(torch.cat(token_ids), torch.cat(loss_mask), torch.cat(aux), torch.cat(last),
                           tuple(ids.numel() for ids in token_ids))
