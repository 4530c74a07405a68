"""The draft vocabulary: the reduced output vocabulary of a drafter.

A drafter's output matrix is most of its work when the target's vocabulary is large, and most of that vocabulary is
almost never produced: FR-Spec (arXiv:2502.14856) finds a quarter of the tokens covers 95 % of text. So the drafter
predicts over the D tokens its target produced most often in the training answers. Tokens that end an answer or frame a
tool call are always included: every answer contains them, and a missing one costs a rejected round.

Two maps tie the vocabularies together, in the form serving engines load:

    d2t [D] int64   OFFSETS: draft id j stands for target id j + d2t[j]; strictly ascending target ids
    t2d [V] bool    whether a target id has a draft id

    V target vocabulary, D draft vocabulary
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie_api.errors import VocabularyTooLarge

DEFAULT_MAX_SIZE = 32_768
"""The whole vocabulary is used up to this size when the spec gives none: EAGLE-3's drafters for 128k vocabularies use
32k."""


@dataclass(frozen=True)
class DraftVocabulary:
    """The target ids that have a draft id."""

    ids: Tensor
    """[D] int64 target ids, strictly ascending."""

    vocab_size: int
    """V."""

    @property
    def size(self) -> int:
        """D."""
        return self.ids.numel()

    @property
    def d2t(self) -> Tensor:
        """[D] int64 offsets."""
        return self.ids - torch.arange(self.size)

    @property
    def t2d(self) -> Tensor:
        """[V] bool."""
        member = torch.zeros(self.vocab_size, dtype=torch.bool)
        member[self.ids] = True
        return member

    @staticmethod
    def from_buffers(d2t: Tensor, t2d: Tensor) -> "DraftVocabulary":
        """From a drafter's buffers, which must be consistent (loading a checkpoint checks it)."""
        return DraftVocabulary(ids=(d2t + torch.arange(d2t.numel(), device=d2t.device)).cpu(), vocab_size=t2d.numel())


def count_tokens(token_ids: Tensor, loss_mask: Tensor, vocab_size: int) -> Tensor:
    """How often each target id was produced: [T] ids and [T] bool mask -> [V] int64."""
    return torch.bincount(token_ids[loss_mask], minlength=vocab_size)


def choose_size(vocab_size: int, wanted: int | None) -> int:
    """D for a target of V tokens. Raises VocabularyTooLarge when `wanted` exceeds V."""
    if wanted is None:
        return min(vocab_size, DEFAULT_MAX_SIZE)
    if wanted > vocab_size:
        raise VocabularyTooLarge(f"drafter.draft_vocab_size {wanted} is larger than the target's vocabulary of "
                                 f"{vocab_size}", f"give at most {vocab_size}, or leave it out")
    return wanted


def build(counts_V: Tensor, size: int, always: Collection[int] = ()) -> DraftVocabulary:
    """The `size` most frequent tokens, ties to the smaller id, with `always` (end and special tokens) among them.

    counts_V  [V] int64  from `count_tokens`.
    size      D; raises VocabularyTooLarge when it exceeds V, or cannot hold `always`.

    When fewer than D tokens were produced, ties at count 0 go to the smallest ids, which byte-level tokenizers give to
    single bytes: the parts of any unseen word.
    """
    vocab_size = counts_V.numel()
    choose_size(vocab_size, size)
    forced = sorted({token for token in always if 0 <= token < vocab_size})
    if len(forced) > size:
        raise VocabularyTooLarge(
            f"{len(forced)} end and special tokens do not fit a draft vocabulary of {size}",
            f"give drafter.draft_vocab_size of at least {len(forced)}")
    rank_V = counts_V.to(torch.float64)
    rank_V[forced] = torch.inf
    order = torch.sort(rank_V, descending=True, stable=True).indices
    return DraftVocabulary(ids=order[:size].sort().values, vocab_size=vocab_size)


def coverage(counts_V: Tensor, vocabulary: DraftVocabulary) -> float:
    """Share of the produced tokens that have a draft id; 1.0 when nothing was produced."""
    total = int(counts_V.sum())
    return int(counts_V[vocabulary.ids].sum()) / total if total else 1.0


def coverage_curve(counts_V: Tensor, always: Collection[int] = ()) -> dict[int, float]:
    """Coverage at powers of two up to V, and at V: for choosing a size."""
    vocab_size = counts_V.numel()
    floor = len({token for token in always if 0 <= token < vocab_size})
    sizes = [size for size in (2**power for power in range(6, 32)) if floor <= size < vocab_size] + [vocab_size]
    return {size: coverage(counts_V, build(counts_V, size, always)) for size in sizes}
