"""A step in micro-batches is the step of one large batch; longer rows are cut."""

from collections.abc import Generator, Iterable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from eyrie_api.contract.training import TrainSpec
from eyrie_workers.drafters.eagle3.drafter import TrainingTimeTest
from eyrie_workers.drafters.initialisation import TargetEmbeddings
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.hidden_states.shard_format import TopKLogits, supervised_positions
from eyrie_workers.training.batches import (
    BatchLoader,
    Features,
    Schedule,
    StepBatch,
    first_tokens,
    micro_batches,
)
from eyrie_workers.training.loop import StepReport, Trainer
from tests.workers.drafters.test_eagle3_proposer import HIDDEN, VOCAB, embedding, random_documents, random_drafter

LENGTHS = (40, 25, 31, 12)


def step_of(max_tokens_per_gpu: int | None, **fields: Any) -> tuple[StepReport, list[Tensor]]:
    """One training step: its report, and the gradients before they are clipped."""
    documents, drafter = random_documents(LENGTHS), random_drafter()
    spec = TrainSpec(ttt_length=4, unrolled_fraction=0.5, single_step_ratio=0.0, max_grad_norm=1e9,
                     max_tokens_per_gpu=max_tokens_per_gpu, **fields)
    lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    objective = TrainingTimeTest(
        drafter, TargetEmbeddings(embedding(), lm_head, torch.ones(HIDDEN)), spec, max_positions=64)
    schedule = Schedule(range(4), LENGTHS, sum(LENGTHS), 1.0, 0)
    trainer = Trainer(objective, schedule, spec, BatchLoader(schedule, cast(Features, None)))
    starts = (0, 40, 65, 96)
    report = trainer.train_on(StepBatch(schedule.at(0), documents, starts, sum(LENGTHS)), 0.0)
    return report, [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("fields", [{}, {"normalization": "sequence"}, {"loss": "lk_hybrid"}], ids=str)
def test_a_step_in_micro_batches_has_the_gradients_of_one_large_batch(fields: dict[str, Any]) -> None:
    (whole, gradients), (divided, summed) = step_of(None, **fields), step_of(64, **fields)
    assert divided.loss == pytest.approx(whole.loss, rel=1e-5)
    assert (divided.tokens, divided.supervised_tokens) == (whole.tokens, whole.supervised_tokens)
    for one, other in zip(gradients, summed, strict=True):
        torch.testing.assert_close(other, one, atol=1e-6, rtol=1e-4)  # sums in another order


def test_micro_batches_are_as_few_and_as_even_as_documents_allow() -> None:
    documents = random_documents(LENGTHS)
    assert [part.lengths for _, part in micro_batches(documents, 70)] == [(40, 25), (31, 12)]
    [(numbers, same)] = micro_batches(documents, None)
    assert same is documents
    assert numbers == range(4)


def with_topk(documents: PackedBatch) -> PackedBatch:
    """The batch with top-k logits whose ids are the packed positions they belong to."""
    starts = torch.tensor([0, *documents.lengths]).cumsum(0)
    position_M = torch.cat([start + supervised_positions(mask).nonzero().squeeze(1)
                            for start, mask in zip(starts[:-1], documents.loss_mask.split(documents.lengths),
                                                   strict=True)])
    column = position_M.float()
    return PackedBatch(documents.token_ids, documents.loss_mask, documents.aux, documents.last, documents.lengths,
                       TopKLogits(position_M[:, None], column[:, None], column, column, position_M))


def supervised_at(batch: PackedBatch) -> list[float]:
    """A number of the aux state at each supervised position."""
    where = torch.cat([supervised_positions(mask) for mask in batch.loss_mask.split(batch.lengths)])
    return batch.aux[where, 0, 0].tolist()


def test_parts_and_cut_rows_keep_the_topk_logits_of_their_positions() -> None:
    whole = with_topk(random_documents(LENGTHS))
    for parts in ([part for _, part in micro_batches(whole, 45)], [first_tokens(whole, 30)]):
        for part in parts:
            assert part.topk_logits is not None
            position_M = part.topk_logits.choice
            assert whole.aux[position_M, 0, 0].tolist() == supervised_at(part)


class _Rows:
    """What a `BatchLoader` needs of a store of random documents."""

    def batches(self, groups: Iterable[Sequence[int]], *, ahead: int = 2,
                reuse: bool = False) -> Generator[PackedBatch, None, None]:
        yield from (random_documents(LENGTHS) for _ in groups)


def test_rows_longer_than_a_process_computes_are_cut() -> None:
    schedule = Schedule(range(4), [min(length, 30) for length in LENGTHS], 200, 1.0, 0)
    batch = BatchLoader(schedule, cast(Features, _Rows()), most_tokens=30).take(0)
    read, documents = batch.documents, random_documents(LENGTHS)
    assert read.lengths == (30, 25, 30, 12)
    assert batch.num_tokens == 97
    for mine, whole in zip(read.aux.split(read.lengths), documents.aux.split(LENGTHS), strict=True):
        assert torch.equal(mine, whole[:mine.shape[0]])
