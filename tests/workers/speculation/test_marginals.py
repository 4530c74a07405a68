"""Trees from marginals against brute force: every prefix written out, the most probable taken."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.speculation.noise import RowNoise, gumbel
from eyrie_workers.speculation.protocol import NO_TOKEN, DraftStep, DraftTree
from eyrie_workers.speculation.tree import ancestors, build_draft_tree, build_tree_from_marginals, static_topology

VOCAB = 7


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, DraftTreeShape]:
    """Logits of a few rows and depths, and a shape that may be deeper than they are; whole numbers, so that many
    prefixes tie."""
    num_steps, top_k = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    most = 1 + top_k + (num_steps - 1) * top_k**2
    shape = DraftTreeShape(num_steps=num_steps, top_k=top_k, num_draft_tokens=draw(st.integers(num_steps + 1, most)))
    rows, depths = draw(st.integers(1, 2)), draw(st.integers(1, num_steps + 1))
    values = draw(st.lists(st.integers(-3, 3), min_size=rows * depths * VOCAB, max_size=rows * depths * VOCAB))
    return torch.tensor(values, dtype=torch.float32).view(rows, depths, VOCAB), shape


def paths(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """Tokens from the root to each real node."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, tree.tokens.shape[1]):
        found.append((*found[int(tree.parents[row, node])], int(tree.tokens[row, node])))
    return [path for node, path in enumerate(found) if node and int(tree.tokens[row, node]) != NO_TOKEN]


def best_prefixes(logits_SD: torch.Tensor, num_steps: int, top_k: int) -> list[float]:
    """Log-probability of every prefix of the top_k tokens of each depth, the most probable first."""
    best = logits_SD.double().log_softmax(-1).topk(min(top_k, VOCAB)).values.tolist()[:num_steps]
    return sorted((sum(path) for depth in range(1, len(best) + 1) for path in product(*best[:depth])), reverse=True)


@settings(max_examples=40)
@given(cases())
def test_the_tree_holds_the_most_probable_prefixes_and_nothing_else(case: tuple[torch.Tensor, DraftTreeShape]) -> None:
    logits, shape = case
    tree = build_tree_from_marginals(logits, shape)
    confidence = logits.double().log_softmax(-1)
    for row in range(len(logits)):
        assert [int(token) for token in tree.tokens[row, :1]] == [NO_TOKEN]
        found = paths(tree, row)
        assert len(set(found)) == len(found)  # siblings carry distinct tokens
        wanted = best_prefixes(logits[row], shape.num_steps, shape.top_k)[: shape.num_draft_tokens - 1]
        scores = [sum(float(confidence[row, depth, token]) for depth, token in enumerate(path)) for path in found]
        assert scores == pytest.approx(wanted, abs=1e-5)  # in this order, and no more of them
        assert tree.scores[row, 1: len(found) + 1].tolist() == pytest.approx(wanted, abs=1e-4)
        assert bool((tree.tokens[row, len(found) + 1:] == NO_TOKEN).all())
    assert bool((tree.parents[:, 1:] < torch.arange(1, shape.num_draft_tokens)).all())


@settings(max_examples=40)
@given(cases())
def test_a_static_tree_has_its_topology_filled_by_rank(case: tuple[torch.Tensor, DraftTreeShape]) -> None:
    logits, shape = case
    shape = shape.model_copy(update={"static": True})
    tree, topology = build_tree_from_marginals(logits, shape), static_topology(shape)
    depths = ancestors(tree.parents, shape.num_steps).sum(-1) - 1
    assert tree.parents.tolist() == [list(topology.parents)] * len(logits)
    for row, node in product(range(len(logits)), range(1, shape.num_draft_tokens)):
        depth = int(depths[row, node])
        if depth > logits.shape[1]:
            assert int(tree.tokens[row, node]) == NO_TOKEN
            continue
        said = logits[row, depth - 1].log_softmax(-1)
        assert float(said[tree.tokens[row, node]]) == float(said.sort(descending=True).values[topology.ranks[node]])
    for row in range(len(logits)):
        assert len(set(paths(tree, row))) == len(paths(tree, row))


@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(1, 6))
def test_a_chain_holds_the_first_choices_and_no_token_beyond(depths: int, num_steps: int) -> None:
    logits = torch.randn(3, depths, VOCAB, generator=torch.Generator().manual_seed(depths * 7 + num_steps))
    shape = DraftTreeShape(num_steps=num_steps, top_k=1, num_draft_tokens=num_steps + 1)
    for static in (False, True):
        tree = build_tree_from_marginals(logits, shape.model_copy(update={"static": static}))
        said = min(depths, num_steps)
        assert tree.parents.tolist() == [[0, *range(num_steps)]] * 3
        assert tree.num_filled == said + 1
        assert tree.tokens[:, 1: said + 1].tolist() == logits.argmax(-1)[:, :said].tolist()
        assert bool((tree.tokens[:, said + 1:] == NO_TOKEN).all())
        torch.testing.assert_close(tree.scores[:, 1: said + 1], logits.log_softmax(-1).amax(-1).cumsum(1)[:, :said])


def test_draft_ids_become_target_ids() -> None:
    logits, ids = torch.randn(2, 3, VOCAB), torch.tensor([2, 3, 11, 12, 20, 31, 40])
    shape = DraftTreeShape(num_steps=3, top_k=3, num_draft_tokens=9)
    plain, mapped = build_tree_from_marginals(logits, shape), build_tree_from_marginals(logits, shape, ids)
    assert mapped.tokens[:, 1:].tolist() == ids[plain.tokens[:, 1:]].tolist()
    assert torch.equal(plain.parents, mapped.parents)


@pytest.mark.parametrize("top_k", [1, 3])
def test_each_depth_is_coupled_to_the_noise_of_its_own_position_as_in_a_grown_tree(top_k: int) -> None:
    """With a step that ignores the path, `build_draft_tree` and marginals must agree on every token."""
    rows, depths, ids = 2, 3, torch.tensor([0, 1, 4, 6, 7, 8, 9])
    logits = torch.randn(rows, depths, VOCAB, generator=torch.Generator().manual_seed(3))
    noise = RowNoise(torch.tensor([1.0, 0.7], dtype=torch.float64), torch.stack([gumbel(5, 9, 4, 10),
                                                                                gumbel(6, 2, 4, 10)]))

    def step(tokens: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor, depth: int) -> DraftStep:
        return DraftStep(logits[:, depth: depth + 1].expand(-1, tokens.shape[1], -1), hidden)

    # Few enough nodes that no depth has more than top_k parents, as `build_draft_tree` demands.
    shape = DraftTreeShape(num_steps=depths, top_k=top_k, num_draft_tokens=4 if top_k == 1 else 5)
    grown = build_draft_tree(DraftStep(logits[:, :1], torch.zeros(rows, 1, 1)), step, shape, ids, noise)
    drawn = build_tree_from_marginals(logits, shape, ids, noise)
    for row in range(rows):
        assert sorted(paths(grown, row)) == sorted(paths(drawn, row))
    without_noise = build_tree_from_marginals(logits, shape, ids)
    assert drawn.tokens.tolist() != without_noise.tokens.tolist()


def test_half_precision_logits_rank_as_their_values() -> None:
    logits = torch.randn(1, 4, 400, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    shape = DraftTreeShape(num_steps=4, top_k=4, num_draft_tokens=20)
    half, full = build_tree_from_marginals(logits, shape), build_tree_from_marginals(logits.float(), shape)
    assert half.tokens.tolist() == full.tokens.tolist()
    assert half.scores.dtype == torch.float32
