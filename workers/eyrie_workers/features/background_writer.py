"""Writes shards in threads, so that the target computes the next pass while the last ones are digested and written.

    caller's thread    forward pass -> codes on the device -> copy to pinned host memory, not waited for
    writer threads     wait for the copy -> digest, write -> at the end of a shard: flush to disk, rename

A shard belongs to one thread; with two threads the flush of a shard overlaps the writing of the next. At most
`_MAX_PASSES` passes are between the two sides: `put` blocks until a writer has finished one, which bounds memory and
lets a slow disk, not memory, limit the rate. On the CPU there is no copy and the codes themselves are passed on.

An error of a writer thread is raised in the caller's thread, by the next `put` or `finish`. When the block is left by
an error, whole shards are still completed and the open one is deleted; a killed process leaves hidden files, which the
next `FeatureWriter` deletes.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from eyrie_workers.features.shard_format import TokenRow
from eyrie_workers.features.writer import FeatureWriter

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
    copied: torch.cuda.Event | None
    """None where nothing is copied."""

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
        """This writer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Abandon the open shard, if there is one, and wait for the others."""
        if self._open is not None:
            self._open.put(_ABANDON)
        self._pool.shutdown(wait=True)

    def begin(self, number: int, rows: Sequence[TokenRow]) -> None:
        """Begin a shard."""
        assert self._open is None, "the previous shard is not ended"
        self._open = SimpleQueue()
        self._shards.append(self._pool.submit(self._write_shard, number, rows, self._open))

    def put(self, states: Mapping[str, Tensor], num_rows: int) -> None:
        """Write the next rows of the open shard: `blocks.encode_states` of them, on any device. Blocks while
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
                while isinstance(one := passes.get(), _Pass):
                    if one.copied is not None:
                        one.copied.synchronize()
                    shard.append(one.states, one.num_rows)
                    self._buffers.append(one.buffer)
                    self._free.release()
                if one == _ABANDON:
                    raise _Abandoned
                self._writer.commit(shard)
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = self._error or error
            self._free.release()  # a blocked `put` wakes, and raises


class _Abandoned(Exception):
    """The open shard is deleted: its remaining rows will not come."""
