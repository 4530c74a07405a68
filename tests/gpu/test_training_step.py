"""A training step on a pretended GPU: what the host waits for, what is copied, and which form computes it."""

from dataclasses import replace
from inspect import getclosurevars
from pathlib import Path
from shutil import copytree
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyrie_api.contract.families import FAMILIES
from eyrie_api.contract.training import TrainSpec
from eyrie_workers.drafters.eagle1 import NOISE, noisy
from eyrie_workers.drafters.eagle3.drafter import TrainingTimeTest
from eyrie_workers.drafters.family import family_named
from eyrie_workers.drafters.initialisation import TargetEmbeddings, read_target_embeddings
from eyrie_workers.hidden_states.shard_format import TopKLogits
from eyrie_workers.targets.device import device_scope
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.operators import OutputHead
from eyrie_workers.training import attention
from eyrie_workers.training import objective as objectives
from eyrie_workers.training.batches import BatchLoader, Schedule, StepBatch
from eyrie_workers.training.evaluation import HitCounts
from eyrie_workers.training.loop import Trainer
from eyrie_workers.training.objective import (
    Outcome,
    StepContext,
    TargetDistribution,
    TargetHead,
    TargetTable,
    compute_target_table,
)
from tests.gpu.pretended import GPU, PretendedGpu
from tests.gpu.test_pretended import STEPS, documents_for, made
from tests.tiny import tiny_target
from tests.workers.drafters.test_eagle3_proposer import HIDDEN, VOCAB, embedding, random_documents, random_drafter

SPEC = TrainSpec(ttt_length=STEPS, unrolled_fraction=0.5, single_step_ratio=0.0, normalization="sequence")
CONTEXT = StepContext(9, 10, 0)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny", seed=5, initializer_range=0.15)


def objective_of(name: str, target_dir: Path, ends: TargetEmbeddings, dtype: torch.dtype) -> Any:
    drafter, _ = made(name, target_dir, ends)
    drafter.to(GPU)
    with device_scope(GPU):
        return family_named(name).objective(drafter, ends, SPEC, 64, dtype)


def eagle3(**settings: Any) -> TrainingTimeTest:
    drafter = random_drafter()
    drafter.to(GPU)
    lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    with device_scope(GPU):
        ends = TargetEmbeddings(embedding().to(GPU), lm_head.to(GPU), torch.ones(HIDDEN))
        return TrainingTimeTest(drafter, ends, SPEC, max_positions=128, **settings)


def test_a_step_with_its_update_waits_once(gpu: PretendedGpu) -> None:
    objective, documents = eagle3(), random_documents((40, 25))
    schedule = Schedule((0, 1), documents.lengths, 65, epochs=3, seed=0)
    trainer = Trainer(objective, schedule, SPEC, cast(BatchLoader, None))
    for number in range(2):
        batch = StepBatch(schedule.at(number), documents, (0, 40), 65)
        before = gpu.num_syncs
        trainer.train_on(batch, started=0.0)
        assert len(gpu.syncs[before:]) == 1, gpu.syncs[before:]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_host_waits_for_nothing_in_forward_and_backward(name: str, gpu: PretendedGpu, target_dir: Path) -> None:
    ends = read_target_embeddings(target_dir, False, GPU)
    objective = objective_of(name, target_dir, ends, torch.float32)
    documents = documents_for(target_dir, family_named(name).layers((1, 2, 3), 4))
    before = gpu.num_syncs
    objective(documents, CONTEXT).loss.backward()
    assert gpu.syncs[before:] == []


def test_the_host_waits_for_nothing_between_the_parts_of_a_step(gpu: PretendedGpu) -> None:
    objective, documents = eagle3(max_kept_bytes=1), random_documents((90, 30, 50))
    before = gpu.num_syncs
    objective(documents, CONTEXT).loss.backward()
    assert gpu.syncs[before:] == []


def test_an_evaluation_counts_steps_that_no_root_reaches(gpu: PretendedGpu) -> None:
    counts = HitCounts(3)
    counts.add(Outcome(torch.tensor(0.0), 2, (torch.tensor([True, False]).to(GPU),)))
    counted = counts.evaluation()
    assert (counted.predicted, counted.hit, counted.hit_before, counted.hit_so_far) == (
        (2, 0, 0), (1, 0, 0), (2, 0, 0), (1, 0, 0))


def test_the_targets_logits_are_few_products_there_summed_in_float32(gpu: PretendedGpu,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    generator, shapes = torch.Generator().manual_seed(0), []
    last = torch.randn(1024, 16, generator=generator).to(torch.bfloat16)
    matrix = torch.randn(5000, 16, generator=generator).to(torch.bfloat16)
    multiply = objectives.matmul_as

    def counted(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        shapes.append(b.shape[1])
        return multiply(a, b, dtype)

    monkeypatch.setattr(objectives, "matmul_as", counted)
    head = TargetHead.of(OutputHead(matrix.to(GPU)), DraftVocabulary(torch.arange(0, 5000, 3), 5000))
    found = compute_target_table(last.to(GPU), head)
    assert shapes == [5000]
    exact = compute_target_table(last, TargetHead.of(OutputHead(matrix.float()), head.vocabulary))
    assert len(shapes) == 6  # a CPU reads 1024 columns at a time
    # Products of bfloat16 are exact in float32; rounded to bfloat16, logits near 16 would differ by up to 2^-5.
    torch.testing.assert_close(found.probabilities.cpu(), exact.probabilities, rtol=1e-4, atol=1e-7)


def test_drafters_of_all_families_share_one_copy_of_the_targets_matrices(gpu: PretendedGpu, target_dir: Path) -> None:
    ends = read_target_embeddings(target_dir, False, GPU)
    size, storages = ends.embed.numel(), set()
    for name in FAMILIES:
        objective = objective_of(name, target_dir, ends, ends.lm_head.dtype)
        own = {parameter.data_ptr() for parameter in objective.drafter.parameters()}
        held = [*vars(objective).values(), *vars(objective._head).values()]
        storages |= {x.data_ptr() for x in held if isinstance(x, Tensor) and x.numel() == size} - own
    assert storages == {ends.embed.data_ptr(), ends.lm_head.data_ptr()}


def test_the_matrices_keep_the_checkpoints_dtype_there_and_are_float32_on_a_cpu(gpu: PretendedGpu, target_dir: Path,
                                                                                tmp_path: Path) -> None:
    path = Path(copytree(target_dir, tmp_path / "bfloat16"))
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, path / "model.safetensors")
    there, here = read_target_embeddings(path, False, GPU), read_target_embeddings(path, False)
    assert (there.embed.dtype, there.lm_head.dtype, there.norm.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert {here.embed.dtype, here.lm_head.dtype, here.norm.dtype} == {torch.float32}
    assert there.lm_head_as(torch.float32) is there.lm_head_as(torch.float32)


def test_a_block_is_one_attention_call_in_each_layer(gpu: PretendedGpu, target_dir: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    calls, attend = [], attention.packed_attention

    def counted(*arguments: Any) -> Tensor:
        calls.append(arguments[0].shape)
        return attend(*arguments)

    monkeypatch.setattr(attention, "packed_attention", counted)
    objective = objective_of("dflash", target_dir, read_target_embeddings(target_dir, False, GPU), torch.float32)
    objective(documents_for(target_dir, (1, 2, 3)), CONTEXT).loss.backward()
    assert len(calls) == objective.drafter.config.decoder.num_layers


def test_noise_drawn_there_is_the_documents_own_in_every_division_of_a_batch(gpu: PretendedGpu) -> None:
    features, context = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(0)).to(GPU), CONTEXT
    before = gpu.num_syncs
    whole = noisy(features, (6, 14), context)
    second = noisy(features[6:], (14,), replace(context, starts=(6,)))
    assert gpu.syncs[before:] == []
    assert torch.equal(whole[6:], second)
    assert not torch.equal(whole, noisy(features, (6, 14), replace(context, step=8)))
    size = features.square().mean(-1, keepdim=True).sqrt()
    assert 0.8 * NOISE < float(((whole - features) / size).abs().max()) <= NOISE * (1 + 1e-4)


def topk_of(rows: int, draft_vocab_size: int) -> TopKLogits:
    generator = torch.Generator().manual_seed(7)
    logits, ids = torch.randn(rows, draft_vocab_size, generator=generator).topk(3)
    return TopKLogits(ids, logits - logits[:, :1], torch.rand(rows, generator=generator) / 2,
                      torch.rand(rows, generator=generator) / 2 + 0.5, ids[:, 0])


def test_stored_logits_stay_sparse_on_the_device(gpu: PretendedGpu) -> None:
    objective, documents = eagle3(), random_documents((40, 25))
    rows = int(documents.loss_mask.sum())  # in these documents every answer token has a position before it
    stored = topk_of(rows, objective.vocabulary.size)
    sparse = replace(documents, last=documents.last[:, :0], topk_logits=stored)
    targets = objective.target_distribution(sparse, objective.plan(sparse, CONTEXT).target_positions)
    table = targets.table
    assert not isinstance(table.probabilities, Tensor)
    kept = getclosurevars(table.probabilities).nonlocals["topk_logits"]
    assert all(x.is_cuda and x.shape[1:] in ((), (3,)) for x in vars(kept).values())
    dense = TargetTable(table.rows(torch.arange(table.mass_R.numel(), device=GPU)), table.mass_R, table.inside_R,
                       table.choice_R)
    before = gpu.num_syncs
    ours = objective(sparse, CONTEXT)
    assert gpu.syncs[before:] == []
    theirs = objective(sparse, CONTEXT, TargetDistribution(targets.row_T, dense))
    torch.testing.assert_close(ours.loss, theirs.loss)
