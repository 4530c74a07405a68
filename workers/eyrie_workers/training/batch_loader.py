"""Batches of a schedule, read ahead of the training loop: one interface over two sources of hidden states.

    store      `features.store`: read from a directory, or from S3 by ranges, and decoded while the previous batch is
               trained on
    stream     `features.streaming`: nothing is stored; the target computes states just ahead of the trainer

`open_features` chooses from what capture wrote; both implement `Features`. Several trainers may share a `BatchLoader`
(`stages.sweep`): one read, or one forward pass of the target, for all. A step's batch is a function of the step's
number: neither an interruption nor the source changes a bit of it.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.features.shard_format import StoreFormat
from eyrie_workers.features.storage_backend import open_backend
from eyrie_workers.features.store import FeatureStore
from eyrie_workers.features.streaming import StreamedFeatures, read_plan
from eyrie_workers.targets.device import target_device
from eyrie_workers.targets.state_source import open_source
from eyrie_workers.training.distributed import SINGLE_PROCESS, BatchShard, DistContext, shard_batch
from eyrie_workers.training.packing import Schedule, StepPlan


class Features(Protocol):
    """Random access to captured rows, from a store or a stream."""

    format: StoreFormat
    digest: str
    """Of everything the states depend on."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""

    @property
    def num_rows(self) -> int:
        """How many rows."""

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids [T] int64 and loss mask [T] bool of a row, without its states."""

    def read(self, rows: Sequence[int]) -> PackedBatch:
        """Some rows end to end, in that order."""

    def batches(self, groups: Iterable[Sequence[int]], *, ahead: int = 2,
                reuse: bool = False) -> Generator[PackedBatch, None, None]:
        """`read` of each group in order, some of them ahead. With `reuse` a batch's memory is reused once the next
        one is requested."""


def open_features(where: str, target: TargetSpec) -> Features:
    """What capture left in a directory or below `s3://bucket/prefix`.

    Raises ArtifactMissing, StoreDamaged, and InvalidInput for a device of the target that does not exist.
    """
    place = open_backend(where)
    found = read_plan(place)
    if found is None:
        return FeatureStore(place)
    device = target_device()
    return StreamedFeatures(*found, lambda: open_source(found[0].source, target, device))


@dataclass(frozen=True)
class StepBatch:
    """This process's part of one step's documents."""

    plan: StepPlan
    documents: PackedBatch
    starts: tuple[int, ...]
    """First token of each document in the step's whole batch."""

    num_tokens: int
    """0 where this process has no document of the step: it then holds one in which nothing is supervised."""


class BatchLoader:
    """The batches of a schedule, in order, each read while the previous one is trained on.

    A batch's states are valid until the next one is taken: their memory is reused. Any step may be requested; reading
    ahead continues from there.
    """

    def __init__(self, schedule: Schedule, features: Features, dist: DistContext = SINGLE_PROCESS) -> None:
        self._schedule, self._features, self._dist = schedule, features, dist
        self._next_step = -1
        # One entry per group of rows that the reader has been given and whose batch has not been taken yet.
        self._shards: deque[tuple[StepPlan, BatchShard]] = deque()
        self._batches: Generator[PackedBatch, None, None] | None = None

    def take(self, step: int) -> StepBatch:
        """The batch of a step."""
        if self._batches is None or step != self._next_step:
            self.close()
            self._batches = self._features.batches(self._groups(step), ahead=1, reuse=True)
        # Invalid until the read succeeds: after an error the same step starts a new reader.
        self._next_step = -1
        documents = next(self._batches)
        plan, shard = self._shards.popleft()
        self._next_step = step + 1
        if shard.rows:
            return StepBatch(plan, documents, shard.starts, documents.token_ids.numel())
        # More processes than documents: this one still takes part in the step's collectives, with loss 0.
        return StepBatch(plan, replace(documents, loss_mask=torch.zeros_like(documents.loss_mask)), (0,), 0)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None
        self._shards.clear()

    def _groups(self, step: int) -> Iterator[Sequence[int]]:
        """Rows to read for each step from `step` on. The reader's threads are ahead of `take`: hence the queue."""
        for number in range(step, self._schedule.num_steps):
            plan = self._schedule.at(number)
            shard = self._shard(plan)
            self._shards.append((plan, shard))
            yield shard.rows or plan.rows[:1]

    def _shard(self, plan: StepPlan) -> BatchShard:
        if self._dist.size > 1:
            return shard_batch(plan.rows, self._schedule.lengths, self._dist.size)[self._dist.rank]
        lengths = [self._schedule.lengths[row] for row in plan.rows]
        return BatchShard(plan.rows, tuple(accumulate(lengths, initial=0))[:-1])
