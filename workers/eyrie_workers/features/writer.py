"""Writes a hidden-state store, one whole shard at a time.

A shard is written under a hidden name (`features.shard_file`), flushed and renamed; its record lists what it holds. No
other file is written until the store is finished, and no shard depends on another, so shards may be written in any
order and several at a time (`features.background_writer`). In a directory with a `catalog.STORE_ADDRESS_FILE` a shard
is uploaded instead of renamed, and its file deleted (`features.storage_backend`). A writer reads the records of the
shards that exist in either place:

    record valid, size right, no damage note    the shard is kept
    cut, unreadable, or with a damage note      the shard is written again, and no other

The note is `shard-00003.damaged`: a reader whose digest did not match wrote it (`features.store`), so that the next run
of capture repairs the shard without reading the whole store. One run per directory: the stage program's lock ensures
it; the processes of one run write different shards. The caller must write the same rows into the same shards every
time; `capture` plans them from the rows' lengths.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from eyrie_api.artifacts import write_model
from eyrie_api.errors import ArtifactCorrupt, Conflict
from eyrie_api.v1alpha1.rules import first_problem
from eyrie_workers.features.blocks import encode_states
from eyrie_workers.features.shard_file import ShardFile
from eyrie_workers.features.shard_format import (
    INDEX,
    FeatureRow,
    ShardEnd,
    ShardRecord,
    StoreFormat,
    StoreIndex,
    TokenRow,
    check_row,
    shard_name,
    shard_number,
    supervised_positions,
)
from eyrie_workers.features.storage_backend import StorageBackend, open_backend, read_shard_end


def read_index(directory: Path) -> StoreIndex | None:
    """The index of a finished store, None when there is none. Raises ArtifactCorrupt when it cannot be read."""
    path = directory / INDEX
    try:
        return StoreIndex.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ArtifactCorrupt(f"{path} is not a readable store index: {first_problem(error)}",
                              "delete it and run capture again: it is composed from the shards") from error


def is_whole(directory: Path) -> bool:
    """Whether a finished store matches its index and has no damage notes. Reads only the ends of the shards."""
    index, backend = read_index_or_none(directory), open_backend(directory)
    if index is None or backend.notes():
        return False
    return _ends(backend, [shard.name for shard in index.shards]) == [
        ShardEnd(layout=index.layout, record=shard) for shard in index.shards]


def _ends(backend: StorageBackend, shards: Sequence[str]) -> list[ShardEnd | None]:
    with ThreadPoolExecutor(backend.parallel, thread_name_prefix="eyrie-ends") as pool:
        return list(pool.map(lambda shard: read_shard_end(backend, shard), shards))


class FeatureWriter:
    """Writes whole shards; on opening, finds the shards that are missing or damaged."""

    def __init__(self, directory: Path, fmt: StoreFormat, *, alone: bool = True) -> None:
        """Open or create the store in `directory`. Raises Conflict when it holds states of another format.

        alone   no other process writes shards now: temporary files are those of a killed run, and are deleted.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._backend = directory, open_backend(directory)
        self.format = fmt
        self._shards: dict[int, ShardRecord] = {}
        self.damaged: dict[str, str] = {}
        """Shards to be written again, with the reason."""

        names, notes = self._backend.shards(), self._backend.notes()
        for name, end in zip(names, _ends(self._backend, names), strict=True):
            self._inspect(name, end, notes.get(name))
        # Never renamed, so no reader has seen them.
        for part in [*directory.glob(".shard-*.part"), *directory.glob(f".{INDEX}.*")] if alone else ():
            part.unlink()

    @property
    def shards(self) -> dict[int, ShardRecord]:
        """Whole shards by number."""
        return dict(self._shards)

    @property
    def num_rows(self) -> int:
        """Rows in whole shards."""
        return sum(shard.rows for shard in self._shards.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all whole shards."""
        return sum(self._backend.size(shard.name) or 0 for shard in self._shards.values())

    def holds(self, number: int, row_ids: Sequence[str]) -> bool:
        """Whether shard `number` is complete. Raises Conflict when it holds other rows than these."""
        shard = self._shards.get(number)
        if shard is not None and shard.row_ids != tuple(row_ids):
            raise Conflict(f"{self._directory} holds hidden states of other rows",
                           "capture into an empty directory, or delete this one")
        return shard is not None

    def write_shard(self, rows: Sequence[FeatureRow], number: int | None = None) -> ShardRecord:
        """Write one whole shard, by default the next. Raises ValueError for no rows or a row that does not fit."""
        shard = self.open_shard([TokenRow(row.row_id, row.token_ids, row.loss_mask) for row in rows],
                                max(self._shards, default=-1) + 1 if number is None else number)
        with shard:
            for row in rows:
                shard.append(_encode_row(row, self.format), 1)
        return self.commit(shard)

    def open_shard(self, rows: Sequence[TokenRow], number: int) -> ShardFile:
        """Begin shard `number`. Raises ValueError for no rows."""
        if not rows:
            raise ValueError("a shard needs at least one row")
        return ShardFile(self._directory / shard_name(number), self.format, rows)

    def commit(self, shard: ShardFile) -> ShardRecord:
        """Make a shard visible whose rows are all written. May be called in another thread than `open_shard`."""
        # Crash safety: all bytes are on disk before the shard becomes visible, and the damage note of an old version
        # goes last; a kill in between leaves a note on a good shard, which is then written once more.
        record = shard.finish()
        self._backend.add(shard.name, shard.part)
        self._shards[shard_number(shard.name)] = record
        self.damaged.pop(shard.name, None)
        return record

    def finish(self) -> list[Path]:
        """Write the index; returns every file of the store on this machine. Raises ValueError when a shard is missing.

        Shards elsewhere are not among the files: the index has a digest of each of their blocks.
        """
        if sorted(self._shards) != list(range(len(self._shards))) or not self._shards or self.damaged:
            raise ValueError(f"the store in {self._directory} is not complete: it has shards {sorted(self._shards)}")
        shards = tuple(self._shards[number] for number in sorted(self._shards))
        index = StoreIndex(layout=self.format, shards=shards)
        if read_index_or_none(self._directory) != index:
            write_model(self._directory / INDEX, index)
        here = (self._backend.path(shard.name) for shard in shards)
        return [self._directory / INDEX, *(path for path in here if path is not None)]

    def _inspect(self, name: str, end: ShardEnd | None, note: str | None) -> None:
        if end is None:
            self.damaged[name] = "it is cut, or its end cannot be read"
        elif note is not None:
            self.damaged[name] = note
        elif end.layout != self.format:
            raise Conflict(
                f"{self._directory} holds hidden states of another format ({_difference(end.layout, self.format)})",
                "capture into an empty directory, or delete this one")
        else:
            self._shards[shard_number(name)] = end.record


def read_index_or_none(directory: Path) -> StoreIndex | None:
    """The index; None when it is missing or cannot be read."""
    try:
        return read_index(directory)
    except ArtifactCorrupt:
        return None


def _encode_row(row: FeatureRow, fmt: StoreFormat) -> dict[str, Tensor]:
    check_row(row, fmt)
    supervised = supervised_positions(row.loss_mask.to(torch.bool)).nonzero().squeeze(1)
    return encode_states(fmt, row.aux, row.last, supervised, row.topk_logits)


def _difference(found: StoreFormat, wanted: StoreFormat) -> str:
    one, other = found.model_dump(), wanted.model_dump()
    return ", ".join(f"{name}: {one[name]} instead of {other[name]}" if name != "draft_ids" else "draft_ids"
                     for name in one if one[name] != other[name])
