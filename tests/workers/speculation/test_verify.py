from collections import Counter
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyrie_api.contract.engine import SamplingSpec
from eyrie_workers.speculation.noise import RowNoise, gumbel
from eyrie_workers.speculation.verify import accept_path, apply_top_k_top_p, sample_target_tokens
from tests.workers.speculation.chi_square import chi_square_score


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3)), max_size=15),
       st.lists(st.integers(0, 3), min_size=16, max_size=16))
def test_following_finds_the_longest_agreeing_path(nodes: list[tuple[int, int]], choices: list[int]) -> None:
    tokens, parents = [-1], [0]
    for draw, token in nodes:
        parent = draw % len(tokens)
        siblings = {tokens[n] for n in range(1, len(tokens)) if parents[n] == parent}
        if token not in siblings:  # the protocol: siblings are distinct
            tokens.append(token)
            parents.append(parent)
    choices = choices[:len(tokens)]

    def agreeing(node: int) -> list[int] | None:
        if node == 0:
            return [0]
        above = agreeing(parents[node])
        return [*above, node] if above is not None and choices[parents[node]] == tokens[node] else None

    longest = max((path for node in range(len(tokens)) if (path := agreeing(node)) is not None), key=len)
    path = accept_path(tokens, parents, choices)
    assert path.nodes == longest
    assert path.tokens == [choices[node] for node in longest]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), st.floats(0.01, 1.0))
def test_truncation_keeps_what_hugging_face_keeps(seed: int, top_k: int, top_p: float) -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    scores = torch.randn(3, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    ours = apply_top_k_top_p(scores, SamplingSpec(top_k=top_k, top_p=top_p))
    theirs = scores
    if top_k:
        theirs = TopKLogitsWarper(top_k=min(top_k, 10))(None, theirs)
    if top_p < 1.0:
        theirs = TopPLogitsWarper(top_p=top_p)(None, theirs)
    assert torch.equal(ours.isinf(), theirs.isinf())
    assert bool((ours == scores)[~ours.isinf()].all())


def test_rows_of_one_batch_are_chosen_each_by_their_own_sampling() -> None:
    logits = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    depths = torch.tensor([[0, 1, 1, 2]] * 3)
    samplings = [SamplingSpec(temperature=0.0), SamplingSpec(temperature=0.7, top_k=5), SamplingSpec(temperature=1.3)]
    noise = RowNoise(torch.tensor([1.0, 0.7, 1.3], dtype=torch.float64),
                     torch.stack([torch.zeros(3, 50, dtype=torch.float64), gumbel(1, 7, 3, 50), gumbel(2, 9, 3, 50)]))
    together = sample_target_tokens(logits, depths, samplings, noise)
    assert torch.equal(together[0], logits[0].argmax(-1))
    for row in range(3):
        alone = sample_target_tokens(logits[row:row + 1], depths[row:row + 1], samplings[row:row + 1],
                       RowNoise(noise.temperature[row:row + 1], noise.gumbel[row:row + 1]))
        assert torch.equal(together[row], alone[0])
    top5 = logits[1].topk(5).indices
    assert all(together[1, node] in top5[node] for node in range(4))


# Distribution, with known probabilities. A toy target over 6 tokens: the next token depends on the last one. Texts of
# 3 tokens are decoded speculatively from 12 000 independent seeds; the joint counts of the 216 texts are compared with
# the exact joint probability. `accept` is the verifier under test: it may overrule the target's draw by a draft token.

NUM_SEEDS, VOCAB, LENGTH = 12_000, 6, 3
TARGET = torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
DRAFTS = torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
Accept = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(the target's choices [B, N], the draft's tokens [B, N], previous tokens [B, N]) -> choices"""


def honest(choices: Tensor, drafts: Tensor, previous: Tensor) -> Tensor:
    return choices


def decode_texts(accept: Accept) -> Tensor:
    """[NUM_SEEDS, 3] texts, decoded in rounds of a chain of two draft tokens, all seeds at once."""
    generator = torch.Generator().manual_seed(6)
    texts = torch.full((NUM_SEEDS, 1), VOCAB)  # token VOCAB stands for the prompt
    noise_rows = torch.stack([gumbel(seed, 1, LENGTH + 3, VOCAB) for seed in range(NUM_SEEDS)])
    settled = torch.zeros(NUM_SEEDS, dtype=torch.int64)
    answers = torch.full((NUM_SEEDS, LENGTH + 3), -1)
    root = texts[:, 0]
    while bool((settled < LENGTH).any()):
        first = torch.multinomial(DRAFTS[root].softmax(-1), 1, generator=generator)[:, 0]
        second = torch.multinomial(DRAFTS[first].softmax(-1), 1, generator=generator)[:, 0]
        nodes = torch.stack([root, first, second], 1)
        at = (settled[:, None] + torch.arange(3)).clamp(max=LENGTH + 2)
        noise = RowNoise(torch.ones(NUM_SEEDS, dtype=torch.float64),
                         noise_rows.gather(1, at[:, :, None].expand(-1, -1, VOCAB)))
        samplings = [SamplingSpec(temperature=1.0)] * NUM_SEEDS
        choices = sample_target_tokens(TARGET[nodes], torch.arange(3).expand(NUM_SEEDS, -1), samplings, noise)
        drafts = torch.cat([nodes[:, 1:], torch.full((NUM_SEEDS, 1), -1)], 1)
        choices = accept(choices, drafts, nodes)
        walked = zip(nodes.tolist(), choices.tolist(), settled.tolist(), strict=True)
        for row, (tokens, chosen, start) in enumerate(walked):
            if start >= LENGTH:
                continue
            path = accept_path(tokens, [0, 0, 1], chosen)
            end = min(start + len(path.tokens), LENGTH + 3)
            answers[row, start:end] = torch.tensor(path.tokens[:end - start])
            settled[row], root[row] = end, path.tokens[-1]
    return answers[:, :LENGTH]


def score(accept: Accept) -> float:
    counts = Counter(map(tuple, decode_texts(accept).tolist()))
    probability = TARGET.softmax(-1)
    texts = [(a, b, c) for a in range(VOCAB) for b in range(VOCAB) for c in range(VOCAB)]
    expected = [NUM_SEEDS * float(probability[VOCAB, a] * probability[a, b] * probability[b, c]) for a, b, c in texts]
    return chi_square_score([counts[text] for text in texts], expected)


def test_sampled_texts_have_the_targets_exact_distribution() -> None:
    assert score(honest) < 4.0  # one in 30 000 by chance; the seeds are fixed


def test_verifiers_that_are_wrong_by_a_little_fail_the_same_test() -> None:
    def ratio_upside_down(choices: Tensor, drafts: Tensor, previous: Tensor) -> Tensor:
        """min(1, q / p) for min(1, p / q), the classic slip."""
        p, q = TARGET.softmax(-1)[previous], DRAFTS.softmax(-1)[previous]
        token = drafts.clamp(min=0)[:, :, None]
        kept = torch.rand(drafts.shape, generator=torch.Generator().manual_seed(7)) < (q / p).gather(2, token)[:, :, 0]
        return torch.where(kept & (drafts >= 0), drafts, choices)

    def one_in_ten_waved_through(choices: Tensor, drafts: Tensor, previous: Tensor) -> Tensor:
        waved = torch.rand(drafts.shape, generator=torch.Generator().manual_seed(8)) < 0.1
        return torch.where(waved & (drafts >= 0), drafts, choices)

    assert score(ratio_upside_down) > 20.0
    assert score(one_in_ten_waved_through) > 6.0


def test_noise_shared_between_positions_would_fail_the_same_test() -> None:
    """A draw repeated at the next position keeps every marginal nearly right and the joint wrong."""
    texts: Counter[tuple[int, int]] = Counter()
    probability = TARGET.softmax(-1)
    num_texts = NUM_SEEDS // 2
    for seed in range(num_texts):
        noise = gumbel(seed, 1, 1, VOCAB)[0]
        first = int((TARGET[VOCAB] + noise).argmax())
        texts[(first, int((TARGET[first] + noise).argmax()))] += 1
    pairs = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]
    expected = [num_texts * float(probability[VOCAB, a] * probability[a, b]) for a, b in pairs]
    assert chi_square_score([texts[pair] for pair in pairs], expected) > 20.0
