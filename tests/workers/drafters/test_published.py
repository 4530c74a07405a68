"""Published drafters, in the forms they are published in: converted to a checkpoint of ours, or refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie_api.errors import ArtifactMissing
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.drafters.eagle3.family import load_drafter
from eyrie_workers.drafters.export import to_speculators
from eyrie_workers.drafters.published import adopt, fetch
from tests.tiny import tiny_target
from tests.workers.measure.tiny_bench import random_drafter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), num_layers=8)


def head(path: Path, target: Path) -> Path:
    return random_drafter(path, target, layers=(2, 4, 5))  # what SGLang captures by default of eight layers


def same_weights(a: Path, b: Path) -> bool:
    mine, its = load_drafter(a).state_dict(), load_drafter(b).state_dict()
    return mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


def test_a_head_in_speculators_format_is_the_head_it_was_made_from(tmp_path: Path, target: Path) -> None:
    exported = head(tmp_path / "head", target)
    to_speculators(exported, tmp_path / "published", target="org/model")
    assert adopt(tmp_path / "published", tmp_path / "out", target).name == "eagle3"
    assert same_weights(tmp_path / "out", exported)
    assert load_drafter(tmp_path / "out").config.aux_layers == (2, 4, 5)


def test_a_head_in_its_authors_form_gets_the_layers_that_sglang_captures_by_default(tmp_path: Path,
                                                                                   target: Path) -> None:
    exported = head(tmp_path / "head", target)
    published = tmp_path / "published"
    published.mkdir()
    config = json.loads((exported / "config.json").read_text())
    dropped = ("eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states")
    config = {key: value for key, value in config.items() if key not in dropped}
    (published / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    tensors = load_file(exported / "model.safetensors")
    torch.save(tensors | {"embed_tokens.weight": torch.zeros(320, 32)}, published / "pytorch_model.bin")
    assert adopt(published, tmp_path / "out", target).name == "eagle3"
    assert same_weights(tmp_path / "out", exported)
    assert load_drafter(tmp_path / "out").config.aux_layers == (2, 4, 5)


def test_a_small_llama_with_a_shared_matrix_becomes_a_draft_model(tmp_path: Path, target: Path) -> None:
    small = tiny_target(tmp_path / "small", seed=3, num_layers=2, hidden_size=16, tie_word_embeddings=True)
    assert adopt(small, tmp_path / "out", target).name == "standalone"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_a_head_of_another_target_is_refused_with_both_values(tmp_path: Path, target: Path) -> None:
    wide = tiny_target(tmp_path / "wide", num_layers=8, hidden_size=48)
    with pytest.raises(CheckpointInvalid, match=r"states of 48, the target's are 32"):
        adopt(head(tmp_path / "head", wide), tmp_path / "out", target)
    shallow = tiny_target(tmp_path / "shallow", num_layers=4)
    with pytest.raises(CheckpointInvalid, match=r"\[4, 5\] of a target with 4 layers"):
        adopt(head(tmp_path / "deep", target), tmp_path / "out", shallow)


def test_weights_that_do_not_match_the_config_are_refused(tmp_path: Path, target: Path) -> None:
    exported = head(tmp_path / "head", target)
    tensors = load_file(exported / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "norm.weight"},
              exported / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"norm\.weight"):
        adopt(exported, tmp_path / "out", target)
    with pytest.raises(ArtifactMissing, match="rivals"):
        fetch("rivals: path", str(tmp_path / "nothing"))
