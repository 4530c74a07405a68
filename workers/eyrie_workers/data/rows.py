"""A row to answer and an answered one, what identifies a set of them, and the ledger that collects them.

`rows.jsonl` is its own ledger. While the stage runs, each answer is one line, appended and flushed in the order
answers arrive; a resumed run truncates a torn last line and does not ask again for the rows that are there. At the end
the file is rewritten once in the order of the selection, so that the artifact does not depend on the order of arrival.

A row carries token ids, never text alone: tokenizing the text again does not always give the ids that the target
generated (`ids_exact` tells which they are), and the drafter is trained on ids.

`rows.meta.json` holds the digest of the target and of everything else that decides what an answer is. Rows of another
target or another sampling are refused, here and in capture.

In a pod whose disk is smaller than the answers (`placement.work.states: ranged`), an answer is appended to a file on
this machine, and handed over to the artifact store with its part:

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, JsonValue, ValidationError

from eyrie_api.artifacts import read_manifest
from eyrie_api.artifacts.store import ArtifactStore, StoreUnavailable, while_unavailable
from eyrie_api.contract.model import Digest, Frozen
from eyrie_api.contract.rules import first_problem
from eyrie_api.contract.stages import FileEntry
from eyrie_api.errors import ArtifactCorrupt, ArtifactMissing
from eyrie_api.full_disk import free_bytes
from eyrie_workers.catalog import LEDGER_PARTS, ROWS_FILE, SYNC_VARIABLE, ledger_part
from eyrie_workers.jsonl_ledger import Extent, JsonlLedger, decode_line, reason_of
from eyrie_workers.stored_files import RangeReader, hand_over, open_binary, open_object, place_of, verify_stored

ROWS = ROWS_FILE
META = "rows.meta.json"


class SelectedRow(Frozen):
    """One row to answer: a line of selection.jsonl."""

    id: str
    source: str
    source_name: str = ""
    line: int
    category: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt_ids: list[int]
    chat_template_kwargs: dict[str, Any] = {}
    max_new_tokens: int | None = None
    """Of the source; None: the spec's."""

    answer: dict[str, Any] | None = None
    """With `data.answered`: the last assistant turn, which `messages` are without."""


class RowSampling(Frozen):
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


class AnsweredRow(Frozen):
    """One prompt and the target's own answer to it."""

    id: str
    source: str
    """Path of the source."""

    source_name: str = ""
    """What `data.mix` calls the source."""

    line: int
    category: str
    prompt_ids: tuple[int, ...] = Field(min_length=1)
    answer_ids: tuple[int, ...] = Field(min_length=1)
    """Ends with an end-of-sequence token exactly when finish_reason is `stop`."""

    finish_reason: Literal["stop", "length"]
    text: str
    sampling: RowSampling
    seed: int
    ids_exact: bool
    """True when answer_ids are the ids the target generated, False when its text was tokenized again."""

    ids_differ: bool = False
    """Whether the ids tokenized again are known to differ from the target's."""

    reasoning: str = ""
    """Reasoning that the endpoint returned in a field of its own."""

    tool_calls: tuple[dict[str, JsonValue], ...] = ()
    """Tool calls as the endpoint parsed them from the answer."""

    turn: int = 0
    """With `turns: all`: index of the answered turn in its conversation."""

    key: str = ""
    """Digest of all that the answer is a function of (`regeneration.earlier_answers`). Empty in rows of earlier
    versions, which are not reused."""

    generated_by: str = ""
    """The earlier job that generated the answer; empty where it was generated here."""


class RowsMeta(Frozen):
    format_version: Literal[1] = 1
    target_digest: Digest
    answers_digest: Digest
    """Digest of data, exclusions, sampling and seed: all that decides which prompts are sent and what is answered."""


class RowLedger(JsonlLedger[AnsweredRow]):
    """Answered rows of one directory, by id. Holds positions in memory, not rows."""

    def __init__(self, path: Path) -> None:
        """Open or create the ledger. Raises ArtifactCorrupt when a complete line cannot be read."""
        self._by_id: dict[str, Extent] = {}
        self.in_store: tuple[FileEntry, ...] = ()
        """The finished file, where it is in an artifact store instead of at `path`."""

        # No fsync: a power failure costs some answers, which are requested again; an fsync per answer costs more.
        super().__init__(path, AnsweredRow, fsync=False,
                         hint="delete that line and run again: its prompt is answered again")

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def row(self, row_id: str) -> AnsweredRow:
        return self.read(self._by_id[row_id])

    def put_in_order(self, row_ids: Iterable[str],
                     keep: Callable[[AnsweredRow], bool] = lambda _: True) -> Iterator[AnsweredRow]:
        """Rewrite the file with the rows of `row_ids` that are answered and that `keep` accepts, in that order.

        Yields each answered row, kept or not. The new file replaces the old one when the iteration ends; a kill before
        that leaves the old file.
        """
        self._hand_over()
        kept: dict[str, Extent] = {}
        seen, sha, size = set[str](), hashlib.sha256(), 0
        for row_id in row_ids:
            if row_id not in self._by_id or row_id in seen:
                continue
            seen.add(row_id)
            line = self._line(self._by_id[row_id])
            row = decode_line(line, AnsweredRow)
            if keep(row):
                kept[row_id] = self._by_id[row_id]
                sha.update(line)
                size += len(line)
            yield row
        self._replace(kept, size, f"sha256:{sha.hexdigest()}")

    def _hand_over(self) -> None:
        """Before the rows are put in order: nothing to do for a file."""

    def _replace(self, kept: Mapping[str, Extent], _size: int, _sha256: str) -> None:
        part = self.path.with_name(f".{self.path.name}.part")
        placed: dict[str, Extent] = {}
        size = 0
        with self.path.open("rb") as old, part.open("wb") as new:
            for row_id, (offset, length) in kept.items():
                old.seek(offset)
                new.write(old.read(length))
                placed[row_id], size = Extent(size, length), size + length
            new.flush()
            os.fsync(new.fileno())
        os.replace(part, self.path)
        self._by_id, self._extents, self._size = placed, list(placed.values()), size

    def _add(self, entry: AnsweredRow, extent: Extent) -> None:
        super()._add(entry, extent)
        self._by_id[entry.id] = extent


def read_rows(path: Path) -> Iterator[AnsweredRow]:
    """Answered rows of a finished regenerate stage, in order. A file that is in a store has not been compared with its
    manifest before: it is here, at its end. Raises ArtifactMissing or ArtifactCorrupt."""
    hint, digest = "run regenerate again", None
    try:
        file = open_binary(path)
    except FileNotFoundError:
        raise ArtifactMissing(f"no {path}", "run regenerate first") from None
    if not path.is_file():
        digest = {entry.path: entry.sha256 for entry in read_manifest(path.parent).files}.get(path.name, "")
    with file:
        yield from (row for _, row in located_rows(file, path, digest, hint))


def located_rows(file: Iterable[bytes], path: Path, digest: str | None,
                 hint: str) -> Iterator[tuple[Extent, AnsweredRow]]:
    """All rows of an open file with their positions. At the end the file is compared with its digest, if one is given.
    Raises ArtifactCorrupt."""
    sha, offset = hashlib.sha256(), 0
    for number, line in enumerate(file, start=1):
        sha.update(line)
        try:
            yield Extent(offset, len(line)), decode_line(line, AnsweredRow)
        except ValueError as error:
            raise ArtifactCorrupt(f"{path}, line {number} is not an answered row: {reason_of(error)}", hint) from error
        offset += len(line)
    if digest is not None and f"sha256:{sha.hexdigest()}" != digest:
        raise ArtifactCorrupt(f"{path} differs from the digest in its manifest", hint)


def read_meta(directory: Path) -> RowsMeta | None:
    """The metadata of a directory's rows, None where the file is missing. Raises ArtifactCorrupt when unreadable."""
    path = directory / META
    try:
        return RowsMeta.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ArtifactCorrupt(f"{path} is not readable: {first_problem(error)}", "run regenerate again") from error


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
        for stored in sorted(store.list(f"{prefix}/{LEDGER_PARTS}"), key=lambda stored: stored.key):
            offset = int(stored.key.rpartition("/")[2])
            if offset != self._tail.offset:  # it follows a part that is lost: its rows are answered again
                store.delete(stored.key)
                continue
            self._add(Extent(offset, stored.size_bytes))
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
        local = [self._tail.offset, *([] if self._sending is None else [self._sending.extent.offset])]
        begins = max((offset for offset in local if offset <= extent.offset), default=None)
        if begins is not None:
            try:
                with self._file(begins).open("rb") as file:
                    file.seek(extent.offset - begins)
                    return file.read(extent.length)
            except FileNotFoundError:  # race: handed over since
                return self._reader.read(self._key(begins), extent.offset - begins, extent.length)
        part = self._parts[bisect_right(self._parts, extent.offset, key=lambda part: part.offset) - 1]
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
    def __init__(self, path: Path, parts: LedgerParts) -> None:
        """Read the parts. Raises ArtifactCorrupt when a line cannot be read."""
        self._stored = parts
        super().__init__(path)

    def _hand_over(self) -> None:
        self._stored.flush()  # a pod that is lost from here on loses no answer

    def _replace(self, kept: Mapping[str, Extent], size: int, sha256: str) -> None:
        # The parts stay until the stage's manifest is in the store.
        if kept:
            self.in_store = (self._stored.write_in_order(kept.values(), size, sha256),)

    def _prepare(self) -> None:
        """Nothing: a part has whole lines."""

    def _write(self, line: bytes) -> None:
        self._stored.append(line)

    def _line(self, extent: Extent) -> bytes:
        return self._stored.read(extent)

    def _lines(self, _offset: int) -> Iterator[bytes]:
        return self._stored.lines()
