"""Which conversations are held out, occur in a benchmark, or repeat another: decided from the text alone.

A drafter measured on its training data looks better than it is. Three rules prevent that:

* **held out**: a prompt whose key hashes below the given fraction is kept for the `held-out` suite. The hash reads the
  text alone, so a prompt stays on its side in every run, seed, mixture and order of rows;
* **excluded**: a conversation that contains a whole benchmark prompt, or is a part of one, is not trained on;
* **overlap**: thirteen words in a row (GPT-3, arXiv:2005.14165, appendix C) that both contain are seldom equal by
  chance. In scripts without spaces each character counts as a word.

All compare user turns without case, punctuation and spacing. System prompts and tool definitions are ignored: the same
question under another system prompt counts as the same question. So are assistant and tool turns: a file that lists
each step of one tool conversation as a row of its own keeps all of them on one side.

Near duplicates, off by default, are found by MinHash (Broder 1997) over shingles of tokens, candidates by bands (LSH).
A signature has 128 minima; the share of equal minima of two texts estimates the Jaccard similarity of their shingles
with a standard deviation of at most 0.045. Two texts are compared when one band of their signatures is equal; the band
is the longest that finds texts at the threshold with a probability of at least 0.9. The first of several near
duplicates is kept, so the result depends on the order of rows alone. Costs about 0.3 ms and 1.5 KB per text of 200
tokens.

Pure; `suites` reads the benchmark prompts.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eyrie_api.chat_messages import Message

_HASH_BITS = 64


def normalized(text: str) -> str:
    """Text without case, punctuation and spacing, so that trivial variants are equal.

    Text of punctuation alone stays as it is: `+` and `-` are different questions.
    """
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split()) or text.strip()


def user_turns(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(normalized(message["content"]) for message in messages if message["role"] == "user")


def is_held_out(messages: Sequence[Message], fraction: float) -> bool:
    """Whether this prompt is held out. A fraction of 0 holds out nothing, 1 everything."""
    drawn = hashlib.sha256(b"held-out:" + json.dumps(user_turns(messages)).encode()).digest()
    return int.from_bytes(drawn[: _HASH_BITS // 8], "big") < fraction * 2**_HASH_BITS


@dataclass(frozen=True)
class BenchmarkPrompts:
    """An index over the prompts of some suites, to find conversations that overlap with one of them."""

    whole: frozenset[tuple[str, ...]]  # user turns of each prompt
    parts: frozenset[tuple[str, ...]]  # every sequence of consecutive turns of each prompt
    lengths: tuple[int, ...]  # the numbers of turns that occur

    @classmethod
    def of(cls, prompts: Iterable[Sequence[Message]]) -> "BenchmarkPrompts":
        whole = frozenset(turns for prompt in prompts if (turns := user_turns(prompt)))
        parts = frozenset(run for turns in whole for length in range(1, len(turns) + 1) for run in _runs(turns, length))
        return cls(whole, parts, tuple(sorted({len(turns) for turns in whole})))

    def overlap(self, messages: Sequence[Message]) -> bool:
        """Whether the conversation contains a whole benchmark prompt, or is a part of one."""
        turns = user_turns(messages)
        return turns in self.parts or any(run in self.whole for length in self.lengths for run in _runs(turns, length))


def _runs(turns: tuple[str, ...], length: int) -> Iterator[tuple[str, ...]]:
    return (turns[start: start + length] for start in range(len(turns) - length + 1))


RUN_WORDS = 13
_UNSPACED = ((0x0E00, 0x0EFF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xAC00, 0xD7AF))


class Runs:
    """All word n-grams of some conversations."""

    def __init__(self, conversations: Iterable[Sequence[Message]] = ()) -> None:
        self._runs = {run for messages in conversations for run in _word_runs(messages)}

    def overlap(self, messages: Sequence[Message]) -> bool:
        """Whether the conversation shares an n-gram with one of them."""
        return bool(self._runs) and any(run in self._runs for run in _word_runs(messages))


def words(text: str) -> list[str]:
    """Words of a normalized text; characters in scripts without spaces."""
    return [part for word in text.split()
            for part in (word if any(low <= ord(word[0]) <= high for low, high in _UNSPACED) else (word,))]


def _word_runs(messages: Sequence[Message]) -> Iterator[int]:
    for text in user_turns(messages):
        tokens = words(text)
        for start in range(len(tokens) - RUN_WORDS + 1):
            yield hash(tuple(tokens[start:start + RUN_WORDS]))


NUM_HASHES = 128
SHINGLE_TOKENS = 5
_RECALL = 0.9
_PRIME = np.uint64(2**31 - 1)


class NearDuplicates:
    """Signatures of the texts kept so far."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        # A band of r minima is equal with probability J**r, at least one of n / r bands with 1 - (1 - J**r)**(n / r).
        self._band = next((length for length in (32, 16, 8, 4, 2)
                           if 1.0 - (1.0 - threshold**length) ** (NUM_HASHES // length) >= _RECALL), 1)
        rng = np.random.default_rng(0)
        self._scale = rng.integers(1, int(_PRIME), (NUM_HASHES, 1), dtype=np.uint64)
        self._shift = rng.integers(0, int(_PRIME), (NUM_HASHES, 1), dtype=np.uint64)
        self._kept: list[NDArray[np.uint32]] = []
        self._buckets: dict[tuple[int, bytes], list[int]] = {}

    def seen(self, token_ids: list[int]) -> bool:
        """Whether a near duplicate of this text was added before; if not, the text is added."""
        length = min(SHINGLE_TOKENS, max(1, len(token_ids)))
        # hash() of a tuple of ints does not depend on PYTHONHASHSEED, so signatures are the same in every process.
        shingles = {hash(tuple(token_ids[start:start + length])) % int(_PRIME)
                    for start in range(max(1, len(token_ids) - length + 1))}
        values = np.fromiter(shingles, dtype=np.uint64)
        signature: NDArray[np.uint32] = ((self._scale * values + self._shift) % _PRIME).min(axis=1).astype(np.uint32)
        # LSH: only texts that share a band of equal minima, at the same place, are compared in full.
        keys = [(start, signature[start:start + self._band].tobytes())
                for start in range(0, NUM_HASHES - self._band + 1, self._band)]
        candidates = {index for key in keys for index in self._buckets.get(key, ())}
        if any(float(np.mean(self._kept[index] == signature)) >= self._threshold for index in candidates):
            return True
        for key in keys:
            self._buckets.setdefault(key, []).append(len(self._kept))
        self._kept.append(signature)
        return False
