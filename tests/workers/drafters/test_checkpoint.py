"""What is written loads bit for bit, and whatever an engine would load wrongly is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie_api.errors import ArtifactMissing
from eyrie_api.v1alpha1.job import DrafterSpec
from eyrie_workers.drafters.checkpoint import CheckpointInvalid, expected_shapes, load_drafter, save_drafter
from eyrie_workers.drafters.inheritance import read_target_ends
from eyrie_workers.drafters.registry import family_named, open_drafter
from eyrie_workers.drafters.vocabulary import build
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.loading import load_target
from tests.tiny import tiny_target
from tests.workers.drafters.test_serving import HIDDEN, VOCAB, random_drafter


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_drafter(tmp_path / "drafter", random_drafter(), provenance={"step": 7})
    return tmp_path / "drafter"


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"norm_output": True}], ids=["plain", "fc_norm", "output"])
def test_a_drafter_comes_back_bit_for_bit(tmp_path: Path, flags: dict[str, bool]) -> None:
    drafter = random_drafter(**flags)
    save_drafter(tmp_path / "d", drafter)
    loaded = load_drafter(tmp_path / "d")
    assert loaded.config == drafter.config
    before, after = drafter.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_names_and_shapes_are_those_of_the_serving_engines(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    ids, q, kv = 14, 32, 16
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.input_layernorm.weight": (HIDDEN,), "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * HIDDEN), "midlayer.self_attn.k_proj.weight": (kv, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * HIDDEN), "midlayer.self_attn.o_proj.weight": (HIDDEN, q),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.mlp.gate_proj.weight": (24, HIDDEN), "midlayer.mlp.up_proj.weight": (24, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 24), "norm.weight": (HIDDEN,), "lm_head.weight": (ids, HIDDEN),
        "d2t": (ids,), "t2d": (VOCAB,)}
    assert expected_shapes(random_drafter().config).keys() == tensors.keys()


def test_config_speaks_both_engines_conventions(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["tie_word_embeddings"] is False
    assert (config["draft_vocab_size"], config["vocab_size"]) == (14, VOCAB)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert (config["num_aux_hidden_states"], config["target_hidden_size"]) == (3, HIDDEN)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100.0}
    assert config["eyrie"] == {"step": 7}


def test_parameters_are_written_in_the_wanted_dtype(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", random_drafter(), dtype="bfloat16")
    loaded = load_drafter(tmp_path / "d")
    assert loaded.fc.weight.dtype == torch.bfloat16
    assert loaded.d2t.dtype == torch.int64


def test_writing_again_replaces_the_whole_and_leaves_nothing_aside(saved: Path) -> None:
    (saved / "stray").write_text("from an older export")
    save_drafter(saved, random_drafter(seed=3))
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


Tensors = dict[str, torch.Tensor]


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).contiguous()
    return apply


@pytest.mark.parametrize(("damage", "message"), [
    (lambda t: t.pop("midlayer.hidden_norm.weight"), "tensors are missing: midlayer.hidden_norm.weight"),
    (lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
     "unknown tensors: midlayer.self_attn.q_norm.weight"),
    (lambda t: t.update({"embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}), "unknown tensors: embed_tokens.weight"),
    (_set("fc.weight", lambda x: x[:, :-1]), "fc.weight has shape"),
    (_set("lm_head.weight", lambda x: x[:-1]), "lm_head.weight has shape"),
    (_set("norm.weight", lambda x: x.bfloat16()), "parameters have dtypes"),
    (_set("d2t", lambda x: x.int()), "d2t is torch.int32, not int64"),
    (_set("t2d", lambda x: x.to(torch.uint8)), "t2d is torch.uint8, not bool"),
    (_set("d2t", lambda x: x + torch.arange(x.numel())), "t2d and d2t name different tokens|leaves the target's"),
    (_set("d2t", lambda x: x + VOCAB), "d2t leaves the target's vocabulary of 40"),
    (_set("d2t", lambda x: x - 1), "d2t leaves the target's vocabulary of 40: ids -1 to"),
    (_set("d2t", lambda x: torch.cat([x[1:2] + 1, x[:1] - 1, x[2:]])), "not strictly ascending"),
    (_set("t2d", lambda x: x.roll(1)), "t2d and d2t name different tokens"),
])
def test_damaged_tensors_are_refused(saved: Path, damage: Callable[[Tensors], Any], message: str) -> None:
    tensors = load_file(saved / "model.safetensors")
    damage(tensors)
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=message):
        load_drafter(saved)


@pytest.mark.parametrize(("change", "message"), [
    ({"architectures": ["LlamaForCausalLM"]}, "architectures is"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is not false"),
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2, not 1"),
    ({"target_hidden_size": 32}, "target_hidden_size 32 differs from hidden_size 16"),
    ({"draft_vocab_size": 41}, "draft_vocab_size 41 is not between 1 and vocab_size 40"),
    ({"draft_vocab_size": 13}, "lm_head.weight has shape"),
    ({"hidden_size": None}, "hidden_size is None"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope type 'yarn'"),
    ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}, "layer_ids is missing"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, "the first must be the second minus 1"),
    ({"fc_norm": True}, "tensors are missing: fc_norm.0.weight"),
])
def test_a_config_that_engines_would_misread_is_refused(saved: Path, change: dict[str, Any], message: str) -> None:
    file = saved / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointInvalid, match=message):
        load_drafter(saved)


def test_missing_and_cut_files_are_named(saved: Path, tmp_path: Path) -> None:
    weights = saved / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointInvalid, match="not a readable safetensors file"):
        load_drafter(saved)
    weights.unlink()
    with pytest.raises(ArtifactMissing, match=r"model\.safetensors is missing"):
        load_drafter(saved)
    shutil.rmtree(saved)
    with pytest.raises(ArtifactMissing, match=r"config\.json is missing"):
        load_drafter(saved)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), "qwen3", tie_word_embeddings=True)


def test_a_new_drafter_inherits_the_targets_output_rows_and_last_norm(target_dir: Path) -> None:
    config, ends = read_config(target_dir), read_target_ends(target_dir, tie_word_embeddings=True)
    vocabulary = build(torch.arange(config.vocab_size), 50)
    drafter = family_named("eagle3").create(DrafterSpec(), config, ends, (1, 2), vocabulary, 0)
    assert torch.equal(drafter.lm_head.weight, ends.embed[vocabulary.ids])  # tied: the output matrix is the embedding
    assert torch.equal(drafter.norm.weight, ends.norm)
    again = family_named("eagle3").create(DrafterSpec(), config, ends, (1, 2), vocabulary, 0)
    assert torch.equal(drafter.fc.weight, again.fc.weight)


def test_a_drafter_is_opened_for_its_own_target_only(target_dir: Path, saved: Path, tmp_path: Path) -> None:
    config, target = read_config(target_dir), load_target(target_dir, "float32")
    ends = read_target_ends(target_dir, tie_word_embeddings=True)
    family = family_named("eagle3")
    drafter = family.create(DrafterSpec(), config, ends, (1, 2), build(torch.arange(config.vocab_size), 50), 0)
    family.save(tmp_path / "own", drafter, "float32", {})
    assert open_drafter(tmp_path / "own", target).aux_layers == (1, 2)
    with pytest.raises(CheckpointInvalid, match="this target has"):
        open_drafter(saved, target)
