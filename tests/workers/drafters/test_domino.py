"""Domino: the head as its formulas read plainly, serving against training, the export against what SGLang loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_workers.drafters.blocks import DFlashDrafter, DFlashProposer, load
from eyrie_workers.drafters.dflash import FAMILY
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.objective import StepContext
from tests.workers.drafters.test_dflash import (
    HIDDEN,
    LAYERS,
    STEPS,
    VOCAB,
    check_drafts,
    check_loss_and_gradients,
    documents,
    drafter_for,
    ends_of,
    naive_stream,
    target,
)

__all__ = ["target"]  # the fixture


def domino(target: TargetModel) -> DFlashDrafter:
    return drafter_for(target, causal_head="domino")


def naive_logits(drafter: DFlashDrafter, ends: TargetEmbeddings, aux: Tensor, tokens: list[int]) -> list[Tensor]:
    """[V] logits of each step, given the settled token and those that are drafted after it, one place at a time."""
    head, hidden = drafter.domino_head, naive_stream(drafter, ends, aux, tokens[0])
    assert head is not None
    size, logits = head.state_size, []
    memory = hidden.new_zeros(size)
    for step, token in enumerate(tokens[:STEPS]):
        h, read = hidden[step], head.prefix_gru.weight_ih_l0 @ ends.embed[token]
        kept = head.prefix_gru.weight_hh_l0 @ memory
        reset, update = ((read + kept)[:2 * size].sigmoid().split(size))
        new = (read[2 * size:] + reset * kept[2 * size:]).tanh()
        memory = (1 - update) * new + update * memory
        logits.append(ends.lm_head @ h)
        if step:
            joined = head.embed_proj[0].weight @ torch.cat([h, memory])
            logits[-1] = logits[-1] + head.bias_VM @ (joined * joined.sigmoid())
    return logits


def test_loss_and_gradients_at_the_end_of_training_equal_a_plain_implementation(target: TargetModel) -> None:
    check_loss_and_gradients(FAMILY, domino(target), target, naive_logits, context=StepContext(1, 2, 0))


def test_at_the_first_step_the_loss_is_that_of_the_marginals_and_then_a_falling_share(target: TargetModel) -> None:
    drafter, packed = domino(target), documents((9, 12))
    objective = FAMILY.objective(drafter, ends_of(target), TrainSpec(unrolled_fraction=1.0), 12, torch.float32)

    def loss(step: int) -> float:
        return float(objective(packed, StepContext(step, 8, 0)).loss.detach())

    both = [loss(step) for step in (0, 2, 4, 6)]
    assert drafter.domino_head is not None
    assert both[1] == pytest.approx((both[0] + both[2]) / 2, rel=1e-5)
    assert both[2] == both[3] == float(objective(packed).loss.detach()), "from the middle on the head's alone"
    torch.nn.init.zeros_(drafter.domino_head.bias_VM)
    assert [loss(step) for step in (0, 4)] == pytest.approx([both[0], both[0]])
    assert both[2] != pytest.approx(both[0])


def test_each_drafted_token_reads_those_before_it(target: TargetModel, tmp_path: Path) -> None:
    drafter, ends = domino(target), ends_of(target)
    FAMILY.save(tmp_path / "drafter", drafter, "float32", None)
    proposer = open_drafter(tmp_path / "drafter", target)
    assert isinstance(proposer, DFlashProposer)
    check_drafts(drafter, ends, proposer, naive_logits)


def test_the_export_is_what_sglang_reads_and_training_continues_from_it(target: TargetModel, tmp_path: Path) -> None:
    drafter = domino(target)
    FAMILY.save(tmp_path, drafter, "float32", None)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    size, rank = HIDDEN // 4, HIDDEN // 2
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {
        "block_size": STEPS + 1, "mask_token_id": 1, "num_target_layers": 4, "target_layer_ids": [0, 1, 2],
        "projector_type": "domino", "pure_draft_prefix_len": 1, "shift_label": True, "gru_hidden_dim": size,
        "emb_dim": rank}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith(("prefix", "embed"))} == {
        "prefix_gru.weight_ih_l0": (3 * size, HIDDEN), "prefix_gru.weight_hh_l0": (3 * size, size),
        "embed_proj.0.weight": (rank, HIDDEN + size), "embed_proj.2.weight": (VOCAB, rank)}
    again = load(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in drafter.state_dict().items())


def test_a_new_drafter_proposes_the_marginals_alone(target: TargetModel) -> None:
    wanted = DrafterSpec(family="dflash", max_draft_tokens=STEPS, num_layers=2, causal_head="domino")
    drafter = FAMILY.create(wanted, target.config, ends_of(target), LAYERS, DraftVocabulary(torch.arange(VOCAB), VOCAB),
                            1)
    assert isinstance(drafter, DFlashDrafter)
    assert drafter.domino_head is not None
    assert not bool(drafter.domino_head.bias_VM.any())
    assert all(bool(parameter.any()) for parameter in drafter.domino_head.prefix_gru.parameters())
