"""The prompts of a suite, whatever layout they come in.

A suite's `path` names its rows:

    quickstart:<name>          package data: suites/<name>.jsonl of eyrie_workers.quickstart
    held-out                   held_out.jsonl of regenerate
    /some/file.jsonl[.gz]      also .json (an array) and .parquet
    org/name[:split]           a Hub data set, when the `datasets` package is installed

and the layout of a row is recognised by its fields, so that a downloaded gsm8k, HumanEval or MT-Bench file works as
it is: `messages` (OpenAI; a final assistant turn is dropped), `prompt` (HumanEval; a list is MT-Bench on the Hub),
`question` (gsm8k), `turns` (MT-Bench). Of several turns only the first is asked: the others would need the answers.

Rows are put in an order that depends on their content and a seed alone, because downloaded sets are often sorted by
category (MT-Bench) and the first few would be a category; the quickstart suites keep theirs, in which any first N are a
mixture already. `select` cuts disjoint slices from that order: a choice made on one is confirmed on another.
"""

import gzip
import hashlib
import importlib.resources
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie_api.errors import ArtifactMissing, InvalidInput, NoUsableData
from eyrie_api.v1alpha1.benchmark import SuiteSpec

HELD_OUT = "held-out"
_QUICKSTART = "quickstart:"
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
# Configuration names that `load_dataset` demands for the data sets the contract mentions.
_HUB_CONFIGURATIONS = {"openai/gsm8k": "main", "gsm8k": "main"}
_ID_FIELDS = ("id", "task_id", "question_id", "prompt_id")

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered."""

    id: str
    suite: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()


def load_suite(spec: SuiteSpec, held_out_file: Path | None = None, seed: int = 0) -> list[Prompt]:
    """Every prompt of a suite, duplicates removed, in the order of the module's essay.

    Raises InvalidInput naming file and line for a row that cannot be asked, ArtifactMissing for a file that is not
    there, NoUsableData for a suite without rows.
    """
    prompts: dict[str, Prompt] = {}
    for where, row in _rows(spec, held_out_file):
        prompt = _prompt(row, spec.name, where)
        prompts.setdefault(_fingerprint(prompt), prompt)
    if not prompts:
        raise NoUsableData(f"suite {spec.name!r}: {spec.path} has no rows", "give a file with prompts, or drop it")
    digests = list(prompts)
    if not spec.path.startswith(_QUICKSTART):
        digests.sort(key=lambda digest: hashlib.sha256(f"{seed}:{digest}".encode()).digest())
    return _with_distinct_ids([prompts[digest] for digest in digests])


def select(prompts: list[Prompt], start: int, num: int) -> list[Prompt]:
    """`num` prompts from `start`, wrapping round when the suite is too short; never one twice."""
    num = min(num, len(prompts))
    return [prompts[(start + i) % len(prompts)] for i in range(num)]


def _rows(spec: SuiteSpec, held_out_file: Path | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rows with the place they stand at, for error messages."""
    if spec.path.startswith(_QUICKSTART):
        yield from _quickstart_rows(spec)
    elif spec.path == HELD_OUT:
        if held_out_file is None:
            raise ArtifactMissing(f"suite {spec.name!r} wants the held-out prompts, but the stage got no "
                                  "held_out_file", "run regenerate first, or name a file in the suite's path")
        yield from _file_rows(held_out_file, spec.name)
    elif spec.path.endswith(_SUFFIXES) or Path(spec.path).exists():
        yield from _file_rows(Path(spec.path), spec.name)
    else:
        yield from _hub_rows(spec)


def _quickstart_rows(spec: SuiteSpec) -> Iterator[tuple[str, Mapping[str, Any]]]:
    folder = importlib.resources.files("eyrie_workers.quickstart") / "suites"
    name = spec.path.removeprefix(_QUICKSTART)
    file = folder / f"{name}.jsonl"
    if not file.is_file():
        known = sorted(p.name.removesuffix(".jsonl") for p in folder.iterdir()) if folder.is_dir() else []
        raise InvalidInput(f"suite {spec.name!r}: there is no quickstart suite {name!r}",
                           f"use one of: {', '.join(known) or '(none installed)'}")
    yield from _json_lines(file.read_text(encoding="utf-8"), spec.path)


def _file_rows(path: Path, suite: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not path.is_file():
        raise ArtifactMissing(f"suite {suite!r}: there is no file {path}", "check the suite's path")
    try:
        if path.name.endswith(".parquet"):
            yield from _parquet_rows(path)
        elif path.name.endswith(".json"):
            yield from _json_array(path)
        else:
            data = path.read_bytes()
            text = (gzip.decompress(data) if path.name.endswith(".gz") else data).decode()
            yield from _json_lines(text, str(path))
    except (UnicodeDecodeError, OSError) as error:
        raise InvalidInput(f"suite {suite!r}: {path} cannot be read: {error}",
                           f"give UTF-8 text in one of {', '.join(_SUFFIXES)}") from error


def _json_lines(text: str, source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # Not splitlines(): it would cut a row at a U+2028 inside one of its strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{source} line {number}", _json_object(line, f"{source} line {number}")


def _json_object(text: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{where} is not JSON: {error}", "one JSON object per line") from error
    return _object(row, where)


def _object(row: object, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise InvalidInput(f"{where} is a JSON {type(row).__name__}, not an object",
                           'write {"messages": [...]} or {"prompt": "..."}')
    return row


def _json_array(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{path} is not JSON: {error}", "a .json suite is one array of rows") from error
    if not isinstance(rows, list):
        raise InvalidInput(f"{path} holds a JSON {type(rows).__name__}, not an array of rows",
                           "use an array, or one object per line in a .jsonl file")
    for number, row in enumerate(rows, start=1):
        yield f"{path} row {number}", _object(row, f"{path} row {number}")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise InvalidInput(f"{path} is not readable parquet: {error}", "check the download") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path} row {number}", row


def _hub_rows(spec: SuiteSpec) -> Iterator[tuple[str, Mapping[str, Any]]]:
    name, _, split = spec.path.partition(":")
    try:
        import datasets
    except ImportError:
        raise InvalidInput(
            f"suite {spec.name!r}: {spec.path!r} is not a file here, and reading it from the Hub needs the "
            "`datasets` package", "pip install datasets, or download the file and give its path") from None
    try:
        loaded = datasets.load_dataset(name, _HUB_CONFIGURATIONS.get(name))
    except Exception as error:  # `datasets` lets its own, the network's and pyarrow's errors through
        raise InvalidInput(f"suite {spec.name!r}: the Hub data set {name!r} could not be read: {error}",
                           "check the id and the network, or download the file and give its path") from error
    split = split or next((s for s in ("test", "train") if s in loaded), next(iter(loaded)))
    if split not in loaded:
        raise InvalidInput(f"suite {spec.name!r}: {name} has no split {split!r}",
                           f"use one of: {', '.join(loaded)}, as {name}:<split>")
    for number, row in enumerate(loaded[split], start=1):
        yield f"{name}:{split} row {number}", row


def _prompt(row: Mapping[str, Any], suite: str, where: str) -> Prompt:
    """Recognise the layout by its fields (see the module's essay)."""
    messages = row.get("messages")
    if messages is not None:
        turns = _checked_messages(messages, where)
    else:
        turns = ({"role": "user", "content": _first_text(row, where)},)
    tools = row.get("tools") or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidInput(f"{where}: `tools` is not a list of objects", "use the OpenAI tools layout")
    found = next((str(row[name]) for name in _ID_FIELDS if row.get(name) is not None), "")
    return Prompt(id=found, suite=suite, messages=turns, tools=tuple(tools))


def _checked_messages(messages: object, where: str) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise InvalidInput(f"{where}: `messages` is not a list of objects with a `role`", "use the OpenAI layout")
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # the answer to be measured must not be given away
    if not messages:
        raise InvalidInput(f"{where}: nothing is asked before the assistant's turn", "add a user message")
    return tuple(messages)


def _first_text(row: Mapping[str, Any], where: str) -> str:
    for name in ("prompt", "question", "turns"):
        value = row.get(name)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, str) and value.strip():
            return value
        if value is not None:
            raise InvalidInput(f"{where}: `{name}` is empty or not text", "give a non-empty string")
    raise InvalidInput(f"{where} has none of `messages`, `prompt`, `question`, `turns` (fields: "
                       f"{', '.join(map(str, row)) or 'none'})", "rename the column that holds the prompt")


def _fingerprint(prompt: Prompt) -> str:
    content = json.dumps([prompt.messages, prompt.tools], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _with_distinct_ids(prompts: list[Prompt]) -> list[Prompt]:
    """Rows without an id, or with one already used, get the head of their content's digest."""
    seen: set[str] = set()
    result = []
    for prompt in prompts:
        name = prompt.id if prompt.id and prompt.id not in seen else _fingerprint(prompt)[:12]
        seen.add(name)
        result.append(Prompt(name, prompt.suite, prompt.messages, prompt.tools))
    return result
