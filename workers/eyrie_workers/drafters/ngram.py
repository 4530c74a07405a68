"""The n-gram drafter: proposes the continuation of an earlier occurrence of the last tokens. No weights, no training.

Answers repeat their prompts (code, quotations, tool results, tables) and themselves. Prompt Lookup Decoding (Saxena
2023, github.com/apoorvumang/prompt-lookup-decoding) searches the last tokens earlier in the same text and proposes the
tokens that followed. It is the baseline a trained drafter has to exceed. SGLang's NGRAM merges matches into a trie that
persists across requests; this drafter uses one text only, so the drafts of an answer depend on
its own request only.

    match   the longest suffix of at most MAX_MATCH tokens that occurred before, the latest occurrence first; then those
            of shorter suffixes, down to MIN_MATCH
    copy    the tokens after the match. A copy that reaches the end of the text continues with the copied tokens (as in
            LZ77, Ziv and Lempel 1977), so that a period shorter than the draft is repeated
    branch  a chain uses the first match; a tree of top_k merges the first top_k matches into a trie, in that order

A shallower or narrower tree is a prefix of a larger one: its nodes in order of creation, up to the smaller depth.
`measure.tuner.predict` relies on that. Rows without a match propose nothing, and the engine verifies only proposed
nodes: a failed search costs a dictionary lookup.
"""

# B rows, N tree nodes

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN, CommittedTokens, DrafterState, DraftTree
from eyrie_workers.targets.device import upload

# Longer suffixes have better continuations, shorter ones match more often. A single token recurs too often to predict
# its continuation: at least two tokens, at most four.
MAX_MATCH = 4
MIN_MATCH = 2


@dataclass
class Text:
    """One row's text and the index of its n-grams."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """n-gram -> indices of its last token, ascending."""

    def append(self, token: int) -> None:
        self.tokens.append(token)
        for length in range(MIN_MATCH, min(MAX_MATCH, len(self.tokens)) + 1):
            self.ends.setdefault(tuple(self.tokens[-length:]), []).append(len(self.tokens) - 1)

    def matches(self) -> Iterator[int]:
        """Last indices of earlier occurrences of the text's suffixes: longest first, then latest; each once."""
        last = len(self.tokens) - 1
        yielded = {last}
        for length in range(min(MAX_MATCH, len(self.tokens)), MIN_MATCH - 1, -1):
            for end in reversed(self.ends.get(tuple(self.tokens[-length:]), ())):
                if end not in yielded:
                    yielded.add(end)
                    yield end

    def copy(self, end: int, length: int) -> list[int]:
        """The `length` tokens after index `end`; at the end of the text the copy continues with its own tokens."""
        period = len(self.tokens) - 1 - end
        copied = self.tokens[end + 1:end + 1 + length]
        while len(copied) < length:
            copied.append(copied[-period])
        return copied


class NgramDrafter:
    """`speculation.protocol.Drafter` from the text only. The state is the text of each row."""

    aux_layers: tuple[int, ...] = ()
    max_length = 2**31 - 1

    def new_state(self, num_rows: int) -> list[Text]:
        return [Text() for _ in range(num_rows)]

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        """Start the row's text with the first token; the pairs of `extend` contain the others."""
        assert isinstance(state, list)
        state[row] = Text()
        state[row].append(prompt[0])

    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        assert isinstance(state, list)
        for row, tokens in zip(pairs.rows, pairs.tokens, strict=True):
            for token in tokens:
                state[row].append(token)

    def propose(self, state: DrafterState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """One trie per row, from its first `top_k` matches."""
        assert isinstance(state, list)
        return tree_of_rows([_trie(state[row], shape) for row in rows])


def _trie(text: Text, shape: DraftTreeShape) -> tuple[list[int], list[int]]:
    """Tokens and parents of N nodes, the root first, padded with NO_TOKEN nodes.

    Padding nodes form a chain, so that a chain remains a chain for every number of matches.
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


def tree_of_rows(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> DraftTree:
    """Tokens and parents of each row as tensors. Without confidences, scores descend in order of creation, -inf for
    padding."""
    scores = [[0.0, *(-float(node) if tokens[node] != NO_TOKEN else -torch.inf for node in range(1, len(tokens)))]
              for tokens, _ in rows]
    filled = [node for tokens, _ in rows for node in range(1, len(tokens)) if tokens[node] != NO_TOKEN]
    tokens_BN, parents_BN = upload([[*tokens, *parents] for tokens, parents in rows]).chunk(2, 1)
    return DraftTree(tokens_BN, parents_BN, upload(scores, torch.float32), num_filled=1 + max(filled, default=0))
