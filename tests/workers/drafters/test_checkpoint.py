"""What is written loads bit for bit, and whatever an engine would load wrongly is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.errors import ArtifactMissing, InvalidInput
from eyrie_api.planning.drafter_rules import tensor_rules
from eyrie_api.planning.eagle3_rules import expected_shapes, shape_of
from eyrie_workers.drafters.card import Card, TargetIdentity
from eyrie_workers.drafters.checkpoint import (
    CheckpointInvalid,
    as_stored,
    headers_of,
    read_tensors,
    refuse,
    write_checkpoint,
)
from eyrie_workers.drafters.eagle3.family import load_drafter, save_drafter
from eyrie_workers.drafters.family import family_named, open_drafter
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.draft_vocabulary import build
from eyrie_workers.targets.loading import load_target
from tests.tiny import tiny_target
from tests.workers.drafters.test_eagle3_proposer import HIDDEN, VOCAB, random_drafter, variants


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_drafter(tmp_path / "drafter", random_drafter())
    return tmp_path / "drafter"


def edit(directory: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@variants
def test_a_saved_drafter_is_loaded_bit_for_bit(tmp_path: Path, flags: dict[str, Any]) -> None:
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


def test_the_config_contains_the_layer_ids_of_both_engines(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["tie_word_embeddings"] is False
    assert (config["draft_vocab_size"], config["vocab_size"]) == (14, VOCAB)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert (config["num_aux_hidden_states"], config["target_hidden_size"]) == (3, HIDDEN)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100.0}
    assert "sliding_window" not in config


def test_window_and_post_norm_are_written_in_the_form_of_each_engine(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", random_drafter(sliding_window=8, norm_output=True, norm_before_fc=True))
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert (config["sliding_window"], config["layer_types"]) == (8, ["sliding_attention"])
    assert config["norm_output"] is True
    assert config["norm_before_fc"] is config["eagle_config"]["norm_before_fc"] is True


@pytest.mark.parametrize(("architecture", "aux_layers", "nested"), [
    ("LlamaForCausalLM", (2, 8, 13), [1, 7, 12]), ("DeepseekV3ForCausalLM", (2, 8, 13), [1, 7, 12]),
    ("DeepseekV3ForCausalLM", (3, 8, 13), [3, 8, 13]), ("GptOssForCausalLM", (3, 8, 13), [2, 7, 12])])
def test_layer_ids_are_written_as_the_targets_class_reads_them(tmp_path: Path, architecture: str,
                                                               aux_layers: tuple[int, ...], nested: list[int]) -> None:
    save_drafter(tmp_path / "d", random_drafter(aux_layers=aux_layers), card=card_for(architecture, aux_layers))
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == nested
    assert config["eagle_aux_hidden_state_layer_ids"] == list(aux_layers)
    assert load_drafter(tmp_path / "d").config.aux_layers == aux_layers


def card_for(architecture: str = "LlamaForCausalLM", aux_layers: tuple[int, ...] = (1, 2, 4), **fields: Any) -> Card:
    """A card of a drafter for some target of 16 layers."""
    target = TargetIdentity(name="some", architecture=architecture, num_layers=16, digest="sha256:" + "0" * 64)
    return Card(target=target, drafter=DrafterSpec(), aux_layers=aux_layers, code_version="0", **fields)


def test_parameters_are_written_in_the_wanted_dtype(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", random_drafter(), dtype="bfloat16")
    loaded = load_drafter(tmp_path / "d")
    assert loaded.fc.weight.dtype == torch.bfloat16
    assert loaded.d2t.dtype == torch.int64


def test_saving_again_replaces_the_directory_and_leaves_no_temporary_files(saved: Path) -> None:
    (saved / "stray").write_text("from an older export")
    save_drafter(saved, random_drafter(seed=3))
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_loading_a_defective_checkpoint_lists_all_errors_and_a_hint(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + torch.arange(14)
    save_file(tensors, saved / "model.safetensors")
    edit(saved, tie_word_embeddings=True)
    with pytest.raises(CheckpointInvalid, match=r"tie_word_embeddings is true.*d2t holds target ids") as refused:
        load_drafter(saved)
    assert refused.value.hint == "write false"


def test_saving_a_defective_drafter_writes_nothing(tmp_path: Path) -> None:
    drafter = random_drafter()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = torch.nan
    with pytest.raises(CheckpointInvalid, match=r"fc\.weight holds nan"):
        save_drafter(tmp_path / "d", drafter)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("change", "says"), [
    ({"num_hidden_layers": 2}, "computes drafters of one layer"),
    ({"target_hidden_size": 32}, "of their target's hidden size"), ({"bias": True}, "without bias"),
    ({"draft_vocab_size": None}, "an output matrix of their own"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0}}, "rope type 'yarn'")])
def test_variants_that_only_sglang_serves_are_refused_at_loading(
        saved: Path, change: dict[str, Any], says: str) -> None:
    edit(saved, **change)
    shapes = expected_shapes(shape_of(json.loads((saved / "config.json").read_text())))
    stored = load_file(saved / "model.safetensors")
    if "draft_vocab_size" in change:
        del shapes["lm_head.weight"]  # the target's is used
    # Tensors as such a drafter has them: else those would be what is refused.
    save_file({name: stored[name] if name in stored and stored[name].shape == shape else torch.rand(shape)
               for name, shape in shapes.items()}, saved / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=says):
        load_drafter(saved)


def test_a_drafter_of_the_whole_vocabulary_has_no_maps(tmp_path: Path) -> None:
    # vLLM has no place for d2t when both vocabularies are the same, and refuses names it does not know.
    drafter = random_drafter(draft_ids=torch.arange(VOCAB))
    save_drafter(tmp_path / "d", drafter)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "d" / "model.safetensors").keys()
    assert torch.equal(load_drafter(tmp_path / "d").d2t, drafter.d2t)


def test_other_tensor_spellings_of_sglang_are_loaded(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    other = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(other, saved / "model.safetensors")
    assert torch.equal(load_drafter(saved).fc.weight, tensors["fc.weight"])


def test_missing_and_truncated_files_are_named(saved: Path, tmp_path: Path) -> None:
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


def test_a_new_drafter_is_initialised_with_the_targets_output_rows_and_final_norm(target_dir: Path) -> None:
    config, ends = read_config(target_dir), read_target_embeddings(target_dir, tie_word_embeddings=True)
    vocabulary = build(torch.arange(config.vocab_size), 50)
    drafter = family_named("eagle3").create(DrafterSpec(), config, ends, (1, 2), vocabulary, 0)
    assert torch.equal(drafter.lm_head.weight, ends.embed[vocabulary.ids])  # tied: the output matrix is the embedding
    assert torch.equal(drafter.norm.weight, ends.norm)
    again = family_named("eagle3").create(DrafterSpec(), config, ends, (1, 2), vocabulary, 0)
    assert torch.equal(drafter.fc.weight, again.fc.weight)


def test_a_drafter_is_opened_for_its_own_target_only(target_dir: Path, saved: Path, tmp_path: Path) -> None:
    config, target = read_config(target_dir), load_target(target_dir, "float32")
    ends = read_target_embeddings(target_dir, tie_word_embeddings=True)
    family = family_named("eagle3")
    drafter = family.create(DrafterSpec(), config, ends, (1, 2), build(torch.arange(config.vocab_size), 50), 0)
    family.save(tmp_path / "own", drafter, "float32", None)
    assert open_drafter(tmp_path / "own", target).aux_layers == (1, 2)
    with pytest.raises(CheckpointInvalid, match="this target has"):
        open_drafter(saved, target)


def test_the_specs_variant_flags_reach_the_drafter(target_dir: Path) -> None:
    config, ends = read_config(target_dir), read_target_embeddings(target_dir, tie_word_embeddings=True)
    spec = DrafterSpec(norm_before_fc=True, norm_output=True, sliding_window=16)
    drafter = family_named("eagle3").create(spec, config, ends, (1, 2), build(torch.arange(config.vocab_size), 50), 0)
    made = drafter.config
    assert (made.norm_before_fc, made.norm_output, made.sliding_window, made.fc_norm) == (True, True, 16, False)
    assert torch.equal(drafter.input_norm.weight, torch.ones(2 * config.hidden_size))


def test_one_aux_layer_is_refused_because_sglang_would_skip_fc(target_dir: Path) -> None:
    config, ends = read_config(target_dir), read_target_embeddings(target_dir, tie_word_embeddings=True)
    with pytest.raises(InvalidInput, match="skip its fc"):
        family_named("eagle3").create(DrafterSpec(), config, ends, (2,), build(torch.arange(config.vocab_size), 50), 0)


def test_a_checkpoint_with_missing_unknown_and_misshapen_tensors_is_refused_naming_all_three() -> None:
    found = {"fc.weight": torch.zeros(4, 8), "norm.weight": torch.zeros(4), "head.weight": torch.zeros(2)}
    expected = {"fc.weight": (4, 4), "norm.weight": (4,), "fc.bias": (4,)}
    with pytest.raises(CheckpointInvalid) as refused:
        refuse("mine", tensor_rules(headers_of(found), expected))
    assert "fc.bias is missing; head.weight is not known; fc.weight has shape [4, 8], not [4, 4]" in str(refused.value)


def test_a_checkpoint_written_comes_back_whole_and_replaces_the_one_before(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    for number in (1, 2):
        write_checkpoint(tmp_path / "drafter", {"architectures": ["One"], "number": number},
                         as_stored({"a": shared.T, "b": shared, "ids": torch.arange(3)}, "bfloat16"), None)
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["number"] == 2
    tensors = read_tensors(tmp_path / "drafter")
    assert torch.equal(tensors["a"].float(), shared.T)
    assert tensors["a"].dtype == torch.bfloat16
    assert tensors["ids"].dtype == torch.int64
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]
