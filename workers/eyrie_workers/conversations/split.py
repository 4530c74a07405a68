"""Decides which prompts are held out and which occur in a benchmark, from the text alone and before anything else.

A drafter measured on its training data looks better than it is. Two rules prevent that:

* **held out**: a prompt whose key hashes below the given fraction is kept for the `held-out` suite. The hash reads the
  text alone, so a prompt stays on its side in every run, seed, mixture and order of rows;
* **excluded**: a conversation that contains a whole benchmark prompt, or is a part of one, is not trained on.

Both compare user turns without case, punctuation and spacing. System prompts and tool definitions are ignored: the same
question under another system prompt counts as the same question. So are assistant and tool turns: a file that lists
each step of one tool conversation as a row of its own keeps all of them on one side.

Pure; `suites` reads the benchmark prompts.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from eyrie_workers.conversations.conversation import Message

_HASH_BITS = 64


def normalised(text: str) -> str:
    """Text without case, punctuation and spacing, so that trivial variants are equal.

    Text of punctuation alone stays as it is: `+` and `-` are different questions.
    """
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split()) or text.strip()


def user_turns(messages: Sequence[Message]) -> tuple[str, ...]:
    """The normalised user turns of a conversation."""
    return tuple(normalised(message["content"]) for message in messages if message["role"] == "user")


def is_held_out(messages: Sequence[Message], fraction: float) -> bool:
    """Whether this prompt is held out. A fraction of 0 holds out nothing, 1 everything."""
    drawn = hashlib.sha256(b"held-out:" + json.dumps(user_turns(messages)).encode()).digest()
    return int.from_bytes(drawn[: _HASH_BITS // 8], "big") < fraction * 2**_HASH_BITS


@dataclass(frozen=True)
class BenchmarkPrompts:
    """An index over the prompts of some suites, to find conversations that overlap with one of them."""

    whole: frozenset[tuple[str, ...]]
    """User turns of each prompt."""

    parts: frozenset[tuple[str, ...]]
    """Every sequence of consecutive turns of each prompt."""

    lengths: tuple[int, ...]
    """The numbers of turns that occur."""

    @classmethod
    def of(cls, prompts: Iterable[Sequence[Message]]) -> "BenchmarkPrompts":
        """Build the index from prompts, each a sequence of messages."""
        whole = frozenset(turns for prompt in prompts if (turns := user_turns(prompt)))
        parts = frozenset(run for turns in whole for length in range(1, len(turns) + 1) for run in _runs(turns, length))
        return cls(whole, parts, tuple(sorted({len(turns) for turns in whole})))

    def overlap(self, messages: Sequence[Message]) -> bool:
        """Whether the conversation contains a whole benchmark prompt, or is a part of one."""
        turns = user_turns(messages)
        return turns in self.parts or any(run in self.whole for length in self.lengths for run in _runs(turns, length))


def _runs(turns: tuple[str, ...], length: int) -> Iterator[tuple[str, ...]]:
    return (turns[start: start + length] for start in range(len(turns) - length + 1))
