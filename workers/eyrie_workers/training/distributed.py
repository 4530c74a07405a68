"""Several processes that train one drafter: who this one is, and the few sums they share.

    torchrun --nproc-per-node 2 -m eyrie_workers.stages.train --spec spec.json --out <dir>/manifest.json

Every process holds the whole drafter (one layer) and takes some documents of each step's batch, near equal in tokens.
Counts are summed before the losses, so that each process weighs its predictions by the whole batch; gradients are then
summed, not averaged, and are those one process would have computed, up to the order of sums. Of gradients and moments
each keeps a slice (`training.optimiser`). What a step sees does not
depend on the number of processes, and the saved state holds nothing of it: a run killed on two goes on upon one.

Process 0 leads: it alone has the lock, the voice, the checkpoints and the state, and sends the state to the others
when they begin. The others follow (`stages.train`). gloo carries the sums on CPUs, nccl on GPUs.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eyrie_workers.training.state import Counters, Moments, trainable_parameters


@dataclass(frozen=True)
class DistContext:
    """This process among all of a run."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def join() -> "DistContext":
        """The dist torchrun describes in the environment; alone without one."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return DistContext()
        if not dist.is_initialized():
            # Counts are summed where they are made, on the processor; gradients where they are, on the GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return DistContext(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def leave(self) -> None:
        """End the connection, if there is one."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def total(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def any(self, said: bool) -> bool:
        """Whether any process said so."""
        return bool(self.total(torch.tensor([float(said)])).item()) if self.size > 1 else said

    def tell(self, told: Any) -> Any:
        """What process 0 was given, on every process. JSON-able."""
        if self.size == 1:
            return told
        box = [told]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def share_state(self, drafter: nn.Module, moments: Moments, counters: Counters) -> tuple[Counters, Moments]:
        """Parameters, moments and counters of process 0, on every process."""
        if self.size == 1:
            return counters, moments
        counters = Counters(**self.tell(counters.__dict__))
        for parameter in drafter.parameters():
            dist.broadcast(parameter.data, src=0)
        told = self.tell([sorted(kept) for kept in moments])
        shared: list[dict[str, Tensor]] = []
        for number, ((_, parameter), names) in enumerate(zip(trainable_parameters(drafter), told, strict=True)):
            shared.append({})
            for name in names:
                value = torch.zeros_like(parameter.data) if name != "step" else parameter.new_zeros(())
                if self.leads:
                    value.copy_(moments[number][name])
                dist.broadcast(value, src=0)
                shared[-1][name] = value
        return counters, shared


SINGLE_PROCESS = DistContext()


@dataclass(frozen=True)
class Part:
    """One process's documents of a step."""

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    """Where each begins in the step's whole batch."""


def split(rows: Sequence[int], lengths: Sequence[int], num_parts: int) -> list[Part]:
    """A step's documents in `num_parts`, near equal in tokens: longest first, each to the lightest part so far.

    rows     the step's documents, in their order, which every part keeps.
    lengths  tokens of every row of the store.
    """
    starts, begin = [], 0
    for row in rows:
        starts.append(begin)
        begin += lengths[row]
    loads, parts = [0] * num_parts, [[] for _ in range(num_parts)]  # type: list[int], list[list[int]]
    for place in sorted(range(len(rows)), key=lambda place: (-lengths[rows[place]], place)):
        lightest = loads.index(min(loads))
        loads[lightest] += lengths[rows[place]]
        parts[lightest].append(place)
    return [Part(tuple(rows[place] for place in sorted(part)), tuple(starts[place] for place in sorted(part)))
            for part in parts]
