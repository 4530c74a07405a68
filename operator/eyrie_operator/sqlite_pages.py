"""Pages of an SQLite database that neither its file nor its write-ahead log has.

SQLite takes the number of pages from the log. Where the file ends before that, and the log does not have the page, it
reads zeros: `quick_check` finds nothing wrong with a long text whose end is lost. Formats: sqlite.org/fileformat2.html,
sections 1.3 (header), 1.4 (the page at the lock byte, which is never written) and 4 (the log).
"""

import struct
from pathlib import Path

_LOCK_BYTE = 2**30
_FRAME = struct.Struct(">II8s8x")
"""Of a frame: page, pages of the database after a commit (0 within a transaction), salt."""


def lost_pages(path: Path) -> int:
    """How many pages are lost; 0 for a file that is no database, which SQLite reports itself. Nothing may write to it.
    Raises OSError."""
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        return 0
    page_size = int.from_bytes(header[16:18]) or 1
    page_size = 65_536 if page_size == 1 else page_size
    logged, pages = _log(path.with_name(f"{path.name}-wal"), page_size)
    pages = pages or int.from_bytes(header[28:32])
    in_file = path.stat().st_size // page_size
    return len(set(range(in_file + 1, pages + 1)) - logged - {_LOCK_BYTE // page_size + 1})


def _log(path: Path, page_size: int) -> tuple[set[int], int]:
    """Pages that committed frames of the log have, and pages of the database after the last commit (0: none)."""
    committed, pending, pages = set[int](), set[int](), 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return committed, pages
    with file:
        salt = file.read(32)[16:24]
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            page, after, frame_salt = _FRAME.unpack(frame)
            if frame_salt != salt or len(file.read(page_size)) < page_size:
                break  # of an earlier log in the same file, or cut off
            pending.add(page)
            if after:
                committed, pending, pages = committed | pending, set(), after
    return committed, pages
