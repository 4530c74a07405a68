"""What counts as equal output where two programs round differently."""

import pytest

from eyrie_api.decisions.near_ties import is_lossless, is_near_tie, rounding_step


@pytest.mark.parametrize(("logit", "dtype", "step"), [
    (1.0, "bfloat16", 2**-7), (1.99, "bfloat16", 2**-7), (-20.5, "bfloat16", 2**-3), (20.5, "float16", 2**-6),
    (0.3, "bfloat16", 2**-9), (0.0, "bfloat16", 0.0)])
def test_a_rounding_step_is_the_distance_of_neighbouring_values(logit: float, dtype: str, step: float) -> None:
    assert rounding_step(logit, dtype) == step


@pytest.mark.parametrize(("gap", "tie"), [(0.0, True), (0.125, True), (0.126, False), (0.25, False)])
def test_a_near_tie_is_at_most_one_bfloat16_step(gap: float, tie: bool) -> None:
    assert is_near_tie(gap, 20.0, "bfloat16") is tie


def test_float32_logits_tie_only_within_the_order_of_additions() -> None:
    assert is_near_tie(1e-3, 20.0, "float32")
    assert not is_near_tie(1e-2, 20.0, "float32")


def test_output_is_lossless_when_every_difference_is_a_near_tie() -> None:
    assert is_lossless(10, 10, 0)
    assert is_lossless(10, 8, 2)
    assert not is_lossless(10, 8, 1)
