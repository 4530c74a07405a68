"""The n-gram drafter: what it finds, and that nobody can see in the output that it was there."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.contract.engine import DraftTreeShape, SamplingSpec
from eyrie_api.errors import InvalidInput
from eyrie_workers.drafters.family import open_method
from eyrie_workers.drafters.ngram import NgramDrafter
from eyrie_workers.speculation.engine import Engine, Request
from eyrie_workers.speculation.protocol import NO_TOKEN, CommittedTokens
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    # The default initializer range makes a target that repeats itself: what an n-gram drafter is for.
    return load_target(tiny_target(tmp_path_factory.mktemp("target"), "llama", seed=5))


def shape(num_steps: int, top_k: int = 1, num_draft_tokens: int | None = None) -> DraftTreeShape:
    return DraftTreeShape(num_steps=num_steps, top_k=top_k, num_draft_tokens=num_draft_tokens or num_steps + 1)


def proposed(texts: Sequence[Sequence[int]], of: DraftTreeShape) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and parents proposed after each text."""
    drafter = NgramDrafter()
    state = drafter.new_state(len(texts))
    for row, text in enumerate(texts):
        drafter.admit(state, row, text)
        if len(text) > 1:
            drafter.extend(state, CommittedTokens(
                [row], [0], [text[1:]], torch.empty(1, len(text) - 1, 0, 8)))
    tree = drafter.propose(state, range(len(texts)), of)
    return tree.tokens.tolist(), tree.parents.tolist()


def test_the_continuation_of_the_longest_latest_match_is_copied() -> None:
    text = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]  # [1, 2, 3] was followed by 7 9; the later, shorter [2, 3] by 8
    assert proposed([text], shape(2))[0] == [[NO_TOKEN, 7, 9]]


def test_a_copy_that_reaches_the_end_of_the_text_repeats_itself() -> None:
    assert proposed([[5, 6, 4, 5, 6]], shape(7))[0] == [[NO_TOKEN, 4, 5, 6, 4, 5, 6, 4]]


def test_a_text_without_repetition_gets_a_chain_of_padding() -> None:
    tokens, parents = proposed([[1, 2, 3, 4], [8, 9, 8, 9]], shape(3))
    assert tokens == [[NO_TOKEN] * 4, [NO_TOKEN, 8, 9, 8]]
    assert parents == [[0, 0, 1, 2]] * 2


def test_a_tree_merges_several_continuations() -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2]
    tokens, parents = proposed([text], shape(2, 2, 5))
    assert (tokens, parents) == ([[NO_TOKEN, 3, 5, 4, NO_TOKEN]], [[0, 0, 1, 1, 3]])


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=30), steps=st.integers(1, 5), width=st.integers(1, 3),
       nodes=st.integers(2, 12))
def test_every_tree_is_well_formed_and_a_prefix_of_the_deeper_one(text: list[int], steps: int, width: int,
                                                                  nodes: int) -> None:
    nodes = steps + 1 if width == 1 else max(steps + 1, min(nodes, 1 + width + (steps - 1) * width**2))
    (tokens,), (parents,) = proposed([text], shape(steps, width, nodes))
    assert len(tokens) == len(parents) == nodes
    assert all(parent < node for node, parent in enumerate(parents) if node)
    real = [(parents[node], token) for node, token in enumerate(tokens) if token != NO_TOKEN]
    assert len(set(real)) == len(real)  # siblings differ
    (deep_tokens,), (deep_parents,) = proposed([text], shape(8, width, 9 if width == 1 else 8 * width + 1))
    depths = [0]
    for parent in deep_parents[1:]:
        depths.append(depths[parent] + 1)
    shallow = [token for token, depth in zip(deep_tokens, depths, strict=True) if depth <= steps and token != NO_TOKEN]
    assert [token for token in tokens if token != NO_TOKEN] == shallow[: nodes - 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lookup_changes_no_token_and_saves_passes(target: TargetModel, temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    asked = [Request(f"r{i}", torch.randint(3, 12, (length,), generator=generator).tolist(), 40,
                     SamplingSpec(temperature=temperature), seed=7 + i) for i, length in enumerate((30, 3, 60, 12))]
    plain = [answer.token_ids for answer in Engine(target).generate(asked)]
    for concurrency, tree in ((1, shape(4)), (3, shape(4)), (2, shape(3, 3, 8))):
        drafter = open_method("ngram", None, target)
        drafted = Engine(target, drafter, max_concurrency=concurrency).generate(asked, tree)
        assert [answer.token_ids for answer in drafted] == plain
        if temperature == 0.0:
            assert sum(answer.rounds for answer in drafted) < sum(len(text) - 1 for text in plain)


def test_a_method_without_what_it_needs_is_refused(target: TargetModel) -> None:
    assert open_method("off", None, target) is None
    with pytest.raises(InvalidInput, match="no drafter directory"):
        open_method("drafter", None, target)
    with pytest.raises(InvalidInput, match="'eagle9' is not known"):
        open_method("eagle9", None, target)
