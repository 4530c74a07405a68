"""The first rows of a data file: whether the regenerate stage would find conversations in it.

The stage quarantines single rows that it cannot use, with the reason; a file is refused here when it is of a kind that
the stage does not read, or when none of its first rows is a conversation with a user turn and, for `data.answered`, an
answer. Parquet is checked by its first and last
bytes and zstd by its first, since their rows need a library that the control plane does not load.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from eyrie_api.contract.data import DataSource
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.data_files import (
    BYTE_ORDER_MARK,
    CALL_TURNS,
    GZIP,
    MAX_ROW_BYTES,
    PARQUET,
    ROLES,
    SAVED_TO_DISK_HINT,
    SUFFIXES,
    ZSTD,
    array_rows,
    begins_array,
    data_files,
    is_pattern,
    saved_to_disk,
)
from eyrie_api.errors import NoUsableData
from eyrie_api.file_rules import open_file
from eyrie_api.planning.target_files import GIT_LFS, LFS_HINT

_PARQUET = b"PAR1"
_SAMPLE_ROWS = 64
_SAMPLE_BYTES = 1 << 18
_CHECKED_FILES = 100

_KEYS = {"messages": ("messages",), "sharegpt": ("conversations", "conversation"), "alpaca": ("instruction",)}
_KINDS = {PARQUET: (_PARQUET, "parquet"), GZIP: (b"\x1f\x8b", "gzip"), ZSTD: (b"\x28\xb5\x2f\xfd", "zstd")}
_FOREIGN = (
    (b"BZh", "compressed with bzip2", "bunzip2 it"),
    (b"PK\x03\x04", "a zip archive", "unzip it"),
    (b"ARROW1", "an Arrow file", "write it as parquet"),
    (b"\xff\xfe", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
)
_ONE_PER_LINE = ("give one JSON object per line with `messages` (OpenAI), `conversations` (ShareGPT) or `instruction` "
                 "(Alpaca)")
_NO_USER = "it has no user turn"
_NO_ANSWER = "its last turn is not an answer, and data.answered is true"
_HINTS = {_NO_USER: "give conversations with the user's turns, which the target answers",
          _NO_ANSWER: "omit data.answered, or give rows that end with the assistant's answer"}


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
        _check_file(source.path if len(files) == 1 else str(file), file, source.format, answered, rules)


def _check_file(name: str, path: Path, layout: str, answered: bool, rules: ReadRules | None) -> None:
    try:
        with open_file(path, rules, "data file") as file:
            start = file.read(len(GIT_LFS))
            size = file.seek(0, 2)
            file.seek(max(0, size - len(_PARQUET)))
            end = file.read()
            file.seek(0)
            _check_kind(name, path.suffix, size, start, end)
            # A file none of whose sampled rows can be used is refused with the fault of the first.
            rows = [] if path.suffix in (PARQUET, ZSTD) else _first_rows(file, path.suffix)
        if path.suffix not in (PARQUET, ZSTD):
            if not rows:
                raise NoUsableData(f"data file {name!r} holds no rows", "give a file with one conversation per line")
            faults = [_fault(row, layout, answered) for row in rows]
            if None not in faults:
                raise NoUsableData(
                    f"data file {name!r}: none of its first {len(rows)} rows can be used; the first: {faults[0]}",
                    _HINTS.get(faults[0] or "", _ONE_PER_LINE))
    except OSError as error:
        raise NoUsableData(f"data file {name!r} cannot be read: {error.strerror or error}",
                           "make it readable for the server, or write it again") from None
    except (EOFError, ValueError, zlib.error) as error:
        raise NoUsableData(f"data file {name!r}: {error}", "write it again") from None


def _first_rows(packed: io.BufferedReader, suffix: str) -> list[bytes]:
    """Rows of the file's beginning, at most `_SAMPLE_ROWS`: lines that are not blank, or an array's elements.

    Raises OSError, EOFError and ValueError for what cannot be unpacked or is no array.
    """
    with gzip.open(packed) if suffix == GZIP else nullcontext(packed) as file:
        start = file.read(_SAMPLE_BYTES)
        file.seek(0)
        if begins_array(start):
            return [json.dumps(row).encode() for row in islice(array_rows(file), _SAMPLE_ROWS)]
        rows: list[bytes] = []
        while len(rows) < _SAMPLE_ROWS and file.tell() < _SAMPLE_BYTES and (line := file.readline(MAX_ROW_BYTES + 1)):
            if line.strip():
                rows.append(line)
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


def _fault(line: bytes, layout: str, answered: bool) -> str | None:
    """Why a line is no conversation, or has no answer where one is needed, as far as its outer structure shows."""
    if len(line) > MAX_ROW_BYTES:
        return f"longer than {MAX_ROW_BYTES >> 20} MiB"
    try:
        row: Any = json.loads(line.removeprefix(BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):
        return "not JSON"
    if not isinstance(row, Mapping):
        return f"a JSON {type(row).__name__}, not an object"
    keys = [key for name in ([layout] if layout in _KEYS else _KEYS) for key in _KEYS[name]]
    held = next((row[key] for key in keys if key in row), None)
    if held is None:
        fields = ", ".join(sorted(map(str, row))[:6]) or "no fields"
        return f"no {' or '.join(f'`{key}`' for key in keys)} in the row, which has {fields}"
    if isinstance(held, str) and "instruction" in row:
        if not held.strip():
            return "the instruction is empty"
        return _NO_ANSWER if answered and not row.get("output") else None
    if not isinstance(held, list) or not held:
        return "the conversation is empty or not a list"
    turns = [turn if isinstance(turn, Mapping) else {} for turn in held]
    if not any(_role(turn) == "user" for turn in turns):
        return _NO_USER
    last_answers = _role(turns[-1]) == "assistant" and any(turns[-1].get(key) for key in (
        "content", "value", "tool_calls", "function_call", "function_calls"))
    return _NO_ANSWER if answered and not last_answers else None


def _role(turn: Mapping[str, Any]) -> str | None:
    name = str(turn.get("role", turn.get("from")))
    return "assistant" if name in CALL_TURNS else ROLES.get(name)
