"""One forward pass of the target over whole rows, and its states as a store holds them.

Capture writes the encoded states; a stream decodes them at once (`features.streaming`). Nothing here leaves the
target's device: which positions are supervised is decided on the host, where the loss masks are, so no pass waits for
the device.
"""

# M tokens of the pass, S supervised positions of it, A aux layers, H hidden

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie_workers.features.blocks import encode_states
from eyrie_workers.features.shard_format import StoreFormat, TokenRow, TopKLogits, supervised_positions
from eyrie_workers.features.topk_logits import compute_topk_logits_of_rows
from eyrie_workers.targets.state_source import StateSource


@dataclass(frozen=True)
class TargetPass:
    """States of some rows, end to end, as the target computes them and on its device."""

    aux: Tensor
    """[M, A, H]."""

    last: Tensor
    """[M, H], after the final norm."""

    is_supervised: Tensor
    """[M] bool, on the CPU."""

    supervised: Tensor
    """[S] int64: the supervised positions, on the target's device."""

    topk_logits: TopKLogits | None
    """Of these positions, where the format stores them."""

    def encode(self, fmt: StoreFormat) -> dict[str, Tensor]:
        """The sections of `blocks.encode_states`."""
        return encode_states(fmt, self.aux, self.last, self.supervised, self.topk_logits)


def compute_pass(target: StateSource, rows: Sequence[TokenRow], fmt: StoreFormat) -> TargetPass:
    """One teacher-forced pass over rows."""
    aux_MAH, last_MH = target.packed_states([row.token_ids for row in rows], fmt.aux_layers)
    by_row = [supervised_positions(row.loss_mask) for row in rows]
    is_supervised = torch.cat(by_row)
    supervised = is_supervised.nonzero().squeeze(1).to(target.device, non_blocking=True)
    topk_logits = None
    if fmt.final_state == "topk":
        parts = last_MH.index_select(0, supervised).split([int(one.sum()) for one in by_row])
        topk_logits = compute_topk_logits_of_rows(parts, target.output_head, fmt)
    return TargetPass(aux_MAH, last_MH, is_supervised, supervised, topk_logits)


def plan_passes(lengths: Sequence[int], batch_tokens: int) -> Iterator[range]:
    """Consecutive rows per forward pass, at most `batch_tokens` tokens or a single longer row."""
    start, size = 0, 0
    for row, length in enumerate(lengths):
        if row > start and size + length > batch_tokens:
            yield range(start, row)
            start, size = row, 0
        size += length
    if start < len(lengths):
        yield range(start, len(lengths))
