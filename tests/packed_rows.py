"""Packs rows of a test into the batch type of features and training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyrie_workers.hidden_states.packed_batch import PackedBatch


def pack_rows(rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> PackedBatch:
    """Pack (token_ids [T], loss_mask [T], aux [T, A, H], last [T, H]) rows end to end."""
    token_ids, loss_mask, aux, last = zip(*rows, strict=True)
    return PackedBatch(torch.cat(token_ids), torch.cat(loss_mask), torch.cat(aux), torch.cat(last),
                       tuple(ids.numel() for ids in token_ids))
