"""Rows with states made by a test or a benchmark, and a shard of them. Capture writes passes of a target instead."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from eyrie_workers.hidden_states.codecs import encode_states
from eyrie_workers.hidden_states.shard_format import TokenRow, TopKLogits, supervised_positions
from eyrie_workers.hidden_states.writer import FeatureWriter


class FeatureRow(NamedTuple):
    """T tokens, A aux layers, H hidden."""

    row_id: str
    token_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    aux: Tensor  # [T, A, H]
    last: Tensor  # [T, H]
    topk_logits: TopKLogits | None = None


def write_shard(writer: FeatureWriter, rows: Sequence[FeatureRow], number: int | None = None) -> None:
    """Write one whole shard, by default the next."""
    number = max(writer.shards, default=-1) + 1 if number is None else number
    with writer.open_shard([TokenRow(*row[:3]) for row in rows], number) as shard:
        for row in rows:
            supervised = supervised_positions(row.loss_mask).nonzero().squeeze(1)
            shard.append(encode_states(writer.format, row.aux, row.last, supervised, row.topk_logits), 1)
    writer.commit(shard)
