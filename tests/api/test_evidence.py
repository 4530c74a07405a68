"""When a measured ratio decides against its bound: the rules by which the proof stops and promotion judges."""

import pytest

from eyrie_api.contract.model import Interval
from eyrie_api.contract.promotion import PromotionPolicy
from eyrie_api.decisions.evidence import (
    changed_prompt_standing,
    first_token_standing,
    no_slowdown_standing,
    pairs_needed,
    speedup_standing,
)

POLICY = PromotionPolicy()


@pytest.mark.parametrize(("ratio", "low", "high", "standing"), [
    (2.0, 1.5, 2.6, "passed"), (1.06, 1.01, 1.12, "passed"), (1.06, 0.99, 1.14, "open"), (1.03, 1.01, 1.06, "open"),
    (1.0, 0.97, 1.04, "failed"), (0.8, 0.5, 1.2, "open")])
def test_a_speed_up_is_shown_refuted_or_open(ratio: float, low: float, high: float, standing: str) -> None:
    assert speedup_standing(POLICY, ratio, Interval(low=low, high=high)) == standing


def test_without_confidence_the_first_estimate_decides() -> None:
    lenient = PromotionPolicy(require_confidence=False)
    assert speedup_standing(lenient, 1.06, Interval(low=0.1, high=9.0)) == "passed"
    assert speedup_standing(lenient, 1.04, Interval(low=0.1, high=9.0)) == "failed"


def test_off_has_to_be_shown_not_slower_by_what_a_drafter_has_to_gain() -> None:
    assert no_slowdown_standing(POLICY, Interval(low=0.96, high=1.03)) == "passed"
    assert no_slowdown_standing(POLICY, Interval(low=0.94, high=1.03)) == "open"
    assert no_slowdown_standing(POLICY, Interval(low=0.9, high=0.99)) == "failed"


def test_a_late_first_token_has_to_be_shown() -> None:
    wide, narrow = Interval(low=1.2, high=5.0), Interval(low=2.0, high=3.0)
    assert first_token_standing(POLICY, 2.5, wide, 0.2) == "open"
    assert first_token_standing(POLICY, 2.5, narrow, 0.2) == "failed"
    assert first_token_standing(POLICY, 2.5, None, 0.2) == "failed"
    assert first_token_standing(POLICY, 2.5, narrow, 0.037) == "passed"  # nobody feels 37 ms


def test_another_system_prompt_is_measured_until_its_bound_is_outside() -> None:
    assert changed_prompt_standing(POLICY, Interval(low=1.1, high=1.4)) == "passed"
    assert changed_prompt_standing(POLICY, Interval(low=0.9, high=1.4)) == "open"
    assert changed_prompt_standing(POLICY, Interval(low=0.7, high=0.9)) == "failed"


def test_the_pairs_that_would_be_enough_grow_with_the_square_of_the_width() -> None:
    assert pairs_needed(1.2, Interval(low=1.2 / 1.44, high=1.2 * 1.44), 50, 1.05) == pytest.approx(200, abs=1)
    assert pairs_needed(1.0, Interval(low=1.0 / 1.05, high=1.05), 100, 1.05) == pytest.approx(100, abs=1)
    assert pairs_needed(1.2, Interval(low=0.0012, high=1200.0), 3, 1.05) is None
    assert pairs_needed(1.05, Interval(low=0.9, high=1.2), 0, 1.05) is None
