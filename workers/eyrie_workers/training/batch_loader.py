"""What a trainer eats: one interface, and three ways to be fed through it.

    the store      `features.store`: read from a directory, or from S3 by ranges, and decoded while the batch before is
                   learnt from
    the stream     `features.streaming`: nothing is stored; the target computes states just ahead of the trainer
    shared         several trainers at one `BatchLoader` (`stages.sweep`): one read, or one pass of the target, for all

`open_features` tells which, from what capture left. Both answer as `Features`; everything above knows only that. A
step's batch is a function of the step's number: where a run was killed, and how it is fed, changes no bit of it.
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
from eyrie_workers.targets.loading import load_target, resolve
from eyrie_workers.training.distributed import SINGLE_PROCESS, DistContext, Part, split
from eyrie_workers.training.packing import Schedule, StepPlan


class Features(Protocol):
    """Captured rows in any order, wherever they come from."""

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
        """`read` of each group in order, some of them ahead. With `reuse` a batch's states are its own until the next
        is asked for."""


def open_features(where: str, target: TargetSpec) -> Features:
    """What capture left in a directory or below `s3://bucket/prefix`. Raises ArtifactMissing, StoreDamaged."""
    place = open_backend(where)
    found = read_plan(place)
    if found is None:
        return FeatureStore(place)
    return StreamedFeatures(*found, lambda: load_target(resolve(target), target.dtype))


@dataclass(frozen=True)
class Batch:
    """This process's part of one step's documents."""

    plan: StepPlan
    documents: PackedBatch
    starts: tuple[int, ...]
    num_tokens: int
    """0 where this process has no document of the step: it then sees one of which nothing is taught."""


class BatchLoader:
    """A schedule's batches, in order, each made while the one before is learnt from.

    A batch's states are its own until the next one is taken. Any step may be asked for; what follows it is then ahead.
    """

    def __init__(self, schedule: Schedule, features: Features, dist: DistContext = SINGLE_PROCESS) -> None:
        self._schedule, self._features, self._dist = schedule, features, dist
        self._next = -1
        self._parts: deque[tuple[StepPlan, Part]] = deque()
        self._batches: Generator[PackedBatch, None, None] | None = None

    def take(self, step: int) -> Batch:
        """The batch of a step."""
        if self._batches is None or step != self._next:
            self.close()
            self._batches = self._features.batches(self._groups(step), ahead=1, reuse=True)
        self._next = -1  # what fails is begun anew
        documents = next(self._batches)
        plan, part = self._parts.popleft()
        self._next = step + 1
        if part.rows:
            return Batch(plan, documents, part.starts, documents.token_ids.numel())
        return Batch(plan, replace(documents, loss_mask=torch.zeros_like(documents.loss_mask)), (0,), 0)

    def close(self) -> None:
        """Nothing is made ahead any more."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None
        self._parts.clear()

    def _groups(self, step: int) -> Iterator[Sequence[int]]:
        for number in range(step, self._schedule.num_steps):
            plan = self._schedule.at(number)
            part = self._part(plan)
            self._parts.append((plan, part))
            yield part.rows or plan.rows[:1]

    def _part(self, plan: StepPlan) -> Part:
        if self._dist.size > 1:
            return split(plan.rows, self._schedule.lengths, self._dist.size)[self._dist.rank]
        lengths = [self._schedule.lengths[row] for row in plan.rows]
        return Part(plan.rows, tuple(accumulate(lengths, initial=0))[:-1])
