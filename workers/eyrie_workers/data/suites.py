"""The prompts of benchmark suites, for two uses: to send them to an engine, and to keep them out of training.

The path of a suite names its source:

    quickstart:<name>          package data: suites/<name>.jsonl of eyrie_workers.quickstart
    /some/file.jsonl           rows of one line each or a JSON array, by its content, also compressed as .gz or .zst;
                               parquet (.parquet)
    s3://..., https://...      such a file, read as `readers` reads data sources
    org/name[:split]           a Hub data set, when the `datasets` package is installed

The format of a row is recognized by its fields, so that a downloaded gsm8k, HumanEval or MT-Bench file needs no
conversion: `messages` (OpenAI), `prompt` (HumanEval; a list is MT-Bench on the Hub), `question` (gsm8k; the turns of
BFCL, with `function` for its tools), `turns` (MT-Bench), `instruction` and `input` (Alpaca).

`load_suite` returns the prompts that an engine answers. A final assistant turn is dropped, because it is the answer to
be measured. Of a row with several texts, as MT-Bench has, the first is the prompt and the others follow in `further`:
each is sent after the answer to the one before.

Rows are ordered by their content and a seed alone, because downloaded sets are often sorted by category (MT-Bench) and
the first few would be one category; the quickstart suites keep their order, in which any first N are a mixture already.
`select` cuts disjoint slices from that order: a choice made on one is confirmed on another.

`excluded_prompts` returns every turn of every row for the check against training data. A missing or malformed file is
an error, because excluding nothing instead would be silent. A Hub data set that cannot be read here is a warning: the
benchmark stage will fail on it with the reason.
"""

import hashlib
import importlib.resources
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eyrie_api.chat_messages import Message
from eyrie_api.contract.benchmark import SuiteSpec
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.conversation import EMPTY_LINE, Undecodable
from eyrie_api.data_files import SUFFIXES, is_remote
from eyrie_api.errors import ArtifactMissing, InvalidInput, NoUsableData
from eyrie_api.file_rules import check_path
from eyrie_workers.data.readers import RemoteFile, file_rows, located_lines

QUICKSTART = "quickstart:"
# Configuration names that `load_dataset` demands for the data sets the contract mentions.
_HUB_CONFIGURATIONS = {"openai/gsm8k": "main", "gsm8k": "main"}
_TEXT_FIELDS = ("prompt", "question", "turns")

Row = Mapping[str, Any]
Located = tuple[str, Row]  # a row and its location (file and line) for error messages


def read_suite_rows(path: str, owner: str, rules: ReadRules | None = None) -> Iterator[Located]:
    """Rows of a suite with their locations.

    owner   names the setting in errors: "suite 'gsm8k'", "exclude_prompts"

    Raises InvalidInput for a source that cannot be read or its rules forbid, ArtifactMissing for a missing file.
    """
    check_path(owner, path, rules)
    if is_remote(path):
        yield from _file_rows(RemoteFile(path, rules), owner)
    elif path.startswith(QUICKSTART):
        folder = importlib.resources.files("eyrie_workers.quickstart") / "suites"
        file = folder / f"{path.removeprefix(QUICKSTART)}.jsonl"
        if not file.is_file():
            known = sorted(p.name.removesuffix(".jsonl") for p in folder.iterdir()) if folder.is_dir() else []
            raise InvalidInput(f"{owner}: there is no quickstart suite {path.removeprefix(QUICKSTART)!r}",
                               f"use one of: {', '.join(known) or '(none installed)'}")
        with file.open("rb") as lines:
            yield from _checked(located_lines(lines), path)
    elif path.endswith(SUFFIXES) or Path(path).exists():
        yield from _file_rows(Path(path), owner, rules)
    else:
        yield from _hub_rows(path, owner)


def _file_rows(file: Path | RemoteFile, owner: str, rules: ReadRules | None = None) -> Iterator[Located]:
    if isinstance(file, Path) and not file.is_file():
        raise ArtifactMissing(f"{owner}: there is no file {file}", "check the suite's path")
    return _checked(file_rows(file, f"{owner}: ", rules), str(file))


def _checked(rows: Iterable[tuple[str, Any]], source: str) -> Iterator[Located]:
    """Rows with their locations; empty lines are left out. Raises InvalidInput for a row that is not an object."""
    for place, row in rows:
        location = f"{source} {place}"
        if isinstance(row, Undecodable):
            if row.reason == EMPTY_LINE:
                continue
            raise InvalidInput(f"{location} is not JSON: {row.reason}",
                               "give one JSON object per line, or one array of rows")
        if not isinstance(row, dict):
            raise InvalidInput(f"{location} is a JSON {type(row).__name__}, not an object",
                               'write {"messages": [...]} or {"prompt": "..."}')
        yield location, row


def row_messages(row: Row, location: str) -> list[Message]:
    """All messages of a row; the texts of `prompt`, `question` or `turns` become user messages. Raises InvalidInput
    naming the location for a row without a prompt."""
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


def _hub_rows(path: str, owner: str) -> Iterator[Located]:
    name, _, split = path.partition(":")
    _require_hub_id(name, owner)
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


def _require_hub_id(name: str, owner: str) -> None:
    # `load_dataset` prefers a directory of that name, of whatever files: `/data/x:train` would be one.
    if Path(name).expanduser().exists():
        raise InvalidInput(f"{owner}: {name!r} is a directory here, not a Hub data set", "give a file of it")


HELD_OUT = "held-out"  # the suite of prompts that regenerate split off: held_out.jsonl of its directory
_ID_FIELDS = ("id", "task_id", "question_id", "prompt_id")


@dataclass(frozen=True)
class Prompt:
    id: str
    suite: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    further: tuple[str, ...] = ()  # texts of the user's later turns

    def messages_with(self, system_prompt: str | None) -> list[Message]:
        """The messages; with `system_prompt` in place of their own system message, if one is given."""
        if system_prompt is None:
            return list(self.messages)
        kept = [message for message in self.messages if message.get("role") not in ("system", "developer")]
        return [{"role": "system", "content": system_prompt}, *kept]


def load_suite(spec: SuiteSpec, held_out_file: Path | None = None, seed: int = 0,
               rules: ReadRules | None = None) -> list[Prompt]:
    """Every prompt of a suite, duplicates removed, ordered as the module's docstring says. Raises InvalidInput naming
    file and line for a row without a prompt, ArtifactMissing for a missing file, NoUsableData for a suite without
    rows."""
    prompts, owner = dict[str, Prompt](), f"suite {spec.name!r}"
    if spec.path != HELD_OUT:
        rows = read_suite_rows(spec.path, owner, rules)
    elif held_out_file is not None:
        rows = _file_rows(held_out_file, owner)
    else:
        raise ArtifactMissing(f"{owner} needs the held-out prompts, but the stage got no held_out_file",
                              "run regenerate first, or name a file in the suite's path")
    for location, row in rows:
        prompt = _prompt(row, spec.name, location)
        content = json.dumps([prompt.messages, prompt.tools, *prompt.further], sort_keys=True, default=str)
        prompts.setdefault(hashlib.sha256(content.encode()).hexdigest(), prompt)
    if not prompts:
        raise NoUsableData(f"{owner}: {spec.path} has no rows", "give a file with prompts, or drop it")
    digests = list(prompts)
    if not spec.path.startswith(QUICKSTART):
        digests.sort(key=lambda digest: hashlib.sha256(f"{seed}:{digest}".encode()).digest())
    # Rows without an id, or with one already used, get the first digits of their content's digest.
    seen: set[str] = set()
    named = []
    for digest in digests:
        prompt = prompts[digest]
        named.append(replace(prompt, id=prompt.id if prompt.id and prompt.id not in seen else digest[:12]))
        seen.add(named[-1].id)
    return named


def select(prompts: list[Prompt], start: int, num: int) -> list[Prompt]:
    """`num` prompts from `start`, wrapping round at the end of the suite; never a prompt twice."""
    num = min(num, len(prompts))
    return [prompts[(start + i) % len(prompts)] for i in range(num)]


def excluded_prompts(paths: Iterable[str], warn: Callable[[str], None],
                     rules: ReadRules | None = None) -> Iterator[list[Message]]:
    """Messages of every prompt of some suites, all turns included.

    warn   called with a sentence for a suite that cannot be read here.

    Raises InvalidInput for a suite file that is missing or malformed.
    """
    owner = "exclude_prompts"
    for path in paths:
        if path == HELD_OUT:  # regenerate splits those off by hash
            continue
        if path.startswith(QUICKSTART) or is_remote(path) or Path(path).is_file():
            yield from map(_texts_of, read_suite_rows(path, owner, rules))
        elif path.endswith(SUFFIXES) or Path(path).exists() or path.count("/") != 1 or path.startswith(("/", ".", "~")):
            raise InvalidInput(f"{owner}: {path!r} does not exist", "give a JSONL file or quickstart:<suite>")
        elif find_spec("datasets") is None:
            warn(f"prompts of {path} are not excluded from training: the `datasets` package is not installed")
        else:
            from datasets import get_dataset_config_names, load_dataset

            name = path.partition(":")[0]
            _require_hub_id(name, owner)
            try:
                # Every configuration and split but `train`, which one may train on.
                for config in get_dataset_config_names(name):
                    splits: dict[str, Any] = load_dataset(name, config, streaming=True)
                    for split in (split for split in splits if split != "train"):
                        for number, row in enumerate(splits[split], start=1):
                            yield _texts_of((f"{name}:{split} row {number}", row))
            except (OSError, ValueError, InvalidInput) as error:
                warn(f"prompts of {path} are not all excluded from training: {error}")


def _texts_of(located: Located) -> list[Message]:
    # Only text can be compared with training data: an assistant turn of tool calls, or an image, has none.
    location, row = located
    return [dict(message) for message in row_messages(row, location) if isinstance(message.get("content"), str)]


def _prompt(row: Row, suite: str, location: str) -> Prompt:
    messages = row_messages(row, location)
    further: tuple[str, ...] = ()
    if row.get("messages") is None and has_turns(row.get("question")):
        first = len(row["question"][0])
        further = tuple(message["content"] for message in messages[first:] if message["role"] == "user")
        messages = messages[:first]
    elif row.get("messages") is None:
        further = tuple(message["content"] for message in messages[1:])
        messages = messages[:1]
    elif messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise InvalidInput(f"{location}: nothing is asked before the assistant's turn", "add a user message")
    prompt_id = next((str(row[name]) for name in _ID_FIELDS if row.get(name) is not None), "")
    return Prompt(prompt_id, suite, tuple(messages), tuple(row_tools(row, location)), further)
