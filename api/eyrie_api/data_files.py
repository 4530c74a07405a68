"""The files that the path of a data source names, the elements of a JSON array that is too large to load, and the
names of roles in data sets.

A path names one file, whatever its name; a directory, that is the files in it with a suffix of `SUFFIXES`, those of
directories below left out; or, by a pattern as its last part, files of one directory (`chats/*.jsonl.gz`). Names that
begin with a dot are no data, unless the pattern does: archives from a Mac hold `._NAME` next to each file. What a file
holds is decided by its content, except parquet and compression, which its name decides. No directory tree is walked,
since users of the REST API give these paths.
"""

import errno
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path, PurePath
from typing import IO, cast

from eyrie_api import client_left

S3, HTTPS = "s3://", "https://"
"""How the paths of files that are elsewhere begin."""

PARQUET, GZIP, ZSTD = ".parquet", ".gz", ".zst"
SUFFIXES = (*(f"{form}{packed}" for form in (".jsonl", ".json") for packed in ("", GZIP, ZSTD)), PARQUET)
MAX_ROW_BYTES = 8 << 20
"""The longest row: 8 MiB of conversation are some two million tokens, which indicates a broken file."""

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool",
    "function": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "environment": "tool", "ipython": "tool",
}
"""Role names in data sets and their normal form."""

CALL_TURNS = ("function_call", "tool_call")
"""Role names of an assistant turn that is a call, in some ShareGPT files."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OF_THE_KERNEL = ("/proc", "/sys")
_SPACE = " \t\r\n"
_PIECE = 1 << 16
_LONGEST_LINE = 16
"""Of the longest row: a longer line is one faulty row, up to here."""



def is_remote(path: str) -> bool:
    """Whether a path is a URL, which stages read where they run."""
    return path.startswith((S3, HTTPS))


def is_pattern(path: str) -> bool:
    """Whether a path may name several files by `*`, `?` or `[...]` in its last part."""
    return any(character in PurePath(path).name for character in "*?[")


def data_files(path: str) -> list[Path]:
    """The files that a path names, in the order of their names; empty where there is none, or none may be listed."""
    try:
        location = Path(path).expanduser()
        if location.is_file():
            return [location]
        if location.is_dir():
            files = [file for file in location.iterdir() if names_data(file.name)]
        else:
            files = [file for file in location.parent.iterdir() if names_data(file.name, location.name)] \
                if is_pattern(path) else []
        return sorted(filter(_is_file, files))
    except (OSError, ValueError, RuntimeError):  # a NUL in the path; the home of an unknown user
        return []


def _is_file(path: Path) -> bool:
    client_left.check()
    return path.is_file()


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file of stored bytes. Raises OSError, for what is none too: a FIFO or a device, of which reading may wait
    for ever, whatever the path named a moment ago; a file that the kernel makes up (/proc/kmsg waits)."""
    client_left.check()
    # Without O_NONBLOCK opening a FIFO waits for its other end.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or any(map(path.resolve().is_relative_to, _OF_THE_KERNEL)):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def names_data(name: str, pattern: str = "") -> bool:
    """Whether a file of a directory is data by its name."""
    if name.startswith(".") and not pattern.startswith("."):
        return False
    return fnmatchcase(name, pattern) if pattern else name.endswith(SUFFIXES)


SAVED_TO_DISK_HINT = ("write its rows as parquet: datasets.load_from_disk(DIR).to_parquet(FILE), for each split of a "
                      "DatasetDict")


def saved_to_disk(path: str) -> bool:
    """Whether it is a data set as `save_to_disk` of the datasets library writes it: Arrow files, which are not read."""
    try:
        directory = Path(path).expanduser()
        return (directory / "dataset_dict.json").is_file() or (
            (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file())
    except (OSError, ValueError, RuntimeError):  # as in `data_files`
        return False


class RangedFile(io.RawIOBase):
    """A file elsewhere, of which `read(start, length)` returns bytes, at most `length` of them."""

    def __init__(self, read: Callable[[int, int], bytes], size_bytes: int) -> None:
        self._read, self._size, self._position = read, size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = max(0, min(len(buffer), self._size - self._position))
        data = self._read(self._position, wanted) if wanted else b""
        buffer[:len(data)] = data
        self._position += len(data)
        return len(data)


def begins_array(start: bytes) -> bool:
    """Whether these first bytes of a file are a JSON array's, rather than rows of one line each."""
    return start.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def row_lines(file: io.BufferedIOBase | IO[bytes], max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[bytes]:
    """The lines of a file with a row on each; of one longer than a row may be, its first `max_row_bytes` + 1 bytes.
    Raises ValueError, saying where, for as much white space in a row, or a line of `_LONGEST_LINE` rows: a gigabyte of
    either fits a megabyte of gzip."""
    blank = 0
    # readline, not splitlines: it does not split a row at a U+2028 inside one of its strings.
    for number in count(1):
        line = piece = file.readline(max_row_bytes + 1)
        length = len(line)
        while length > max_row_bytes and piece and not piece.endswith(b"\n"):
            piece = file.readline(max_row_bytes)
            length += len(piece)
            if length > _LONGEST_LINE * max_row_bytes:
                raise ValueError(f"line {number} has more than {_LONGEST_LINE * max_row_bytes} bytes")
        blank = blank + length if line.isspace() else 0
        if blank > max_row_bytes:
            raise ValueError(f"more than {max_row_bytes} bytes of white space up to line {number}")
        if not line:
            return
        client_left.check()
        yield line


def array_rows(file: io.BufferedIOBase, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[object]:
    """The elements of the JSON array in a file, decoded one after the other. Memory is bounded by the longest element.
    Raises ValueError, saying after which element, where it is not JSON or ends too early, and for a longer element, or
    as much white space."""
    text = io.TextIOWrapper(cast(IO[bytes], file), encoding="utf-8-sig")
    buffer, expected, number, blank = "", "[", 0, 0
    while True:
        blank += len(buffer)
        buffer = buffer.lstrip(_SPACE)
        blank -= len(buffer)
        if not buffer:
            if blank > max_row_bytes:  # a gigabyte of it fits a megabyte of gzip
                raise ValueError(f"more than {max_row_bytes} bytes of white space after element {number}")
            client_left.check()
            buffer = text.read(_PIECE)
            if not buffer:
                raise ValueError(f"the array ends early, after {number} elements")
        elif expected == "[":
            buffer, expected = buffer[1:], "first"
        elif buffer[0] == "]" and expected in ("first", ","):
            return
        elif expected == ",":
            if buffer[0] != ",":
                raise ValueError(f"no comma after element {number}")
            buffer, expected = buffer[1:], "element"
        else:
            buffer, value = _element(text, buffer, number + 1, max_row_bytes)
            expected, number, blank = ",", number + 1, 0
            yield value


def _element(text: io.TextIOWrapper, buffer: str, number: int, max_row_bytes: int) -> tuple[str, object]:
    """What follows the element that `buffer` begins with, reading on as far as needed, and its value."""
    decode = json.JSONDecoder().raw_decode
    while True:
        value, end, fault = None, len(buffer), ""
        try:
            value, end = decode(buffer)
        except json.JSONDecodeError as error:
            fault = error.msg
        except RecursionError:
            raise ValueError(f"element {number} is nested too deep") from None
        if end < len(buffer):
            return buffer[end:], value
        # An element that reaches the end of what was read may go on.
        client_left.check()
        more = text.read(max(_PIECE, len(buffer))) if len(buffer) <= max_row_bytes else ""
        if not more and fault:
            raise ValueError(f"element {number} is not JSON ({fault}), or longer than {max_row_bytes} bytes")
        if not more:
            return "", value
        buffer += more
