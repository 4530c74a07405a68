"""The draft vocabulary: the reduced output vocabulary of a drafter.

A drafter's output matrix is most of its work when the target's vocabulary is large, and most of that vocabulary is
almost never produced: FR-Spec (arXiv:2502.14856) finds a quarter of the tokens covers 95 % of text. So the drafter
predicts over the D tokens its target produced most often in the training answers. Tokens that end an answer or frame a
tool call are always included: every answer contains them, and a missing one costs a rejected round.

Where the spec gives no D, it follows from what the answers contain and from what an output row costs (`default_size`).
A vocabulary covers more of the answers that it was counted from than of others: of 100,000 tokens one in twenty may be
the only one of its id. Its size is therefore judged on answers that were not counted. The answers of each source are
divided into four parts, and the tokens of each part looked up in the ranking of the other three
(`AnswerCounts.unseen_coverage`, c(D)). A chain of n steps whose tokens are accepted with probability p where they have
a draft id gives 1 + pc + ... + (pc)^n tokens per target pass, and a draft step costs as much as R + D output rows, R
being the rest of it (`TargetFacts.rows_of_a_step`). D is where the first over the second is greatest, for the source
that wants most, as a multiple of 64. A target of 135M parameters has R = 64,000, and one of 8B 500,000, so that D grows
with the target. The ranking of three quarters of the answers is worse than that of all, and rare tokens are seldom
accepted anyway: D is rather too large than too small. It is at most `DEFAULT_DRAFT_VOCABULARY`; at least
`LEAST_DRAFT_VOCABULARY`, below which the output matrix is smaller than the rest of the drafter of any target in use.

Two maps tie the vocabularies together, in the form serving engines load:

    d2t [D] int64   OFFSETS: draft id j stands for target id j + d2t[j]; strictly ascending target ids
    t2d [V] bool    whether a target id has a draft id

    V target vocabulary, D draft vocabulary, F parts of the answers
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from eyrie_api.errors import VocabularyTooLarge
from eyrie_api.planning.plan_work import LEAST_DRAFT_VOCABULARY, TargetFacts, largest_draft_vocabulary

_STEPS, _ACCEPTED = 4, 0.7
"""n and p of the module's rule: a usual chain, and a usual drafter."""

_NUM_PARTS = 4
_MULTIPLE = 64
"""Of the size: what products of matrices are fast at, and SGLang pads to."""

_FEWEST_TOKENS = 2000
"""Of a source from which a size is estimated; with less, the figure is chance."""


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
    """D for a target of V tokens, without a wish at most. Raises VocabularyTooLarge when `wanted` exceeds V."""
    if wanted is None:
        return largest_draft_vocabulary(vocab_size)
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
    forced = _forced(always, vocab_size)
    if len(forced) > size:
        raise VocabularyTooLarge(
            f"{len(forced)} end and special tokens do not fit a draft vocabulary of {size}",
            f"give drafter.draft_vocab_size of at least {len(forced)}")
    return DraftVocabulary(ids=_ranking(counts_V, forced)[:size].sort().values, vocab_size=vocab_size)


def _forced(always: Collection[int], vocab_size: int) -> list[int]:
    return sorted({token for token in always if 0 <= token < vocab_size})


def _ranking(counts_V: Tensor, forced: list[int]) -> Tensor:
    rank_V = counts_V.to(torch.float64)
    rank_V[forced] = torch.inf
    return torch.sort(rank_V, descending=True, stable=True).indices


class AnswerCounts:
    """How often each target id was produced, by source, in F parts: an answer belongs to each in turn."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._answers = Counter[str]()
        self._parts: dict[str, Tensor] = {}  # [F, V]

    def add(self, source: str, counts_V: Tensor) -> None:
        """Count one answer (`count_tokens`)."""
        if source not in self._parts:
            self._parts[source] = torch.zeros(_NUM_PARTS, self.vocab_size, dtype=torch.int64)
        self._parts[source][self._answers[source] % _NUM_PARTS] += counts_V
        self._answers[source] += 1

    @property
    def total_V(self) -> Tensor:
        return sum((part_FV.sum(0) for part_FV in self._parts.values()), torch.zeros(self.vocab_size).long())

    def unseen_coverage(self, always: Collection[int] = ()) -> dict[str, Tensor]:
        """[V] by source, without those of few tokens: at D - 1 the share of the tokens of an answer that the D first of
        a ranking without it hold."""
        forced = _forced(always, self.vocab_size)
        covered = {source: torch.zeros(self.vocab_size, dtype=torch.int64) for source, part_FV in self._parts.items()
                   if int(part_FV.sum()) >= _FEWEST_TOKENS}
        total_V = self.total_V
        for number in range(_NUM_PARTS):
            ranking = _ranking(total_V - sum(part_FV[number] for part_FV in self._parts.values()), forced)
            for source, sum_V in covered.items():
                sum_V += self._parts[source][number][ranking].cumsum(0)
        return {source: sum_V / sum_V[-1] for source, sum_V in covered.items()}


def default_size(counts: AnswerCounts, target: TargetFacts, always: Collection[int] = ()) -> int:
    """D where the spec gives none (see the module)."""
    largest = largest_draft_vocabulary(counts.vocab_size)
    coverages = counts.unseen_coverage(always)
    if largest <= LEAST_DRAFT_VOCABULARY or not coverages:
        return largest
    cost_D = target.rows_of_a_step(_STEPS) + torch.arange(1, largest + 1)
    best = max(int((sum((_ACCEPTED * covered_V[:largest]) ** step for step in range(_STEPS + 1)) / cost_D).argmax()) + 1
               for covered_V in coverages.values())
    size = max(best, LEAST_DRAFT_VOCABULARY, len(_forced(always, counts.vocab_size)))
    return min(largest, -(-size // _MULTIPLE) * _MULTIPLE)


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
