"""Static trees: what their topology promises, and what is grown upon it."""

import math
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.speculation.protocol import NO_TOKEN, DraftStep
from eyrie_workers.speculation.tree import accepted_at, build_draft_tree, static_topology
from tests.workers.speculation.test_tree import ToyDrafter, paths_of, toy_logits


@st.composite
def shapes(draw: st.DrawFn, most_steps: int = 8, most_top_k: int = 6) -> DraftTreeShape:
    num_steps, top_k = draw(st.integers(1, most_steps)), draw(st.integers(1, most_top_k))
    most = min(512, 1 + top_k + (num_steps - 1) * top_k**2)
    num = num_steps + 1 if top_k == 1 else draw(st.integers(num_steps + 1, most))
    return DraftTreeShape(num_steps=num_steps, top_k=top_k, num_draft_tokens=num, static=True)


def paths(shape: DraftTreeShape) -> list[tuple[int, ...]]:
    """Every node as the ranks on its way down from the root."""
    found: list[tuple[int, ...]] = [()]
    parents, ranks = static_topology(shape)
    for parent, rank in zip(parents[1:], ranks[1:], strict=True):
        found.append((*found[parent], rank))
    return found


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_a_topology_is_a_tree_of_exactly_the_shape_s_size(shape: DraftTreeShape) -> None:
    parents, ranks = static_topology(shape)
    assert len(parents) == len(ranks) == shape.num_draft_tokens
    assert (parents[0], ranks[0]) == (0, 0)
    assert all(parent < node for node, parent in enumerate(parents) if node)
    siblings: dict[int, list[int]] = {}
    for parent, rank in zip(parents[1:], ranks[1:], strict=True):
        siblings.setdefault(parent, []).append(rank)
    assert all(found == list(range(len(found))) and len(found) <= shape.top_k for found in siblings.values())
    grown = paths(shape)
    depths = [len(path) for path in grown]
    assert depths == sorted(depths)
    assert max(depths) <= shape.num_steps
    # Scratch keys are reserved for top_k nodes of each depth.
    assert all(count <= shape.top_k for depth, count in Counter(depths[parent] for parent in siblings).items() if depth)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16))
def test_one_guess_per_node_is_the_chain(num_steps: int) -> None:
    shape = DraftTreeShape(num_steps=num_steps, top_k=1, num_draft_tokens=num_steps + 1, static=True)
    assert static_topology(shape) == ((0, *range(num_steps)), (0,) * (num_steps + 1))


@settings(max_examples=60, deadline=None)
@given(shapes(most_steps=4, most_top_k=3))
def test_no_node_left_out_is_likelier_than_one_taken_unless_its_depth_has_parents_enough(shape: DraftTreeShape) -> None:
    taken = set(paths(shape))

    def chance(path: tuple[int, ...]) -> float:
        product = 1.0
        for rank in path:
            product *= accepted_at(rank)
        return product

    worst = min(chance(path) for path in taken)
    for path in taken:
        parents_beside = {other[:-1] for other in taken if len(other) == len(path) + 1}
        may_have_children = path in parents_beside or len(parents_beside) < (shape.top_k if path else 1)
        if len(path) < shape.num_steps and may_have_children:
            left_out = [(*path, rank) for rank in range(shape.top_k) if (*path, rank) not in taken]
            assert all(chance(child) <= worst * (1 + 1e-9) for child in left_out)


def test_the_prior_falls_with_every_rank() -> None:
    chances = [accepted_at(rank) for rank in range(64)]
    assert chances == sorted(chances, reverse=True)
    assert 0 < chances[-1] < chances[0] < sum(chances) <= 1


@settings(max_examples=80, deadline=None)
@given(shapes(most_steps=5, most_top_k=4), st.integers(1, 3), st.integers(4, 9), st.integers(0, 10**6))
def test_every_node_takes_the_guess_of_its_rank(shape: DraftTreeShape, num_rows: int, vocab: int, seed: int) -> None:
    vocabulary = [3 * token + 1 for token in range(vocab)]
    drafter = ToyDrafter(num_rows, vocabulary, seed)
    tree = build_draft_tree(drafter.first(), drafter.step, shape, torch.tensor(vocabulary))
    assert tree.parents.tolist() == [list(static_topology(shape).parents)] * num_rows
    for row in range(num_rows):
        expected: dict[tuple[int, ...], float] = {}
        for ranks in paths(shape)[1:]:
            path: tuple[int, ...] = ()
            score = 0.0
            for rank in ranks:
                logs = toy_logits(path, row, vocab, seed).log_softmax(-1).sort(descending=True)
                path, score = (*path, vocabulary[int(logs.indices[rank])]), score + float(logs.values[rank])
            expected[path] = score
        found = paths_of(tree, row)
        assert list(found) == list(expected)
        assert all(math.isclose(found[path], expected[path], abs_tol=1e-9) for path in expected)


def test_only_nodes_that_have_children_are_run() -> None:
    shape = DraftTreeShape(num_steps=4, top_k=4, num_draft_tokens=12, static=True)
    drafter, widths = ToyDrafter(2, list(range(8)), 0), []

    def step(tokens: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor, depth: int) -> DraftStep:
        widths.append(tokens.shape[1])
        return drafter.step(tokens, hidden, mask, depth)

    build_draft_tree(drafter.first(), step, shape)
    inner = {path[:-1] for path in paths(shape)[1:]}
    by_depth = Counter(len(path) for path in inner)
    assert widths == [by_depth[depth] for depth in range(1, max(by_depth) + 1)]
    assert len(set(widths)) > 1


def test_a_draft_vocabulary_smaller_than_the_tree_is_wide_leaves_empty_nodes() -> None:
    shape = DraftTreeShape(num_steps=2, top_k=3, num_draft_tokens=13, static=True)
    drafter = ToyDrafter(1, [7, 5], 3)
    tree = build_draft_tree(drafter.first(), drafter.step, shape, torch.tensor([7, 5]))
    ranks = torch.tensor(static_topology(shape).ranks)
    assert torch.equal(tree.tokens[0] == NO_TOKEN, (ranks > 1) | (torch.arange(13) == 0))
    live = tree.tokens[0] != NO_TOKEN
    assert set(tree.tokens[0][live].tolist()) == {5, 7}
    for node in live.nonzero().flatten().tolist():
        siblings = (tree.parents[0] == tree.parents[0, node]) & live
        assert tree.tokens[0][siblings].unique().numel() == int(siblings.sum())
