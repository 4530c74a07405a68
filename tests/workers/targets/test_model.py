from pathlib import Path
from typing import Any

import pytest
import torch

from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import ArtifactCorrupt, TargetNotFound, UnsupportedTarget
from eyrie_workers.targets.loading import load_target, resolve, target_digest
from eyrie_workers.targets.operators import Linear, rms_normalise
from tests.tiny import tiny_target
from tests.workers.independent_rows import INDEPENDENT_ROWS

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biased": {"attention_bias": True, "mlp_bias": True},
    "llama rope llama3": {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}},
    "llama rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "qwen2": {},
    "qwen2 sliding": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "qwen3": {},
    "qwen3 wide heads": {"head_dim": 16},
    "llama yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
    "qwen3 yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 16.0,
                                       "attention_factor": 1.3, "original_max_position_embeddings": 64}},
    "mistral": {"sliding_window": None},
    "mistral sliding": {"sliding_window": 7, "head_dim": 16},
    "phi3": {},
    "phi3 partial": {"sliding_window": 7, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    "smollm3": {"tie_word_embeddings": True},
    "smollm3 listed": {"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 7,
                       "attention_bias": True, "mlp_bias": True},
    "granite": {"embedding_multiplier": 12.0, "attention_multiplier": 0.21, "residual_multiplier": 0.22,
                "logits_scaling": 7.0, "attention_bias": True, "mlp_bias": True},
    "olmo2": {},
    "olmo3": {"sliding_window": 7},
    "olmo3 yarn": {"sliding_window": 7, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0,
                           "beta_slow": 1.0, "original_max_position_embeddings": 64}}},
}


def huggingface(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_and_every_hidden_state_equal_hugging_face(variant: str, tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "target", variant.split()[0], seed=3, **VARIANTS[variant])
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 320, (length,), generator=generator) for length in (23, 1, 90)]
    target = load_target(path, "float32")
    states = target.hidden_states(texts, range(target.config.num_layers + 1))
    model = huggingface(path)
    for tokens, (aux, last) in zip(texts, states, strict=True):
        with torch.no_grad():
            theirs = model(tokens[None], output_hidden_states=True)
        # Same mathematics in another order of float32 sums; states are of size 1 to 30, so 2e-5 is about 20 ulp.
        torch.testing.assert_close(aux, torch.stack([h[0] for h in theirs.hidden_states], dim=1), rtol=2e-5, atol=2e-4)
        torch.testing.assert_close(last, theirs.hidden_states[-1][0], rtol=2e-5, atol=2e-4)
        torch.testing.assert_close(target.logits(last), theirs.logits[0], rtol=2e-5, atol=5e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmo3", "granite"])
def test_bfloat16_states_stay_close_to_float32(family: str, tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "target", family)
    tokens = [torch.arange(5, 60)]
    [(_, exact)] = load_target(path, "float32").hidden_states(tokens, ())
    [(_, rounded)] = load_target(path, "bfloat16").hidden_states(tokens, ())
    error = (rounded.float() - exact).norm() / exact.norm()
    # 8 bits of mantissa through 4 layers of random weights far from unit scale.
    assert 0 < error < 0.1


@pytest.mark.parametrize("shape", [(32, 64), (256, 1408), (704, 256)])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=INDEPENDENT_ROWS), torch.bfloat16])
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = shape
    linear = Linear(torch.randn(outputs, inputs, generator=generator).to(dtype) / inputs**0.5)
    x = torch.randn(130, inputs, generator=generator).to(dtype)
    residual = torch.randn(130, outputs, generator=generator).to(dtype)
    whole, added = linear(x), linear.add(x, residual)
    eps = torch.tensor(1e-6)  # the norm is only used on float32 and wider
    normed = rms_normalise(x.float(), eps)
    for num_rows in (1, 2, 3, 6, 8, 16, 17, 33, 64, 129):
        for first in (0, 130 - num_rows):
            rows = slice(first, first + num_rows)
            assert torch.equal(linear(x[rows]), whole[rows])
            assert torch.equal(linear.add(x[rows], residual[rows]), added[rows])
            assert torch.equal(rms_normalise(x[rows].float(), eps), normed[rows])


def test_weights_in_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "whole")
    model = huggingface(path)
    model.save_pretrained(tmp_path / "split", max_shard_size="40KB")
    assert (tmp_path / "split" / "model.safetensors.index.json").exists()
    tokens = [torch.arange(3, 30)]
    [(_, whole)] = load_target(path).hidden_states(tokens, ())
    [(_, split)] = load_target(tmp_path / "split").hidden_states(tokens, ())
    assert torch.equal(whole, split)


def test_the_digest_follows_weights_and_template_and_nothing_else(tmp_path: Path) -> None:
    path = tiny_target(tmp_path / "target")
    first = target_digest(path)
    (path / "notes.txt").write_text("not read by anyone")
    assert target_digest(path) == first
    (path / "chat_template.jinja").write_text("{{ messages }}")
    assert target_digest(path) != first
    assert target_digest(tiny_target(tmp_path / "other", seed=1)) != first


def test_missing_and_unusable_targets_are_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(TargetNotFound, match="is not a directory"):
        resolve(TargetSpec(model=str(tmp_path / "nowhere")))
    with pytest.raises(TargetNotFound, match=r"config\.json"):
        resolve(TargetSpec(model=str(tmp_path)))
    with pytest.raises(TargetNotFound, match="Hub"):
        resolve(TargetSpec(model="nobody/such-model-was-never-fetched"))
    path = tiny_target(tmp_path / "target")
    assert resolve(TargetSpec(model=str(path))) == path.resolve()
    weights = path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ArtifactCorrupt, match="cannot be read"):
        load_target(path)
    weights.unlink()
    with pytest.raises(UnsupportedTarget, match="safetensors"):
        load_target(path)
