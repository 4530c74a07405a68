"""The prompts of benchmark suites, for two uses: to send them to an engine, and to keep them out of training.

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
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from eyrie_api.data_files import is_remote
from eyrie_api.errors import ArtifactMissing, InvalidInput, NoUsableData
from eyrie_api.v1alpha1.benchmark import SuiteSpec
from eyrie_workers.conversations.conversation import Message
from eyrie_workers.conversations.suite_rows import (
    QUICKSTART,
    Located,
    Row,
    evaluation_hub_rows,
    file_rows,
    has_turns,
    is_file,
    is_hub_id,
    read_suite_rows,
    row_messages,
    row_tools,
)

HELD_OUT = "held-out"
"""The suite of prompts that regenerate split off: held_out.jsonl of its directory."""

_ID_FIELDS = ("id", "task_id", "question_id", "prompt_id")


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered."""

    id: str
    suite: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    further: tuple[str, ...] = ()
    """Texts of the user's later turns."""

    def messages_with(self, system_prompt: str | None) -> list[Message]:
        """The messages; with `system_prompt` in place of their own system message, if one is given."""
        if system_prompt is None:
            return list(self.messages)
        kept = [message for message in self.messages if message.get("role") not in ("system", "developer")]
        return [{"role": "system", "content": system_prompt}, *kept]


def load_suite(spec: SuiteSpec, held_out_file: Path | None = None, seed: int = 0) -> list[Prompt]:
    """Every prompt of a suite, duplicates removed, ordered as the module's docstring says.

    Raises InvalidInput naming file and line for a row without a prompt, ArtifactMissing for a missing file,
    NoUsableData for a suite without rows.
    """
    prompts: dict[str, Prompt] = {}
    for location, row in _rows(spec, held_out_file):
        prompt = _prompt(row, spec.name, location)
        prompts.setdefault(_fingerprint(prompt), prompt)
    if not prompts:
        raise NoUsableData(f"suite {spec.name!r}: {spec.path} has no rows", "give a file with prompts, or drop it")
    digests = list(prompts)
    if not spec.path.startswith(QUICKSTART):
        digests.sort(key=lambda digest: hashlib.sha256(f"{seed}:{digest}".encode()).digest())
    return _with_distinct_ids([prompts[digest] for digest in digests])


def select(prompts: list[Prompt], start: int, num: int) -> list[Prompt]:
    """`num` prompts from `start`, wrapping round at the end of the suite; never a prompt twice."""
    num = min(num, len(prompts))
    return [prompts[(start + i) % len(prompts)] for i in range(num)]


def excluded_prompts(paths: Iterable[str], warn: Callable[[str], None]) -> Iterator[list[Message]]:
    """Messages of every prompt of some suites, all turns included.

    warn   called with a sentence for a suite that cannot be read here.

    Raises InvalidInput for a suite file that is missing or malformed.
    """
    for path in paths:
        if path != HELD_OUT:  # regenerate splits those off by hash
            yield from _excluded(path, warn)


def _excluded(path: str, warn: Callable[[str], None]) -> Iterator[list[Message]]:
    owner = "exclude_prompts"
    if path.startswith(QUICKSTART) or is_remote(path) or Path(path).is_file():
        yield from map(_texts_of, read_suite_rows(path, owner))
    elif is_file(path) or not is_hub_id(path):
        raise InvalidInput(f"{owner}: {path!r} does not exist", "give a JSONL file or quickstart:<suite>")
    elif find_spec("datasets") is None:
        warn(f"prompts of {path} are not excluded from training: the `datasets` package is not installed")
    else:
        try:
            yield from map(_texts_of, evaluation_hub_rows(path.partition(":")[0]))
        except (OSError, ValueError, InvalidInput) as error:
            warn(f"prompts of {path} are not all excluded from training: {error}")


def _texts_of(located: Located) -> list[Message]:
    # Only text can be compared with training data: an assistant turn of tool calls, or an image, has none.
    location, row = located
    return [dict(message) for message in row_messages(row, location) if isinstance(message.get("content"), str)]


def _rows(spec: SuiteSpec, held_out_file: Path | None) -> Iterator[Located]:
    owner = f"suite {spec.name!r}"
    if spec.path != HELD_OUT:
        return read_suite_rows(spec.path, owner)
    if held_out_file is None:
        raise ArtifactMissing(f"{owner} needs the held-out prompts, but the stage got no held_out_file",
                              "run regenerate first, or name a file in the suite's path")
    return file_rows(held_out_file, owner)


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


def _fingerprint(prompt: Prompt) -> str:
    content = json.dumps([prompt.messages, prompt.tools, *prompt.further], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _with_distinct_ids(prompts: list[Prompt]) -> list[Prompt]:
    """Rows without an id, or with one already used, get the first digits of their content's digest."""
    seen: set[str] = set()
    result = []
    for prompt in prompts:
        name = prompt.id if prompt.id and prompt.id not in seen else _fingerprint(prompt)[:12]
        seen.add(name)
        result.append(replace(prompt, id=name))
    return result
