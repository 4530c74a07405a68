import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_workers.speculation.noise import NOISE_SHARE, NoiseTable, RowNoise, gumbel
from tests.workers.speculation.chi_square import chi_square_score

WORD = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The published generator's output for a state, in Python integers."""
    word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def test_the_stream_is_splitmix64() -> None:
    weyl = 0x9E3779B97F4A7C15
    seed, position = 12345, 678
    start = splitmix64((splitmix64((seed + weyl) & WORD) + (position + 1) * weyl) & WORD)
    row = gumbel(seed, position, 1, 50)[0]
    for token in range(50):
        uniform = ((splitmix64((start + (token + 1) * weyl) & WORD) >> 11) + 0.5) / 2**53
        assert row[token].item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(1, 8), st.integers(2, 40))
def test_an_element_depends_on_seed_position_and_token_alone(seed: int, position: int, rows: int, vocab: int) -> None:
    block = gumbel(seed, position, rows, vocab)
    assert bool(block.isfinite().all())
    assert torch.equal(block[rows - 1], gumbel(seed, position + rows - 1, 1, vocab + 7)[0, :vocab])


@pytest.mark.parametrize("vocab", [40, 70_000])  # many positions at a time, and those that are asked for alone
def test_a_table_has_the_noise_of_any_positions_in_any_order(vocab: int) -> None:
    table = NoiseTable(7, vocab)
    for position, rows in ((5, 4), (6, 4), (8, 1), (9, 3), (36, 2), (37, 4), (90, 2), (88, 4), (5, 1)):
        assert torch.equal(table.at(position, rows), gumbel(7, position, rows, vocab))


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_noise_is_gumbel_and_neighbours_are_independent(along: str) -> None:
    if along == "tokens":
        values = gumbel(3, 5, 1, 200_000)[0]
    elif along == "positions":
        values = gumbel(3, 0, 50_000, 4)[:, 2]
    else:
        values = torch.stack([gumbel(seed, 9, 1, 4)[0, 2] for seed in range(8_000)])
    num = len(values)
    uniform = torch.exp(-torch.exp(-values))
    counts = torch.histc(uniform, bins=200, min=0, max=1)
    assert chi_square_score(counts.tolist(), [num / 200] * 200) < 4.5
    # Pairs of neighbours fill the unit square evenly: 400 cells.
    left, right = (uniform[:-1] * 20).long().clamp(max=19), (uniform[1:] * 20).long().clamp(max=19)
    pairs = torch.bincount(left * 20 + right, minlength=400)
    assert chi_square_score(pairs.tolist(), [(num - 1) / 400] * 400) < 4.5
    # Tails: the argmax over a vocabulary lives there. P(G > 6) = 1 - exp(-exp(-6)).
    tail = 1 - math.exp(-math.exp(-6))
    spread = math.sqrt(num * tail)
    assert abs((values > 6).sum().item() - num * tail) < 5 * spread


def test_a_generator_with_a_slight_bias_would_fail_the_same_test() -> None:
    uniform = torch.exp(-torch.exp(-gumbel(3, 5, 1, 200_000)[0])) ** 1.03
    counts = torch.histc(uniform, bins=200, min=0, max=1)
    assert chi_square_score(counts.tolist(), [1000.0] * 200) > 4.5


def test_confidence_leans_towards_the_draw_to_come_and_leaves_greedy_rows_alone() -> None:
    noise = RowNoise(torch.tensor([0.5, 1.0], dtype=torch.float64),
                     torch.stack([gumbel(1, 10, 3, 60), torch.zeros(3, 60, dtype=torch.float64)]))
    vocabulary = torch.arange(5, 60, 5)
    logits = torch.randn(2, 4, len(vocabulary), generator=torch.Generator().manual_seed(0))
    confidence = noise.confidence(logits, 2, vocabulary)
    expected = logits[0].double() / 0.5 + NOISE_SHARE * gumbel(1, 11, 1, 60)[0, vocabulary]
    torch.testing.assert_close(confidence[0], expected.log_softmax(-1).float())
    torch.testing.assert_close(confidence[1], logits[1].log_softmax(-1))
