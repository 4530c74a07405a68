"""Static trees: what their topology promises, and what is grown upon it."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.v1alpha1.job import DraftTreeShape
from eyrie_workers.speculation.static_tree import accepted_at, static_topology


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
