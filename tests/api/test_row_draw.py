"""Draws of captured rows with the shares of a mix: exact to a row, without repetition, and nested."""

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.planning.row_draw import draw_rows, expected_union, largest_size, quotas, shares

NAMES = ("chats", "code", "maths", "tools")
WEIGHTS = st.one_of(st.just(0.0), st.floats(1e-6, 1e6), st.integers(1, 9).map(float))
MIXES = st.dictionaries(st.sampled_from(NAMES), WEIGHTS, min_size=2).filter(lambda mix: any(mix.values()))
STORES = st.lists(st.sampled_from(NAMES), min_size=1, max_size=80)


@given(MIXES, st.integers(0, 10**6))
def test_every_source_has_its_share_to_within_one_row_and_the_size_is_exact(mix: dict[str, float], size: int) -> None:
    found = quotas(mix, size)
    assert sum(found.values()) == size
    assert found.keys() == {name for name, weight in mix.items() if weight > 0}
    assert all(abs(rows - shares(mix)[name] * size) < 1 for name, rows in found.items())


@given(MIXES, st.fixed_dictionaries({name: st.integers(0, 10**5) for name in NAMES}))
def test_the_largest_size_needs_no_more_than_there_is_and_one_row_more_would(
        mix: dict[str, float], available: dict[str, int]) -> None:
    size = largest_size(available, mix)
    assert all(rows <= available[name] for name, rows in quotas(mix, size).items())
    assert any(share * (size + 1) > available[name] for name, share in shares(mix).items())


@given(STORES, MIXES, st.integers(0, 2**31), st.data())
def test_a_draw_repeats_no_row_has_the_quotas_and_is_the_same_again(
        sources: list[str], mix: dict[str, float], seed: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.sampled_from(range(len(sources))), unique=True))
    size = largest_size(Counter(sources[row] for row in rows), mix)
    drawn = draw_rows(sources, rows, mix, size, seed)
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(rows)
    assert Counter(sources[row] for row in drawn) == Counter(quotas(mix, size))
    assert drawn == draw_rows(sources, rows[::-1], mix, size, seed), "the order of the rows does not matter"


@given(STORES, MIXES, MIXES, st.integers(0, 2**31))
def test_of_two_mixes_the_one_with_fewer_rows_of_a_source_has_a_subset_of_the_others(
        sources: list[str], one: dict[str, float], other: dict[str, float], seed: int) -> None:
    rows = range(len(sources))
    size = min(largest_size(Counter(sources), mix) for mix in (one, other))
    first, second = (draw_rows(sources, rows, mix, size, seed) for mix in (one, other))
    for name in NAMES:
        of_first, of_second = ({row for row in drawn if sources[row] == name} for drawn in (first, second))
        assert of_first <= of_second or of_second <= of_first


def test_another_seed_draws_other_rows() -> None:
    sources, mix = ["chats"] * 50 + ["tools"] * 50, {"chats": 1.0, "tools": 1.0}
    draws = {tuple(draw_rows(sources, range(100), mix, 20, seed)) for seed in range(5)}
    assert len(draws) == 5


def test_shares_of_decimal_weights_are_exact() -> None:
    assert shares({"chats": 3, "tools": 1, "code": 0}) == {"chats": Fraction(3, 4), "tools": Fraction(1, 4)}
    assert quotas({"chats": 1, "tools": 1, "code": 1}, 10) == {"chats": 4, "code": 3, "tools": 3}


@given(st.integers(0, 10**6), st.fixed_dictionaries({name: st.floats(1e-3, 1e3) for name in NAMES}),
       st.fixed_dictionaries({name: st.integers(0, 10**6) for name in NAMES}))
def test_the_expected_union_takes_no_more_than_there_is_and_all_that_was_asked_for_where_there_is_enough(
        num_rows: int, weights: dict[str, float], available: dict[str, int]) -> None:
    found = expected_union(num_rows, weights, available)
    assert all(0 <= rows <= available[name] for name, rows in found.items())
    wanted = min(num_rows, sum(available.values()))
    assert wanted - len(NAMES) <= sum(found.values()) <= wanted
    assert expected_union(num_rows, weights, None).keys() == weights.keys()
