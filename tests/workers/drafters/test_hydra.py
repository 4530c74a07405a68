"""Hydra: what a head reads, what reading tokens buys, what its directory may hold, and that its drafts change no
token."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.drafters.heads import save_heads as save
from eyrie_workers.drafters.hydra import FAMILY, HydraDrafter, HydraProposer
from eyrie_workers.speculation.protocol import NO_TOKEN
from eyrie_workers.speculation.tree import ancestors
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


def said(drafter: HydraDrafter, embed: torch.Tensor, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The formula for one state and the tokens behind it; as many tokens as the head's number and one."""
    scaled = [embed[token] / (embed[token].square().mean() + 1e-6).sqrt() for token in tokens]
    z, head = torch.cat([h, *scaled]), drafter.heads[len(tokens) - 1]
    return drafter.lm_head.weight @ (head.skip.weight @ z + F.silu(head.inner.weight @ z))


@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradients_equal_the_formula_at_each_root_and_head(recompute: bool, tiny: World) -> None:
    """Head s at root i reads h_i and the true tokens i + 1 .. i + 1 + s, and is taught by position i + 1 + s."""
    drafter = scrambled(new_drafter(FAMILY, tiny)).double()
    embed, ids, inside = tiny.ends.embed.double(), tiny.vocabulary.ids, tiny.vocabulary.t2d
    sums, counts = [torch.zeros((), dtype=torch.float64) for _ in range(HEADS)], [0] * HEADS
    for document in tiny.documents[:3]:
        for root in range(len(document.token_ids)):
            for head in range(HEADS):
                if not all(t < len(document.token_ids) and document.loss_mask[t]
                           for t in range(root + 1, root + 3 + head)):
                    break
                opinion = tiny.ends.lm_head.double() @ document.last[root + 1 + head].double()
                if inside[opinion.argmax()]:
                    logits = said(drafter, embed, document.aux[root, 0].double(),
                                  document.token_ids[root + 1: root + 2 + head])
                    sums[head] = sums[head] - opinion[ids].softmax(0) @ logits.log_softmax(0)
                    counts[head] += 1
    raw = [DECAY**head for head in range(HEADS)]
    expected = sum(w / sum(raw) * total / count for w, total, count in zip(raw, sums, counts, strict=True))
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    first = replace(tiny, documents=tiny.documents[:3]).packed
    outcome = objective(FAMILY, drafter, tiny, torch.float64, step_decay=DECAY, grad_checkpoint=recompute)(first)
    outcome.loss.backward()
    torch.testing.assert_close(outcome.loss.double(), expected, atol=1e-5, rtol=1e-5)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], atol=2e-5, rtol=2e-4, msg=name)
        assert wanted[name].abs().max() > 1e-4, f"{name} was not tested by this data"


def test_decoding_equals_training_at_every_root_and_depth(tiny: World) -> None:
    """Chains and trees: each node's best child is the formula's first choice behind the path to it."""
    drafter = scrambled(new_drafter(FAMILY, tiny))
    proposer = HydraProposer(drafter, tiny.target.embed_weight, tiny.target.config.num_layers)
    document, ids = tiny.documents[0], tiny.vocabulary.ids
    state = proposer.new_state(1)
    for root in range(3, 20):
        proposer.extend(state, pairs_until(document, root))
        settled = document.token_ids[root + 1: root + 2]
        for name in ("chain", "dynamic", "static"):
            tree = proposer.propose(state, [0], SHAPES[name])
            above = ancestors(tree.parents, 4)[0]
            for node in range(SHAPES[name].num_draft_tokens):
                children = [n for n in range(1, above.shape[0]) if n != node and int(tree.parents[0, n]) == node]
                if children:
                    path = [int(tree.tokens[0, n]) for n in above[node].nonzero().flatten() if n != 0]
                    logits = said(drafter, tiny.target.embed_weight, document.aux[root, 0],
                                  torch.cat([settled, torch.tensor(path, dtype=torch.int64)]))
                    assert int(ids[logits.argmax()]) in {int(tree.tokens[0, n]) for n in children}


def test_hits_are_counted_after_the_true_tokens(tiny: World) -> None:
    drafter = scrambled(new_drafter(FAMILY, tiny))
    document, ids = tiny.documents[1], tiny.vocabulary.ids
    outcome = objective(FAMILY, drafter, tiny)(document)
    hits = [0] * HEADS
    for root in range(len(document.token_ids)):
        for head in range(HEADS):
            if all(t < len(document.token_ids) and document.loss_mask[t] for t in range(root + 1, root + 3 + head)):
                logits = said(drafter, tiny.ends.embed, document.aux[root, 0],
                              document.token_ids[root + 1: root + 2 + head])
                hits[head] += int(ids[logits.argmax()]) == int(
                    (tiny.ends.lm_head @ document.last[root + 1 + head]).argmax())
    assert [int(one.sum()) for one in outcome.hits] == hits


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_a_shape_deeper_than_the_heads_changes_no_token(sampling: str, tiny: World, checkpoint: Path) -> None:
    drafter = open_drafter(checkpoint, tiny.target)
    plain = [one.token_ids for one in answers(tiny, None, None, SAMPLINGS[sampling])]
    for name in ("deeper chain", "deeper dynamic", "deeper static"):
        drafted = answers(tiny, drafter, SHAPES[name], SAMPLINGS[sampling])
        assert [one.token_ids for one in drafted] == plain, name
        assert sum(sum(one.accepted_histogram[1:]) for one in drafted) > 0, name


@pytest.mark.parametrize("shape", [
    DraftTreeShape(num_steps=7, top_k=1, num_draft_tokens=8), DraftTreeShape(num_steps=7, top_k=2, num_draft_tokens=27),
    DraftTreeShape(num_steps=7, top_k=2, num_draft_tokens=27, static=True)], ids=DraftTreeShape.label)
def test_a_deeper_shape_has_no_token_beyond_the_last_head(shape: DraftTreeShape, tiny: World, checkpoint: Path) -> None:
    drafter = open_drafter(checkpoint, tiny.target)
    state = drafter.new_state(1)
    drafter.extend(state, pairs_until(tiny.documents[0], 9))
    tree = drafter.propose(state, [0], shape)
    assert tree.tokens.shape == tree.parents.shape == tree.scores.shape == (1, shape.num_draft_tokens)
    grown = HEADS if shape.top_k == 1 else shape.top_k + (HEADS - 1) * shape.top_k**2
    assert int((tree.tokens[0, 1:] != NO_TOKEN).sum()) == grown < shape.num_draft_tokens - 1
    depths = ancestors(tree.parents, shape.num_draft_tokens)[0].sum(-1) - 1
    assert int(depths[tree.tokens[0] != NO_TOKEN].max()) == HEADS


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


def test_the_same_seed_makes_the_same_drafter_and_another_seed_another(tiny: World) -> None:
    one, same, other = (new_drafter(FAMILY, tiny, seed).heads[2].inner.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(("change", "result"), [
    ({"num_heads": 5}, "heads.4.skip.weight"), ({"num_heads": 3}, "heads.3.inner.weight"),
    ({"vocab_size": 300}, "token_map"), ({"original_lm_head": False}, "original_lm_head"),
    ({"architectures": ["EyrieHydra", "Other"]}, "EyrieHydra"), ({"truncated_vocab_size": 0}, "truncated_vocab_size")])
def test_a_config_that_does_not_fit_is_named(change: dict[str, object], result: str, tiny: World, checkpoint: Path,
                                             tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointInvalid) as refused:
        open_drafter(tmp_path, tiny.target)
    assert result in str(refused.value)


def test_a_head_of_the_wrong_shape_is_named(tiny: World, checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["heads.2.inner.weight"] = tensors["heads.2.inner.weight"][:, :-1].contiguous()
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointInvalid) as refused:
        open_drafter(tmp_path, tiny.target)
    assert "heads.2.inner.weight" in str(refused.value)
