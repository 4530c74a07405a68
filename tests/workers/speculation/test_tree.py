import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.speculation.protocol import NO_TOKEN, DraftStep, DraftTree
from eyrie_workers.speculation.tree import ancestors, build_draft_tree

Path = tuple[int, ...]


def toy_logits(path: Path, row: int, vocab_size: int, seed: int) -> Tensor:
    """A drafter's logits as a function of the path alone, without ties."""
    generator = torch.Generator().manual_seed(hash((path, row, seed)) & 0x7FFFFFFF)
    return torch.randn(vocab_size, generator=generator, dtype=torch.float64) * 2


class ToyDrafter:
    """Runs `build_draft_tree` on `toy_logits`; the hidden state of a node is the number of its path."""

    def __init__(self, num_rows: int, vocabulary: list[int], seed: int) -> None:
        self.num_rows, self.vocabulary, self.seed = num_rows, vocabulary, seed
        self.paths: list[Path] = [()]
        self.keys: list[list[Path]] = [[] for _ in range(num_rows)]

    def first(self) -> DraftStep:
        logits = torch.stack([toy_logits((), row, len(self.vocabulary), self.seed) for row in range(self.num_rows)])
        return DraftStep(logits[:, None], torch.zeros(self.num_rows, 1, 1))

    def step(self, tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
        width = tokens.shape[1]
        if depth == 1:
            self.keys = [[] for _ in range(self.num_rows)]
        assert mask.shape == (self.num_rows, width, len(self.keys[0]) + width)
        logits, states = [], []
        for row in range(self.num_rows):
            mine = []
            for node in range(width):
                mine.append((*self.paths[int(hidden[row, node, 0])], int(tokens[row, node])))
            self.keys[row] += mine
            for node, path in enumerate(mine):
                assert len(path) == depth
                # What the node sees is itself and its ancestors below the root, nothing else.
                seen = {self.keys[row][key] for key in torch.nonzero(mask[row, node]).flatten().tolist()}
                assert seen == {path[:length] for length in range(1, depth + 1)}
                self.paths.append(path)
                logits.append(toy_logits(path, row, len(self.vocabulary), self.seed))
                states.append(float(len(self.paths) - 1))
        return DraftStep(torch.stack(logits).view(self.num_rows, width, -1),
                         torch.tensor(states).view(self.num_rows, width, 1))


def reference_tree(shape: DraftTreeShape, vocabulary: list[int], row: int, seed: int) -> dict[Path, float]:
    """EAGLE-2 in dictionaries: every kept path and its score."""
    width = min(shape.top_k, len(vocabulary))

    def children(path: Path, score: float) -> dict[Path, float]:
        logs = toy_logits(path, row, len(vocabulary), seed).log_softmax(-1)
        best = logs.topk(width)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return {(*path, vocabulary[i]): score + s for i, s in pairs}

    grown = frontier = children((), 0.0)
    for _ in range(1, shape.num_steps):
        frontier = dict(sorted(frontier.items(), key=lambda item: -item[1])[:width])
        frontier = {k: v for path, score in frontier.items() for k, v in children(path, score).items()}
        grown = grown | frontier
    return dict(sorted(grown.items(), key=lambda item: -item[1])[:shape.num_draft_tokens - 1])


def paths_of(tree: DraftTree, row: int) -> dict[Path, float]:
    """Every node's path and score; checks that the layout is a tree in order."""
    tokens, parents, scores = (x[row].tolist() for x in (tree.tokens, tree.parents, tree.scores))
    assert (tokens[0], parents[0]) == (NO_TOKEN, 0)
    paths: list[Path] = [()]
    for node in range(1, len(tokens)):
        assert parents[node] < node
        paths.append((*paths[parents[node]], tokens[node]))
    return {path: score for path, score in zip(paths[1:], scores[1:], strict=True) if path[-1] != NO_TOKEN}


@st.composite
def shapes(draw: st.DrawFn) -> DraftTreeShape:
    num_steps, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    most = 1 + top_k + (num_steps - 1) * top_k**2
    num = num_steps + 1 if top_k == 1 else draw(st.integers(num_steps + 1, most))
    return DraftTreeShape(num_steps=num_steps, top_k=top_k, num_draft_tokens=num)


@settings(max_examples=80, deadline=None)
@given(shapes(), st.integers(1, 3), st.integers(2, 9), st.integers(0, 10**6))
def test_grown_trees_equal_the_reference(shape: DraftTreeShape, num_rows: int, vocab: int, seed: int) -> None:
    vocabulary = [3 * token + 1 for token in range(vocab)]
    drafter = ToyDrafter(num_rows, vocabulary, seed)
    tree = build_draft_tree(drafter.first(), drafter.step, shape, torch.tensor(vocabulary))
    assert tree.tokens.shape == (num_rows, shape.num_draft_tokens)
    for row in range(num_rows):
        found, expected = paths_of(tree, row), reference_tree(shape, vocabulary, row, seed)
        assert found.keys() == expected.keys()
        assert all(math.isclose(found[path], expected[path], abs_tol=1e-9) for path in expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20), st.integers(1, 3))
def test_ancestors_equal_a_walk_to_the_root(draws: list[int], num_rows: int) -> None:
    rows = [[0] + [(draw + row * 7) % node for node, draw in enumerate(draws, start=1)] for row in range(num_rows)]
    parents = torch.tensor(rows)
    seen = ancestors(parents, max_depth=len(draws))
    for row, of_row in enumerate(rows):
        for node in range(len(of_row)):
            walk = {node}
            above = node
            while above:
                above = of_row[above]
                walk.add(above)
            assert set(torch.nonzero(seen[row, node]).flatten().tolist()) == walk


def test_ties_keep_parents_with_their_children() -> None:
    """All confidences 1: every path has the same score, and what is cut must still be a tree."""
    def flat(tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
        return DraftStep(torch.full((1, tokens.shape[1], 2), 0.0), hidden)

    shape = DraftTreeShape(num_steps=4, top_k=2, num_draft_tokens=7)
    tree = build_draft_tree(DraftStep(torch.zeros(1, 1, 2), torch.zeros(1, 1, 1)), flat, shape)
    assert len(paths_of(tree, 0)) == 6


def test_a_draft_vocabulary_smaller_than_the_tree_leaves_empty_nodes() -> None:
    def certain(tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
        return DraftStep(torch.zeros(1, tokens.shape[1], 1), hidden)

    shape = DraftTreeShape(num_steps=2, top_k=3, num_draft_tokens=10)
    tree = build_draft_tree(DraftStep(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)), certain, shape, torch.tensor([42]))
    assert tree.tokens.tolist() == [[NO_TOKEN, 42, 42] + [NO_TOKEN] * 7]
    assert tree.parents.tolist()[0][:3] == [0, 0, 1]


def test_branches_may_see_the_keys_written_at_their_place_instead_of_their_ancestors() -> None:
    """What SGLang's drafter attends to; with a chain there is one place, and both are the same."""
    shape = DraftTreeShape(num_steps=4, top_k=3, num_draft_tokens=8)
    masks: list[Tensor] = []

    def step(tokens: Tensor, hidden: Tensor, mask: Tensor, depth: int) -> DraftStep:
        masks.append(mask)
        return DraftStep(torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(depth)), hidden)

    first = DraftStep(torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 1, 1))
    build_draft_tree(first, step, shape, branch_keys="frontier_slots")
    for depth, mask in enumerate(masks, start=1):
        for place in range(3):
            assert torch.nonzero(mask[0, place]).flatten().tolist() == [3 * above + place for above in range(depth)]
