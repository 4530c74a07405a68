"""DSpark: each head as its formulas read plainly, serving against training, the export against what SGLang loads."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyrie_api.contract.drafter import DrafterSpec, MarkovHeadKind
from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import InvalidInput
from eyrie_workers.drafters.blocks import DFlashDrafter, DFlashProposer, load
from eyrie_workers.drafters.checkpoint import CheckpointInvalid
from eyrie_workers.drafters.dspark import FAMILY
from eyrie_workers.drafters.family import open_drafter
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.sglang.checkpoints import read_drafter
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.model import TargetModel
from eyrie_workers.training.evaluation import evaluate
from tests.workers.drafters.test_dflash import (
    FIRST_STEP,
    HIDDEN,
    LAYERS,
    STEPS,
    VOCAB,
    check_drafts,
    check_loss_and_gradients,
    documents,
    ends_of,
    naive_stream,
    target,
)

__all__ = ["target"]  # the fixture
RANK = 5
KINDS: tuple[MarkovHeadKind, ...] = ("vanilla", "gated", "rnn")


def drafter_for(target: TargetModel, kind: MarkovHeadKind = "vanilla", random: bool = True) -> DFlashDrafter:
    wanted = DrafterSpec(family="dspark", max_draft_tokens=STEPS, num_layers=2, markov_head=kind, markov_rank=RANK)
    drafter = FAMILY.create(wanted, target.config, ends_of(target), LAYERS, DraftVocabulary(torch.arange(VOCAB), VOCAB),
                            1)
    assert isinstance(drafter, DFlashDrafter)
    generator = torch.Generator().manual_seed(3)
    for parameter in drafter.parameters() if random else ():
        with torch.no_grad():
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return drafter


def naive_logits(drafter: DFlashDrafter, ends: TargetEmbeddings, aux: Tensor, tokens: list[int]) -> list[Tensor]:
    """[V] logits of each step, given the settled token and those that are drafted after it, one place at a time."""
    head, hidden = drafter.markov_head, naive_stream(drafter, ends, aux, tokens[0])
    assert head is not None
    memory, logits = hidden.new_zeros(RANK), []
    for step, token in enumerate(tokens[:STEPS]):
        read, h = head.markov_w1.weight[token], hidden[step]
        if head.gate_proj is not None:
            gate = head.gate_proj.weight @ torch.cat([h, read]) + head.gate_proj.bias
            read = read * (1 / (1 + (-gate).exp()))
        elif head.joint_proj is not None:
            joined = head.joint_proj.weight @ torch.cat([memory, read, h]) + head.joint_proj.bias
            kept, new, out = joined[:RANK].sigmoid(), joined[RANK:2 * RANK].tanh(), joined[2 * RANK:]
            memory, read = kept * memory + (1 - kept) * new, out.tanh()
        logits.append(ends.lm_head @ h + head.markov_w2.weight @ read)
    return logits


def naive_confidence(drafter: DFlashDrafter, ends: TargetEmbeddings, aux: Tensor, tokens: list[int],
                     step: int) -> Tensor:
    """The logit that the token after `tokens[step]` is accepted."""
    head, confidence = drafter.markov_head, drafter.confidence_head
    assert head is not None
    assert confidence is not None
    features = torch.cat([naive_stream(drafter, ends, aux, tokens[0])[step], head.markov_w1.weight[tokens[step]]])
    return (confidence.proj.weight @ features + confidence.proj.bias)[0]


@pytest.mark.parametrize("loss", ["kl", "tv"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_a_plain_implementation_of_the_paper(kind: MarkovHeadKind, loss: Literal["kl", "tv"],
                                                                      target: TargetModel) -> None:
    check_loss_and_gradients(FAMILY, drafter_for(target, kind), target, naive_logits, naive_confidence, loss)


def test_evaluation_measures_the_drafting_alone(target: TargetModel) -> None:
    drafter, packed = drafter_for(target), documents((9, 12))
    objective = FAMILY.objective(drafter, ends_of(target), TrainSpec(), 12, torch.float32)
    before = float(objective(packed).loss.detach())
    assert drafter.confidence_head is not None
    torch.nn.init.constant_(drafter.confidence_head.proj.bias, 9.0)
    assert float(objective(packed).loss.detach()) == before


def test_evaluation_has_the_confidences_and_an_export_their_temperatures(target: TargetModel, tmp_path: Path) -> None:
    drafter, packed = drafter_for(target, "gated"), documents((9, 12))
    objective = FAMILY.objective(drafter, ends_of(target), TrainSpec(unrolled_fraction=1.0), 12, torch.float32)
    outcome = objective(packed)
    assert [of.shape for of in outcome.confidences] == [of.shape for of in outcome.hits]
    assert objective(packed, FIRST_STEP).confidences == ()
    evaluation = evaluate(objective, [packed])  # of the block's steps, which are not those of train.ttt_length
    assert len(evaluation.predicted) == len(evaluation.temperatures) == STEPS
    objective.calibrate((2.0, 0.5, 1.0))
    FAMILY.save(tmp_path, drafter, "float32", None)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eyrie"] == {"confidence_temperatures": [2.0, 0.5, 1.0]}
    assert read_drafter(str(tmp_path), config).confidence_temperatures == (2.0, 0.5, 1.0)
    assert isinstance(open_drafter(tmp_path, target), DFlashProposer)


def test_a_drafter_without_a_confidence_head_is_read_and_continued(target: TargetModel, tmp_path: Path) -> None:
    FAMILY.save(tmp_path, drafter_for(target), "float32", None)
    tensors = {name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()
               if not name.startswith("confidence_head.")}
    config = json.loads((tmp_path / "config.json").read_text()) | {"enable_confidence_head": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    assert isinstance(open_drafter(tmp_path, target), DFlashProposer)
    assert load(tmp_path).confidence_head is None


def test_a_confidence_head_that_does_not_read_the_token_before_is_refused(target: TargetModel, tmp_path: Path) -> None:
    FAMILY.save(tmp_path, drafter_for(target), "float32", None)
    config = json.loads((tmp_path / "config.json").read_text()) | {"confidence_head_with_markov": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointInvalid, match="confidence_head_with_markov is false"):
        open_drafter(tmp_path, target)


@pytest.mark.parametrize("kind", KINDS)
def test_each_drafted_token_reads_the_one_before_it(kind: MarkovHeadKind, target: TargetModel, tmp_path: Path) -> None:
    drafter, ends = drafter_for(target, kind), ends_of(target)
    FAMILY.save(tmp_path / "drafter", drafter, "float32", None)
    proposer = open_drafter(tmp_path / "drafter", target)
    assert isinstance(proposer, DFlashProposer)
    check_drafts(drafter, ends, proposer, naive_logits)


def test_a_new_drafter_proposes_the_marginals_alone(target: TargetModel) -> None:
    drafter = drafter_for(target, random=False)
    assert drafter.markov_head is not None
    assert not bool(drafter.markov_head.markov_w2.weight.any())
    assert bool(drafter.markov_head.markov_w1.weight.any())
    assert drafter.confidence_head is not None
    assert not any(bool(parameter.any()) for parameter in drafter.confidence_head.parameters()), "each c is 1/2"


def test_the_export_is_what_sglang_reads(target: TargetModel, tmp_path: Path) -> None:
    FAMILY.save(tmp_path, drafter_for(target, "rnn"), "float32", None)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert config["architectures"] == ["DSparkDraftModel"]
    assert (config["markov_head_type"], config["markov_rank"], config["block_size"]) == ("rnn", RANK, STEPS)
    assert (config["enable_confidence_head"], config["confidence_head_with_markov"]) == (True, True)
    assert tensors["confidence_head.proj.weight"].shape == (1, HIDDEN + RANK)
    assert tensors["confidence_head.proj.bias"].shape == (1,)
    assert {name for name in tensors if name.startswith("markov")} == {
        f"markov_head.{name}" for name in ("markov_w1.weight", "markov_w2.weight", "joint_proj.weight",
                                           "joint_proj.bias")}


def test_the_head_belongs_to_dspark_alone(target: TargetModel) -> None:
    wanted = DrafterSpec(family="dflash", max_draft_tokens=STEPS, markov_head="gated")
    with pytest.raises(InvalidInput, match=r"markov_head is gated, which a dflash drafter does not have") as caught:
        FAMILY.create(wanted, target.config, ends_of(target), LAYERS, DraftVocabulary(torch.arange(VOCAB), VOCAB), 1)
    assert caught.value.hint == "leave drafter.markov_head out, or train dspark"
