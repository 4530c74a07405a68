"""Medusa: what a head reads, what it learns, what its directory may hold, and that its drafts change no token."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.errors import ArtifactMissing
from eyrie_workers.drafters.card import Card, identify
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.drafters.heads import save_heads as save
from eyrie_workers.drafters.medusa import FAMILY, MedusaDrafter, MedusaProposer
from eyrie_workers.speculation.protocol import NO_TOKEN
from tests.workers.drafters.heads import (
    HEADS,
    SAMPLINGS,
    SHAPES,
    World,
    answers,
    exported,
    new_drafter,
    objective,
    pairs_until,
    scrambled,
    world,
)

DECAY = 0.7


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def checkpoint(tiny: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(FAMILY, tiny, tmp_path_factory.mktemp("drafter") / "trained")


def said(drafter: MedusaDrafter, h: torch.Tensor, head: int) -> torch.Tensor:
    """The paper's formula for one state."""
    inner = drafter.blocks[head].layers[0].weight @ h
    return drafter.lm_heads[head].weight @ (F.silu(inner) + h)


def test_loss_and_gradients_equal_the_papers_formula_at_each_root_and_head(tiny: World) -> None:
    """One document, one position at a time: head s at root i reads h_i and is taught by position i + 1 + s."""
    drafter = scrambled(new_drafter(FAMILY, tiny)).double()
    ids, inside = tiny.vocabulary.ids, tiny.vocabulary.t2d
    sums, counts = [torch.zeros((), dtype=torch.float64) for _ in range(HEADS)], [0] * HEADS
    for document in tiny.documents[:3]:
        for root in range(len(document.token_ids)):
            for head in range(HEADS):
                if not all(t < len(document.token_ids) and document.loss_mask[t]
                           for t in range(root + 1, root + 3 + head)):
                    break
                opinion = tiny.ends.lm_head.double() @ document.last[root + 1 + head].double()
                if inside[opinion.argmax()]:
                    logits = said(drafter, document.aux[root, 0].double(), head)
                    sums[head] = sums[head] - opinion[ids].softmax(0) @ logits.log_softmax(0)
                    counts[head] += 1
    raw = [DECAY**head for head in range(HEADS)]
    expected = sum(w / sum(raw) * total / count for w, total, count in zip(raw, sums, counts, strict=True))
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    first = World(tiny.target, tiny.ends, tiny.documents[:3], tiny.vocabulary).packed
    outcome = objective(FAMILY, drafter, tiny, torch.float64, step_decay=DECAY)(first)
    outcome.loss.backward()
    torch.testing.assert_close(outcome.loss.double(), expected, atol=1e-5, rtol=1e-5)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=2e-5, rtol=2e-4, msg=name)
        assert wanted[name].abs().max() > 1e-4, f"{name} was not tested by this data"


def test_the_heads_of_a_new_drafter_give_the_targets_distribution(tiny: World) -> None:
    drafter = new_drafter(FAMILY, tiny)
    h = tiny.documents[0].aux[7, 0]
    for head in range(HEADS):
        torch.testing.assert_close(said(drafter, h, head), tiny.ends.lm_head[tiny.vocabulary.ids] @ h)


def test_the_first_proposals_are_the_first_choices_in_training(tiny: World) -> None:
    """Hits of a judged batch, counted once more from proposals grown one root at a time."""
    drafter = scrambled(new_drafter(FAMILY, tiny))
    proposer = MedusaProposer(drafter, tiny.target.config.num_layers, torch.float32)
    document = tiny.documents[0]
    outcome = objective(FAMILY, drafter, tiny)(document)
    state, ids = proposer.new_state(1), tiny.vocabulary.ids
    hits = [0] * HEADS
    for root in range(len(document.token_ids) - 1):
        proposer.extend(state, pairs_until(document, root))
        tokens = proposer.propose(state, [0], SHAPES["chain"]).tokens[0, 1:].tolist()
        assert tokens == [int(ids[said(drafter, document.aux[root, 0], head).argmax()]) for head in range(HEADS)]
        for head, token in enumerate(tokens):
            if all(t < len(document.token_ids) and document.loss_mask[t] for t in range(root + 1, root + 3 + head)):
                opinion = tiny.ends.lm_head @ document.last[root + 1 + head]
                hits[head] += token == int(opinion.argmax())
    assert [int(one.sum()) for one in outcome.hits] == hits


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_a_shape_deeper_than_the_heads_changes_no_token(sampling: str, tiny: World, checkpoint: Path) -> None:
    drafter = open_drafter(checkpoint, tiny.target)
    plain = [one.token_ids for one in answers(tiny, None, None, SAMPLINGS[sampling])]
    for name in ("deeper chain", "deeper dynamic", "deeper static"):
        drafted = answers(tiny, drafter, SHAPES[name], SAMPLINGS[sampling])
        assert [one.token_ids for one in drafted] == plain, name
        assert sum(sum(one.accepted_histogram[1:]) for one in drafted) > 0, name


@pytest.mark.parametrize("static", [False, True])
def test_a_deeper_shape_has_no_token_beyond_the_last_head(static: bool, tiny: World, checkpoint: Path) -> None:
    drafter = open_drafter(checkpoint, tiny.target)
    state = drafter.new_state(1)
    drafter.extend(state, pairs_until(tiny.documents[0], 9))
    deep = DraftTreeShape(num_steps=7, top_k=1, num_draft_tokens=8, static=static)
    tree = drafter.propose(state, [0], deep)
    assert tree.tokens[0, HEADS + 1:].tolist() == [NO_TOKEN] * 3
    assert NO_TOKEN not in tree.tokens[0, 1: HEADS + 1].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_drafter_is_loaded_unchanged(dtype: str, tiny: World, tmp_path: Path) -> None:
    drafter = scrambled(new_drafter(FAMILY, tiny))
    save(tmp_path / "one", drafter, dtype)
    save(tmp_path / "two", FAMILY.load(tmp_path / "one", tiny.target.config), dtype)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    loaded = FAMILY.load(tmp_path / "two", tiny.target.config)
    assert loaded.vocabulary.ids.tolist() == tiny.vocabulary.ids.tolist()
    for name, parameter in drafter.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.to(getattr(torch, dtype)))


def test_the_directory_has_the_format_of_vllm(tiny: World, checkpoint: Path) -> None:
    config, tensors = json.loads((checkpoint / "config.json").read_text()), load_file(checkpoint / "model.safetensors")
    assert (config["architectures"], config["model_type"]) == (["MedusaModel"], "medusa")
    # Its configuration takes every key with "num" and "heads" in it for num_heads, with "layers" for the layers.
    assert [key for key in config if "num" in key] == ["num_heads", "num_hidden_layers"]
    assert set(tensors) == {f"blocks.{head}.layers.0.weight" for head in range(HEADS)} | {
        f"lm_heads.{head}.weight" for head in range(HEADS)} | {"token_map"}
    assert tensors["token_map"].tolist() == tiny.vocabulary.ids.tolist()
    assert tensors["lm_heads.0.weight"].shape == (config["truncated_vocab_size"], config["hidden_size"])


def test_a_card_of_another_family_is_refused(tiny: World, checkpoint: Path, tmp_path: Path) -> None:
    assert tiny.target.path is not None
    card = Card(family="medusa", target=identify(tiny.target.path), drafter=DrafterSpec(family="medusa"),
                aux_layers=(4,), code_version="test")
    drafter = FAMILY.load(checkpoint, tiny.target.config)
    save(tmp_path / "ours", drafter, card=card)
    open_drafter(tmp_path / "ours", tiny.target)
    save(tmp_path / "theirs", drafter, card=card.model_copy(update={"family": "hydra"}))
    with pytest.raises(CheckpointInvalid, match="its card is of a hydra drafter"):
        open_drafter(tmp_path / "theirs", tiny.target)


DAMAGES = {
    "num_heads 'four'": {"num_heads": "four"}, "no hidden_size": {"hidden_size": None},
    "num_hidden_layers 2": {"num_hidden_layers": 2}, "original_lm_head true": {"original_lm_head": True},
    "medusa_fc_bias true": {"medusa_fc_bias": True}, "truncated_vocab_size 9999": {"truncated_vocab_size": 9999},
    "hidden_size 64": {"hidden_size": 64}, "num_heads 5": {"num_heads": 5},
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_config_that_does_not_fit_is_named(damage: str, tiny: World, checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | DAMAGES[damage]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointInvalid) as refused:
        open_drafter(tmp_path, tiny.target)
    [key] = DAMAGES[damage]
    named = {"hidden_size 64": "blocks.0.layers.0.weight", "num_heads 5": "blocks.4.layers.0.weight"}
    assert named.get(damage, key) in str(refused.value)


def damaged(tensors: dict[str, torch.Tensor], how: str) -> str:
    """Damage the tensors; the name that the error must contain."""
    if how == "missing":
        del tensors["lm_heads.1.weight"]
        return "lm_heads.1.weight"
    if how == "unknown":
        tensors["lm_heads.9.weight"] = torch.zeros(1)
        return "lm_heads.9.weight"
    if how == "not finite":
        tensors["blocks.2.layers.0.weight"][3, 4] = torch.nan
        return "blocks.2.layers.0.weight"
    if how == "of two types":
        tensors["blocks.2.layers.0.weight"] = tensors["blocks.2.layers.0.weight"].half()
        return "torch.float16"
    tensors["token_map"] = {"beyond the vocabulary": tensors["token_map"] + 2, "not ascending": tensors[
        "token_map"].flip(0), "of float ids": tensors["token_map"].float()}[how]
    return "token_map"


@pytest.mark.parametrize("how", ["missing", "unknown", "not finite", "of two types", "beyond the vocabulary",
                                 "not ascending", "of float ids"])
def test_tensors_that_are_damaged_are_named(how: str, tiny: World, checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = damaged(tensors, how)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointInvalid) as refused:
        open_drafter(tmp_path, tiny.target)
    assert name in str(refused.value)


def test_a_directory_without_weights_is_missing(tiny: World, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(ArtifactMissing, match=r"model\.safetensors"):
        open_drafter(tmp_path, tiny.target)
