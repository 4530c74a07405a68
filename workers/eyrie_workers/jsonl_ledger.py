"""An append-only JSONL file of finished work: a killed program loses at most the entry it was writing.

One entry is one line, whose last member is a checksum of the bytes before it: a flipped bit in a number would be valid
JSON. A kill in the middle of a write leaves a last line without its newline; opening the ledger truncates that line. A
complete line that does not parse, or whose checksum differs, is an error: it is not what this module wrote.
A line without a checksum is read as it is.

An optional header line `{"belongs_to": <digest>}` names the spec that the entries belong to. A file with another header
is renamed to `<name>.stale` and a new one is begun, so that entries of two specs never mix.

One process writes a ledger at a time; the lock of the stage's directory ensures it.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from eyrie_api.contract.model import Frozen
from eyrie_api.contract.rules import first_problem
from eyrie_api.errors import ArtifactCorrupt

EntryT = TypeVar("EntryT", bound=Frozen)

_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"}\s*$')


class Extent(NamedTuple):
    """The bytes of one line, newline included."""

    offset: int
    length: int


def decode_line(line: bytes, entry_type: type[EntryT]) -> EntryT:
    """The entry of a line. Raises ValueError for another checksum or another type (pydantic's ValidationError)."""
    checksum = _CHECKSUM.search(line)
    if checksum is None:
        return entry_type.model_validate_json(line)
    body = line[:checksum.start()]
    if zlib.crc32(body) != int(checksum[1], 16):
        raise ValueError("its checksum differs: the file was damaged after it was written")
    return entry_type.model_validate_json(body + b"}")


def reason_of(error: ValueError) -> str:
    """What is wrong with a line, in one sentence."""
    return first_problem(error) if isinstance(error, ValidationError) else str(error)


class JsonlLedger(Generic[EntryT]):
    """Entries of one type in the order they were appended. Positions are kept in memory, entries are not."""

    def __init__(self, path: Path, entry_type: type[EntryT], belongs_to: str | None = None, *, fsync: bool = True,
                 hint: str = "delete the file and run again") -> None:
        """Open the ledger at `path`, or create it.

        belongs_to  digest in the header line; None for a file without a header
        fsync       whether an appended entry survives a power failure, or only the end of the process
        hint        of the error for a line that cannot be read

        Raises ArtifactCorrupt when a complete line is not an entry.
        """
        self.path = path
        self.set_aside: Path | None = None  # where the file of another spec was moved
        self._entry_type = entry_type
        self._fsync = fsync
        self._extents: list[Extent] = []
        self._size = 0
        self._prepare()
        if belongs_to is not None:
            header = json.dumps({"belongs_to": belongs_to})
            first = next(self._lines(0), None)
            if first is not None and first.decode(errors="replace").rstrip("\n") != header:
                self.set_aside = self.path.with_name(f"{self.path.name}.stale")
                os.replace(self.path, self.set_aside)
                first = None
            if first is None:
                self.path.write_text(header + "\n")
            self._size = len(header) + 1
        for number, line in enumerate(self._lines(self._size), start=1 if belongs_to is None else 2):
            try:
                entry = decode_line(line, entry_type)
            except ValueError as error:
                raise ArtifactCorrupt(f"{path}, line {number} is not an entry: {reason_of(error)}", hint) from error
            self._add(entry, Extent(self._size, len(line)))

    def __len__(self) -> int:
        return len(self._extents)

    @property
    def entries(self) -> list[EntryT]:
        return [self.read(extent) for extent in self._extents]

    def append(self, entry: EntryT) -> None:
        """Write one entry. When this returns it survives the end of the process, and with `fsync` of the machine."""
        # The entry's JSON, and the CRC-32 of its bytes but the closing brace as last member.
        body = entry.model_dump_json().encode()[:-1]
        line = b'%s,"crc32":"%08x"}\n' % (body, zlib.crc32(body))
        self._write(line)
        self._add(entry, Extent(self._size, len(line)))

    def read(self, extent: Extent) -> EntryT:
        return decode_line(self._line(extent), self._entry_type)

    def _add(self, entry: EntryT, extent: Extent) -> None:
        """Register one entry, just read or just written. A subclass overrides this to index entries."""
        self._extents.append(extent)
        self._size = extent.offset + extent.length

    def _prepare(self) -> None:
        """Create the file, or truncate a torn last line. A subclass that keeps its lines elsewhere overrides this and
        the next three."""
        self.path.touch()
        size = 0
        for line in self._lines(0):
            # Iterating a binary file splits at \n alone; str.splitlines() would also split at a U+2028 inside a string.
            size += len(line) if line.endswith(b"\n") else 0
        os.truncate(self.path, size)

    def _write(self, line: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(line)
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())

    def _line(self, extent: Extent) -> bytes:
        with self.path.open("rb") as file:
            file.seek(extent.offset)
            return file.read(extent.length)

    def _lines(self, offset: int) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            file.seek(offset)
            yield from file
