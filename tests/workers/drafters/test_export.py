"""A drafter taken to speculators format and back is the drafter it was; what would not be is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyrie_api.errors import InvalidInput
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.drafters.eagle3_checkpoint import load_drafter, save_drafter
from eyrie_workers.drafters.export import main, to_sglang, to_speculators
from tests.workers.drafters.test_checkpoint import card_for, edit
from tests.workers.drafters.test_serving import VOCAB, random_drafter, variants


@variants
def test_there_and_back_is_the_same_drafter(tmp_path: Path, flags: dict[str, Any]) -> None:
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
def test_what_sglang_would_compute_otherwise_is_not_taken_back(tmp_path: Path, change: dict[str, Any],
                                                               message: str) -> None:
    save_drafter(tmp_path / "ours", random_drafter())
    to_speculators(tmp_path / "ours", tmp_path / "theirs", target="org/model")
    edit(tmp_path / "theirs", **change)
    with pytest.raises(InvalidInput, match=message):
        to_sglang(tmp_path / "theirs", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_drafter_whose_target_nobody_names_is_not_exported(tmp_path: Path) -> None:
    save_drafter(tmp_path / "ours", random_drafter())
    with pytest.raises(InvalidInput, match="its target is not known"):
        to_speculators(tmp_path / "ours", tmp_path / "theirs")
