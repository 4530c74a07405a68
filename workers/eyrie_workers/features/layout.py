"""What a hidden-state store looks like on disk, as values.

A store is a directory of shards and one index:

    index.json                  layout of every row; per shard its rows, tokens, bytes, digest and row ids
    shard-00000.safetensors     rows laid end to end, nothing padded

A shard of R rows and N tokens holds five tensors. Row r is the slice `offsets[r] : offsets[r + 1]` of the others:

    offsets    [R + 1]   int64
    token_ids  [N]       int32    prompt and answer
    loss_mask  [N]       bool     True exactly at answer tokens
    aux        [N, A, H] codec    aux hidden states of the chosen layers, ascending
    last       [N, H]    codec    after the final norm: target logits are `last @ lm_head.T`

Padding is never stored: padding a batch to its longest row costs 2 to 4 times the disk, the reading and the training
arithmetic on chat-like lengths. Everything here is pure; `writer` and `store` meet the disk.

Legend: R rows, N tokens of a shard, T tokens of a row, A aux layers, H hidden.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from eyrie_api.v1alpha1.model import Digest, Frozen

INDEX = "index.json"
Codec = Literal["float32", "bfloat16"]
CODEC_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MASK_AND_ID_BYTES = 1 + 4
_OFFSET_BYTES = 8


@dataclass(frozen=True)
class FeatureRow:
    """One answered conversation as the target saw it."""

    row_id: str
    token_ids: Tensor
    """[T] int64."""

    loss_mask: Tensor
    """[T] bool, True at answer tokens."""

    aux: Tensor
    """[T, A, H] in the stored dtype."""

    last: Tensor
    """[T, H] in the stored dtype."""


class StoreLayout(Frozen):
    """What all rows of a store have in common; two stores may be mixed only when these are equal."""

    aux_layers: tuple[int, ...] = Field(min_length=1)
    """`hidden_states` indices (0 = embeddings), ascending."""

    hidden_size: int = Field(ge=1)
    codec: Codec
    target_digest: Digest
    """Of the target whose states these are: a drafter trained on them serves no other."""

    @property
    def dtype(self) -> torch.dtype:
        """The stored dtype of the states."""
        return CODEC_DTYPES[self.codec]

    @property
    def bytes_per_token(self) -> int:
        """States, token id and mask of one token, headers left out."""
        states = (len(self.aux_layers) + 1) * self.hidden_size * self.dtype.itemsize
        return states + _MASK_AND_ID_BYTES

    def row_bytes(self, num_tokens: int) -> int:
        """Bytes one row adds to its shard."""
        return num_tokens * self.bytes_per_token + _OFFSET_BYTES


class ShardEntry(Frozen):
    """One whole shard, as the index lists it."""

    name: str = Field(pattern=r"^shard-\d{5,}\.safetensors$")
    rows: int = Field(ge=1)
    tokens: int = Field(ge=1)
    size_bytes: int = Field(ge=1)
    sha256: Digest
    row_ids: tuple[str, ...]


class StoreIndex(Frozen):
    """`index.json`: the store is what this file lists, no more."""

    format_version: Literal[1] = 1
    layout: StoreLayout
    shards: tuple[ShardEntry, ...] = ()


def shard_name(number: int) -> str:
    """File name of shard `number`, counted from 0."""
    return f"shard-{number:05d}.safetensors"


def plan_shards(lengths: Sequence[int], layout: StoreLayout, shard_size_bytes: int) -> Iterator[range]:
    """Which rows go into which shard: consecutive ranges, each within `shard_size_bytes` or a single row.

    A function of the lengths alone, so that a run that was killed cuts the same shards again.
    """
    start, size = 0, 0
    for row, num_tokens in enumerate(lengths):
        added = layout.row_bytes(num_tokens)
        if row > start and size + added > shard_size_bytes:
            yield range(start, row)
            start, size = row, 0
        size += added
    if start < len(lengths):
        yield range(start, len(lengths))


def check_row(row: FeatureRow, layout: StoreLayout) -> None:
    """Refuse a row that does not fit the layout. Raises ValueError: a mismatch is our own mistake, not the user's."""
    length = row.token_ids.shape[0]
    wanted = {
        "token_ids": (length,), "loss_mask": (length,),
        "aux": (length, len(layout.aux_layers), layout.hidden_size), "last": (length, layout.hidden_size),
    }
    for name, shape in wanted.items():
        got = tuple(getattr(row, name).shape)
        if got != shape:
            raise ValueError(f"row {row.row_id}: {name} has shape {got}, the layout wants {shape}")
    if length == 0:
        raise ValueError(f"row {row.row_id} has no tokens")


def join_rows(rows: Iterable[FeatureRow], layout: StoreLayout) -> dict[str, Tensor]:
    """The five tensors of a shard (see the module's essay)."""
    rows = list(rows)
    for row in rows:
        check_row(row, layout)
    lengths = torch.tensor([0, *(row.token_ids.shape[0] for row in rows)], dtype=torch.int64)
    return {
        "offsets": lengths.cumsum(0),
        "token_ids": torch.cat([row.token_ids.to(torch.int32) for row in rows]),
        "loss_mask": torch.cat([row.loss_mask.to(torch.bool) for row in rows]),
        "aux": torch.cat([row.aux.to(layout.dtype) for row in rows]),
        "last": torch.cat([row.last.to(layout.dtype) for row in rows]),
    }
