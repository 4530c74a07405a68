"""Shared word n-grams between conversations: the usual contamination check.

Thirteen words in a row (GPT-3, arXiv:2005.14165, appendix C) are seldom equal by chance. Words are compared without
case and punctuation; in scripts without spaces each character counts as a word. Only user turns are compared, each by
itself. Whole prompts with fewer words are checked by `split.BenchmarkPrompts`.
"""

from collections.abc import Iterable, Iterator, Sequence

from eyrie_workers.conversations.conversation import Message
from eyrie_workers.conversations.split import user_turns

RUN_WORDS = 13
_UNSPACED = ((0x0E00, 0x0EFF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xAC00, 0xD7AF))


class Runs:
    """All word n-grams of some conversations."""

    def __init__(self, conversations: Iterable[Sequence[Message]] = ()) -> None:
        self._runs: set[int] = set()
        for messages in conversations:
            self.add(messages)

    def add(self, messages: Sequence[Message]) -> None:
        """Add the n-grams of one conversation."""
        self._runs.update(_runs(messages))

    def overlap(self, messages: Sequence[Message]) -> bool:
        """Whether the conversation shares an n-gram with any that was added."""
        return bool(self._runs) and any(run in self._runs for run in _runs(messages))


def words(text: str) -> list[str]:
    """Words of a normalised text; characters in scripts without spaces."""
    return [part for word in text.split() for part in (word if _unspaced(word) else (word,))]


def _unspaced(word: str) -> bool:
    return any(low <= ord(word[0]) <= high for low, high in _UNSPACED)


def _runs(messages: Sequence[Message]) -> Iterator[int]:
    for text in user_turns(messages):
        tokens = words(text)
        for start in range(len(tokens) - RUN_WORDS + 1):
            yield hash(tuple(tokens[start:start + RUN_WORDS]))
