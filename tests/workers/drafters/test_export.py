"""A drafter taken to speculators format and back is the drafter it was; what would not be is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie_api.errors import InvalidInput
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.drafters.checkpoint import CheckpointInvalid, read_config
from eyrie_workers.drafters.eagle3.family import load_drafter, save_drafter
from eyrie_workers.drafters.export import main, to_sglang, to_speculators
from tests.workers.drafters.test_checkpoint import card_for, edit
from tests.workers.drafters.test_eagle3_proposer import VOCAB, random_drafter, variants


@variants
def test_conversion_to_speculators_and_back_gives_the_same_drafter(tmp_path: Path, flags: dict[str, Any]) -> None:
    drafter = random_drafter(**flags)
    save_drafter(tmp_path / "ours", drafter, dtype="bfloat16")
    to_speculators(tmp_path / "ours", tmp_path / "theirs", target="org/model")
    to_sglang(tmp_path / "theirs", tmp_path / "back")
    assert load_drafter(tmp_path / "back").config == drafter.config
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_speculators_form_names_target_layers_and_length_as_vllm_reads_them(tmp_path: Path) -> None:
    save_drafter(tmp_path / "ours", random_drafter(), card=card_for())
    assert main([str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "speculators", "--num-steps", "3"]) == 0
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["norm_before_residual"] is False  # vLLM takes absence for true
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["speculators_config"]["verifier"] == {"name_or_path": "some", "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert config["transformer_layer_config"]["vocab_size"] == VOCAB
    assert "layers.0.self_attn.q_proj.weight" in load_file(tmp_path / "theirs" / "model.safetensors")
    assert [finding.code for finding in check_directory(tmp_path / "theirs")] == ["speculators-format"]


@pytest.mark.parametrize(("change", "message"), [
    ({"norm_before_residual": True}, "norm_before_residual is true"), ({"norm_before_residual": None}, "or absent"),
    ({"eagle_aux_hidden_state_layer_ids": None}, "not written"), ({"speculators_model_type": "dflash"}, "dflash"),
    ({"draft_vocab_size": 13}, "has shape"), ({"fc_norm": True}, "fc_norm is set"),
])
def test_a_drafter_that_sglang_computes_differently_is_not_converted(tmp_path: Path, change: dict[str, Any],
                                                                     message: str) -> None:
    save_drafter(tmp_path / "ours", random_drafter())
    to_speculators(tmp_path / "ours", tmp_path / "theirs", target="org/model")
    edit(tmp_path / "theirs", **change)
    with pytest.raises(InvalidInput, match=message):
        to_sglang(tmp_path / "theirs", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_drafter_without_a_target_name_is_not_exported(tmp_path: Path) -> None:
    save_drafter(tmp_path / "ours", random_drafter())
    with pytest.raises(InvalidInput, match="its target is not known"):
        to_speculators(tmp_path / "ours", tmp_path / "theirs")


def authors_eagle1(to: Path, pickled: bool) -> dict[str, torch.Tensor]:
    """A directory as EAGLE's authors publish it, of random weights."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 32,
              "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
              "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "torch_dtype": "float16"}
    layer = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.v_proj": (16, 32),
             "self_attn.o_proj": (32, 32), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32),
             "mlp.down_proj": (32, 48), "post_attention_layernorm": (32,)}
    shapes = {"embed_tokens.weight": (64, 32), "fc.weight": (32, 64)} | {
        f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    tensors = {name: torch.randn(shape).half() for name, shape in shapes.items()}
    to.mkdir()
    (to / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, to / "pytorch_model.bin")
    else:
        save_file(tensors, to / "model.safetensors")
    return tensors


@pytest.mark.parametrize("pickled", [True, False])
def test_eagle1_in_its_authors_format_is_converted_to_sglangs(tmp_path: Path, pickled: bool) -> None:
    theirs = authors_eagle1(tmp_path / "theirs", pickled)
    assert main([str(tmp_path / "theirs"), str(tmp_path / "ours"), "--to", "sglang"]) == 0
    ours, config = load_file(tmp_path / "ours" / "model.safetensors"), read_config(tmp_path / "ours")
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert ours.pop("fc.bias").eq(0).all()
    assert ours.keys() == theirs.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert check_directory(tmp_path / "ours") == ()


def test_eagle1_in_its_authors_format_is_an_error_with_the_command_to_convert_it(tmp_path: Path) -> None:
    authors_eagle1(tmp_path / "theirs", pickled=False)
    found, = check_directory(tmp_path / "theirs")
    assert found.code == "architecture-name"
    assert "export --to sglang" in found.hint


def test_other_drafters_are_not_converted_as_eagle1(tmp_path: Path) -> None:
    tensors = authors_eagle1(tmp_path / "theirs", pickled=False)
    save_file(tensors | {"fc.weight": torch.randn(32, 96).half()}, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match="not an EAGLE-1/2"):
        to_sglang(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
