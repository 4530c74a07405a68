from typing import Any

import pytest

from eyrie_api.errors import UnsupportedTarget
from eyrie_workers.targets.config import RopeConfig, parse_config, parse_drafter_config

BASE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100,
    "intermediate_size": 128, "rope_theta": 500000.0, "eos_token_id": [7, 9],
}


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
    old = parse_config(BASE | {"rope_scaling": scaling})
    new = parse_config({k: v for k, v in BASE.items() if k != "rope_theta"}
                       | {"rope_parameters": scaling | {"rope_theta": 500000.0}})
    assert old == new
    assert old.rope.theta == 500000.0


def test_end_tokens_are_gathered_from_both_files() -> None:
    assert parse_config(BASE, {"eos_token_id": 3}).eos_token_ids == (3, 7, 9)
    assert parse_config(BASE | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(("change", "named"), [
    ({"model_type": "gpt2"}, "model_type 'gpt2'"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
    ({"rope_scaling": {"type": "yarn"}}, "factor of rope type 'yarn' is None"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8}}, "mscale"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}}, "truncate"),
    ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
    ({"model_type": "phi3", "partial_rotary_factor": 0.2}, "rotates 3 elements"),
    ({"model_type": "mistral", "layer_types": ["full_attention"] * 4}, "layer_types is given"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers"),
    ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ({"model_type": "granite", "attention_multiplier": 0}, "attention_multiplier"),
    ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "layer_types"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
    ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_size": None}, "hidden_size"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
])
def test_what_we_cannot_compute_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedTarget, match=named):
        parse_config(BASE | change)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
        "beta_slow": 1.0, "attention_factor": 1.2079441541679836}


def test_olmo3_stretches_the_rope_of_its_full_layers_alone_in_both_spellings() -> None:
    olmo = {**BASE, "model_type": "olmo3", "sliding_window": 16}
    old = parse_config(olmo | {"rope_scaling": YARN})
    assert old.layer_types == ("sliding_attention",) * 3 + ("full_attention",)
    assert (old.rope.kind, old.rope.theta) == ("default", 500000.0)
    assert old.full_rope is not None
    assert (old.full_rope.kind, old.full_rope.theta) == ("yarn", 500000.0)
    new = parse_config({k: v for k, v in olmo.items() if k != "rope_theta"} | {"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "full_attention": YARN | {"rope_theta": 500000.0}}})
    assert new == old
    assert parse_config(olmo).full_rope is None


def test_yarn_without_an_attention_factor_takes_the_papers() -> None:
    result = parse_config({**BASE, "model_type": "olmo3", "sliding_window": 16, "rope_scaling": YARN})
    untold = parse_config({**BASE, "model_type": "olmo3", "sliding_window": 16,
                           "rope_scaling": {k: v for k, v in YARN.items() if k != "attention_factor"}})
    assert result.full_rope is not None
    assert untold.full_rope is not None
    assert untold.full_rope.attention_factor == pytest.approx(result.full_rope.attention_factor)


def test_a_drafter_of_a_yarn_target_has_the_unscaled_rope_and_one_with_yarn_is_refused() -> None:
    scaled = BASE | {"rope_scaling": YARN}
    assert parse_config(scaled).drafter_rope == RopeConfig(theta=500000.0)
    with pytest.raises(UnsupportedTarget, match="rope type 'yarn' of a drafter"):
        parse_drafter_config(scaled)


def test_fields_that_a_config_omits_have_the_defaults_of_its_class() -> None:
    mistral = parse_config({**BASE, "model_type": "mistral"})
    assert (set(mistral.layer_types), mistral.sliding_window) == ({"sliding_attention"}, 4096)
    smollm3 = parse_config({key: value for key, value in BASE.items() if key != "rope_theta"}
                           | {"model_type": "smollm3"})
    assert (smollm3.rope.theta, smollm3.unrotated_layers, smollm3.tie_word_embeddings) == (2_000_000.0, (3,), True)
