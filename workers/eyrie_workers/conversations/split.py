"""Which prompts are held out, and which occur in a benchmark: decided before anything else, by the text alone.

A drafter measured on what it was trained on looks better than it is. Two doors close that:

* **held out**: a prompt whose key hashes below the wanted share is kept aside for the `held-out` suite. The hash sees
  the text and nothing else, so a prompt stays on its side through every run, seed, mixture and order of rows;
* **excluded**: a conversation that asks what a benchmark suite asks, or is a part of what it asks, is not trained on.

Both compare user turns without case, punctuation and spacing. System prompts and tool definitions are left out on
purpose: the same question under another system prompt is the same question. So are assistant and tool turns: a file
that lists each step of one tool conversation as a row of its own keeps all of them on one side.

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
    """Whether this prompt is split off. A fraction of 0 holds out nothing, 1 everything."""
    drawn = hashlib.sha256(b"held-out:" + json.dumps(user_turns(messages)).encode()).digest()
    return int.from_bytes(drawn[: _HASH_BITS // 8], "big") < fraction * 2**_HASH_BITS


@dataclass(frozen=True)
class BenchmarkPrompts:
    """The prompts of some suites, arranged for the question whether a conversation overlaps with one of them."""

    whole: frozenset[tuple[str, ...]]
    """User turns of each prompt."""

    parts: frozenset[tuple[str, ...]]
    """Every run of consecutive turns of each prompt."""

    lengths: tuple[int, ...]
    """Numbers of turns that occur."""

    @classmethod
    def of(cls, prompts: Iterable[Sequence[Message]]) -> "BenchmarkPrompts":
        """Arrange prompts, each a sequence of messages."""
        whole = frozenset(turns for prompt in prompts if (turns := user_turns(prompt)))
        parts = frozenset(run for turns in whole for length in range(1, len(turns) + 1) for run in _runs(turns, length))
        return cls(whole, parts, tuple(sorted({len(turns) for turns in whole})))

    def overlap(self, messages: Sequence[Message]) -> bool:
        """Whether the conversation contains a whole benchmark prompt, or is a part of one."""
        turns = user_turns(messages)
        return turns in self.parts or any(run in self.whole for length in self.lengths for run in _runs(turns, length))


def _runs(turns: tuple[str, ...], length: int) -> Iterator[tuple[str, ...]]:
    return (turns[start: start + length] for start in range(len(turns) - length + 1))
