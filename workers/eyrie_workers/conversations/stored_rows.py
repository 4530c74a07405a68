"""The ledger of answers in a pod whose disk is smaller than they are (`placement.work.states: ranged`).

An answer is appended to a file on this machine, and handed over to the artifact store with its part:

    .rows.jsonl.<offset>             here: the lines from that offset on, until their part is in the store
    rows.jsonl.parts/<offset>        in the store: one part, whole lines (`catalog.ledger_part`)
    rows.jsonl                       in the store, at the end: the rows in order, as one object

A part is finished when it has 64 MiB (an eighth of the free disk, if that is less), or when the interval at which
unfinished work is uploaded has passed, and is uploaded meanwhile: this machine holds two of them at most. Another
pod finds the parts, and answers none of their rows again; a pod that keeps its disk also continues with the lines that
had not been handed over. The parts are those that `eyrie_pipelines.directory_sync` writes of a ledger that is a file,
so that a job goes on under either setting.

The rows are put in order from the parts through memory, twice: once for their digest, which the object carries, and
once to send them. The artifact is the same as that of a ledger in a file.
"""

import hashlib
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from eyrie_api.artifacts.store import ArtifactStore, StoreUnavailable, while_unavailable
from eyrie_api.full_disk import free_bytes
from eyrie_api.v1alpha1.stages import FileEntry
from eyrie_workers.catalog import LEDGER_PARTS, ROWS_FILE, SYNC_VARIABLE, ledger_part
from eyrie_workers.conversations.rows import AnsweredRow, RowLedger
from eyrie_workers.jsonl_ledger import Extent, decode_line
from eyrie_workers.left_in_store import RangeReader, hand_over, open_object, place_of, verify_stored

PART_BYTES = 64 * 2**20
_SHARE_OF_DISK = 8
"""Of what is free on this machine a part is an eighth, if that is less: two of them, and room for what else is written.
"""
_EVERY_S = 15.0


@contextmanager
def open_row_ledger(path: Path) -> Iterator[RowLedger]:
    """The ledger of answers at `path`: a file, or parts in the store that the directory's address names. Answers that
    are only here when the block ends are handed over. Raises ArtifactCorrupt, StoreUnavailable."""
    place = place_of(path.parent)
    if place is None:
        yield RowLedger(path)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="eyrie-answers") as pool:
        parts = LedgerParts(path.parent, *place, pool, every_s=float(os.environ.get(SYNC_VARIABLE, _EVERY_S)),
                            part_bytes=min(PART_BYTES, free_bytes(path.parent) // _SHARE_OF_DISK))
        try:
            yield StoredRowLedger(path, parts)
        except StoreUnavailable:  # it was waited for: this machine keeps what it has
            raise
        except BaseException:
            with suppress(StoreUnavailable):
                parts.flush()
            raise
        parts.flush()


class _Sending(NamedTuple):
    extent: Extent
    future: Future[None]


class LedgerParts:
    """The lines of a ledger, in parts. Offsets are those in all lines together."""

    def __init__(self, directory: Path, store: ArtifactStore, prefix: str, pool: ThreadPoolExecutor, *, every_s: float,
                 part_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Find the parts, and hand over what an earlier process has left here."""
        self._directory, self._store, self._prefix, self._pool = directory, store, prefix, pool
        self._every_s, self._part_bytes, self._clock = every_s, part_bytes, clock
        self._reader = RangeReader(store)
        self._parts: list[Extent] = []
        self._sending: _Sending | None = None
        self._tail = Extent(0, 0)
        self._due = clock() + every_s
        self._find_parts()
        self._recover()

    def append(self, line: bytes) -> None:
        """Add a line. Waits for the store where this machine would hold more than two parts."""
        with self._file(self._tail.offset).open("ab") as file:
            file.write(line)
        self._tail = Extent(self._tail.offset, self._tail.length + len(line))
        full = self._tail.length >= self._part_bytes
        if full or (self._clock() >= self._due and (self._sending is None or self._sending.future.done())):
            self._send()

    def read(self, extent: Extent) -> bytes:
        """Bytes of one line."""
        here = [self._tail.offset, *([] if self._sending is None else [self._sending.extent.offset])]
        begins = max((offset for offset in here if offset <= extent.offset), default=None)
        if begins is not None:
            try:
                with self._file(begins).open("rb") as file:
                    file.seek(extent.offset - begins)
                    return file.read(extent.length)
            except FileNotFoundError:  # race: handed over since
                return self._reader.read(self._key(begins), extent.offset - begins, extent.length)
        part = self._parts[bisect_right(self._parts, extent.offset, key=lambda one: one.offset) - 1]
        return self._reader.read(self._key(part.offset), extent.offset - part.offset, extent.length)

    def lines(self) -> Iterator[bytes]:
        """All lines that are in the store, in the order in which they were appended."""
        for part in self._parts:
            with open_object(self._reader, self._key(part.offset), part.length) as file:
                yield from file

    def flush(self) -> None:
        """Hand over every line, and wait until that is done."""
        if self._tail.length:
            self._send()
        self._received()

    def write_in_order(self, extents: Iterable[Extent], size_bytes: int, sha256: str) -> FileEntry:
        """Write the lines at `extents` as one object, `rows.jsonl`. Raises ArtifactCorrupt when they have another
        digest."""
        key = f"{self._prefix}/{ROWS_FILE}"
        while_unavailable(lambda: self._store.write_stream(key, map(self.read, extents), size_bytes=size_bytes,
                                                           sha256=sha256))
        verify_stored(self._store, key, size_bytes, lambda: len(self._store.read(key, start=size_bytes - 1)) == 1)
        return FileEntry(path=ROWS_FILE, size_bytes=size_bytes, sha256=sha256)

    def _find_parts(self) -> None:
        root = f"{self._prefix}/{LEDGER_PARTS}"
        for found in sorted(self._store.list(root), key=lambda one: one.key):
            offset = int(found.key.rpartition("/")[2])
            if offset != self._tail.offset:  # it follows a part that is lost: its rows are answered again
                self._store.delete(found.key)
                continue
            self._add(Extent(offset, found.size_bytes))

    def _recover(self) -> None:
        for path in sorted(self._directory.glob(f".{ROWS_FILE}.{'[0-9]' * 15}")):
            offset = int(path.name.rpartition(".")[2])
            with path.open("rb") as file:
                whole = sum(len(line) for line in file if line.endswith(b"\n"))
            if offset != self._tail.offset or whole == 0:  # in the store already, or of a ledger that is lost
                path.unlink()
                continue
            os.truncate(path, whole)
            hand_over(self._store, self._key(offset), path)
            self._add(Extent(offset, whole))

    def _send(self) -> None:
        self._received()
        extent, path = self._tail, self._file(self._tail.offset)
        sent = self._pool.submit(hand_over, self._store, self._key(extent.offset), path)
        self._sending = _Sending(extent, sent)
        self._tail = Extent(extent.offset + extent.length, 0)
        self._due = self._clock() + self._every_s

    def _received(self) -> None:
        if self._sending is not None:
            self._sending.future.result()
            self._parts.append(self._sending.extent)
            self._sending = None

    def _add(self, part: Extent) -> None:
        self._parts.append(part)
        self._tail = Extent(part.offset + part.length, 0)

    def _file(self, offset: int) -> Path:
        return self._directory / f".{ROWS_FILE}.{offset:015d}"

    def _key(self, offset: int) -> str:
        return f"{self._prefix}/{ledger_part(offset)}"


class StoredRowLedger(RowLedger):
    """`RowLedger` whose lines are in `LedgerParts`."""

    def __init__(self, path: Path, parts: LedgerParts) -> None:
        """Read the parts. Raises ArtifactCorrupt when a line cannot be read."""
        self._stored = parts
        super().__init__(path)

    def put_in_order(self, row_ids: Iterable[str],
                     keep: Callable[[AnsweredRow], bool] = lambda _: True) -> Iterator[AnsweredRow]:
        """See `RowLedger`. The parts stay until the stage's manifest is in the store."""
        self._stored.flush()  # a pod that is lost from here on loses no answer
        kept, seen, sha, size = list[Extent](), set[str](), hashlib.sha256(), 0
        for row_id in row_ids:
            if row_id not in self._by_id or row_id in seen:
                continue
            seen.add(row_id)
            extent = self._by_id[row_id]
            line = self._line(extent)
            row = decode_line(line, AnsweredRow)
            if keep(row):
                sha.update(line)
                size += len(line)
                kept.append(extent)
            yield row
        if kept:
            self.in_store = (self._stored.write_in_order(kept, size, f"sha256:{sha.hexdigest()}"),)

    def _prepare(self) -> None:
        """Nothing: a part has whole lines."""

    def _write(self, line: bytes) -> None:
        self._stored.append(line)

    def _line(self, extent: Extent) -> bytes:
        return self._stored.read(extent)

    def _lines(self, _offset: int) -> Iterator[bytes]:
        return self._stored.lines()
