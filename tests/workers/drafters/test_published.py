"""Published drafters, in the forms they are published in: converted to a checkpoint of ours, or refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.errors import ArtifactMissing, EyrieError
from eyrie_api.planning.facts import Facts, read_config
from eyrie_api.planning.published_drafters import check_published_drafters
from eyrie_api.planning.resolve import derive
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.drafters.eagle3.family import load_drafter
from eyrie_workers.drafters.export import to_speculators
from eyrie_workers.drafters.family import family_named, open_drafter
from eyrie_workers.drafters.published import adopt, fetch, load_head
from eyrie_workers.speculation.protocol import CommittedTokens
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.model import TargetModel
from tests.api.samples import job_spec
from tests.tiny import tiny_target
from tests.workers.drafters import published_forms
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


@pytest.fixture(scope="module")
def of_the_forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetModel]:
    path = tiny_target(tmp_path_factory.mktemp("deeper"), **published_forms.TARGET)
    return path, load_target(path)


def drafts(directory: Path, target: TargetModel) -> torch.Tensor:
    """The log confidences of a chain of three drafted tokens, after checking that all three are tokens."""
    proposer = open_drafter(directory, target)
    ids = torch.arange(20, 29)
    with torch.inference_mode():
        [(aux, _)] = target.hidden_states([ids], proposer.aux_layers)
    state = proposer.new_state(1)
    proposer.admit(state, 0, ids[:8].tolist())
    proposer.extend(state, CommittedTokens([0], [0], [ids[1:9].tolist()], aux[None, :8]))
    tree = proposer.propose(state, [0], DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4))
    assert tree.tokens.shape == (1, 4)
    assert all(0 <= token < published_forms.VOCAB for token in tree.tokens[0, 1:].tolist())
    return tree.scores[0, 1:]


@pytest.mark.parametrize("form", list(published_forms.READ))
def test_a_drafter_as_its_authors_publish_it_is_adopted_drafts_and_is_trained_further(
        form: str, tmp_path: Path, of_the_forms: tuple[Path, TargetModel]) -> None:
    program, family = published_forms.READ[form]
    path, target = of_the_forms
    published = program().write(tmp_path / "published")
    assert adopt(published, tmp_path / "out", path).name == family
    assert bool(drafts(tmp_path / "out", target).isfinite().all())
    head = load_head(DrafterSpec(family=family, init_from=str(published)), family_named(family), path)
    assert all(bool(parameter.isfinite().all()) for parameter in head.module.parameters())
    if family == "eagle3":  # by hidden_states index: outputs of layers 1, 12 / 2 - 1 and 12 - 4, or the named ones
        assert head.layers == ((2, 7, 10) if form == "SpecForge with layer ids" else (2, 6, 9))
    elif family in ("dflash", "dspark"):
        assert head.layers == (2, 6, 10)


@pytest.mark.parametrize("form", list(published_forms.REFUSED))
def test_a_drafter_that_eyrie_does_not_compute_is_refused_with_what_it_is_and_where_it_is_served(
        form: str, tmp_path: Path, of_the_forms: tuple[Path, TargetModel]) -> None:
    program, says, hint = published_forms.REFUSED[form]
    with pytest.raises(CheckpointInvalid, match=says) as refused:
        adopt(program().write(tmp_path / "published"), tmp_path / "out", of_the_forms[0])
    assert hint in refused.value.hint


def test_the_defaults_of_absent_keys_are_written_out(tmp_path: Path, of_the_forms: tuple[Path, TargetModel]) -> None:
    path, _ = of_the_forms
    adopt(published_forms.specforge().write(tmp_path / "plain"), tmp_path / "out", path)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rope_theta"], config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) == (10000.0, [1, 5, 8])
    bare = published_forms.dflash()
    settings = {"mask_token_id": bare.config["dflash_config"]["mask_token_id"]}
    without = published_forms.Published(bare.config | {"num_target_layers": None, "dflash_config": settings},
                                        bare.tensors | {"fc.weight": torch.ones(32, 64) * torch.randn(32, 1)})
    adopt(without.write(tmp_path / "bare"), tmp_path / "blocks", path)
    written = json.loads((tmp_path / "blocks" / "config.json").read_text())["dflash_config"]
    assert written == {"mask_token_id": 319, "block_size": 8, "num_target_layers": 12, "target_layer_ids": [1, 9]}


VALUES: tuple[Any, ...] = (None, True, False, 0, -1, 3, 2.5, "x", [1], {})
MORE_KEYS = ("sliding_window", "layer_types", "rope_parameters", "num_aux_hidden_states", "draft_vocab_size",
             "is_causal", "fc_norm", "norm_output", "target_hidden_size", "partial_rotary_factor", "hot_vocab_size",
             "quantization_config", "eagle_config", "eagle_aux_hidden_state_layer_ids", "dflash_config")


@pytest.mark.parametrize("form", ["EAGLE-1", "SpecForge with layer ids", "speculators", "DFlash, newer", "DFlash2",
                                  "LiLiCorr"])
def test_submission_and_stage_agree_on_a_config_with_any_value_in_any_key(
        form: str, tmp_path: Path, of_the_forms: tuple[Path, TargetModel]) -> None:
    """80 of the changes at random: what is accepted is adopted and loads, what is refused is refused there too."""
    path, target = of_the_forms
    facts, published = Facts(target=path, config=read_config(path)), published_forms.READ[form][0]()
    drafter = published_forms.Published(published.config, published.tensors).write(tmp_path / "drafter")
    nested = [key for key, value in published.config.items() if isinstance(value, dict)]
    keys = [(section, key) for section in nested for key in published.config[section]]
    keys += [(None, key) for key in (*published.config, *MORE_KEYS)]
    changes = random.Random(form).sample([(*place, value) for place in keys for value in VALUES], 80)
    job = derive(job_spec(target={"model": str(path)}, rivals=[str(drafter)]))
    for section, key, value in changes:
        config = json.loads(json.dumps(published.config))
        (config if section is None else config[section])[key] = value
        (drafter / "config.json").write_text(json.dumps(config))
        verdicts = []
        for judge in (lambda: check_published_drafters(job, facts),
                      lambda: (adopt(drafter, tmp_path / "out", path), open_drafter(tmp_path / "out", target))):
            try:
                judge()
                verdicts.append("")
            except EyrieError as refusal:
                verdicts.append(refusal.message)
        assert bool(verdicts[0]) == bool(verdicts[1]), (section, key, value, verdicts)
