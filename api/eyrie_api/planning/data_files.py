"""The first rows of a data file: how many conversations the regenerate stage would find in it.

The stage quarantines single rows that it cannot use, with the reason; a file is refused here when it is of a kind that
the stage does not read, or when it could use none of its first rows. Parquet is checked by its first and last bytes and
zstd by its first, since their rows need a library that the control plane does not load.
"""

import gzip
import io
import json
import os
import zlib
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path

from eyrie_api.chat_messages import Malformed
from eyrie_api.contract.data import DataSource
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.conversation import NO_ANSWER, NO_USER, Conversation, conversation, decode_row, detect_layout
from eyrie_api.data_files import (
    GZIP,
    PARQUET,
    SAVED_TO_DISK_HINT,
    SUFFIXES,
    ZSTD,
    array_rows,
    begins_array,
    data_files,
    is_pattern,
    row_lines,
    saved_to_disk,
)
from eyrie_api.errors import NoUsableData
from eyrie_api.file_rules import open_file
from eyrie_api.planning.target_files import GIT_LFS, LFS_HINT

_PARQUET = b"PAR1"
_SAMPLE_ROWS = 64
_SAMPLE_BYTES = 1 << 18
_CHECKED_FILES = 100

_KINDS = {PARQUET: (_PARQUET, "parquet"), GZIP: (b"\x1f\x8b", "gzip"), ZSTD: (b"\x28\xb5\x2f\xfd", "zstd")}
_FOREIGN = (
    (b"BZh", "compressed with bzip2", "bunzip2 it"),
    (b"PK\x03\x04", "a zip archive", "unzip it"),
    (b"ARROW1", "an Arrow file", "write it as parquet"),
    (b"\xff\xfe", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
)
_ONE_PER_LINE = ("give one JSON object per line with `messages` (OpenAI), `conversations` (ShareGPT), `instruction` "
                 "(Alpaca), `question` (GSM8K) or `prompt` (TRL)")
_HINTS = {NO_USER: "give conversations with the user's turns, which the target answers",
          NO_ANSWER: "omit data.answered, or give rows that end with the assistant's answer"}


def check_data_source(source: DataSource, answered: bool = False, rules: ReadRules | None = None) -> None:
    """Raises NoUsableData, naming the file and its first row's fault; InvalidInput for one that may not be read.

    answered   as `data.answered`: each row has to end with an answer
    """
    if saved_to_disk(source.path):
        raise NoUsableData(f"data source {source.path!r} is a directory of save_to_disk", SAVED_TO_DISK_HINT)
    files = data_files(source.path)
    if not files and os.path.isdir(os.path.expanduser(source.path)):
        raise NoUsableData(f"data source {source.path!r} is a directory without data files",
                           f"put files there whose names end in {', '.join(SUFFIXES)}")
    if not files and is_pattern(source.path):
        raise NoUsableData(f"data source {source.path!r} matches no file on the server", "correct the pattern")
    if not files:
        raise NoUsableData(f"data file {source.path!r}: no such file on the server",
                           "give the path of a JSONL or parquet file, a Hub data set id, or 'quickstart'")
    for file in files[:_CHECKED_FILES]:
        _check_file(source.path if len(files) == 1 else str(file), file, source, answered, rules)


def _check_file(name: str, path: Path, source: DataSource, answered: bool, rules: ReadRules | None) -> None:
    try:
        with open_file(path, rules, "data file") as file:
            start = file.read(len(GIT_LFS))
            size = file.seek(0, 2)
            file.seek(max(0, size - len(_PARQUET)))
            end = file.read()
            file.seek(0)
            _check_kind(name, path.suffix, size, start, end)
            # A file none of whose sampled rows can be used is refused with the fault of the first.
            rows = [] if path.suffix in (PARQUET, ZSTD) else first_rows(file, path.suffix)
        if path.suffix not in (PARQUET, ZSTD):
            if not rows:
                raise NoUsableData(f"data file {name!r} holds no rows", "give a file with one conversation per line")
            usable, fault = usable_rows(rows, source, answered)
            if not usable:
                raise NoUsableData(
                    f"data file {name!r}: none of its first {len(rows)} rows can be used; the first: {fault}",
                    _HINTS.get(fault, _ONE_PER_LINE))
    except OSError as error:
        raise NoUsableData(f"data file {name!r} cannot be read: {error.strerror or error}",
                           "make it readable for the server, or write it again") from None
    except (EOFError, ValueError, zlib.error) as error:
        raise NoUsableData(f"data file {name!r}: {error}", "write it again") from None


def usable_rows(rows: list[bytes], source: DataSource, answered: bool) -> tuple[list[Conversation], str]:
    """The conversations in rows of a source, as the regenerate stage reads them, and the fault of the first of the
    other rows; empty where there is none."""
    layout: str | None = None if source.format == "auto" else source.format
    usable: list[Conversation] = []
    first = ""
    for number, row in enumerate(rows, start=1):
        value = decode_row(row)
        layout = layout or detect_layout(value)
        try:
            read = conversation(value, source.path, number, layout)
            if answered and read.answer is None:
                raise Malformed(NO_ANSWER)
            usable.append(read)
        except Malformed as fault:
            first = first or str(fault)
    return usable, first


def _unpacked(packed: io.BufferedReader, suffix: str) -> AbstractContextManager[io.BufferedIOBase, None]:
    return gzip.open(packed) if suffix == GZIP else nullcontext(packed)


def first_rows(packed: io.BufferedReader, suffix: str, most: int = _SAMPLE_ROWS) -> list[bytes]:
    """At most `most` rows of the file's beginning: lines that are not blank, or an array's elements. Raises OSError,
    EOFError and ValueError for what cannot be unpacked or is no array."""
    with _unpacked(packed, suffix) as file:
        start = file.read(_SAMPLE_BYTES)
        file.seek(0)
        if begins_array(start):
            return [json.dumps(row).encode() for row in islice(array_rows(file), most)]
        rows: list[bytes] = []
        for line in row_lines(file):
            if line.strip():
                rows.append(line)
            if len(rows) == most or file.tell() >= _SAMPLE_BYTES:
                break
        return rows


def _check_kind(name: str, suffix: str, size: int, start: bytes, end: bytes) -> None:
    if size == 0:
        raise NoUsableData(f"data file {name!r} is empty", "give a file with one conversation per line")
    if start == GIT_LFS:
        raise NoUsableData(f"data file {name!r} is a git-LFS pointer, not the file itself", LFS_HINT)
    for ending, (magic, kind) in _KINDS.items():
        if suffix == ending and not start.startswith(magic):
            raise NoUsableData(f"data file {name!r} is no {kind} file, as its name says",
                               "write it again, or name it .jsonl if it is JSON lines")
        if suffix != ending and start.startswith(magic):
            raise NoUsableData(f"data file {name!r} is a {kind} file of another name", f"rename it to end in {ending}")
    if suffix == PARQUET and (end != _PARQUET or size < 12):
        raise NoUsableData(f"data file {name!r} does not end as a parquet file does: it is truncated",
                           "copy or write it again")
    for magic, kind, hint in _FOREIGN:
        if start.startswith(magic):
            raise NoUsableData(f"data file {name!r} is {kind}, which is not read", hint)
