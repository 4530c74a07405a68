"""The n-gram drafter: what followed these words last time will follow them again. No weights, no training.

Answers repeat their prompts (code, quotations, tool results, tables) and themselves. So look for the last few tokens
earlier in the same text and propose what came next there: Prompt Lookup Decoding (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding); the model-free rival a trained drafter has to beat before it is worth
its training. SGLang's NGRAM is a relative: it merges matches into a trie and keeps it across requests; ours knows one
text, so an answer depends on nothing but its request.

    match   the longest suffix of at most MAX_MATCH tokens that occurred before, the latest occurrence first; then those
            of shorter suffixes, down to MIN_MATCH
    copy    from behind the match. A copy that reaches the end of the text goes on with what it copied (as in LZ77,
            Ziv and Lempel 1977), so a period shorter than the draft is carried on
    branch  a chain takes the first match; a tree of top_k merges the first top_k in a trie, in that order

A shallower or narrower tree is the beginning of a deeper one: of the nodes in the order they were made, those not too
deep. `measurement.tuner.predict` relies on that. Rows without a match propose nothing, and the engine verifies no more
nodes than were proposed: not finding anything costs a dictionary look-up.
"""

# B rows, N tree nodes

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN, CommittedTokens, DrafterState, DraftTree

# Longer suffixes pick better continuations, shorter ones find some at all. A single token recurs everywhere and says
# little of what follows it: two at least, as four at most.
MAX_MATCH = 4
MIN_MATCH = 2


@dataclass
class Text:
    """One row's text, and where each of its n-grams ends."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """n-gram -> indices of its last token, ascending."""

    def append(self, token: int) -> None:
        """Take in the next token."""
        self.tokens.append(token)
        for length in range(MIN_MATCH, min(MAX_MATCH, len(self.tokens)) + 1):
            self.ends.setdefault(tuple(self.tokens[-length:]), []).append(len(self.tokens) - 1)

    def matches(self) -> Iterator[int]:
        """Where earlier occurrences of the text's end end: longest first, then latest; each once."""
        last = len(self.tokens) - 1
        seen = {last}
        for length in range(min(MAX_MATCH, len(self.tokens)), MIN_MATCH - 1, -1):
            for end in reversed(self.ends.get(tuple(self.tokens[-length:]), ())):
                if end not in seen:
                    seen.add(end)
                    yield end

    def copy(self, end: int, length: int) -> list[int]:
        """`length` tokens from behind `end`, going on with the copy itself at the text's end."""
        period = len(self.tokens) - 1 - end
        found = self.tokens[end + 1:end + 1 + length]
        while len(found) < length:
            found.append(found[-period])
        return found


@dataclass
class NgramState:
    """The texts of all rows."""

    texts: list[Text]


class NgramDrafter:
    """`speculation.protocol.Drafter` over nothing but the text."""

    aux_layers: tuple[int, ...] = ()
    max_length = 2**31 - 1

    def new_state(self, num_rows: int, max_length: int, max_shape: DraftTreeShape) -> NgramState:
        """Empty texts."""
        return NgramState([Text() for _ in range(num_rows)])

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        """Begin the row's text with the first token: the others come as the followers of their positions."""
        assert isinstance(state, NgramState)
        state.texts[row] = Text()
        state.texts[row].append(prompt[0])

    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Take in the tokens of the pairs."""
        assert isinstance(state, NgramState)
        for row, tokens, length in zip(pairs.rows.tolist(), pairs.tokens.tolist(), pairs.lengths.tolist(), strict=True):
            for token in tokens[:length]:
                state.texts[row].append(token)

    def propose(self, state: DrafterState, rows: Tensor, shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """One trie per row, from its first `top_k` matches."""
        assert isinstance(state, NgramState)
        tries = [_trie(state.texts[row], shape) for row in rows.tolist()]
        return DraftTree(torch.tensor([tokens for tokens, _ in tries]), torch.tensor([parents for _, parents in tries]),
                         torch.tensor([_scores(tokens) for tokens, _ in tries]))


def _trie(text: Text, shape: DraftTreeShape) -> tuple[list[int], list[int]]:
    """Tokens and parents of N nodes, the root first, filled up with NO_TOKEN nodes.

    What fills up hangs like a chain, so that a chain stays one whatever its rows found.
    """
    tokens, parents = [NO_TOKEN], [0]
    children: dict[tuple[int, int], int] = {}
    for number, end in enumerate(text.matches()):
        if number == shape.top_k or len(tokens) == shape.num_draft_tokens:
            break
        node = 0
        for token in text.copy(end, shape.num_steps):
            if (node, token) not in children:
                if len(tokens) == shape.num_draft_tokens:
                    break
                children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = children[node, token]
    while len(tokens) < shape.num_draft_tokens:
        parents.append(len(tokens) - 1)
        tokens.append(NO_TOKEN)
    return tokens, parents


def _scores(tokens: Sequence[int]) -> list[float]:
    """Confidence falls in the order the nodes were made: only the order has a meaning here."""
    return [0.0] + [-float(index) if token != NO_TOKEN else -torch.inf for index, token in enumerate(tokens) if index]
