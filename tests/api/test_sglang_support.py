import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from eyrie_api.errors import InvalidInput, UnsupportedTarget
from eyrie_api.planning.sglang_support import (
    CAPTURED_ARCHITECTURES,
    PLUGIN_ARCHITECTURES,
    RAW_UNLESS_FIRST_IS_ONE,
    captured_inputs,
    require_capture,
    sglang_layer_ids,
)


def test_ordinary_families_count_outputs_from_zero() -> None:
    assert sglang_layer_ids("LlamaForCausalLM", 32, (2, 16, 29)) == (1, 15, 28)
    assert sglang_layer_ids("GptOssForCausalLM", 24, (0, 12, 23)) == (-1, 11, 22)
    assert sglang_layer_ids("Olmo3ForCausalLM", 32, (4, 16, 28)) == (3, 15, 27)


def test_deepseek_like_families_take_ids_raw_unless_the_first_is_one() -> None:
    assert sglang_layer_ids("DeepseekV3ForCausalLM", 61, (2, 30, 58)) == (1, 29, 57)
    assert sglang_layer_ids("DeepseekV3ForCausalLM", 61, (3, 30, 58)) == (3, 30, 58)
    with pytest.raises(InvalidInput, match="begin with 1"):
        sglang_layer_ids("KimiK25ForConditionalGeneration", 61, (1, 30, 58))


def test_gpt_oss_takes_ids_raw_when_they_reach_its_last_state() -> None:
    assert captured_inputs("GptOssForCausalLM", (2, 12, 24), 24) == (2, 12, 24)
    assert captured_inputs("GptOssForCausalLM", (2, 12, 22), 24) == (3, 13, 23)
    assert captured_inputs("LlamaForCausalLM", (2, 12, 24), 24) == (3, 13, 25)


@given(st.sampled_from([*CAPTURED_ARCHITECTURES, *PLUGIN_ARCHITECTURES]),
       st.sets(st.integers(0, 39), min_size=1, max_size=5))
def test_sglang_captures_exactly_the_layers_meant(family: str, wanted: set[int]) -> None:
    layers = tuple(sorted(wanted))
    assume(family not in RAW_UNLESS_FIRST_IS_ONE or layers[0] != 1)
    assert captured_inputs(family, sglang_layer_ids(family, 40, layers), 40) == layers


@pytest.mark.parametrize("family", RAW_UNLESS_FIRST_IS_ONE)
def test_ids_are_refused_where_sglang_would_capture_other_layers(family: str) -> None:
    with pytest.raises(InvalidInput, match="begin with 1"):
        sglang_layer_ids(family, 40, (1, 20, 37))


def test_the_state_after_the_last_layer_cannot_be_asked_for() -> None:
    with pytest.raises(InvalidInput, match="last layer"):
        sglang_layer_ids("LlamaForCausalLM", 16, (2, 8, 16))


def test_the_scanned_targets_are_each_listed_once() -> None:
    assert len(set(CAPTURED_ARCHITECTURES)) == len(CAPTURED_ARCHITECTURES) == 53
    assert not set(PLUGIN_ARCHITECTURES) & set(CAPTURED_ARCHITECTURES)
    assert set(RAW_UNLESS_FIRST_IS_ONE) <= set(CAPTURED_ARCHITECTURES)


def test_an_unsupported_target_is_refused_with_what_is_supported() -> None:
    require_capture("Qwen3ForCausalLM")
    require_capture("Olmo3ForCausalLM")
    with pytest.raises(UnsupportedTarget, match="MixtralForCausalLM") as refused:
        require_capture("MixtralForCausalLM")
    assert "Qwen3MoeForCausalLM" in refused.value.hint
