"""Conversations to fixed-shape batches: tokens, loss weights, and which document each token belongs to.

Every step has 2048 tokens in one of two shapes, 8 x 256 or 4 x 512. Fixed shapes matter on this hardware: oneDNN
compiles a kernel per shape, and attention costs grow with the row. Conversations up to 256 tokens share rows of
256; longer ones get rows of 512. Rows are filled best-fit decreasing within pools of 256 conversations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import torch
from torch import Tensor

TOKENS_PER_STEP = 2048
ROW_LENGTHS = (256, 512)
POOL_SIZE = 256
"""Conversations packed together."""

PROMPT_WEIGHT = 0.2
"""Loss weight of tokens outside assistant turns. Prompts train the embeddings; answers are what the model serves."""


@dataclass(frozen=True)
class Encoded:
    """One conversation as tokens; `answer` marks what the assistant says, end-of-turn token included."""

    family: str
    tokens: list[int]
    answer: list[int]


@dataclass
class Row:
    """Conversations back to back."""

    length: int
    documents: list[Encoded] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.length - sum(len(d.tokens) for d in self.documents)


@dataclass(frozen=True)
class Batch:
    """tokens, documents [B, T] int64; weights [B, T] float32, for predicting the token at that place."""

    tokens: Tensor
    documents: Tensor
    weights: Tensor


def batches(conversations: Iterable[Encoded]) -> Iterator[Batch]:
    """Batches of TOKENS_PER_STEP tokens. What is still open when the input ends is dropped."""
    waiting: dict[int, list[Row]] = {length: [] for length in ROW_LENGTHS}
    source, shuffle = iter(conversations), Random(0)
    while pool := list(islice(source, POOL_SIZE)):
        rows = pack(pool)
        shuffle.shuffle(rows)  # packing sorts by length; training should not
        for row in rows:
            same = waiting[row.length]
            same.append(row)
            if len(same) * row.length == TOKENS_PER_STEP:
                yield collate(same)
                same.clear()


def pack(pool: list[Encoded]) -> list[Row]:
    """Best-fit decreasing: longest conversations first, each into the row it fills best."""
    rows: list[Row] = []
    for document in sorted(pool, key=lambda d: -len(d.tokens)):
        size = len(document.tokens)
        row = min((r for r in rows if r.room >= size), key=lambda r: r.room, default=None)
        if row is None:
            length = next((n for n in ROW_LENGTHS if size <= n), None)
            if length is None:
                longest = ROW_LENGTHS[-1]
                raise ValueError(f"conversation of {size} tokens exceeds the row length {longest}: shorten its family")
            row = Row(length)
            rows.append(row)
        row.documents.append(document)
    return rows


def collate(rows: list[Row]) -> Batch:
    shape = (len(rows), rows[0].length)
    tokens, documents, weights = torch.zeros(shape, dtype=torch.long), torch.zeros(shape,
                                                                                   dtype=torch.long), torch.zeros(shape)
    for b, row in enumerate(rows):
        start = 0
        for number, document in enumerate(row.documents, 1):
            end = start + len(document.tokens)
            tokens[b, start:end] = torch.tensor(document.tokens)
            documents[b, start:end] = number
            weights[b, start:end] = torch.tensor(document.answer).float() * (1 - PROMPT_WEIGHT) + PROMPT_WEIGHT
            weights[b, start] = 0.0  # nothing precedes the first token of a document
            start = end
    return Batch(tokens, documents, weights)
