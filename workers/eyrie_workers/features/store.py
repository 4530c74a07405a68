"""Reads a hidden-state store in any order, without loading it: from a directory, or from an artifact store by ranges.

`row(i)` and `read(rows)` read the blocks of those rows alone and decode them directly into the tensors they return, so
a store of terabytes opens in the time it takes to read its index. Adjacent blocks are read together; from an artifact
store several reads are in flight, and `batches` prefetches while the caller computes.

Every block is compared with its digest before it is decoded: from a directory the first time it is read, from the
network always. A mismatch raises StoreDamaged with the shard and its rows, and writes a note that capture finds.
Damaged states never reach training, and one damaged shard costs one shard.
"""

import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from eyrie_api.artifacts import digest_bytes
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_api.v1alpha1.rules import first_problem
from eyrie_workers.features.blocks import concat_topk_logits, decode_block
from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.features.shard_format import (
    INDEX,
    Block,
    FeatureRow,
    ShardEnd,
    ShardMap,
    StoreFormat,
    StoreIndex,
    block_sections,
    end_of_shard,
    from_bytes,
    shard_name,
    short_digest,
    supervised_positions,
)
from eyrie_workers.features.storage_backend import LocalBackend, StorageBackend, open_backend, read_shard_end

_READ_TOGETHER = 16 * 2**20
"""Bytes of adjacent blocks per read, at most: large against a request's overhead, small enough for several in
flight."""

_MAX_TOKENS_KEPT = 32 * 2**20
"""Tokens whose ids and masks are cached, 9 bytes each: shuffled reads would fetch them for every row otherwise."""


class StoreDamaged(ArtifactCorrupt):
    """Bytes of a store differ from their digest, or are missing."""

    def __init__(self, backend: str, damage: "Damage") -> None:
        super().__init__(f"{damage.shard} in {backend} is damaged: {damage}",
                         "run capture again: it writes this shard again and keeps the others")
        self.damage = damage


@dataclass(frozen=True)
class Damage:
    """The damage of one shard."""

    shard: str
    rows: range
    """Affected rows, by index in the store."""

    what: str

    def __str__(self) -> str:
        rows = f"row {self.rows.start}" if len(self.rows) == 1 else f"rows {self.rows.start} to {self.rows.stop - 1}"
        return f"{self.what} ({rows} of the store)"


@dataclass(frozen=True)
class Buffers:
    """Memory to decode into, reused from batch to batch: pinned for a GPU, and already faulted in."""

    aux: Tensor
    """[most tokens, A, H], float32 or bfloat16."""

    last: Tensor
    """[most tokens, H] of the same dtype."""


@dataclass(frozen=True)
class _Piece:
    """A block to read."""

    shard: int
    row: int
    """Index in the shard."""

    block: Block


def open_features(where: str | Path) -> "FeatureStore":
    """The store in a directory, or below `s3://bucket/prefix` (credentials as in `artifacts.store`)."""
    return FeatureStore(open_backend(where))


class FeatureStore:
    """Random access to the rows of a store, in the order they were captured."""

    def __init__(self, backend: Path | StorageBackend) -> None:
        """Open a store. Raises ArtifactMissing when there is none, StoreDamaged for a missing or cut shard, and
        ArtifactCorrupt when the index cannot be read."""
        self._backend: StorageBackend = LocalBackend(backend) if isinstance(backend, Path) else backend
        index = _read_index(self._backend)
        self.format: StoreFormat = index.layout
        self.digest = digest_bytes((index.model_dump_json(indent=2) + "\n").encode())
        """Digest of the index, and with it of every byte of the store; equal to that of `index.json`."""

        self._shards = index.shards
        self._row_starts = [0, *accumulate(shard.rows for shard in self._shards)]
        self._maps: dict[int, ShardMap] = {}
        self._checked: set[tuple[int, int]] = set()
        self._tokens: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()
        self._lock = threading.Lock()
        for number in range(len(self._shards)):
            damage = self._check_size(number)
            if damage is not None:
                raise self._damaged(damage)

    @property
    def backend(self) -> StorageBackend:
        """The storage backend."""
        return self._backend

    @property
    def num_rows(self) -> int:
        """Rows in the store."""
        return self._row_starts[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens over all rows."""
        return sum(shard.tokens for shard in self._shards)

    @property
    def row_ids(self) -> list[str]:
        """Ids in order."""
        return [row_id for shard in self._shards for row_id in shard.row_ids]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [length for shard in self._shards for length in shard.lengths]

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(_shard_size(self._map(number), self.format) for number in range(len(self._shards)))

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids [T] int64 and loss mask [T] bool of a row, without reading its states."""
        number, within = self._find(index)
        ids, mask = self._shard_tokens(number)
        first, last = self._map(number).row_tokens[within: within + 2]
        return ids[first:last], mask[first:last]

    def row(self, index: int, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None) -> FeatureRow:
        """Row `index`, or its tokens [start, stop), reading only the blocks that contain them. Raises IndexError.

        Top-k logits are returned for whole rows only.
        """
        number, within = self._find(index)
        ids, mask = self.tokens(index)
        chosen = range(ids.shape[0])[start:stop]
        pieces = [_Piece(number, within, block) for block in self._map(number).rows[within]
                  if block.tokens.start < chosen.stop and block.tokens.stop > chosen.start]
        packed = self._decode([(pieces, ids, mask)], dtype)
        at = pieces[0].block.tokens.start if pieces else 0
        here = slice(chosen.start - at, chosen.stop - at)
        return FeatureRow(
            row_id=self._shards[number].row_ids[within], token_ids=ids[chosen.start:chosen.stop],
            loss_mask=mask[chosen.start:chosen.stop], aux=packed.aux[here], last=packed.last[here],
            topk_logits=packed.topk_logits if len(chosen) == ids.shape[0] else None)

    def read(self, rows: Sequence[int], dtype: torch.dtype | None = None,
             into: Buffers | None = None) -> PackedBatch:
        """Some rows end to end, in that order, decoded to `dtype` (float32 or bfloat16; default: `format.dtype`).

        into   memory for the states; its dtype overrides `dtype`, and the returned states are views of its beginning.
        """
        wanted = []
        for index in rows:
            number, within = self._find(index)
            pieces = [_Piece(number, within, block) for block in self._map(number).rows[within]]
            wanted.append((pieces, *self.tokens(index)))
        return self._decode(wanted, dtype, into)

    def encoded(self, index: int) -> dict[str, Tensor]:
        """The states of a whole row as they are stored: `blocks.encode_states` of it. Raises StoreDamaged."""
        number, within = self._find(index)
        pieces = [_Piece(number, within, block) for block in self._map(number).rows[within]]
        parts = [from_bytes(block_sections(self.format, len(piece.block.tokens), piece.block.num_supervised), data)
                 for piece, data in zip(pieces, self._fetch(pieces), strict=True)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def batches(self, groups: Iterable[Sequence[int]], *, ahead: int = 2, dtype: torch.dtype | None = None,
                reuse: bool = False) -> Generator[PackedBatch, None, None]:
        """`read` of each group in order, with up to `ahead` batches prefetched.

        The memory in use is `ahead + 2` batches. Closing the iterator stops the prefetch.

        reuse   reuse memory: a batch's states are valid until the next batch is requested. Reading then takes a sixth
                of the time (fresh memory is faulted in page by page; measured at 1024 values, int8).
        """
        waiting: deque[tuple[Future[PackedBatch], Buffers | None]] = deque()
        spare: list[Buffers] = []
        pool = ThreadPoolExecutor(max(1, ahead), thread_name_prefix="eyrie-features")
        try:
            for group in groups:
                into = self._buffers_for(group, dtype, spare) if reuse else None
                waiting.append((pool.submit(self.read, group, dtype, into), into))
                if len(waiting) > ahead:
                    yield from _next_batch(waiting, spare)
            while waiting:
                yield from _next_batch(waiting, spare)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _buffers_for(self, group: Sequence[int], dtype: torch.dtype | None, spare: list[Buffers]) -> Buffers:
        num_tokens = 0
        for index in group:
            number, within = self._find(index)
            num_tokens += self._shards[number].lengths[within]
        if spare and spare[-1].aux.shape[0] >= num_tokens:
            return spare.pop()
        if spare:  # too small: replaced by a larger one, so the number of buffers stays bounded
            spare.pop()
        states = (num_tokens, len(self.format.aux_layers), self.format.hidden_size)
        # Pinned, so that the copy to the GPU runs while the previous batch is trained on.
        pinned = torch.cuda.is_available()
        return Buffers(torch.empty(states, dtype=dtype or self.format.dtype, pin_memory=pinned),
                       torch.empty(num_tokens, self.format.hidden_size, dtype=dtype or self.format.dtype,
                                   pin_memory=pinned))

    def damage(self) -> Iterator[Damage]:
        """Read everything; yields each damaged shard and writes its damage note."""
        for number in range(len(self._shards)):
            found = self._check_size(number) or self._verify_shard(number)
            if found is not None:
                self._backend.note_damage(found.shard, str(found))
                yield found

    def verify(self) -> None:
        """Raise StoreDamaged for the first damaged shard."""
        for found in self.damage():
            raise self._damaged(found)

    def __getstate__(self) -> dict[str, object]:
        """Caches and the lock are not pickled."""
        dropped: dict[str, object] = {"_maps": {}, "_tokens": OrderedDict(), "_checked": set(), "_lock": None}
        return {**self.__dict__, **dropped}

    def __setstate__(self, state: dict[str, object]) -> None:
        """See `__getstate__`."""
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of a store of {self.num_rows} rows")
        number = bisect_right(self._row_starts, index) - 1
        return number, index - self._row_starts[number]

    def _map(self, number: int) -> ShardMap:
        found = self._maps.get(number)
        if found is None:
            found = self._maps[number] = ShardMap(self._shards[number], self.format)
        return found

    def _shard_tokens(self, number: int) -> tuple[Tensor, Tensor]:
        with self._lock:
            if number in self._tokens:
                self._tokens.move_to_end(number)
                return self._tokens[number]
        count = self._shards[number].tokens
        data = self._backend.read(self._shards[number].name, 0, self._map(number).tokens_size)
        self._check(number, 0, data, self._rows_of(number))
        ids = data[: 4 * count].view(torch.int32).to(torch.int64)
        kept = (ids, data[4 * count: 5 * count].to(torch.bool))
        with self._lock:  # two threads may have read the same shard: the second result replaces an equal one
            self._tokens[number] = kept
            while len(self._tokens) > 1 and sum(ids.numel() for ids, _ in self._tokens.values()) > _MAX_TOKENS_KEPT:
                self._tokens.popitem(last=False)
        return kept

    def _decode(self, wanted: Sequence[tuple[Sequence[_Piece], Tensor, Tensor]],
                dtype: torch.dtype | None, into: Buffers | None = None) -> PackedBatch:
        fmt, dtype = self.format, dtype or self.format.dtype
        pieces = [(piece, mask) for row, _, mask in wanted for piece in row]
        num_tokens = sum(len(piece.block.tokens) for piece, _ in pieces)
        keeps = fmt.final_state == "keep"
        if into is None:
            aux = torch.empty(num_tokens, len(fmt.aux_layers), fmt.hidden_size, dtype=dtype)
            last = torch.zeros(num_tokens, fmt.hidden_size if keeps else 0, dtype=dtype)
        else:
            aux, last = into.aux[:num_tokens], into.last[:num_tokens, :fmt.hidden_size if keeps else 0].zero_()
        topk_parts = []
        at = 0
        for (piece, mask), data in zip(pieces, self._fetch([piece for piece, _ in pieces]), strict=True):
            block = piece.block
            tensors = from_bytes(block_sections(fmt, len(block.tokens), block.num_supervised), data)
            here = slice(at, at + len(block.tokens))
            decode_block(fmt, tensors, supervised_positions(mask)[block.tokens.start:block.tokens.stop], aux[here],
                         last[here])
            if not keeps:
                topk_parts.append(tensors)
            at = here.stop
        return PackedBatch(
            token_ids=torch.cat([ids for _, ids, _ in wanted]), loss_mask=torch.cat([mask for _, _, mask in wanted]),
            aux=aux, last=last, topk_logits=None if keeps else concat_topk_logits(topk_parts),
            lengths=tuple(ids.shape[0] for _, ids, _ in wanted))

    def _fetch(self, pieces: Sequence[_Piece]) -> list[Tensor]:
        """The bytes of each block, verified; adjacent blocks are read together."""
        order = sorted(range(len(pieces)), key=lambda i: (pieces[i].shard, pieces[i].block.offset))
        # Merge blocks that are adjacent in a shard into one read, up to _READ_TOGETHER bytes.
        groups: list[list[int]] = []
        for i in order:
            piece, before = pieces[i], pieces[groups[-1][-1]] if groups else None
            if before is not None and before.shard == piece.shard \
                    and before.block.offset + before.block.size == piece.block.offset \
                    and piece.block.offset + piece.block.size - pieces[groups[-1][0]].block.offset <= _READ_TOGETHER:
                groups[-1].append(i)
            else:
                groups.append([i])
        found: list[Tensor] = [torch.empty(0)] * len(pieces)

        def read(group: list[int]) -> None:
            first, final = pieces[group[0]], pieces[group[-1]]
            start = first.block.offset
            size = final.block.offset + final.block.size - start
            data = self._backend.read(self._shards[first.shard].name, start, size)
            for i in group:
                piece = pieces[i]
                part = data[piece.block.offset - start: piece.block.offset - start + piece.block.size]
                row = self._row_starts[piece.shard] + piece.row
                self._check(piece.shard, piece.block.number + 1, part, range(row, row + 1))
                found[i] = part

        _all(read, groups, self._backend.parallel)
        return found

    def _check(self, number: int, digest: int, data: Tensor, rows: range) -> None:
        """Compare bytes with digest number `digest` of the shard: 0 for its tokens, 1 + b for block b."""
        if (number, digest) in self._checked:
            return
        shard = self._shards[number]
        if short_digest(data.numpy().data) != shard.digests[digest]:
            raise self._damaged(Damage(shard.name, rows, "its bytes differ from their digest"))
        # Local bytes are verified once; ranges from the network may be damaged at any transfer.
        if isinstance(self._backend, LocalBackend):
            self._checked.add((number, digest))

    def _verify_shard(self, number: int) -> Damage | None:
        shard, of = self._shards[number], self._map(number)
        ranges = [(0, of.tokens_size, self._rows_of(number))]
        for row, blocks in enumerate(of.rows):
            index = self._row_starts[number] + row
            ranges += [(block.offset, block.size, range(index, index + 1)) for block in blocks]
        wrong = [rows for (start, size, rows), digest in zip(ranges, shard.digests, strict=True)
                 if short_digest(self._backend.read(shard.name, start, size).numpy().data) != digest]
        if not wrong:
            return None
        return Damage(shard.name, range(min(rows.start for rows in wrong), max(rows.stop for rows in wrong)),
                      "its bytes differ from their digest")

    def _rows_of(self, number: int) -> range:
        return range(self._row_starts[number], self._row_starts[number + 1])

    def _check_size(self, number: int) -> Damage | None:
        name, rows = self._shards[number].name, self._rows_of(number)
        size, wanted = self._backend.size(name), _shard_size(self._map(number), self.format)
        if size is None:
            return Damage(name, rows, "it is missing")
        return None if size == wanted else Damage(name, rows, f"it has {size} bytes instead of {wanted}")

    def _damaged(self, damage: Damage) -> StoreDamaged:
        self._backend.note_damage(damage.shard, str(damage))
        return StoreDamaged(self._backend.name, damage)


def _next_batch(waiting: deque[tuple[Future[PackedBatch], Buffers | None]],
                spare: list[Buffers]) -> Iterator[PackedBatch]:
    """Yield the first pending batch; its memory is free when the caller asks for the next."""
    future, into = waiting.popleft()
    yield future.result()
    if into is not None:
        spare.append(into)


def _all(do: Callable[[list[int]], None], groups: Sequence[list[int]], parallel: int) -> None:
    if parallel == 1 or len(groups) == 1:
        for group in groups:
            do(group)
        return
    with ThreadPoolExecutor(min(parallel, len(groups)), thread_name_prefix="eyrie-ranges") as pool:
        for _ in pool.map(do, groups):
            pass


def _shard_size(of: ShardMap, fmt: StoreFormat) -> int:
    return of.states_end + len(end_of_shard(ShardEnd(layout=fmt, record=of.record)))


def _read_index(backend: StorageBackend) -> StoreIndex:
    data = backend.file(INDEX)
    if data is None:
        return _compose_index(backend)
    try:
        return StoreIndex.model_validate_json(data)
    except ValidationError as error:
        raise ArtifactCorrupt(f"{INDEX} in {backend.name} is not a readable store index: {first_problem(error)}",
                              "run capture again: it is composed from the shards") from error


def _compose_index(backend: StorageBackend) -> StoreIndex:
    """The index of an unfinished store, or of one whose index is lost, composed from the ends of its shards."""
    names = backend.shards()
    if not names:
        raise ArtifactMissing(f"no {INDEX} and no shard in {backend.name}: it is not a hidden-state store",
                              "run capture first")
    ends: list[ShardEnd] = []
    for number, name in enumerate(names):
        if name != shard_name(number):
            raise ArtifactMissing(f"{shard_name(number)} is missing in {backend.name}", "run capture again")
        end = read_shard_end(backend, name)
        if end is None:
            backend.note_damage(name, "its end cannot be read")
            raise ArtifactCorrupt(f"{name} in {backend.name} is damaged: its end cannot be read", "run capture again")
        ends.append(end)
    return StoreIndex(layout=ends[0].layout, shards=tuple(end.record for end in ends))
