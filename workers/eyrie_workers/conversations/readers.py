"""Reads conversations from files, Hub data sets and the shipped quickstart corpus, row by row with line numbers.

Files are read as streams: memory is bounded by the longest line, whose size is limited. A row that cannot be read or
breaks a rule becomes a `QuarantinedRow` at its position in the stream; the caller counts and keeps it, and no reader
drops a row. A source that cannot be opened is an error before any work, because a job that silently trains on half its
data is worse than one that stops.

`quickstart` is `conversations.jsonl.gz` of eyrie_workers.quickstart, a finite corpus in fixed order.

Rows are not shuffled: they are read in file order, so a sorted file should be shuffled beforehand.
"""

import gzip
import json
from collections.abc import Iterator
from importlib import resources
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from eyrie_api.errors import InvalidInput, Transient
from eyrie_api.v1alpha1.data import DataSource
from eyrie_api.v1alpha1.reports import QuarantinedRow
from eyrie_workers.conversations.conversation import Conversation, Malformed, conversation, detect_layout

MAX_ROW_BYTES = 8 * 2**20
"""Longest line: 8 MiB of conversation are some two million tokens, which indicates a broken file."""


class _Undecodable:
    """A row that could not be decoded."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def read_conversations(source: DataSource) -> Iterator[Conversation | QuarantinedRow]:
    """Conversations and unreadable rows of one source, in order.

    Raises InvalidInput when the source cannot be opened, Transient when the Hub is unreachable.
    """
    layout: str | None = None if source.format == "auto" else source.format
    for line, value in enumerate(islice(_rows(source), source.max_rows), start=1):
        if isinstance(value, _Undecodable):
            yield QuarantinedRow(source=source.path, line=line, reason=value.reason)
            continue
        layout = layout or detect_layout(value)
        try:
            if layout is None:
                raise Malformed("neither `messages` nor `conversations` nor `instruction` in the row")
            yield conversation(value, source.path, line, layout)
        except Malformed as error:
            yield QuarantinedRow(source=source.path, line=line, reason=str(error))


def check_source(source: DataSource) -> None:
    """Refuse a source that cannot be opened, before any work is done. Raises InvalidInput."""
    if source.path == "quickstart":
        return
    path = Path(source.path)
    if path.is_file():
        if path.suffix == ".json":
            raise InvalidInput(f"data source {source.path!r} is a .json file, which cannot be read as a stream",
                               "convert it to JSON lines: jq -c '.[]' chats.json > chats.jsonl")
        return
    if path.is_dir():
        raise InvalidInput(f"data source {source.path!r} is a directory", "name its files, one source each")
    if not _looks_like_hub_id(source.path):
        raise InvalidInput(f"data source {source.path!r} does not exist",
                           "give a JSONL or parquet file, a Hub data set id (org/name), or `quickstart`")
    if find_spec("datasets") is None:
        raise InvalidInput(f"data source {source.path!r} is not a file here, and reading it from the Hub needs the "
                           "`datasets` package, which is not installed",
                           "pip install datasets, or download the data set and give its parquet or JSONL file")


def _looks_like_hub_id(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith(("/", ".", "~")) and not path.endswith((".jsonl", ".parquet"))


def _rows(source: DataSource) -> Iterator[Any]:
    check_source(source)
    if source.path == "quickstart":
        return _quickstart_rows()
    path = Path(source.path)
    if not path.is_file():
        return _hub_rows(source)
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def _quickstart_rows() -> Iterator[Any]:
    """The conversations shipped with the quickstart target; `tests/benchmarks/quickstart` generates the file."""
    packed = resources.files("eyrie_workers.quickstart") / "conversations.jsonl.gz"
    with packed.open("rb") as file, gzip.open(file) as lines:
        yield from map(json.loads, lines)


def _json_rows(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
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
        return json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError as error:
        return _Undecodable(f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return _Undecodable(f"bad JSON at column {error.colno}: {error.msg}")
    except ValueError as error:  # for example an integer of thousands of digits
        return _Undecodable(f"bad JSON: {error}")
    except RecursionError:
        return _Undecodable("bad JSON: nested too deep")


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
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

    hint = "check the id, the split and the network, or download the data set and give its parquet or JSONL file"
    try:
        yield from map(_without_nulls, load_dataset(source.path, split=source.split, streaming=True))
    except (FileNotFoundError, ValueError) as error:
        raise InvalidInput(f"data source {source.path!r}, split {source.split!r}: {error}", hint) from error
    except OSError as error:
        raise Transient(f"data source {source.path!r} cannot be read from the Hub: {error}", hint, 30.0) from error
