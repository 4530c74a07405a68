"""The on-disk format of a hidden-state store, as values.

A store is a directory (or a prefix of an artifact store) of shards and, when it is finished, one index:

    shard-00000.states    tokens | block | block | ... | record | trailer
    index.json            the store's format, and every shard's record: composed once, at the end

*tokens* holds the ids (int32) and loss masks (uint8) of the shard's rows, end to end. Nothing is padded: padding a
batch to its longest row costs 2 to 4 times the disk, the reading and the training arithmetic on chat-like lengths.

A *block* holds up to `block_tokens` tokens of one row, so that a row is one contiguous range, verified in parts. Its
sections, each aligned to 8 bytes:

    aux codes [N, A, H], aux scales          of every token, as the codec defines (`hidden_states.codecs`)
    final codes [M, H], final scales         of its M supervised positions alone, or
    top-k logits                             stored instead of the final state (`hidden_states.topk_logits`)

Position p is *supervised* when token p + 1 is an answer token: training reads the target's distribution only there.
Every final state that training can read is stored, and none of a prompt.

The *record* lists the shard's rows, their lengths and a digest of every block (the first 128 bits of SHA-256), so that
a ranged read is verified as it arrives. The *trailer* is the record's SHA-256, its length and a magic number: a shard
with a valid trailer is complete, and a lost index is composed again from the ends of the shards.

Some stored field names are older than the names in the code: `layout` is a StoreFormat, `taught` counts supervised
positions. They stay, so that existing stores stay readable.

This module is pure; `writer` and `store` do the I/O.

Legend: R rows, N tokens of a block, M supervised positions of a block, A aux layers, H hidden, K top-k.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from eyrie_api.contract.capture import BLOCK_VALUES, NARROW_VOCABULARY, Codec, FinalState, StoredAs, final_codec
from eyrie_api.contract.model import Digest, Frozen

INDEX = "index.json"
FORMAT = 2
MAGIC = b"EYRIESH2"
TRAILER_BYTES = 32 + 8 + len(MAGIC)
_ALIGNMENT = 8
_DIGEST_CHARACTERS = 32

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TopKLogits:
    """The target's distribution at M supervised positions over the draft vocabulary (`hidden_states.topk_logits`).

    ids [M, K] int64 draft ids, most probable first   logits [M, K]   tail [M] float32: the mass of all other draft ids
    mass [M] float32: the target's probability of the whole draft vocabulary
    choice [M] int64: draft id of the target's most probable token over its whole vocabulary, -1 where it has none
    """

    ids: Tensor
    logits: Tensor
    tail: Tensor
    mass: Tensor
    choice: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "TopKLogits":
        return TopKLogits(function(self.ids), function(self.logits), function(self.tail), function(self.mass),
                          function(self.choice))


class TokenRow(NamedTuple):
    """One answered conversation without states."""

    row_id: str
    token_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool, True at answer tokens


class StoreFormat(Frozen):
    """What all rows of a store have in common; stores may be mixed only when their formats are equal."""

    aux_layers: tuple[int, ...] = Field(min_length=1)
    """`hidden_states` indices (0 = embeddings), ascending."""

    fused_layers: tuple[int, ...] = ()
    """The aux layers selected for drafters that fuse several; empty: all."""

    hidden_size: int = Field(ge=1)
    codec: Codec
    target_digest: Digest
    """Digest of the target: a drafter trained on its states serves no other."""

    final_state: FinalState = "keep"
    top_k: int = Field(16, ge=1)
    """K of top-k logits, where they are stored."""

    draft_ids: tuple[int, ...] = ()
    """Target ids of the draft vocabulary of top-k logits, ascending; empty with `final_state: keep`."""

    block_tokens: int = Field(1024, ge=1)

    @model_validator(mode="after")
    def _check_draft_vocabulary(self) -> "StoreFormat":
        if (self.final_state == "topk") != bool(self.draft_ids):
            raise ValueError("draft_ids must be set exactly when final_state is topk")
        if self.draft_ids and self.top_k > len(self.draft_ids):
            raise ValueError(f"top_k {self.top_k} of a draft vocabulary of {len(self.draft_ids)}")
        return self

    @property
    def chosen_layers(self) -> tuple[int, ...]:
        """The layers that drafters which fuse several layers read."""
        return self.fused_layers or self.aux_layers

    @property
    def stored_as(self) -> StoredAs:
        """Codec and final state, for size computations."""
        return StoredAs(self.codec, self.final_state, self.top_k, len(self.draft_ids) or NARROW_VOCABULARY)

    @property
    def dtype(self) -> torch.dtype:
        """Default type of decoded states: bfloat16 if stored so, else float32."""
        return torch.bfloat16 if self.codec == "bfloat16" else torch.float32

    def row_bytes(self, num_tokens: int, num_supervised: int | None = None) -> int:
        """Bytes of a row in its shard, without record and alignment; all tokens supervised by default."""
        taught = num_tokens if num_supervised is None else num_supervised
        return self.stored_as.bytes_of(num_tokens, taught, len(self.aux_layers), self.hidden_size)

    def block_ranges(self, num_tokens: int) -> Iterator[range]:
        for start in range(0, num_tokens, self.block_tokens):
            yield range(start, min(start + self.block_tokens, num_tokens))


class Section(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def num_bytes(self) -> int:
        """Without alignment."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def aligned_bytes(self) -> int:
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


def vector_sections(codec: Codec, of: str, leading: Shape, hidden_size: int) -> list[Section]:
    """Codes and scales of states [*leading, H]."""
    codes, scales = f"{of}_codes", f"{of}_scales"
    if codec == "float32":
        return [Section(codes, torch.float32, (*leading, hidden_size))]
    if codec == "bfloat16":
        return [Section(codes, torch.bfloat16, (*leading, hidden_size))]
    if codec == "int4":
        blocks = -(-hidden_size // BLOCK_VALUES)
        return [Section(codes, torch.uint8, (*leading, blocks * BLOCK_VALUES // 2)),
                Section(scales, torch.bfloat16, (*leading, blocks))]
    return [Section(codes, torch.int8, (*leading, hidden_size)), Section(scales, torch.bfloat16, leading)]


def block_sections(fmt: StoreFormat, num_tokens: int, num_supervised: int) -> list[Section]:
    sections = vector_sections(fmt.codec, "aux", (num_tokens, len(fmt.aux_layers)), fmt.hidden_size)
    if fmt.final_state == "keep":
        return sections + vector_sections(final_codec(fmt.codec), "final", (num_supervised,), fmt.hidden_size)
    ids = torch.int16 if len(fmt.draft_ids) <= NARROW_VOCABULARY else torch.int32
    return [*sections, Section("ids", ids, (num_supervised, fmt.top_k)),
            Section("logits", torch.float16, (num_supervised, fmt.top_k)),
            Section("tail", torch.float32, (num_supervised,)), Section("mass", torch.float32, (num_supervised,)),
            Section("choice", ids, (num_supervised,))]


def section_views(sections: Sequence[Section], tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    """The bytes of the sections in order, each followed by its alignment; views of the tensors, not copies."""
    for section in sections:
        tensor = tensors[section.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (section.dtype, section.shape), section
        if tensor.numel():
            yield tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        yield bytes(section.aligned_bytes - section.num_bytes)


def from_bytes(sections: Sequence[Section], data_B: Tensor) -> dict[str, Tensor]:
    """The sections as views of a block's bytes, [B] uint8 beginning at a multiple of 8 in its storage."""
    tensors, at = {}, 0
    for section in sections:
        tensors[section.name] = data_B[at:at + section.num_bytes].view(section.dtype).view(section.shape)
        at += section.aligned_bytes
    return tensors


def tokens_bytes(num_tokens: int) -> int:
    """Bytes of a shard's tokens: ids, masks, alignment."""
    return -(-num_tokens * 5 // _ALIGNMENT) * _ALIGNMENT


def short_digest(*parts: bytes | memoryview) -> str:
    """128 bits of SHA-256 of the parts, end to end. CPUs have instructions for it (measured 1.8 GB/s; blake2b 1.1)."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def supervised_positions(loss_mask_T: Tensor) -> Tensor:
    """[T] bool: the next token is an answer token."""
    return torch.cat([loss_mask_T[1:], loss_mask_T.new_zeros(1)]) if loss_mask_T.numel() else loss_mask_T


class ShardRecord(Frozen):
    name: str = Field(pattern=r"^shard-\d{5,}\.states$")
    row_ids: tuple[str, ...] = Field(min_length=1)
    lengths: tuple[int, ...]
    """Tokens of each row."""

    taught: tuple[int, ...]
    """Supervised positions of each block."""

    digests: tuple[str, ...]
    """Digest of the tokens, then of each block."""

    @property
    def rows(self) -> int:
        return len(self.row_ids)

    @cached_property
    def tokens(self) -> int:
        return sum(self.lengths)


class StoreIndex(Frozen):
    """`index.json`: the shards of the store."""

    format_version: Literal[2] = 2
    layout: StoreFormat
    shards: tuple[ShardRecord, ...] = ()


class ShardEnd(Frozen):
    """A shard's record as stored: enough to compose the index again."""

    layout: StoreFormat
    record: ShardRecord


class Block(NamedTuple):
    """Location of a block in its shard."""

    number: int  # index in the shard
    offset: int
    size: int
    tokens: range  # token range in its row
    num_supervised: int


class ShardMap:
    """Locations of tokens and blocks in a shard, computed from its record."""

    def __init__(self, record: ShardRecord, fmt: StoreFormat) -> None:
        self.record = record
        self.tokens_size = tokens_bytes(record.tokens)
        self.row_tokens = [0, *accumulate(record.lengths)]  # first token of each row in the shard's tokens
        self.rows: list[list[Block]] = []
        at, number = self.tokens_size, 0
        for length in record.lengths:
            blocks = []
            for tokens in fmt.block_ranges(length):
                size = sum(section.aligned_bytes for section in block_sections(fmt, len(tokens), record.taught[number]))
                blocks.append(Block(number, at, size, tokens, record.taught[number]))
                at, number = at + size, number + 1
            self.rows.append(blocks)
        self.states_end = at  # offset of the record


def end_of_shard(end: ShardEnd) -> bytes:
    record = end.model_dump_json().encode()
    return record + hashlib.sha256(record).digest() + len(record).to_bytes(8, "little") + MAGIC


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.states"


def shard_number(name: str) -> int:
    return int(name.removeprefix("shard-").removesuffix(".states"))


def plan_shards(lengths: Sequence[int], fmt: StoreFormat, shard_size_bytes: int,
                supervised: Sequence[int] | None = None) -> Iterator[range]:
    """Which rows go into which shard: consecutive ranges, each within `shard_size_bytes` or a single row.

    A function of the lengths (and supervised positions of each row) alone, so that a resumed run plans the same shards.
    """
    sizes = [fmt.row_bytes(num_tokens, None if supervised is None else supervised[row])
             for row, num_tokens in enumerate(lengths)]
    return consecutive(sizes, shard_size_bytes)


def consecutive(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Consecutive ranges of some sizes, each with a sum within `limit` or a single larger one."""
    start, total = 0, 0
    for place, size in enumerate(sizes):
        if place > start and total + size > limit:
            yield range(start, place)
            start, total = place, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))
