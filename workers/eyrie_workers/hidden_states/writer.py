"""Writes a hidden-state store, one whole shard at a time, in threads beside the target's passes.

A shard is written under a hidden name (`ShardFile`), flushed and renamed; its record lists what it holds. No other file
is written until the store is finished, and no shard depends on another, so shards may be written in any order and
several at a time. In a directory with a `catalog.STORE_ADDRESS_FILE` a shard is uploaded instead of renamed, and its
file deleted (`hidden_states.storage_backend`). A writer reads the records of the shards that exist in either place:

    record valid, size right, no damage note    the shard is kept
    cut, unreadable, or with a damage note      the shard is written again, and no other

The note is `shard-00003.damaged`: a reader whose digest did not match wrote it (`hidden_states.store`), so that the
next run of capture repairs the shard without reading the whole store. One run per directory: the stage program's lock
ensures it; the processes of one run write different shards. The caller must write the same rows into the same shards
every time; `capture` plans them from the rows' lengths.

`BackgroundWriter` lets the target compute the next pass while the last ones are digested and written:

    caller's thread    forward pass -> codes on the device -> copy to pinned host memory, not waited for
    writer threads     wait for the copy -> digest, write -> at the end of a shard: flush to disk, rename

A shard belongs to one thread; with two threads the flush of a shard overlaps the writing of the next. At most
`_MAX_PASSES` passes are between the two sides: `put` blocks until a writer has finished one, which bounds memory and
lets a slow disk, not memory, limit the rate. On the CPU there is no copy and the codes themselves are passed on.

An error of a writer thread is raised in the caller's thread, by the next `put` or `finish`. When the block is left by
an error, whole shards are still completed and the open one is deleted; a killed process leaves hidden files, which the
next `FeatureWriter` deletes.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from pydantic import ValidationError
from torch import Tensor

from eyrie_api.artifacts import write_model
from eyrie_api.errors import Conflict
from eyrie_workers.hidden_states.codecs import block_of
from eyrie_workers.hidden_states.shard_format import (
    INDEX,
    ShardEnd,
    ShardRecord,
    StoreFormat,
    StoreIndex,
    TokenRow,
    block_sections,
    end_of_shard,
    section_views,
    shard_name,
    shard_number,
    short_digest,
    supervised_positions,
    tokens_bytes,
)
from eyrie_workers.hidden_states.storage_backend import StorageBackend, open_backend, read_shard_end


class ShardFile:
    """A shard under its hidden name, to which rows are appended in order. As a context manager, deleted on an error."""

    def __init__(self, path: Path, fmt: StoreFormat, rows: Sequence[TokenRow]) -> None:
        self.name, self.part = path.name, path.with_name(f".{path.name}.part")
        self._format, self._rows = fmt, rows
        self._file = self.part.open("wb")
        self._digests: list[str] = []
        self._supervised: list[int] = []
        self._num_written = 0
        ids = torch.cat([row.token_ids.to(torch.int32) for row in rows])
        masks = torch.cat([row.loss_mask.to(torch.uint8) for row in rows])
        self._write([(ids.numpy().tobytes() + masks.numpy().tobytes()).ljust(tokens_bytes(ids.numel()), b"\0")])

    def __enter__(self) -> "ShardFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            with suppress(OSError):  # of a full disk again: the first error is the one to report
                self._file.close()
            self.part.unlink(missing_ok=True)

    def append(self, states: Mapping[str, Tensor], num_rows: int) -> None:
        """Write the blocks of the next rows. states: `codecs.encode_states` of these rows end to end, on the CPU."""
        token = taught = 0
        for row in self._rows[self._num_written:self._num_written + num_rows]:
            supervised = supervised_positions(row.loss_mask.to(torch.bool))
            for block in self._format.block_ranges(supervised.numel()):
                num = int(supervised[block.start:block.stop].sum())
                tensors = block_of(states, range(token + block.start, token + block.stop), range(taught, taught + num))
                self._write([*section_views(block_sections(self._format, len(block), num), tensors)])
                self._supervised.append(num)
                taught += num
            token += supervised.numel()
        self._num_written += num_rows

    def finish(self) -> ShardRecord:
        """Write record and trailer and flush everything to disk."""
        assert self._num_written == len(self._rows), "rows of the shard are missing"
        record = ShardRecord(
            name=self.name, row_ids=tuple(row.row_id for row in self._rows),
            lengths=tuple(row.token_ids.shape[0] for row in self._rows), taught=tuple(self._supervised),
            digests=tuple(self._digests))
        with self._file as file:
            file.write(end_of_shard(ShardEnd(layout=self._format, record=record)))
            file.flush()
            os.fsync(file.fileno())
        return record

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        self._digests.append(short_digest(*parts))
        for part in parts:
            self._file.write(part)


def read_index(directory: Path) -> StoreIndex | None:
    """The index of a finished store; None when it is missing or cannot be read."""
    try:
        return StoreIndex.model_validate_json((directory / INDEX).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def is_whole(directory: Path) -> bool:
    """Whether a finished store matches its index and has no damage notes. Reads only the ends of the shards."""
    index, backend = read_index(directory), open_backend(directory)
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
        self.shards: dict[int, ShardRecord] = {}
        self.damaged: dict[str, str] = {}  # shards to be written again, with the reason
        names, notes = self._backend.shards(), self._backend.notes()
        for name, end in zip(names, _ends(self._backend, names), strict=True):
            if end is None or name in notes:
                self.damaged[name] = notes[name] if end is not None else "it is cut, or its end cannot be read"
                continue
            if end.layout != fmt:
                there, wanted = end.layout.model_dump(), fmt.model_dump()
                differences = ", ".join(
                    f"{key}: {there[key]} instead of {wanted[key]}" if key != "draft_ids" else key
                    for key in there if there[key] != wanted[key])
                raise Conflict(f"{directory} holds hidden states of another format ({differences})",
                               "capture into an empty directory, or delete this one")
            self.shards[shard_number(name)] = end.record
        # Never renamed, so no reader has seen them.
        for part in [*directory.glob(".shard-*.part"), *directory.glob(f".{INDEX}.*")] if alone else ():
            part.unlink()

    @property
    def num_rows(self) -> int:
        return sum(shard.rows for shard in self.shards.values())

    @property
    def size_bytes(self) -> int:
        return sum(self._backend.size(shard.name) or 0 for shard in self.shards.values())

    def holds(self, number: int, row_ids: Sequence[str]) -> bool:
        """Whether shard `number` is complete. Raises Conflict when it holds other rows than these."""
        shard = self.shards.get(number)
        if shard is not None and shard.row_ids != tuple(row_ids):
            raise Conflict(f"{self._directory} holds hidden states of other rows",
                           "capture into an empty directory, or delete this one")
        return shard is not None

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
        self.shards[shard_number(shard.name)] = record
        self.damaged.pop(shard.name, None)
        return record

    def finish(self) -> list[Path]:
        """Write the index; returns every file of the store on this machine. Raises ValueError when a shard is missing.

        Shards elsewhere are not among the files: the index has a digest of each of their blocks.
        """
        if sorted(self.shards) != list(range(len(self.shards))) or not self.shards or self.damaged:
            raise ValueError(f"the store in {self._directory} is not complete: it has shards {sorted(self.shards)}")
        shards = tuple(self.shards[number] for number in sorted(self.shards))
        index = StoreIndex(layout=self.format, shards=shards)
        if read_index(self._directory) != index:
            write_model(self._directory / INDEX, index)
        local_paths = (self._backend.path(shard.name) for shard in shards)
        return [self._directory / INDEX, *(path for path in local_paths if path is not None)]


_MAX_PASSES = 3
"""One being computed or copied, one being written, and one that waits, so that neither side stops for the other's
variation."""

_NUM_THREADS = 2
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Pass:
    """The encoded states of some rows, on the CPU or on their way there."""

    states: Mapping[str, Tensor]
    num_rows: int
    copied: torch.cuda.Event | None  # None where nothing is copied
    buffer: "_PinnedBuffer"


_END, _ABANDON = "end", "abandon"
_Passes = SimpleQueue[_Pass | str]


class _PinnedBuffer:
    """Pinned host memory of one pass, reused by later ones: allocating it takes longer than a copy."""

    def __init__(self) -> None:
        self._bytes: Tensor | None = None

    def fill(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy the states from their device; returns where they will be."""
        sizes = {name: -(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT for name, x in states.items()}
        total = sum(sizes.values())
        if self._bytes is None or self._bytes.numel() < total:
            self._bytes = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=True)
        copies, at = {}, 0
        for name, x in states.items():
            place = self._bytes[at:at + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
            copies[name] = place.copy_(x, non_blocking=True)
            at += sizes[name]
        return copies


class BackgroundWriter:
    """Shards of a store, written in threads. A context manager: leaving it waits for the threads."""

    def __init__(self, writer: FeatureWriter) -> None:
        self._writer = writer
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="eyrie-shards")
        self._free = threading.Semaphore(_MAX_PASSES)
        self._buffers = [_PinnedBuffer() for _ in range(_MAX_PASSES)]
        self._open: _Passes | None = None
        self._shards: list[Future[None]] = []
        self._error: BaseException | None = None

    def __enter__(self) -> "BackgroundWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Abandon the open shard, if there is one, and wait for the others."""
        if self._open is not None:
            self._open.put(_ABANDON)
        self._pool.shutdown(wait=True)

    def begin(self, number: int, rows: Sequence[TokenRow]) -> None:
        assert self._open is None, "the previous shard is not ended"
        self._open = SimpleQueue()
        self._shards.append(self._pool.submit(self._write_shard, number, rows, self._open))

    def put(self, states: Mapping[str, Tensor], num_rows: int) -> None:
        """Write the next rows of the open shard: `codecs.encode_states` of them, on any device. Blocks while
        `_MAX_PASSES` passes are not written yet. Raises what a writer thread raised."""
        assert self._open is not None
        self._free.acquire()
        self._raise_error()
        buffer, copied = self._buffers.pop(), None
        if any(x.device.type == "cuda" for x in states.values()):
            states = buffer.fill(states)
            copied = torch.cuda.Event()
            copied.record()
        self._open.put(_Pass(states, num_rows, copied, buffer))

    def end(self) -> None:
        """End the open shard, whose rows have all been put."""
        assert self._open is not None
        self._open.put(_END)
        self._open = None

    def finish(self) -> None:
        """Wait until every shard is on disk. Raises what a writer thread raised."""
        for shard in self._shards:
            shard.exception()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_shard(self, number: int, rows: Sequence[TokenRow], passes: _Passes) -> None:
        try:
            with self._writer.open_shard(rows, number) as shard:
                while isinstance(encoded := passes.get(), _Pass):
                    if encoded.copied is not None:
                        encoded.copied.synchronize()
                    shard.append(encoded.states, encoded.num_rows)
                    self._buffers.append(encoded.buffer)
                    self._free.release()
                if encoded == _ABANDON:
                    raise _Abandoned
                self._writer.commit(shard)
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = self._error or error
            self._free.release()  # a blocked `put` wakes, and raises


class _Abandoned(Exception):
    """The open shard is deleted: its remaining rows will not come."""
