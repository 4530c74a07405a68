"""The order in which variants take their turns is counterbalanced."""

from collections import Counter

import pytest

from eyrie_workers.measure.intervals import interleaved


def test_two_variants_alternate() -> None:
    assert ["".join(interleaved("AB", turn)) for turn in range(4)] == ["AB", "BA", "AB", "BA"]


def test_three_variants_take_every_order_once() -> None:
    assert ["".join(interleaved("ABC", turn)) for turn in range(6)] == ["ABC", "CBA", "CAB", "BAC", "BCA", "ACB"]


@pytest.mark.parametrize("num", range(1, 8))
def test_every_variant_runs_equally_often_at_every_position(num: int) -> None:
    turns = 2 * num
    places = Counter((variant, place) for turn in range(turns)
                     for place, variant in enumerate(interleaved(range(num), turn)))
    assert places == {(variant, place): 2 for variant in range(num) for place in range(num)}


@pytest.mark.parametrize("num", range(1, 8))
def test_a_pair_of_turns_gives_every_variant_the_same_mean_position(num: int) -> None:
    for pair in range(num):
        sums: Counter[int] = Counter()
        for turn in (2 * pair, 2 * pair + 1):
            for place, variant in enumerate(interleaved(range(num), turn)):
                sums[variant] += place
        assert set(sums.values()) <= {num - 1}
