"""The first rows of a data file: whether the regenerate stage would find conversations in it.

The stage quarantines single rows that it cannot use, with the reason; a file is refused here when it is of a kind that
the stage does not read, or when none of its first rows is a conversation. Parquet is checked by its first and last
bytes, since its rows need a library that the control plane does not load.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from eyrie_api.errors import NoUsableData
from eyrie_api.submission.file_reading import GIT_LFS, LFS_HINT
from eyrie_api.v1alpha1.data import DataSource

_PARQUET = b"PAR1"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SAMPLE_ROWS = 64
_SAMPLE_BYTES = 1 << 18
MAX_ROW_BYTES = 8 << 20
"""The longest line that the regenerate stage reads."""

_KEYS = {"messages": ("messages",), "sharegpt": ("conversations", "conversation"), "alpaca": ("instruction",)}
_FOREIGN = (
    (b"\x1f\x8b", "compressed with gzip", "gunzip it"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unzstd it"),
    (b"BZh", "compressed with bzip2", "bunzip2 it"),
    (b"PK\x03\x04", "a zip archive", "unzip it"),
    (b"ARROW1", "an Arrow file", "write it as parquet"),
    (b"\xff\xfe", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
)
_CONVERT = "convert it to JSON lines: jq -c '.[]' chats.json > chats.jsonl"
_ONE_PER_LINE = ("give one JSON object per line with `messages` (OpenAI), `conversations` (ShareGPT) or `instruction` "
                 "(Alpaca)")


def check_data_file(source: DataSource, path: Path) -> None:
    """Raises NoUsableData, naming the file and its first row's fault."""
    if path.is_dir():
        raise NoUsableData(f"data source {source.path!r} is a directory", "name its files, one source each")
    if not path.is_file():
        raise NoUsableData(f"data file {source.path!r}: no such file on the server",
                           "give the path of a JSONL or parquet file, a Hub data set id, or 'quickstart'")
    try:
        with path.open("rb") as file:
            start = file.read(len(GIT_LFS))
            size = file.seek(0, 2)
            file.seek(max(0, size - len(_PARQUET)))
            end = file.read()
            file.seek(0)
            _check_kind(source.path, path.suffix, size, start, end)
            rows = _first_rows(file) if path.suffix != ".parquet" else []
    except OSError as error:
        raise NoUsableData(f"data file {source.path!r} cannot be read: {error.strerror}",
                           "make it readable for the server") from None
    if path.suffix != ".parquet":
        _check_rows(source, rows)


def _first_rows(file: BinaryIO) -> list[bytes]:
    """Lines that are not blank, at most `_SAMPLE_ROWS` of the first `_SAMPLE_BYTES`."""
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
    if suffix == ".parquet":
        if not start.startswith(_PARQUET):
            raise NoUsableData(f"data file {name!r} is not a parquet file, which begins with PAR1",
                               "write it again, or name it .jsonl if it is JSON lines")
        if end != _PARQUET or size < 12:
            raise NoUsableData(f"data file {name!r} does not end as a parquet file does: it is truncated",
                               "copy or write it again")
        return
    if start.startswith(_PARQUET):
        raise NoUsableData(f"data file {name!r} is a parquet file of another name", "rename it to end in .parquet")
    for magic, kind, hint in _FOREIGN:
        if start.startswith(magic):
            raise NoUsableData(f"data file {name!r} is {kind}, which is not read", hint)
    if suffix == ".json":
        raise NoUsableData(f"data file {name!r} is a .json file, which cannot be read as a stream", _CONVERT)


def _check_rows(source: DataSource, rows: list[bytes]) -> None:
    """Refuse a file none of whose sampled rows is a conversation, with the fault of the first."""
    if not rows:
        raise NoUsableData(f"data file {source.path!r} holds no rows", "give a file with one conversation per line")
    faults = [_fault(row, source.format) for row in rows]
    if None in faults:
        return
    hint = _CONVERT if rows[0].removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"[") else _ONE_PER_LINE
    raise NoUsableData(f"data file {source.path!r}: none of its first {len(rows)} rows is a conversation; the first: "
                       f"{faults[0]}", hint)


def _fault(line: bytes, layout: str) -> str | None:
    """Why a line is no conversation, as far as its outer structure shows."""
    if len(line) > MAX_ROW_BYTES:
        return f"longer than {MAX_ROW_BYTES >> 20} MiB"
    try:
        row: Any = json.loads(line.removeprefix(_BYTE_ORDER_MARK).decode())
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
        return None if held.strip() else "the instruction is empty"
    if not isinstance(held, list) or not held:
        return "the conversation is empty or not a list"
    return None
