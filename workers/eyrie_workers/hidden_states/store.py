"""Reads a hidden-state store in any order, without loading it: from a directory, or from an artifact store by ranges.

`read(rows)` reads the blocks of those rows alone and decodes them directly into the tensors it returns, so a store of
terabytes opens in the time it takes to read its index. Adjacent blocks are read together; from an artifact
store several reads are in flight, and `batches` prefetches while the caller computes.

Every block is compared with its digest before it is decoded: from a directory the first time it is read, from the
network always. A mismatch raises StoreDamaged with the shard and its rows, and writes a note that capture finds.
Damaged states never reach training, and one damaged shard costs one shard.

    python -m eyrie_workers.hidden_states.store STORE

reads a whole store (a directory or `s3://bucket/prefix`) and prints damaged shards with their rows; the next run of
capture writes them again. Exit code 0 for an intact store, 74 otherwise.
"""

import argparse
import sys
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from eyrie_api.artifacts import digest_bytes
from eyrie_api.artifacts.store import StoreUnavailable
from eyrie_api.contract.rules import first_problem
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing, EyrieError, report_error
from eyrie_workers.hidden_states.codecs import concat_topk_logits, decode_block
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.hidden_states.shard_format import (
    INDEX,
    Block,
    ShardEnd,
    ShardMap,
    StoreFormat,
    StoreIndex,
    TokenRow,
    block_sections,
    end_of_shard,
    from_bytes,
    shard_name,
    short_digest,
    supervised_positions,
)
from eyrie_workers.hidden_states.storage_backend import LocalBackend, StorageBackend, open_backend, read_shard_end

_READ_TOGETHER = 16 * 2**20
"""Bytes of adjacent blocks per read, at most: large against a request's overhead, small enough for several in
flight."""

_MAX_TOKENS_KEPT = 32 * 2**20
"""Tokens whose ids and masks are cached, 9 bytes each: shuffled reads would fetch them for every row otherwise."""


class StoreDamaged(ArtifactCorrupt):
    """Bytes of a store differ from their digest, or are missing."""

    reason = "ArtifactCorrupt"

    def __init__(self, backend: str, damage: "Damage") -> None:
        super().__init__(f"{damage.shard} in {backend} is damaged: {damage}",
                         "run capture again: it writes this shard again and keeps the others")
        self.damage = damage


@dataclass(frozen=True)
class Damage:
    shard: str
    rows: range  # affected rows, by index in the store
    what: str

    def __str__(self) -> str:
        rows = f"row {self.rows.start}" if len(self.rows) == 1 else f"rows {self.rows.start} to {self.rows.stop - 1}"
        return f"{self.what} ({rows} of the store)"


@dataclass(frozen=True)
class Buffers:
    """Memory to decode into, reused from batch to batch: pinned for a GPU, and already faulted in."""

    aux: Tensor  # [most tokens, A, H], float32 or bfloat16
    last: Tensor  # [most tokens, H] of the same dtype


@dataclass(frozen=True)
class _Piece:
    shard: int
    row: int  # index in the shard
    block: Block


class FeatureStore:
    """Random access to the rows of a store, in the order they were captured."""

    def __init__(self, where: str | Path | StorageBackend) -> None:
        """Open a store: as `open_backend`, unless its backend is given. Raises ArtifactMissing when there is none,
        StoreDamaged for a missing or cut shard, and ArtifactCorrupt when the index cannot be read."""
        self.backend = open_backend(where) if isinstance(where, str | Path) else where
        index = _read_index(self.backend)
        self.format: StoreFormat = index.layout
        self.digest = digest_bytes((index.model_dump_json(indent=2) + "\n").encode())
        """Digest of the index, and with it of every byte of the store; equal to that of `index.json`."""

        self._shards = index.shards
        self._row_starts = [0, *accumulate(shard.rows for shard in self._shards)]
        self._maps = [ShardMap(shard, self.format) for shard in self._shards]
        self._checked: set[tuple[int, int]] = set()
        self._tokens: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()
        self._lock = threading.Lock()
        for number in range(len(self._shards)):
            damage = self._check_size(number)
            if damage is not None:
                raise self._damaged(damage)

    @property
    def num_rows(self) -> int:
        return self._row_starts[-1]

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self._shards)

    @property
    def row_ids(self) -> list[str]:
        return [row_id for shard in self._shards for row_id in shard.row_ids]

    @property
    def lengths(self) -> list[int]:
        return [length for shard in self._shards for length in shard.lengths]

    @property
    def size_bytes(self) -> int:
        return sum(_shard_size(each, self.format) for each in self._maps)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids [T] int64 and loss mask [T] bool of a row, without reading its states."""
        number, within = self._find(index)
        first, last = self._maps[number].row_tokens[within: within + 2]
        with self._lock:
            cached = self._tokens.get(number)
            if cached is not None:
                self._tokens.move_to_end(number)
        if cached is None:
            count = self._shards[number].tokens
            data = self.backend.read(self._shards[number].name, 0, self._maps[number].tokens_size)
            self._check(number, 0, data, self._rows_of(number))
            cached = data[: 4 * count].view(torch.int32).to(torch.int64), data[4 * count: 5 * count].to(torch.bool)
            with self._lock:  # two threads may have read the same shard: the second result replaces an equal one
                self._tokens[number] = cached
                while len(self._tokens) > 1 and sum(ids.numel() for ids, _ in self._tokens.values()) > _MAX_TOKENS_KEPT:
                    self._tokens.popitem(last=False)
        return cached[0][first:last], cached[1][first:last]

    def read(self, rows: Sequence[int], into: Buffers | None = None) -> PackedBatch:
        """Some rows end to end, in that order, decoded to `format.dtype`, or to the memory and dtype of `into`."""
        wanted, fmt = [(self._pieces(index), *self.tokens(index)) for index in rows], self.format
        pieces = [(piece, mask) for row, _, mask in wanted for piece in row]
        num_tokens = sum(len(piece.block.tokens) for piece, _ in pieces)
        keeps = fmt.final_state == "keep"
        if into is None:
            aux = torch.empty(num_tokens, len(fmt.aux_layers), fmt.hidden_size, dtype=fmt.dtype)
            last = torch.zeros(num_tokens, fmt.hidden_size if keeps else 0, dtype=fmt.dtype)
        else:
            aux, last = into.aux[:num_tokens], into.last[:num_tokens, :fmt.hidden_size if keeps else 0].zero_()
        topk_parts = []
        at = 0
        for (piece, mask), data in zip(pieces, self._fetch([piece for piece, _ in pieces]), strict=True):
            block = piece.block
            tensors = from_bytes(block_sections(fmt, len(block.tokens), block.num_supervised), data)
            tokens = slice(at, at + len(block.tokens))
            decode_block(fmt, tensors, supervised_positions(mask)[block.tokens.start:block.tokens.stop], aux[tokens],
                         last[tokens])
            if not keeps:
                topk_parts.append(tensors)
            at = tokens.stop
        return PackedBatch(
            token_ids=torch.cat([ids for _, ids, _ in wanted]), loss_mask=torch.cat([mask for _, _, mask in wanted]),
            aux=aux, last=last, topk_logits=None if keeps else concat_topk_logits(topk_parts),
            lengths=tuple(ids.shape[0] for _, ids, _ in wanted))

    def encoded(self, index: int) -> dict[str, Tensor]:
        """The states of a whole row as they are stored: `codecs.encode_states` of it. Raises StoreDamaged."""
        pieces = self._pieces(index)
        parts = [from_bytes(block_sections(self.format, len(piece.block.tokens), piece.block.num_supervised), data)
                 for piece, data in zip(pieces, self._fetch(pieces), strict=True)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def batches(self, groups: Iterable[Sequence[int]], *, ahead: int = 2,
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
                into = self._buffers_for(group, spare) if reuse else None
                waiting.append((pool.submit(self.read, group, into), into))
                if len(waiting) > ahead:
                    yield from _next_batch(waiting, spare)
            while waiting:
                yield from _next_batch(waiting, spare)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _buffers_for(self, group: Sequence[int], spare: list[Buffers]) -> Buffers:
        num_tokens = 0
        for index in group:
            number, within = self._find(index)
            num_tokens += self._shards[number].lengths[within]
        if spare and spare[-1].aux.shape[0] >= num_tokens:
            return spare.pop()
        if spare:  # too small: replaced by a larger one, so the number of buffers stays bounded
            spare.pop()
        num_layers, hidden = len(self.format.aux_layers), self.format.hidden_size
        # Pinned, so that the copy to the GPU runs while the previous batch is trained on.
        pinned, dtype = torch.cuda.is_available(), self.format.dtype
        return Buffers(torch.empty(num_tokens, num_layers, hidden, dtype=dtype, pin_memory=pinned),
                       torch.empty(num_tokens, hidden, dtype=dtype, pin_memory=pinned))

    def damage(self) -> Iterator[Damage]:
        """Read everything; yields each damaged shard and writes its damage note."""
        for number in range(len(self._shards)):
            shard, layout, damage = self._shards[number], self._maps[number], self._check_size(number)
            if damage is None:
                first = self._row_starts[number]
                ranges = [(0, layout.tokens_size, self._rows_of(number)), *(
                    (block.offset, block.size, range(index, index + 1))
                    for index, blocks in enumerate(layout.rows, first) for block in blocks)]
                wrong = [rows for (start, size, rows), digest in zip(ranges, shard.digests, strict=True)
                         if short_digest(self.backend.read(shard.name, start, size).numpy().data) != digest]
                if not wrong:
                    continue
                damage = Damage(shard.name, range(min(rows.start for rows in wrong), max(rows.stop for rows in wrong)),
                                "its bytes differ from their digest")
            self.backend.note_damage(damage.shard, str(damage))
            yield damage

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of a store of {self.num_rows} rows")
        number = bisect_right(self._row_starts, index) - 1
        return number, index - self._row_starts[number]

    def _pieces(self, index: int) -> list[_Piece]:
        number, within = self._find(index)
        return [_Piece(number, within, block) for block in self._maps[number].rows[within]]

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
        verified: list[Tensor] = [torch.empty(0)] * len(pieces)

        def read(group: list[int]) -> None:
            first, final = pieces[group[0]], pieces[group[-1]]
            start = first.block.offset
            size = final.block.offset + final.block.size - start
            data = self.backend.read(self._shards[first.shard].name, start, size)
            for i in group:
                piece = pieces[i]
                part = data[piece.block.offset - start: piece.block.offset - start + piece.block.size]
                row = self._row_starts[piece.shard] + piece.row
                self._check(piece.shard, piece.block.number + 1, part, range(row, row + 1))
                verified[i] = part

        if self.backend.parallel == 1 or len(groups) == 1:
            for group in groups:
                read(group)
        else:
            with ThreadPoolExecutor(min(self.backend.parallel, len(groups)), "eyrie-ranges") as pool:
                list(pool.map(read, groups))
        return verified

    def _check(self, number: int, digest: int, data: Tensor, rows: range) -> None:
        """Compare bytes with digest number `digest` of the shard: 0 for its tokens, 1 + b for block b."""
        if (number, digest) in self._checked:
            return
        shard = self._shards[number]
        if short_digest(data.numpy().data) != shard.digests[digest]:
            raise self._damaged(Damage(shard.name, rows, "its bytes differ from their digest"))
        # Local bytes are verified once; ranges from the network may be damaged at any transfer.
        if isinstance(self.backend, LocalBackend):
            self._checked.add((number, digest))

    def _rows_of(self, number: int) -> range:
        return range(self._row_starts[number], self._row_starts[number + 1])

    def _check_size(self, number: int) -> Damage | None:
        name, rows = self._shards[number].name, self._rows_of(number)
        size, wanted = self.backend.size(name), _shard_size(self._maps[number], self.format)
        if size is None:
            return Damage(name, rows, "it is missing")
        return None if size == wanted else Damage(name, rows, f"it has {size} bytes instead of {wanted}")

    def _damaged(self, damage: Damage) -> StoreDamaged:
        self.backend.note_damage(damage.shard, str(damage))
        return StoreDamaged(self.backend.name, damage)


def _next_batch(waiting: deque[tuple[Future[PackedBatch], Buffers | None]],
                spare: list[Buffers]) -> Iterator[PackedBatch]:
    """Yield the first pending batch; its memory is free when the caller asks for the next."""
    future, into = waiting.popleft()
    yield future.result()
    if into is not None:
        spare.append(into)


def _shard_size(of: ShardMap, fmt: StoreFormat) -> int:
    return of.states_end + len(end_of_shard(ShardEnd(layout=fmt, record=of.record)))


def _read_index(backend: StorageBackend) -> StoreIndex:
    """The index; that of an unfinished store, or where it is lost, is composed from the ends of the shards."""
    data = backend.file(INDEX)
    if data is not None:
        try:
            return StoreIndex.model_validate_json(data)
        except ValidationError as error:
            raise ArtifactCorrupt(f"{INDEX} in {backend.name} is not a readable store index: {first_problem(error)}",
                                  "run capture again: it is composed from the shards") from error
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


@dataclass
class EarlierStates:
    """States that earlier jobs have captured of the same rows (`reuse: auto`), by row.

    A state is a function of the target, the layers, the codec and the tokens up to its position. The first three are
    the format of a store, so a store with another format is left out. The tokens and the loss mask of each row are
    compared: an answer may have been generated again, or cut at another length.

    What is copied is the encoded row, each block compared with its digest as it is read. An earlier job's states may
    be removed while they are read (`eyrie storage --clean`): a row that cannot be read is computed.
    """

    _places: dict[str, list[tuple[FeatureStore, int]]] = field(default_factory=dict)
    num_unreadable: int = 0  # rows that a store has and that could not be read

    def add(self, store: FeatureStore, fmt: StoreFormat, wanted: set[str]) -> None:
        """Use a store for those of the wanted rows that it has. Raises ArtifactCorrupt when it has another format."""
        if store.format != fmt:
            names = [name for name in StoreFormat.model_fields if getattr(store.format, name) != getattr(fmt, name)]
            raise ArtifactCorrupt(f"the states in {store.backend.name} have another format ({', '.join(names)})")
        for index, row_id in enumerate(store.row_ids):
            if row_id in wanted:
                self._places.setdefault(row_id, []).append((store, index))

    def has_all(self, row_ids: Sequence[str]) -> bool:
        """Whether some store has each row, as far as ids tell."""
        return all(row_id in self._places for row_id in row_ids)

    def find(self, row: TokenRow) -> dict[str, Tensor] | None:
        """The encoded states of a row; None where no store has them of these tokens."""
        for store, index in self._places.get(row.row_id, ()):
            try:
                token_ids, loss_mask = store.tokens(index)
                if torch.equal(token_ids, row.token_ids) and torch.equal(loss_mask, row.loss_mask):
                    return store.encoded(index)
            except (ArtifactCorrupt, ArtifactMissing, StoreUnavailable, OSError):
                self.num_unreadable += 1
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Verify a whole store; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare every block of a hidden-state store with its digest.")
    parser.add_argument("store", help="directory, or s3://bucket/prefix")
    count = 0
    try:
        store = FeatureStore(parser.parse_args(argv).store)
        for damage in store.damage():
            print(f"{damage.shard}: {damage}")
            count += 1
    except EyrieError as error:
        return report_error(error)
    print(f"{store.num_rows} rows, {store.num_tokens} tokens, {store.size_bytes} bytes: "
          + (f"{count} damaged shards" if count else "intact"))
    return ArtifactCorrupt.exit_code if count else 0


if __name__ == "__main__":
    sys.exit(main())
