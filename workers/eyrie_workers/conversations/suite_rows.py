"""Rows of a suite of prompts, from package data, a file or the Hub, and the prompt that a row holds.

The path of a suite names its source:

    quickstart:<name>          package data: suites/<name>.jsonl of eyrie_workers.quickstart
    /some/file.jsonl           rows of one line each or a JSON array, by its content, also compressed as .gz or .zst;
                               parquet (.parquet)
    s3://..., https://...      such a file, read as `remote_files` reads data sources
    org/name[:split]           a Hub data set, when the `datasets` package is installed

The format of a row is recognised by its fields, so that a downloaded gsm8k, HumanEval or MT-Bench file needs no
conversion: `messages` (OpenAI), `prompt` (HumanEval; a list is MT-Bench on the Hub), `question` (gsm8k; the turns of
BFCL, with `function` for its tools), `turns` (MT-Bench), `instruction` and `input` (Alpaca).

`suites` uses these rows twice: to send prompts to an engine, and to keep them out of training.
"""

import gzip
import importlib.resources
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eyrie_api.data_files import PARQUET, SUFFIXES, begins_array, is_remote
from eyrie_api.errors import ArtifactMissing, InvalidInput
from eyrie_workers.conversations.conversation import Message
from eyrie_workers.conversations.readers import opened
from eyrie_workers.conversations.remote_files import RemoteFile, translating_errors

QUICKSTART = "quickstart:"
# Configuration names that `load_dataset` demands for the data sets the contract mentions.
_HUB_CONFIGURATIONS = {"openai/gsm8k": "main", "gsm8k": "main"}
_TEXT_FIELDS = ("prompt", "question", "turns")

Row = Mapping[str, Any]
Located = tuple[str, Row]
"""A row and its location (file and line) for error messages."""


def read_suite_rows(path: str, owner: str) -> Iterator[Located]:
    """Rows of a suite with their locations.

    owner   names the setting in errors: "suite 'gsm8k'", "exclude_prompts"

    Raises InvalidInput for a source that cannot be read, ArtifactMissing for a missing file.
    """
    if path.startswith(QUICKSTART):
        yield from _quickstart_rows(path, owner)
    elif is_remote(path):
        yield from file_rows(RemoteFile(path), owner)
    elif is_file(path):
        yield from file_rows(Path(path), owner)
    else:
        yield from _hub_rows(path, owner)


def is_file(path: str) -> bool:
    """Whether a suite's path names a file, existing or not, and not a Hub data set."""
    return path.endswith(SUFFIXES) or Path(path).exists()


def is_hub_id(path: str) -> bool:
    """Whether a suite's path has the form of a Hub data set's id."""
    return path.count("/") == 1 and not path.startswith(("/", ".", "~"))


def file_rows(file: Path | RemoteFile, owner: str) -> Iterator[Located]:
    """Rows of one file. Raises as `read_suite_rows`, and Transient for a URL where nothing answers."""
    if isinstance(file, Path) and not file.is_file():
        raise ArtifactMissing(f"{owner}: there is no file {file}", "check the suite's path")
    with translating_errors(file.url) if isinstance(file, RemoteFile) else nullcontext():
        try:
            if file.suffix == PARQUET:
                return _parquet_rows(file)
            with opened(file) as rows:
                data = rows.read()
            text = data.decode("utf-8-sig")
        except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _unreadable(file, owner, error) from error
        except OSError as error:
            if isinstance(file, RemoteFile):
                raise
            raise _unreadable(file, owner, error) from error
    return _json_array(text, str(file)) if begins_array(data) else _json_lines(text, str(file))


def _unreadable(file: Path | RemoteFile, owner: str, error: Exception) -> InvalidInput:
    return InvalidInput(f"{owner}: {file} cannot be read: {error}",
                        f"give UTF-8 text in one of {', '.join(SUFFIXES)}")


def evaluation_hub_rows(path: str) -> Iterator[Located]:
    """Rows of every configuration and split of a Hub data set but `train`, which one may train on.

    Raises OSError or ValueError, as the `datasets` package does; the caller checks that it is installed.
    """
    from datasets import get_dataset_config_names, load_dataset

    for config in get_dataset_config_names(path):
        splits: dict[str, Any] = load_dataset(path, config, streaming=True)
        for split in (name for name in splits if name != "train"):
            for number, row in enumerate(splits[split], start=1):
                yield f"{path}:{split} row {number}", row


def row_messages(row: Row, location: str) -> list[Message]:
    """All messages of a row; the texts of `prompt`, `question` or `turns` become user messages.

    Raises InvalidInput naming the location for a row without a prompt.
    """
    messages = row.get("messages")
    if messages is None and has_turns(row.get("question")):
        messages = [message for turn in row["question"] for message in turn]
    if messages is None:
        return [{"role": "user", "content": text} for text in _texts(row, location)]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise InvalidInput(f"{location}: `messages` is not a list of objects with a `role`", "use the OpenAI format")
    return messages


def row_tools(row: Row, location: str) -> list[Message]:
    """Tool definitions of a row. Raises InvalidInput naming the location."""
    tools = row.get("tools") or ()
    if not tools and isinstance(row.get("function"), list) and has_turns(row.get("question")):
        tools = [{"type": "function", "function": function} for function in row["function"]]
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidInput(f"{location}: `tools` is not a list of objects", "use the OpenAI tools format")
    return list(tools)


def has_turns(question: object) -> bool:
    """Whether it is BFCL's: a list of turns, each a list of messages."""
    return isinstance(question, list) and bool(question) and isinstance(question[0], list)


def _texts(row: Row, location: str) -> list[str]:
    if isinstance(row.get("instruction"), str) and row["instruction"].strip():
        return [f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]]
    for name in _TEXT_FIELDS:
        value = row.get(name)
        texts = value if isinstance(value, list | tuple) else [value]
        if texts and isinstance(texts[0], str) and texts[0].strip():
            return [text for text in texts if isinstance(text, str) and text.strip()]
        if value is not None:
            raise InvalidInput(f"{location}: `{name}` is empty or not text", "give a non-empty string")
    raise InvalidInput(f"{location} has none of `messages`, `prompt`, `question`, `turns`, `instruction` (fields: "
                       f"{', '.join(map(str, row)) or 'none'})", "rename the column that holds the prompt")


def _quickstart_rows(path: str, owner: str) -> Iterator[Located]:
    folder = importlib.resources.files("eyrie_workers.quickstart") / "suites"
    name = path.removeprefix(QUICKSTART)
    file = folder / f"{name}.jsonl"
    if not file.is_file():
        known = sorted(p.name.removesuffix(".jsonl") for p in folder.iterdir()) if folder.is_dir() else []
        raise InvalidInput(f"{owner}: there is no quickstart suite {name!r}",
                           f"use one of: {', '.join(known) or '(none installed)'}")
    yield from _json_lines(file.read_text(encoding="utf-8"), path)


def _json_lines(text: str, source: str) -> Iterator[Located]:
    # Not splitlines(): it would also split a row at a U+2028 inside one of its strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{source} line {number}", _json_object(line, f"{source} line {number}")


def _json_object(text: str, location: str) -> Row:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{location} is not JSON: {error}",
                           "give one JSON object per line, or one array of rows") from error
    return _object(row, location)


def _object(row: object, location: str) -> Row:
    if not isinstance(row, dict):
        raise InvalidInput(f"{location} is a JSON {type(row).__name__}, not an object",
                           'write {"messages": [...]} or {"prompt": "..."}')
    return row


def _json_array(text: str, source: str) -> Iterator[Located]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{source} is not JSON: {error}",
                           "a file that begins with [ is one array of rows") from error
    for number, row in enumerate(rows, start=1):
        yield f"{source} row {number}", _object(row, f"{source} row {number}")


def _parquet_rows(file: Path | RemoteFile) -> Iterator[Located]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file.open_at_any_place() if isinstance(file, RemoteFile) else file) as table:
            rows = table.read().to_pylist()
    except pyarrow.ArrowException as error:
        raise InvalidInput(f"{file} is not readable parquet: {error}", "check the download") from error
    return ((f"{file} row {number}", row) for number, row in enumerate(rows, start=1))


def _hub_rows(path: str, owner: str) -> Iterator[Located]:
    name, _, split = path.partition(":")
    if find_spec("datasets") is None:
        raise InvalidInput(
            f"{owner}: {path!r} is not a file here, and reading it from the Hub needs the `datasets` package",
            "pip install datasets, or download the file and give its path")
    import datasets

    try:
        loaded = datasets.load_dataset(name, _HUB_CONFIGURATIONS.get(name))
    except Exception as error:  # `datasets` raises its own, the network's and pyarrow's errors
        raise InvalidInput(f"{owner}: the Hub data set {name!r} could not be read: {error}",
                           "check the id and the network, or download the file and give its path") from error
    split = split or next((s for s in ("test", "train") if s in loaded), next(iter(loaded)))
    if split not in loaded:
        raise InvalidInput(f"{owner}: {name} has no split {split!r}",
                           f"use one of: {', '.join(loaded)}, as {name}:<split>")
    for number, row in enumerate(loaded[split], start=1):
        yield f"{name}:{split} row {number}", row
