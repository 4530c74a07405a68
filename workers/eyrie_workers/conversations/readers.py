"""Reads conversations from files, Hub data sets and the shipped quickstart corpus, row by row with line numbers.

Files are read as streams, compressed ones too: memory is bounded by the longest row, whose size is limited. A file that
begins with `[` is an array of rows, any other has a row on each line. A row that cannot be read or
breaks a rule becomes a `QuarantinedRow` at its position in the stream; the caller counts and keeps it, and no reader
drops a row. A source that cannot be opened is an error before any work, because a job that silently trains on half its
data is worse than one that stops.

`quickstart` is `conversations.jsonl.gz` of eyrie_workers.quickstart, a finite corpus in fixed order.

Rows are not shuffled: they are read in file order, and the files of a directory or pattern in the order of their names,
so a sorted file should be shuffled beforehand.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import resources
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from eyrie_api.data_files import (
    BYTE_ORDER_MARK,
    GZIP,
    MAX_ROW_BYTES,
    PARQUET,
    ZSTD,
    array_rows,
    begins_array,
    data_files,
    is_pattern,
    is_remote,
)
from eyrie_api.errors import InvalidInput, Transient
from eyrie_api.v1alpha1.data import DataSource
from eyrie_api.v1alpha1.reports import QuarantinedRow
from eyrie_workers.conversations.conversation import Conversation, Malformed, conversation, detect_layout
from eyrie_workers.conversations.remote_files import RemoteFile, remote_files, translating_errors

_PEEKED_BYTES = 1 << 12


class _Undecodable:
    """A row that could not be decoded."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def read_conversations(source: DataSource) -> Iterator[Conversation | QuarantinedRow]:
    """Conversations and unreadable rows of one source, in order.

    Raises InvalidInput when the source cannot be opened, Transient when the Hub is unreachable.
    """
    layout: str | None = None if source.format == "auto" else source.format
    for line, (where, value) in enumerate(islice(_rows(source), source.max_rows), start=1):
        if isinstance(value, _Undecodable):
            yield QuarantinedRow(source=source.path, line=line, reason=value.reason + where)
            continue
        layout = layout or detect_layout(value)
        try:
            if layout is None:
                raise Malformed("neither `messages` nor `conversations` nor `instruction` in the row")
            yield conversation(value, source.path, line, layout)
        except Malformed as error:
            yield QuarantinedRow(source=source.path, line=line, reason=str(error) + where)


def check_source(source: DataSource) -> None:
    """Refuse a source that cannot be opened, before any work is done. Raises InvalidInput."""
    if source.path == "quickstart":
        return
    if is_remote(source.path):
        remote_files(source.path)
        return
    if data_files(source.path):
        return
    if Path(source.path).is_dir():
        raise InvalidInput(f"data source {source.path!r} is a directory without data files",
                           "put .jsonl or .parquet files there")
    if is_pattern(source.path):
        raise InvalidInput(f"data source {source.path!r} matches no file", "correct the pattern")
    if not _looks_like_hub_id(source.path):
        raise InvalidInput(f"data source {source.path!r} does not exist",
                           "give a JSONL or parquet file, a directory or pattern, an s3:// or https:// URL, a Hub "
                           "data set id (org/name), or `quickstart`")
    if find_spec("datasets") is None:
        raise InvalidInput(f"data source {source.path!r} is not a file here, and reading it from the Hub needs the "
                           "`datasets` package, which is not installed",
                           "pip install datasets, or download the data set and give its parquet or JSONL file")


def _looks_like_hub_id(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith(("/", ".", "~")) and not path.endswith((".jsonl", ".parquet"))


def _rows(source: DataSource) -> Iterator[tuple[str, Any]]:
    """Rows, each with what its reason needs to name its place: the file and its line, where there are several files."""
    check_source(source)
    if source.path == "quickstart":
        return (("", row) for row in _quickstart_rows())
    files: list[Path] | list[RemoteFile] = (
        remote_files(source.path) if is_remote(source.path) else data_files(source.path))
    if not files:
        return (("", row) for row in _hub_rows(source))
    if len(files) == 1:
        return (("", row) for row in _file_rows(files[0]))
    return ((f" ({file.name} row {number})", row)
            for file in files for number, row in enumerate(_file_rows(file), start=1))


def _file_rows(file: Path | RemoteFile) -> Iterator[Any]:
    with translating_errors(file.url) if isinstance(file, RemoteFile) else nullcontext():
        try:
            if file.suffix == PARQUET:
                yield from _parquet_rows(file)
                return
            with opened(file) as rows:
                if begins_array(rows.peek(_PEEKED_BYTES)):
                    yield from array_rows(rows, MAX_ROW_BYTES)
                else:
                    yield from _lines(rows)
        except (EOFError, ValueError, zlib.error, gzip.BadGzipFile) as error:
            raise _unreadable(file, error) from error
        except OSError as error:
            if isinstance(file, RemoteFile):
                raise
            raise _unreadable(file, error) from error


def _unreadable(file: Path | RemoteFile, error: Exception) -> InvalidInput:
    return InvalidInput(f"data source {file} cannot be read: {error}", "copy or write it again")


def opened(file: Path | RemoteFile) -> io.BufferedReader:
    """The file, unpacked. `peek` reads at least what its first read returns."""
    packed = file.open() if isinstance(file, RemoteFile) else file.open("rb")
    if file.suffix == GZIP:
        return io.BufferedReader(gzip.open(packed))
    if file.suffix == ZSTD:
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(packed, mode="r"), "zstd"))
    return packed


def _quickstart_rows() -> Iterator[Any]:
    """The conversations shipped with the quickstart target; `tests/benchmarks/quickstart` generates the file."""
    packed = resources.files("eyrie_workers.quickstart") / "conversations.jsonl.gz"
    with packed.open("rb") as file, gzip.open(file) as lines:
        yield from map(json.loads, lines)


def _lines(file: io.BufferedReader) -> Iterator[Any]:
    while line := file.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            while line and not line.endswith(b"\n"):  # skip the rest of the line in bounded pieces
                line = file.readline(MAX_ROW_BYTES)
            yield _Undecodable(f"oversized: more than {MAX_ROW_BYTES} bytes")
            continue
        yield _decode(line)


def _decode(line: bytes) -> Any:
    if not line.strip():
        return _Undecodable("empty line")
    try:
        # A byte order mark at the start of the file is not part of the first row.
        return json.loads(line.removeprefix(BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as error:
        return _Undecodable(f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return _Undecodable(f"bad JSON at column {error.colno}: {error.msg}")
    except ValueError as error:  # for example an integer of thousands of digits
        return _Undecodable(f"bad JSON: {error}")
    except RecursionError:
        return _Undecodable("bad JSON: nested too deep")


def _parquet_rows(path: Path | RemoteFile) -> Iterator[Any]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path.open_at_any_place() if isinstance(path, RemoteFile) else path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from map(_without_nulls, batch.to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise InvalidInput(f"data source {path} is not a readable parquet file: {error}",
                           "write it again, or give JSONL") from error


def _without_nulls(value: Any) -> Any:
    """Parquet structs hold null where JSON omits the key: null fields are removed."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _hub_rows(source: DataSource) -> Iterator[Any]:
    from datasets import load_dataset

    hint = "check id, config, split and network, or download the data set and give its parquet or JSONL file"
    try:
        yield from map(_without_nulls, load_dataset(
            source.path, source.config, split=source.split, revision=source.revision, streaming=True))
    except (FileNotFoundError, ValueError) as error:
        raise InvalidInput(f"data source {source.path!r}, split {source.split!r}: {error}", hint) from error
    except OSError as error:
        raise Transient(f"data source {source.path!r} cannot be read from the Hub: {error}", hint, 30.0) from error
