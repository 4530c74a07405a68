"""The n-gram drafter of a server that remembers: what followed these words in any answer, latest first.

`drafters.ngram` knows one text. This one is how SGLang's NGRAM works (0.5.23, match type BFS, no external corpus; read
in `ngram_worker.py` and `ngram_corpus/*.cpp`), so that what it accepts there can be predicted, and proven, here:

    remember   after every round the last WINDOW tokens of the text that was drafted for enter a trie, with all their
               suffixes; at each node the child written last comes first. One trie for all requests, never the whole of
               a prompt: of that, the last WINDOW tokens
    match      all suffixes of the text that are paths of the trie and go on, longest first. A server does not look
               them up again each round: it follows the new tokens down from where each suffix stood. So a suffix that
               the trie learned only after it was passed is not found until its first token has left the window
    merge      each match in turn adds what hangs below it, breadth first, to one tree of num_draft_tokens nodes. Of a
               node the latest children, fewer the longer the match and the deeper the node: from top_k to 1, evenly
               over the WINDOW
    fill up    with nodes of token 0 under the root, which SGLang accepts like any other where the target says 0

There is no depth to set and no chain: even with top_k 1 a shorter match adds a branch beside a longer one's.
`num_steps` cuts here what SGLang would let grow to num_draft_tokens - 1, so the two are the same where it is that. Left
out is what happens at the capacity (10 million nodes): SGLang then forgets what was touched longest ago.

An answer does not change by what is remembered, its speed does: the second of two equal requests is drafted whole.
"""

# B rows, N tree nodes

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN, CommittedTokens, DrafterState, DraftTree

WINDOW = 18
"""SGLang's `max_trie_depth`: the longest path of the trie."""

FILLING = 0
"""The token of nodes that fill up a tree."""


class _Node(dict[int, "_Node"]):
    """A node's children by token, the one written last at the end."""


@dataclass
class _Text:
    """One row's text, and where its suffixes stand in the trie."""

    tokens: list[int] = field(default_factory=list)
    followed: int = 0
    """Tokens `places` accounts for; 0: nothing was looked up yet."""

    places: list[_Node | None] = field(default_factory=list)
    """[d - 1]: the node of the suffix of d tokens; None where the trie had no such path when it was passed."""


@dataclass
class TrieState:
    """The server's memory, and the texts of all rows."""

    texts: list[_Text]
    root: _Node = field(default_factory=_Node)


class TrieDrafter:
    """`speculation.protocol.Drafter` over the texts of all requests since `new_state`."""

    aux_layers: tuple[int, ...] = ()
    max_length = 2**31 - 1

    def new_state(self, num_rows: int, max_length: int, max_shape: DraftTreeShape) -> TrieState:
        """No memory."""
        return TrieState([_Text() for _ in range(num_rows)])

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        """Begin the row's text with the first token; what is remembered stays."""
        assert isinstance(state, TrieState)
        state.texts[row] = _Text([prompt[0]])

    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Take in the tokens of the pairs."""
        assert isinstance(state, TrieState)
        for row, tokens, length in zip(pairs.rows.tolist(), pairs.tokens.tolist(), pairs.lengths.tolist(), strict=True):
            state.texts[row].tokens += tokens[:length]

    def propose(self, state: DrafterState, rows: Tensor, shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """One tree per row from what is remembered; then remember the rows' own last tokens."""
        assert isinstance(state, TrieState)
        texts = [state.texts[row] for row in rows.tolist()]
        trees = [_merge(_matches(text, state.root), shape) for text in texts]
        for text in texts:
            _remember(state.root, text.tokens[-WINDOW:])
        return DraftTree(torch.tensor([tokens for tokens, _ in trees]), torch.tensor([parents for _, parents in trees]),
                         torch.tensor([_scores(tokens) for tokens, _ in trees]))


def _remember(root: _Node, tokens: Sequence[int]) -> None:
    for start in range(len(tokens)):
        node = root
        for token in tokens[start:]:
            child = node.pop(token, None)
            node[token] = child = _Node() if child is None else child
            node = child


def _matches(text: _Text, root: _Node) -> list[tuple[_Node, int]]:
    """Nodes of the text's suffixes that go on, with the suffixes' lengths, longest first."""
    if text.followed == 0:
        last = text.tokens[-WINDOW:]
        text.places = [_walk(root, last[len(last) - length:]) for length in range(1, len(last) + 1)]
    else:
        for token in text.tokens[text.followed:]:
            above = (root, *text.places)[:WINDOW]
            text.places = [None if node is None else node.get(token) for node in above]
    text.followed = len(text.tokens)
    return [(node, length) for length, node in reversed([*enumerate(text.places, start=1)]) if node]


def _walk(root: _Node, tokens: Sequence[int]) -> _Node | None:
    node: _Node | None = root
    for token in tokens:
        node = None if node is None else node.get(token)
    return node


def _merge(matches: Sequence[tuple[_Node, int]], shape: DraftTreeShape) -> tuple[list[int], list[int]]:
    """Tokens and parents of N nodes, the root first."""
    tokens, parents, depths = [NO_TOKEN], [0], [0]
    children: dict[tuple[int, int], int] = {}
    narrowing = (shape.top_k - 1) / (WINDOW - 1)
    for match, length in matches:
        waiting = deque([(0, (WINDOW - 1 - length) * narrowing + 1, match)])
        while waiting and len(tokens) < shape.num_draft_tokens:
            parent, breadth, node = waiting.popleft()
            if depths[parent] == shape.num_steps:
                continue
            for token in [*reversed(node)][:max(1, int(breadth))]:
                if len(tokens) == shape.num_draft_tokens:
                    break
                if (parent, token) not in children:
                    children[parent, token] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                    depths.append(depths[parent] + 1)
                waiting.append((children[parent, token], breadth - narrowing, node[token]))
    missing = shape.num_draft_tokens - len(tokens)
    if missing:  # one filling node stands for all: their tokens are the same, and siblings differ
        first = NO_TOKEN if (0, FILLING) in children else FILLING
        tokens += [first] + [NO_TOKEN] * (missing - 1)
        parents += [0] * missing
    return tokens, parents


def _scores(tokens: Sequence[int]) -> list[float]:
    """Confidence falls in the order the nodes were made: only the order has a meaning here."""
    return [0.0] + [-float(index) if token != NO_TOKEN else -torch.inf for index, token in enumerate(tokens) if index]
