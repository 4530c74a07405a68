"""Rows from files, data sets and the quickstart corpus, one at a time, each with its line number.

A source is read as a stream: a terabyte of JSONL needs the memory of its longest line, and even that is bounded. A row
that cannot be read or breaks a rule becomes a `QuarantinedRow` in the same stream, at its place: the caller counts and
keeps it, and no reader drops anything. A source as a whole that cannot be opened is an error at once, because a job
that quietly trains on half its data is worse than one that stops.

Deliberately not here: shuffling. Rows are taken in file order, so a sorted file should be shuffled by its owner.
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
"""A conversation of 8 MiB is some two million tokens: a broken file, not a chat."""


class _Bad:
    """A row that could not be decoded at all."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def read_conversations(source: DataSource) -> Iterator[Conversation | QuarantinedRow]:
    """Conversations and unreadable rows of one source, in order.

    Raises InvalidInput when the source cannot be opened, Transient when a hub is unreachable.
    """
    layout: str | None = None if source.format == "auto" else source.format
    for line, value in enumerate(islice(_rows(source), source.max_rows), start=1):
        if isinstance(value, _Bad):
            yield QuarantinedRow(source=source.path, line=line, reason=value.reason)
            continue
        layout = layout or detect_layout(value)
        try:
            if layout is None:
                raise Malformed("neither `messages` nor `conversations` in the row")
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
        raise InvalidInput(f"data source {source.path!r} is no file here, and reading it from the Hub needs the "
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
    """The conversations that ship with the quickstart target; `tests/benchmarks/quickstart` generates them."""
    packed = resources.files("eyrie_workers.quickstart") / "conversations.jsonl.gz"
    with packed.open("rb") as file, gzip.open(file) as lines:
        yield from map(json.loads, lines)


def _json_rows(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while line := file.readline(MAX_ROW_BYTES + 1):
            if len(line) > MAX_ROW_BYTES:
                while line and not line.endswith(b"\n"):  # the rest of it, in pieces, to the next row
                    line = file.readline(MAX_ROW_BYTES)
                yield _Bad(f"oversized: more than {MAX_ROW_BYTES} bytes")
                continue
            yield _decode(line)


def _decode(line: bytes) -> Any:
    if not line.strip():
        return _Bad("empty line")
    try:
        # A byte order mark is no fault of the row behind it.
        return json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError as error:
        return _Bad(f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return _Bad(f"bad JSON at column {error.colno}: {error.msg}")
    except ValueError as error:  # an integer of thousands of digits
        return _Bad(f"bad JSON: {error}")
    except RecursionError:
        return _Bad("bad JSON: nested too deep")


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
    """Columns of structs hold null where JSON would leave the key out; content null stays null by absence."""
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
