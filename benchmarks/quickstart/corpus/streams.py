"""The conversations that the quickstart target was trained on, and that the demo trains its drafter on.

A demo must run without a network, so its data cannot be downloaded: it is generated. Conversation `index` of stream
`seed` is a pure function of the two, in four categories (chat, math, code, tools) and some twenty families. Prompts are
products of names, numbers, cities, goods and wordings, so they practically never repeat.

**Held out.** A benchmark prompt must be new to target and drafter. A user message whose normalised text hashes to 0
modulo 64 is *held out*: `conversations` draws again until no user message of a conversation is held out, `held_out`
yields only conversations whose last user message is. The split depends on the text alone, so it holds for every seed.

The text is templated and of modest entropy, easier than text that people write: acceptance lengths measured on it are
higher than on real chat.

    python -m benchmarks.quickstart.corpus.streams --num 1000 --seed 7 --out chats.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.quickstart.corpus import chat, code, math, tools
from benchmarks.quickstart.corpus.conversation import Chat, Message

HELD_OUT_MODULUS = 64
"""One prompt in 64 is held out: rare enough to cost training nothing, common enough to fill a suite in a second."""

CATEGORIES = ("chat", "math", "code", "tools")
CATEGORY_WEIGHTS = (36, 20, 18, 26)

FAMILIES: dict[str, tuple[tuple[Callable[[Random], Chat], int], ...]] = {
    "chat": ((chat.small_talk, 4), (chat.advice, 4), (chat.travel, 3), (chat.email, 3), (chat.rewrite, 2),
             (chat.explain, 2)),
    "math": ((math.addition, 3), (math.product, 3), (math.shopping, 4), (math.speed, 2), (math.sharing, 2),
             (math.discount, 2), (math.ordering, 2), (math.sequence, 2)),
    "code": ((code.numbers_function, 4), (code.words_function, 3), (code.data_class, 2), (code.sql, 3),
             (code.reading, 2)),
    "tools": ((tools.tool_use, 6), (tools.missing_argument, 1), (tools.extraction, 3), (tools.table, 2)),
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a friendly assistant who answers clearly.", "Answer briefly and politely.",
    "You are Wren, a small assistant that runs on a laptop.", "You help people with everyday questions.",
    "Be concise. If a tool fits, use it.", "You are a careful assistant. Think before you answer.",
    "Reply in plain English.", "You work at the help desk of a small company.", "You are a patient teacher.",
)
SYSTEM_SHARE = 0.4


@dataclass(frozen=True)
class Conversation:
    """One conversation and where it came from."""

    category: str
    family: str
    chat: Chat

    def row(self) -> dict[str, Any]:
        """The JSONL row: `messages`, `tools` when there are any, `category`."""
        offered = {"tools": list(self.chat.tools)} if self.chat.tools else {}
        return {"messages": self.chat.messages, **offered, "category": self.category}


def normalised(prompt: str) -> str:
    """A prompt without case, punctuation and spacing, so that trivial variants share one side of the split."""
    return " ".join("".join(c if c.isalnum() else " " for c in prompt.lower()).split())


def is_held_out(prompt: str) -> bool:
    """Whether this user message belongs to the benchmark suites and never to training text."""
    digest = hashlib.sha256(normalised(prompt).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_MODULUS == 0


def user_prompts(messages: list[Message]) -> list[str]:
    return [m["content"] for m in messages if m["role"] == "user"]


def _draw(rng: Random) -> Conversation:
    category = rng.choices(CATEGORIES, CATEGORY_WEIGHTS)[0]
    makers, weights = zip(*FAMILIES[category], strict=True)
    maker = rng.choices(makers, weights)[0]
    turns = maker(rng)
    if rng.random() < SYSTEM_SHARE:
        turns = Chat([{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *turns.messages], turns.tools)
    return Conversation(category, maker.__name__, turns)


def _stream(seed: int, wanted: Callable[[Conversation], bool]) -> Iterator[Conversation]:
    """Endless: for each index, the first draw that is wanted. Each attempt has its own generator."""
    index = 0
    while True:
        attempt = 0
        while not wanted(found := _draw(Random(f"{seed}:{index}:{attempt}"))):
            attempt += 1
        yield found
        index += 1


def training_stream(seed: int) -> Iterator[Conversation]:
    """Endless conversations none of whose user messages is held out."""
    return _stream(seed, lambda c: not any(map(is_held_out, user_prompts(c.chat.messages))))


def held_out(seed: int) -> Iterator[Conversation]:
    """Endless conversations whose last user message is held out."""
    return _stream(seed, lambda c: is_held_out(user_prompts(c.chat.messages)[-1]))


def conversations(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """`num` training conversations of stream `seed` as JSONL rows. Never contains a held-out prompt."""
    return (c.row() for c in islice(training_stream(seed), num))


def digest(num: int, seed: int, stream: Callable[[int], Iterator[Conversation]] = training_stream) -> str:
    """sha256 over the canonical JSON lines of the first `num` conversations of a stream: the identity of a corpus."""
    total = hashlib.sha256()
    for row in (c.row() for c in islice(stream(seed), num)):
        total.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return f"sha256:{total.hexdigest()}"


def write_jsonl(rows: Iterator[dict[str, Any]], out: Path) -> None:
    """Write to a temporary name, then rename: a reader sees the complete file or none."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".part")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    os.replace(partial, out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write training conversations as JSONL, one per line.")
    parser.add_argument("--num", type=int, required=True, help="conversations to write")
    parser.add_argument("--seed", type=int, default=7, help="stream to draw from; the target was trained on stream 0")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args()
    write_jsonl(conversations(args.num, args.seed), args.out)


if __name__ == "__main__":
    main()
