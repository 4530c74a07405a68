"""The prompts of benchmark suites, read for one purpose: to keep them out of training.

Suites are named as in `SuiteSpec.path`. A file that is missing or malformed is an error, because excluding nothing
instead would be silent. A Hub data set that cannot be read here is a warning the caller must pass on: the benchmark
stage will meet the same obstacle and say so.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eyrie_api.errors import InvalidInput
from eyrie_workers.conversations.conversation import Message

_QUICKSTART = "quickstart:"


def suite_prompts(paths: Iterable[str], warn: Callable[[str], None]) -> Iterator[list[Message]]:
    """Messages of every prompt of some suites.

    warn   called with a sentence for a suite that cannot be read here.

    Raises InvalidInput for a suite file that is missing or malformed.
    """
    for path in paths:
        if path != "held-out":  # those are split off by hash
            yield from _prompts_of(path, warn)


def _prompts_of(path: str, warn: Callable[[str], None]) -> Iterator[list[Message]]:
    if path.startswith(_QUICKSTART):
        file = resources.files("eyrie_workers.quickstart") / "suites" / f"{path.removeprefix(_QUICKSTART)}.jsonl"
        if not file.is_file():
            raise InvalidInput(f"exclude_prompts: there is no suite {path!r}", "use chat, math, code or tools")
        return _prompts_in(file.read_text(encoding="utf-8"), path)
    if Path(path).is_file():
        return _prompts_in(Path(path).read_text(encoding="utf-8"), path)
    if path.count("/") == 1 and not path.startswith(("/", ".", "~")):
        return _hub_prompts(path, warn)
    raise InvalidInput(f"exclude_prompts: {path!r} does not exist", "give a JSONL file or quickstart:<suite>")


def _prompts_in(text: str, path: str) -> Iterator[list[Message]]:
    # Split at newlines alone: JSON text may hold U+2028, which `splitlines` would cut at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield _prompt(json.loads(line))
        except ValueError as error:
            raise InvalidInput(f"exclude_prompts: {path}, line {number}: {error}",
                               "one JSON object per line, with `messages` or `prompt`") from None


def _prompt(row: object) -> list[Message]:
    """Messages of a suite row: `messages`, or `prompt` (HumanEval), `question` (GSM8K), `turns` (MT-Bench)."""
    if not isinstance(row, Mapping):
        raise ValueError("not an object")
    if isinstance(row.get("messages"), list):
        return [dict(m) for m in row["messages"] if isinstance(m, Mapping) and isinstance(m.get("content"), str)]
    text = row.get("turns", row.get("prompt", row.get("question")))
    turns = [text] if isinstance(text, str) else text
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError("neither `messages` nor `prompt` in the row")
    return [{"role": "user", "content": turn} for turn in turns]


def _hub_prompts(path: str, warn: Callable[[str], None]) -> Iterator[list[Message]]:
    if find_spec("datasets") is None:
        warn(f"prompts of {path} are not excluded from training: the `datasets` package is not installed")
        return
    from datasets import get_dataset_config_names, load_dataset

    try:
        for config in get_dataset_config_names(path):
            splits: dict[str, Any] = load_dataset(path, config, streaming=True)
            # A data set's own training split is what one may train on.
            for row in (row for name, rows in splits.items() if name != "train" for row in rows):
                yield _prompt(row)
    except (OSError, ValueError) as error:
        warn(f"prompts of {path} are not all excluded from training: {error}")
