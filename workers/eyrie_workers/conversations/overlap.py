"""Which texts share a run of words with texts they should not share one with: the usual check for contamination.

Thirteen words in a row (GPT-3, arXiv:2005.14165, appendix C) are seldom the same by chance. Words are compared without
case and punctuation; writing without spaces counts each character as a word. User turns alone are looked at, each by
itself. Whole prompts shorter than the run are `split.BenchmarkPrompts`' business.
"""

from collections.abc import Iterable, Iterator, Sequence

from eyrie_workers.conversations.conversation import Message
from eyrie_workers.conversations.split import user_turns

RUN_WORDS = 13
_UNSPACED = ((0x0E00, 0x0EFF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xAC00, 0xD7AF))


class Runs:
    """Every run of words of some conversations."""

    def __init__(self, conversations: Iterable[Sequence[Message]] = ()) -> None:
        self._runs: set[int] = set()
        for messages in conversations:
            self.add(messages)

    def add(self, messages: Sequence[Message]) -> None:
        """Take in the runs of one conversation."""
        self._runs.update(_runs(messages))

    def overlap(self, messages: Sequence[Message]) -> bool:
        """Whether the conversation shares a run with any of those taken in."""
        return bool(self._runs) and any(run in self._runs for run in _runs(messages))


def words(text: str) -> list[str]:
    """Words of a normalised text; characters, where it is written without spaces."""
    return [part for word in text.split() for part in (word if _unspaced(word) else (word,))]


def _unspaced(word: str) -> bool:
    return any(low <= ord(word[0]) <= high for low, high in _UNSPACED)


def _runs(messages: Sequence[Message]) -> Iterator[int]:
    for text in user_turns(messages):
        said = words(text)
        for start in range(len(said) - RUN_WORDS + 1):
            yield hash(tuple(said[start:start + RUN_WORDS]))
