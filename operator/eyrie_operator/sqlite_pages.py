"""Which pages and commits of a SQLite database are lost, read from its file and its write-ahead log.

SQLite takes the number of pages from its log. Where the file ends before that, and the log does not have the page, it
reads zeros: `quick_check` finds nothing wrong with a long text whose end is lost. `lost_pages` counts such pages.

Of a log with a damaged frame SQLite uses the frames before it and ignores the rest without a word: commits that were
confirmed are gone, and where a checkpoint had copied a part of them into the file, old and new pages are mixed.
`ignored_commits` counts the commits that are ignored. The end of a log is none: frames without a commit (a transaction
that was cut off or rolled back), and those of an earlier log in the same file, which have another salt.

Formats: sqlite.org/fileformat2.html, sections 1.3 (header), 1.4 (the page at the lock byte, which is never written) and
4 (the log). Nothing here opens a connection: closing the last one writes the log into the file.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

_LOCK_BYTE = 2**30
_HEADER_BYTES = 32
_MAGICS = {0x377F0682: "<", 0x377F0683: ">"}
"""Of a log, and the byte order of the words that its checksums add up."""

_FRAME = struct.Struct(">II8sII")
"""Of a frame: page, pages of the database after a commit (0 within a transaction), salt, checksum."""


@dataclass(frozen=True)
class Log:
    """What SQLite finds in a log."""

    pages: frozenset[int] = frozenset()
    """That committed frames have."""

    size_pages: int = 0
    """Of the database after the last commit; 0 without one."""

    ignored_commits: int = 0
    """After the first damaged frame, or in the whole log where its header is damaged."""


def lost_pages(path: Path) -> int:
    """How many pages are lost; 0 for a file that is no database, which SQLite reports itself. Nothing may write to it.
    Raises OSError."""
    page_size, pages = _size_of(path)
    if page_size == 0:
        return 0
    log = read_log(_log_of(path), page_size)
    in_file = path.stat().st_size // page_size
    wanted = set(range(in_file + 1, (log.size_pages or pages) + 1))
    return len(wanted - log.pages - {_LOCK_BYTE // page_size + 1})


def ignored_commits(path: Path) -> int:
    """How many commits in the log of a database SQLite ignores, since the log is damaged. Raises OSError."""
    page_size, _pages = _size_of(path)
    return read_log(_log_of(path), page_size).ignored_commits if page_size else 0


def read_log(path: Path, page_size: int) -> Log:
    """The log in a file; an empty one where there is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Log()
    header, frame_bytes = data[:_HEADER_BYTES], _FRAME.size + page_size
    order = _MAGICS.get(int.from_bytes(header[:4]))
    is_whole = order is not None and _checksum(header[:24], (0, 0), order) == struct.unpack(">II", header[24:])
    # With a damaged header nothing is used. The frames that belong together are those with the salt of the first.
    salt = header[16:24] if is_whole else data[_HEADER_BYTES + 8:_HEADER_BYTES + 16]
    sums = struct.unpack(">II", header[24:]) if is_whole else (0, 0)
    pages, pending, size_pages, ignored = set[int](), set[int](), 0, 0
    for start in range(_HEADER_BYTES, len(data) - frame_bytes + 1, frame_bytes):
        page, after, frame_salt, *stored = _FRAME.unpack_from(data, start)
        if is_whole and order is not None:
            sums = _checksum(data[start:start + 8], sums, order)
            sums = _checksum(data[start + _FRAME.size:start + frame_bytes], sums, order)
            is_whole = (frame_salt, list(sums)) == (salt, stored)
        if is_whole:
            pending.add(page)
            if after:
                pages, pending, size_pages = pages | pending, set(), after
        elif (frame_salt == salt or list(sums) == stored) and after:
            ignored += 1  # its own salt may be what is damaged: the checksum does not cover it
    return Log(frozenset(pages), size_pages, ignored)


def _checksum(data: bytes, sums: tuple[int, ...], order: str) -> tuple[int, ...]:
    """Section 4.2: over pairs of words, continued from frame to frame."""
    first, second = sums
    words = iter(struct.unpack(f"{order}{len(data) // 4}I", data))
    for one, two in zip(words, words, strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + two + first) & 0xFFFFFFFF
    return first, second


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _size_of(path: Path) -> tuple[int, int]:
    """Size of a page in bytes and pages by the header; 0 and 0 for a file that is no database."""
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        return 0, 0
    page_size = int.from_bytes(header[16:18]) or 1
    return 65_536 if page_size == 1 else page_size, int.from_bytes(header[28:32])
