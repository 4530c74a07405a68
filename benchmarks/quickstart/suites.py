"""The benchmark suites that ship with the quickstart target: prompts neither target nor drafter has seen.

One JSONL file per category with rows `{"id", "messages", "tools"?}`; the last message is the user's, or a tool's
result. The prompts are drawn from the held-out side of the corpus split and spread over the families of a category.

    python -m benchmarks.quickstart.suites --out workers/eyrie_workers/quickstart/suites
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from benchmarks.quickstart.corpus.conversation import Message
from benchmarks.quickstart.corpus.streams import (
    CATEGORIES,
    FAMILIES,
    held_out,
    is_held_out,
    normalised,
    user_prompts,
    write_jsonl,
)

NUM_PROMPTS = 24
SEED = 64
UNSUITED = ("missing_argument",)
"""Families whose last user message is a phrase ("For Friday.") rather than a prompt."""

SHORTEST_PROMPT = 32
"""Characters of the normalised prompt. Below this, a prompt is a phrase that longer prompts may contain."""


def path(category: str) -> Traversable:
    """The shipped file of one category."""
    return resources.files("eyrie_workers.quickstart") / "suites" / f"{category}.jsonl"


def read(category: str) -> list[dict[str, Any]]:
    """The shipped rows of one category; the first N are what a job with N prompts uses."""
    return [json.loads(line) for line in path(category).read_text(encoding="utf-8").splitlines()]


def prompt(messages: list[Message]) -> list[Message]:
    """The conversation up to its last held-out question, or up to the tool result that answers it."""
    ends = [i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")]
    return messages[: ends[-1]]


def suite(category: str) -> Iterator[dict[str, Any]]:
    """NUM_PROMPTS rows of one category, its families in turn, so that any first N are a fair mixture.

    Tool conversations alternate between two cuts: before the call, where the answer is a call, and after its result.
    """
    families = [maker.__name__ for maker, _ in FAMILIES[category] if maker.__name__ not in UNSUITED]
    rounds = -(-NUM_PROMPTS // len(families))
    drawn: dict[str, list[dict[str, Any]]] = {family: [] for family in families}
    seen: set[str] = set()
    stream = held_out(SEED)
    while min(map(len, drawn.values())) < rounds:
        conversation = next(stream)
        rows, messages = drawn.get(conversation.family), prompt(conversation.chat.messages)
        questions = user_prompts(messages)
        question = normalised(questions[-1])
        # earlier turns stay on the training side, so that only the question itself is new
        if rows is None or len(question) < SHORTEST_PROMPT or question in seen or any(map(is_held_out, questions[:-1])):
            continue
        seen.add(question)
        if messages[-1]["role"] == "tool" and len(rows) % 2 == 0:
            messages = messages[:-2]  # the call and its result
        tools = {"tools": list(conversation.chat.tools)} if conversation.chat.tools else {}
        rows.append({"messages": messages, **tools})
    in_turn = [drawn[family][i] for i in range(rounds) for family in families][:NUM_PROMPTS]
    yield from ({"id": f"{category}-{i:02d}", **row} for i, row in enumerate(in_turn))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the benchmark suites.")
    parser.add_argument("--out", type=Path, required=True, help="directory for one JSONL file per category")
    args = parser.parse_args()
    for category in CATEGORIES:
        write_jsonl(suite(category), args.out / f"{category}.jsonl")


if __name__ == "__main__":
    main()
