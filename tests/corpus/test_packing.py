"""Packing: every step has the same number of tokens, no conversation is cut, weights fall where they should."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quickstart.packing import (
    PROMPT_WEIGHT,
    ROW_LENGTHS,
    TOKENS_PER_STEP,
    Encoded,
    Row,
    batches,
    collate,
    pack,
)
from benchmarks.quickstart.pretrain import Recipe


def encoded(size: int) -> Encoded:
    return Encoded("any", list(range(1, size + 1)), [i % 2 for i in range(size)])


@given(sizes=st.lists(st.integers(2, ROW_LENGTHS[-1]), max_size=120))
def test_packing_loses_and_cuts_nothing(sizes: list[int]) -> None:
    rows = pack([encoded(n) for n in sizes])
    assert sorted(len(d.tokens) for r in rows for d in r.documents) == sorted(sizes)
    assert all(r.room >= 0 and r.length in ROW_LENGTHS for r in rows)


@given(sizes=st.lists(st.integers(2, ROW_LENGTHS[-1]), min_size=60, max_size=120))
def test_every_batch_has_the_same_number_of_tokens(sizes: list[int]) -> None:
    assert all(b.tokens.numel() == TOKENS_PER_STEP for b in batches(encoded(n) for n in sizes))


def test_weights_are_one_on_answers_low_on_prompts_and_zero_on_padding_and_first_tokens() -> None:
    batch = collate([Row(256, [encoded(4), encoded(3)])])
    low = pytest.approx(PROMPT_WEIGHT)
    assert batch.weights[0, :8].tolist() == [0, 1, low, 1, 0, 1, low, 0]
    assert batch.documents[0, :8].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]


def test_a_conversation_too_long_for_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds the row length"):
        pack([encoded(ROW_LENGTHS[-1] + 1)])


def test_the_rate_warms_up_holds_and_decays() -> None:
    recipe = Recipe(tokens=2048 * 100, warmup_steps=10, decay_share=0.4)
    rates = [recipe.rate(step) for step in range(recipe.steps)]
    assert rates[0] == pytest.approx(recipe.learning_rate / 10)
    assert rates[10:60] == [recipe.learning_rate] * 50
    assert all(a > b for a, b in itertools.pairwise(rates[60:]))
    assert rates[-1] < 0.03 * recipe.learning_rate
