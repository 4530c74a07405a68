import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.errors import InvalidInput
from eyrie_api.planning.sglang_support import sglang_layer_ids
from eyrie_workers.targets.config import choose_aux_layers, default_aux_layers


def test_the_default_is_low_middle_high() -> None:
    assert choose_aux_layers(32).aux_layers == (2, 16, 29)
    assert choose_aux_layers(16).aux_layers == (2, 8, 13)
    assert [default_aux_layers(depth) for depth in (2, 3, 4, 5, 6)] == [(0, 1), (1, 2), (1, 2, 3), (2, 3, 4), (2, 3, 4)]


@given(st.integers(1, 200))
def test_the_default_is_distinct_ascending_and_inside_at_every_depth(num_layers: int) -> None:
    chosen = default_aux_layers(num_layers)
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) == (3 if num_layers > 3 else min(2, num_layers))
    assert all(0 <= index < num_layers for index in chosen)
    assert len(sglang_layer_ids("LlamaForCausalLM", num_layers, chosen)) == len(chosen), "a drafter can be exported"


@given(st.lists(st.sampled_from(["full_attention", "linear_attention", "sliding_attention"]), min_size=1, max_size=80))
def test_on_hybrids_choices_are_full_attention_outputs_before_the_last_where_there_are_two(kinds: list[str]) -> None:
    choice = choose_aux_layers(len(kinds), kinds)
    assert list(choice.aux_layers) == sorted(set(choice.aux_layers))
    before_the_last = kinds[:-1].count("full_attention")
    if set(kinds) != {"full_attention"} and before_the_last >= 2:
        assert all(kinds[index - 1] == "full_attention" for index in choice.aux_layers)
        assert len(kinds) not in choice.aux_layers
        assert len(choice.aux_layers) == min(len(default_aux_layers(len(kinds))), before_the_last)
    else:
        assert choice.aux_layers == default_aux_layers(len(kinds))


def test_a_hybrid_moves_to_the_nearest_full_layer_and_says_why() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12
    choice = choose_aux_layers(48, kinds)
    assert choice.aux_layers == (4, 24, 44)
    assert "12 of 48" in choice.reason
    assert "linear_attention" in choice.reason


@pytest.mark.parametrize("override", [(), (0, 99), (3, 3), (5, 2)])
def test_a_bad_override_is_refused(override: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match="aux_layers"):
        choose_aux_layers(16, None, override)


def test_a_good_override_is_kept() -> None:
    assert choose_aux_layers(16, None, (0, 7, 16)).aux_layers == (0, 7, 16)
