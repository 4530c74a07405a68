"""Parts of a packed batch: micro-batches of some of its documents, and rows cut to what a process computes at a time.

A step of more tokens than `train.max_tokens_per_gpu` is divided by documents into micro-batches, as evenly as
documents allow. A single row of more is cut at that length: its first tokens are trained on, the rest is not. The cut
is made on reading, so that packing, schedule and counts see the shorter row, and the number of rows is reported.

    T packed tokens, M supervised positions
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.features.shard_format import TopKLogits, supervised_positions
from eyrie_workers.training.batch_loader import Features
from eyrie_workers.training.packing import cut_evenly


def micro_batches(documents: PackedBatch, most_tokens: int | None) -> list[tuple[range, PackedBatch]]:
    """The batch in as few parts as `most_tokens` allows: the numbers of each part's documents, and the part."""
    if most_tokens is None or sum(documents.lengths) <= most_tokens:
        return [(range(len(documents.lengths)), documents)]
    return [(cut, _some_documents(documents, cut)) for cut in cut_evenly(documents.lengths, most_tokens)]


def _some_documents(batch: PackedBatch, chosen: range) -> PackedBatch:
    """Consecutive documents of a batch; views of its tensors."""
    starts = list(accumulate(batch.lengths, initial=0))
    tokens = slice(starts[chosen.start], starts[chosen.stop])
    topk_logits = batch.topk_logits
    if topk_logits is not None:
        before = list(accumulate((int(part.sum()) for part in _supervised(batch)), initial=0))
        rows = slice(before[chosen.start], before[chosen.stop])
        topk_logits = topk_logits.map(lambda x: x[rows])
    return replace(batch, token_ids=batch.token_ids[tokens], loss_mask=batch.loss_mask[tokens], aux=batch.aux[tokens],
                   last=batch.last[tokens], lengths=batch.lengths[chosen.start:chosen.stop], topk_logits=topk_logits)


def _supervised(batch: PackedBatch) -> list[Tensor]:
    """[T] bool of each document: its supervised positions."""
    return [supervised_positions(mask) for mask in batch.loss_mask.split(batch.lengths)]


def first_tokens(batch: PackedBatch, most_tokens: int) -> PackedBatch:
    """The batch with each document cut after its first `most_tokens`."""
    if max(batch.lengths, default=0) <= most_tokens:
        return batch
    lengths = tuple(min(length, most_tokens) for length in batch.lengths)
    starts = accumulate(batch.lengths, initial=0)
    kept_T = torch.cat([torch.arange(start, start + length)
                        for start, length in zip(starts, lengths, strict=False)])
    loss_mask = batch.loss_mask[kept_T]
    topk_logits = batch.topk_logits
    if topk_logits is not None:
        topk_logits = _topk_of(topk_logits, batch, kept_T, loss_mask, lengths)
    return replace(batch, token_ids=batch.token_ids[kept_T], loss_mask=loss_mask, aux=batch.aux[kept_T],
                   last=batch.last[kept_T], lengths=lengths, topk_logits=topk_logits)


def _topk_of(topk_logits: TopKLogits, batch: PackedBatch, kept_T: Tensor, loss_mask: Tensor,
             lengths: tuple[int, ...]) -> TopKLogits:
    """Rows of the positions that are still supervised: the last token of a cut document has no successor."""
    row_T = torch.cat(_supervised(batch)).cumsum(0) - 1
    still_T = torch.cat([supervised_positions(mask) for mask in loss_mask.split(lengths)])
    rows_M = row_T[kept_T][still_T]
    return topk_logits.map(lambda x: x[rows_M])


class CutFeatures:
    """`Features` whose rows have at most so many tokens."""

    def __init__(self, whole: Features, most_tokens: int) -> None:
        self._whole, self._most = whole, most_tokens
        self.format, self.digest = whole.format, whole.digest
        self.lengths = [min(length, most_tokens) for length in whole.lengths]
        self.num_cut = sum(length > most_tokens for length in whole.lengths)
        self.tokens_left_out = sum(whole.lengths) - sum(self.lengths)

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return self._whole.num_rows

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids [T] int64 and loss mask [T] bool of a row, without its states."""
        token_ids, loss_mask = self._whole.tokens(index)
        return token_ids[:self._most], loss_mask[:self._most]

    def read(self, rows: Sequence[int]) -> PackedBatch:
        """Some rows end to end, in that order."""
        return first_tokens(self._whole.read(rows), self._most)

    def batches(self, groups: Iterable[Sequence[int]], *, ahead: int = 2,
                reuse: bool = False) -> Generator[PackedBatch, None, None]:
        """`read` of each group in order, some of them ahead."""
        whole = self._whole.batches(groups, ahead=ahead, reuse=reuse)
        try:
            for batch in whole:
                yield first_tokens(batch, self._most)
        finally:
            whole.close()
