"""Rewrites a store of hidden states in another codec, for the comparison of codecs.

Rows are encoded from decoded states, so the source's codec bounds the quality: transcode from float32.
"""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from eyrie_workers.hidden_states.shard_format import StoreFormat, plan_shards, supervised_positions
from eyrie_workers.hidden_states.store import FeatureStore
from eyrie_workers.hidden_states.topk_logits import compute_topk_logits
from eyrie_workers.hidden_states.writer import FeatureWriter
from eyrie_workers.targets.operators import OutputHead
from tests.feature_rows import FeatureRow, write_shard

_SHARD_BYTES = 64 * 2**20


def transcode(source: FeatureStore, directory: Path, fmt: StoreFormat, lm_head_VH: Tensor) -> None:
    """Write all rows of a store that keeps final states into `directory` in format `fmt`."""
    if source.format.final_state != "keep":
        raise ValueError("a store of top-k logits has no final states to transcode")
    writer = FeatureWriter(directory, fmt)
    for number, shard in enumerate(plan_shards(source.lengths, fmt, _SHARD_BYTES)):
        if not writer.holds(number, source.row_ids[shard.start:shard.stop]):
            write_shard(writer, list(_rows(source, shard, fmt, lm_head_VH)), number)
    writer.finish()


def _rows(source: FeatureStore, rows: range, fmt: StoreFormat, lm_head_VH: Tensor) -> Iterator[FeatureRow]:
    for index in rows:
        row = source.read([index])
        topk_logits = None
        if fmt.final_state == "topk":
            supervised = supervised_positions(row.loss_mask)
            topk_logits = compute_topk_logits([row.last[supervised]], OutputHead(lm_head_VH), fmt)
        yield FeatureRow(source.row_ids[index], row.token_ids, row.loss_mask, row.aux, row.last, topk_logits)
