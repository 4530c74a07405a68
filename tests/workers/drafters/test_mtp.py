"""A target's own MTP layers as a drafter directory: which tensors are taken, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie_api.errors import UnsupportedTarget
from eyrie_api.planning.sglang_support import mtp_tensors
from eyrie_workers.drafters.check import check_directory
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.drafters.published import copy_mtp_layers
from eyrie_workers.sglang.checkpoints import read_drafter
from eyrie_workers.targets.loading import load_target
from tests.tiny import tiny_target

GLM = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 2, "vocab_size": 320,
       "max_position_embeddings": 128, "sliding_window": 1, "num_nextn_predict_layers": 1}


def write_target(directory: Path, config: dict[str, Any]) -> Path:
    """Two shards, the second of which has MTP tensors."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4), "model.layers.0.mlp.weight": torch.zeros(2)},
              directory / "model-00001-of-00002.safetensors")
    save_file({"model.layers.1.mlp.weight": torch.zeros(2), "model.layers.2.eh_proj.weight": torch.ones(2, 4)},
              directory / "model-00002-of-00002.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
        name: file.name for file in directory.glob("*.safetensors") for name in load_file(file)}}))
    return directory


def test_the_layers_behind_the_last_are_copied_with_the_targets_config(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", GLM)
    copy_mtp_layers(target, tmp_path / "out")
    assert {name: tuple(one.shape) for name, one in load_file(tmp_path / "out" / "model.safetensors").items()} == {
        "model.layers.2.eh_proj.weight": (2, 4)}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == GLM | {"eyrie": {"drafter": "mtp"}}
    # Launched as an EAGLE drafter, whose windows are the model class's business.
    drafter = read_drafter(str(tmp_path / "out"), config)
    assert (drafter.algorithm, drafter.context_length, drafter.sliding_window) == ("EAGLE", 128, None)
    assert check_directory(tmp_path / "out", target_dir=target) == ()


@pytest.mark.parametrize(("name", "config", "is_mtp"), [
    ("mtp.fc.weight", {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 4}, True),
    ("model.mtp_layers.0.input_proj.weight", {"architectures": ["MiMoForCausalLM"], "num_hidden_layers": 4}, True),
    ("model.mtp.layers.0.eh_proj.weight", {"architectures": ["LongcatFlashForCausalLM"], "num_layers": 4}, True),
    ("mtp.layers.0.mlp.gate.weight",
     {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {"num_hidden_layers": 4}}, True),
    ("model.layers.61.enorm.weight", {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61}, True),
    ("model.layers.60.mlp.weight", {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61}, False),
    ("model.visual.layers.61.weight", {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61}, False),
    ("lm_head.weight", {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61}, False)])
def test_mtp_tensors_are_known_by_their_names(name: str, config: dict[str, Any], is_mtp: bool) -> None:
    if is_mtp:
        assert mtp_tensors([name, "model.norm.weight"], config) == (name,)
    else:
        with pytest.raises(UnsupportedTarget, match="has no MTP layers"):
            mtp_tensors([name], config)


def test_other_targets_have_no_rival_of_their_own(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", GLM | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(UnsupportedTarget, match="SGLang does not draft with MTP layers of LlamaForCausalLM"):
        copy_mtp_layers(target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps(GLM))
    with pytest.raises(UnsupportedTarget, match="nor its index"):
        copy_mtp_layers(tmp_path / "empty", tmp_path / "out")


def test_mtp_layers_of_another_target_are_found_and_the_embedded_engine_refuses_them(tmp_path: Path) -> None:
    copy_mtp_layers(write_target(tmp_path / "target", GLM), tmp_path / "out")
    other = tiny_target(tmp_path / "other", num_layers=2)
    codes = [finding.code for finding in check_directory(tmp_path / "out", target_dir=other)]
    assert codes == ["target-differs"]
    with pytest.raises(UnsupportedTarget, match="holds MTP layers of the target, which Eyrie does not compute"):
        open_drafter(tmp_path / "out", load_target(other, "float32"))
