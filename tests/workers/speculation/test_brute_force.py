"""Verification against brute force: toy targets, any tree, and rules written from the papers in plain numbers.

A toy target has logits of its own for every prefix over a tiny vocabulary. The output of `sample_target_tokens` and
`accept_path` is compared with two implementations that share no code with them:

    token by token  the text that the target alone generates under the same noise, cut where the tree ends
    exactly         the distribution over emitted texts, enumerated: at each node every token with its probability, on
                    into the child that carries it, else out ("naive sampling" of SpecInfer, arXiv:2305.09781)
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyrie_api.contract.engine import SamplingSpec
from eyrie_workers.speculation.noise import RowNoise
from eyrie_workers.speculation.protocol import NO_TOKEN
from eyrie_workers.speculation.verify import accept_path, sample_target_tokens
from tests.workers.speculation.chi_square import chi_square_score

VOCAB = 5
MOST_NODES = 9
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Toy:
    """A target that is a table."""

    seed: int

    def logits(self, prefix: Prefix) -> list[float]:
        """After the root and these tokens."""
        draw = random.Random(f"{self.seed} {prefix}")
        return [draw.gauss(0.0, 1.5) for _ in range(VOCAB)]


@dataclass(frozen=True)
class Tree:
    """Nodes in order, the root first; NO_TOKEN holds nothing."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def prefix(self, node: int) -> Prefix:
        """Tokens from below the root to the node."""
        return () if node == 0 else (*self.prefix(self.parents[node]), self.tokens[node])

    def child(self, node: int, token: int) -> int | None:
        """The child of a node that carries a token."""
        found = [other for other in range(1, len(self.tokens))
                 if self.parents[other] == node and self.tokens[other] == token]
        assert len(found) <= 1
        return found[0] if found else None


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree whose siblings are distinct, nodes without a proposal anywhere among them."""
    tokens, parents = [NO_TOKEN], [0]
    for _ in range(draw(st.integers(0, MOST_NODES - 1))):
        parent = draw(st.integers(0, len(tokens) - 1))
        taken = {tokens[n] for n in range(1, len(tokens)) if parents[n] == parent and tokens[n] != NO_TOKEN}
        if free := [NO_TOKEN, *(token for token in range(VOCAB) if token not in taken)]:
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
    return Tree(tuple(tokens), tuple(parents))


samplings = st.builds(SamplingSpec, temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
                      top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2]), top_k=st.sampled_from([0, 1, 2, 4, 9]))


def probabilities(logits: Sequence[float], sampling: SamplingSpec) -> list[float]:
    """The target's next-token distribution, by its definition."""
    if sampling.temperature == 0.0:
        best = max(range(VOCAB), key=lambda token: logits[token])
        return [float(token == best) for token in range(VOCAB)]
    weights = [math.exp(z / sampling.temperature) for z in logits]
    order = sorted(range(VOCAB), key=lambda token: -weights[token])
    kept = order[:sampling.top_k] if sampling.top_k else order
    whole, nucleus, mass = sum(weights[token] for token in kept), [], 0.0
    for token in kept:
        nucleus.append(token)
        mass += weights[token] / whole
        if mass >= sampling.top_p:
            break
    whole = sum(weights[token] for token in nucleus)
    return [weights[token] / whole if token in nucleus else 0.0 for token in range(VOCAB)]


def drawn(p: Sequence[float], gumbel: Sequence[float]) -> int:
    """The token this noise draws: argmax of log p + Gumbel (arXiv:1411.0030)."""
    return max((token for token in range(VOCAB) if p[token] > 0.0),
               key=lambda token: math.log(p[token]) + gumbel[token])


def one_by_one(toy: Toy, tree: Tree, sampling: SamplingSpec, gumbel: Sequence[Sequence[float]]) -> list[int]:
    """Plain decoding as long as the tree foresaw it, and the first token it did not."""
    text: list[int] = []
    node: int | None = 0
    while node is not None:
        # Row 0 of the noise belongs to the token after the root.
        text.append(drawn(probabilities(toy.logits(tuple(text)), sampling), gumbel[len(text)]))
        node = tree.child(node, text[-1])
    return text


def enumerated(toy: Toy, tree: Tree, sampling: SamplingSpec, node: int = 0) -> dict[Prefix, float]:
    """Every text a round may emit, with its probability."""
    prefix, found = tree.prefix(node), {}
    for token, chance in enumerate(probabilities(toy.logits(prefix), sampling)):
        child = tree.child(node, token)
        if child is None:
            found[*prefix, token] = chance
        else:
            found |= {text: chance * rest for text, rest in enumerated(toy, tree, sampling, child).items()}
    return {text: chance for text, chance in found.items() if chance > 0.0}


def verified(toy: Toy, tree: Tree, sampling: SamplingSpec, gumbel_BLV: Tensor) -> list[list[int]]:
    """What a round emits, for each row of noise: the code under test."""
    num_rows = gumbel_BLV.shape[0]
    # What stands at a node without a proposal, and below it, is never read: let it be anything.
    logits = torch.tensor([toy.logits(tree.prefix(node)) for node in range(len(tree.tokens))], dtype=torch.float64)
    depths = torch.tensor([len(tree.prefix(node)) for node in range(len(tree.tokens))])
    noise = RowNoise(torch.full((num_rows,), sampling.temperature or 1.0, dtype=torch.float64), gumbel_BLV)
    choices = sample_target_tokens(logits.expand(num_rows, -1, -1), depths.expand(num_rows, -1), [sampling] * num_rows,
                     None if sampling.temperature == 0.0 else noise)
    return [accept_path(tree.tokens, tree.parents, chosen).tokens for chosen in choices.tolist()]


def gumbel_noise(num_rows: int, seed: int) -> Tensor:
    """From torch's generator, not ours: [rows, depths, V]."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(num_rows, MOST_NODES + 1, VOCAB, generator=generator, dtype=torch.float64)
    return -(-uniform.clamp(min=1e-300).log()).log()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), trees(), samplings)
def test_a_round_emits_what_decoding_one_by_one_would(seed: int, tree: Tree, sampling: SamplingSpec) -> None:
    toy, gumbel = Toy(seed), gumbel_noise(4, seed)
    emitted = verified(toy, tree, sampling, gumbel)
    for row, text in enumerate(emitted):
        assert text == one_by_one(toy, tree, sampling, gumbel[row].tolist())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), trees(), samplings)
def test_enumerated_texts_are_a_distribution_and_hold_every_text_that_is_emitted(seed: int, tree: Tree,
                                                                               sampling: SamplingSpec) -> None:
    toy = Toy(seed)
    expected = enumerated(toy, tree, sampling)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert {tuple(text) for text in verified(toy, tree, sampling, gumbel_noise(16, seed))} <= set(expected)


TREES = {
    "root alone": Tree((NO_TOKEN,), (0,)),
    "chain": Tree((NO_TOKEN, 2, 0, 4), (0, 0, 1, 2)),
    "bushy": Tree((NO_TOKEN, 0, 1, 3, 0, 2, 4, 1, 2), (0, 0, 0, 0, 1, 1, 2, 4, 6)),
    "every sibling": Tree((NO_TOKEN, 4, 3, 2, 1, 0), (0, 0, 0, 0, 0, 0)),
    "holes": Tree((NO_TOKEN, 1, NO_TOKEN, 2, 0, NO_TOKEN), (0, 0, 0, 2, 1, 4)),
}
KINDS = {
    "temperature 1": SamplingSpec(temperature=1.0), "temperature 0.5": SamplingSpec(temperature=0.5),
    "top-p": SamplingSpec(temperature=1.0, top_p=0.9), "top-k": SamplingSpec(temperature=1.3, top_k=2),
    "both": SamplingSpec(temperature=0.9, top_p=0.9, top_k=4),
}
NUM_ROWS = 4000


@pytest.mark.parametrize("sampling", list(KINDS.values()), ids=list(KINDS))
@pytest.mark.parametrize("tree", list(TREES.values()), ids=list(TREES))
def test_emitted_texts_have_exactly_the_targets_distribution(tree: Tree, sampling: SamplingSpec) -> None:
    toy = Toy(11)
    expected = enumerated(toy, tree, sampling)
    counts = Counter(map(tuple, verified(toy, tree, sampling, gumbel_noise(NUM_ROWS, 5))))
    assert set(counts) <= set(expected)
    observed = [counts[text] for text in expected]
    assert chi_square_score(observed, [NUM_ROWS * chance for chance in expected.values()]) < 4.0  # seeds are fixed


def test_a_target_a_little_warmer_would_be_noticed() -> None:
    toy, tree = Toy(11), TREES["bushy"]
    counts = Counter(map(tuple, verified(toy, tree, SamplingSpec(temperature=1.15), gumbel_noise(NUM_ROWS, 5))))
    expected = enumerated(toy, tree, SamplingSpec(temperature=1.0))
    assert chi_square_score([counts[text] for text in expected],
                            [NUM_ROWS * chance for chance in expected.values()]) > 4.0


def test_taking_a_draft_token_now_and_then_would_be_noticed() -> None:
    """A verifier that waves one in twenty of the first proposals through is lossless in no sense."""
    toy, tree, sampling = Toy(11), TREES["chain"], SamplingSpec(temperature=1.0)
    emitted = verified(toy, tree, sampling, gumbel_noise(NUM_ROWS, 5))
    waved = [[2, 1] if number % 20 == 0 and text[0] != 2 else text for number, text in enumerate(emitted)]
    expected = enumerated(toy, tree, sampling)
    counts = Counter(map(tuple, waved))
    assert set(counts) <= set(expected)
    assert chi_square_score([counts[text] for text in expected],
                            [NUM_ROWS * chance for chance in expected.values()]) > 4.0
