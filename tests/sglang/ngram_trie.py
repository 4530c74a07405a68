"""The n-gram drafter with a trie across requests: an emulation of SGLang's NGRAM.

`drafters.ngram` uses one text. This drafter reproduces SGLang's NGRAM (0.5.23, match type BFS, no external corpus; read
in `ngram_worker.py` and `ngram_corpus/*.cpp`), so that its acceptance can be predicted and verified with Eyrie's
engine:

    insert     after every round the last WINDOW tokens of each drafted text, with all their suffixes, are inserted into
               a trie; the child written last comes first. One trie serves all requests. Of a prompt only the last
               WINDOW tokens are inserted
    match      all suffixes of the text that are paths of the trie with children, longest first. SGLang does not search
               them again each round: it advances the node of each suffix by the new tokens. A suffix inserted after its
               node was advanced is not found until its first token has left the window
    merge      each match in turn adds its subtree, breadth first, to one tree of num_draft_tokens nodes. A node
               contributes its latest children: from top_k to 1, evenly over the WINDOW, fewer for longer matches and
               deeper nodes
    pad        with nodes of token 0 under the root, which SGLang accepts like any other where the target predicts 0

There is no depth setting and no chain: even with top_k 1 a shorter match adds a branch next to a longer one's.
`num_steps` limits the depth here; SGLang's limit is num_draft_tokens - 1, and the two agree for that value. Not
implemented is eviction at the capacity (10 million nodes), where SGLang removes the least recently used nodes.

The contents of the trie change the speed of an answer, never its tokens: the second of two equal requests is drafted
entirely.
"""

# B rows, N tree nodes

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.drafters.ngram import tree_of_rows
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN, CommittedTokens, DrafterState, DraftTree

WINDOW = 18
"""SGLang's `max_trie_depth`: the longest path of the trie."""

PADDING_TOKEN = 0
"""The token of padding nodes."""


class _Node(dict[int, "_Node"]):
    """A node's children by token, in order of their last write."""


@dataclass
class _Text:
    """One row's text, and the trie nodes of its suffixes."""

    tokens: list[int] = field(default_factory=list)
    num_matched: int = 0
    """Number of tokens that `nodes` accounts for; 0 before the first search."""

    nodes: list[_Node | None] = field(default_factory=list)
    """[d - 1]: the node of the suffix of d tokens; None where the trie had no such path when it was advanced."""


@dataclass
class TrieState:
    """The trie, and the texts of all rows."""

    texts: list[_Text]
    root: _Node = field(default_factory=_Node)


class TrieDrafter:
    """`speculation.protocol.Drafter` from the texts of all requests since `new_state`."""

    aux_layers: tuple[int, ...] = ()
    max_length = 2**31 - 1

    def new_state(self, num_rows: int) -> TrieState:
        """An empty trie and empty texts."""
        return TrieState([_Text() for _ in range(num_rows)])

    def admit(self, state: DrafterState, row: int, prompt: Sequence[int]) -> None:
        """Start the row's text with the first token; the trie is kept."""
        assert isinstance(state, TrieState)
        state.texts[row] = _Text([prompt[0]])

    def extend(self, state: DrafterState, pairs: CommittedTokens) -> None:
        """Append the tokens of the pairs."""
        assert isinstance(state, TrieState)
        for row, tokens in zip(pairs.rows, pairs.tokens, strict=True):
            state.texts[row].tokens += tokens

    def propose(self, state: DrafterState, rows: Sequence[int], shape: DraftTreeShape,
                noise: RowNoise | None = None) -> DraftTree:
        """One tree per row from the trie; then insert the rows' last tokens."""
        assert isinstance(state, TrieState)
        texts = [state.texts[row] for row in rows]
        trees = [_merge(_matches(text, state.root), shape) for text in texts]
        for text in texts:
            _insert(state.root, text.tokens[-WINDOW:])
        return tree_of_rows(trees)


def _insert(root: _Node, tokens: Sequence[int]) -> None:
    for start in range(len(tokens)):
        node = root
        for token in tokens[start:]:
            child = node.pop(token, None)
            node[token] = child = _Node() if child is None else child
            node = child


def _matches(text: _Text, root: _Node) -> list[tuple[_Node, int]]:
    """Trie nodes with children of the text's suffixes, with the suffixes' lengths, longest first."""
    if text.num_matched == 0:
        last = text.tokens[-WINDOW:]
        text.nodes = [_find(root, last[len(last) - length:]) for length in range(1, len(last) + 1)]
    else:
        for token in text.tokens[text.num_matched:]:
            # The suffix of d + 1 tokens continues the suffix of d tokens of the text before the new token.
            above = (root, *text.nodes)[:WINDOW]
            text.nodes = [None if node is None else node.get(token) for node in above]
    text.num_matched = len(text.tokens)
    return [(node, length) for length, node in reversed([*enumerate(text.nodes, start=1)]) if node]


def _find(root: _Node, tokens: Sequence[int]) -> _Node | None:
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
        queue = deque([(0, (WINDOW - 1 - length) * narrowing + 1, match)])
        while queue and len(tokens) < shape.num_draft_tokens:
            parent, breadth, node = queue.popleft()
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
                queue.append((children[parent, token], breadth - narrowing, node[token]))
    missing = shape.num_draft_tokens - len(tokens)
    if missing:  # one padding node is enough: siblings have distinct tokens
        first = NO_TOKEN if (0, PADDING_TOKEN) in children else PADDING_TOKEN
        tokens += [first] + [NO_TOKEN] * (missing - 1)
        parents += [0] * missing
    return tokens, parents
