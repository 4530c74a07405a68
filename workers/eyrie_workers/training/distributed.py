"""Data-parallel training of one drafter: the collectives of its processes, and the optimizer.

    torchrun --nproc-per-node 2 -m eyrie_workers.stages.train --spec spec.json --out <dir>/manifest.json

Every process holds the whole drafter (one or two layers) and takes some documents of each step's batch, nearly equal in
tokens. Counts are summed before the losses, so that each process weights its predictions by the whole batch; gradients
are then summed, not averaged, and equal those of a single process up to the order of sums. The documents of a step do
not depend on the number of processes, and the saved state does not contain it: a run interrupted on four processes
resumes on one, or three.

Rank 0 is the main process: it alone holds the stage's lock and writes events, checkpoints and state, and broadcasts the
state to the others when they start (`stages.train`). gloo carries the collectives of CPU tensors, NCCL those of GPUs.

**The optimizer** is AdamW, sharded over the processes (ZeRO: arXiv:1910.02054). Data-parallel training that replicates
everything needs, with float32 parameters, gradients and two moments, 16 bytes per parameter on each GPU. Sharded, each
process owns some parameters and keeps the moments of those alone:

    backward      full gradients in every process
    all-reduce    every process receives the sum of all gradients
    clip          by the norm of the sum
    step          AdamW by the owner of a parameter, then a broadcast of the new value

`ZeroRedundancyOptimizer` of torch does this. It replaced a hand-written reduce-scatter, which also sharded gradients,
and was chosen over `fully_shard` (FSDP2), which also shards parameters ("Several processes", docs/results/training.md).
On two gloo processes and a drafter-shaped model a step took 0.48 s with it, 0.72 s with the former, 1.10 s with the
latter, and it used the least memory of the three.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eyrie_api.errors import EyrieError
from eyrie_workers.targets.device import default_device
from eyrie_workers.training.state import Counters, Moments, trainable_parameters

ValueT = TypeVar("ValueT")


PATIENCE = timedelta(days=1)
"""For a collective, instead of torch's half an hour: in a sweep a process without candidates waits for those of others.
A process that ends is noticed at once, by torchrun and by its connections."""


@dataclass(frozen=True)
class DistContext:
    """Rank and world size of this process, and the collectives of a run. All processes call a collective in step."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def from_environment() -> "DistContext":
        """The process group that torchrun describes in the environment; a single process without one. Raises
        InvalidInput, on every process of a machine alike, where its GPUs cannot be used (`targets.device`)."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return DistContext()
        if not dist.is_initialized():
            device = default_device()
            if device.type == "cuda":
                # Counts are summed on the CPU, where they are computed; gradients on the GPU. `device_id` binds NCCL
                # to this process's GPU: without it NCCL guesses by rank, wrong for the second machine's processes.
                dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=PATIENCE)
            else:
                dist.init_process_group("gloo", timeout=PATIENCE)
        return DistContext(dist.get_rank(), dist.get_world_size())

    @property
    def is_main(self) -> bool:
        """Whether this process writes events, checkpoints and state."""
        return self.rank == 0

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def all_sum(self, x: Tensor) -> Tensor:
        if self.size > 1:
            x = x.clone()  # all_reduce works in place, and the caller keeps its own
            dist.all_reduce(x)
        return x

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Of each flag, whether it is set on any process; one collective for all of them."""
        if self.size == 1:
            return flags
        return tuple(count > 0 for count in self.all_sum(torch.tensor([float(flag) for flag in flags])).tolist())

    def broadcast(self, value: Any) -> Any:
        """The value that rank 0 passed, on every process. Pickled."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: ValueT) -> list[ValueT]:
        """The value of every process, by rank. Pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def on_main(self, compute: Callable[[], ValueT]) -> ValueT:
        """What `compute` returns on rank 0, on every process. An EyrieError that it raises is raised on all."""
        if self.size == 1:
            return compute()
        outcome: ValueT | EyrieError | None = None
        if self.is_main:
            try:
                outcome = compute()
            except EyrieError as error:
                outcome = error
        outcome = self.broadcast(outcome)
        if isinstance(outcome, EyrieError):
            raise outcome
        return outcome

    def broadcast_state(self, drafter: nn.Module, moments: Moments, counters: Counters) -> tuple[Counters, Moments]:
        """Parameters (in place), moments and counters of rank 0, on every process."""
        if self.size == 1:
            return counters, moments
        counters = Counters(**self.broadcast(counters.__dict__))
        for parameter in drafter.parameters():
            # In place, and outside autograd.
            dist.broadcast(parameter.data, src=0)
        # The other processes have no moments yet: they need the names first, to allocate what they receive.
        names_of = self.broadcast([sorted(state) for state in moments])
        received: list[dict[str, Tensor]] = []
        for number, ((_, parameter), names) in enumerate(zip(trainable_parameters(drafter), names_of, strict=True)):
            received.append({})
            for name in names:
                value = torch.zeros_like(parameter.data) if name != "step" else parameter.new_zeros(())
                if self.is_main:
                    value.copy_(moments[number][name])
                dist.broadcast(value, src=0)
                received[-1][name] = value
        return counters, received


SINGLE_PROCESS = DistContext()


def threads_of_process(processors: int, environment: Mapping[str, str]) -> int:
    """CPU threads of one of torchrun's processes: its share of the machine, since all of them compute at once. Pure."""
    return max(1, processors // int(environment.get("LOCAL_WORLD_SIZE", "1")))


class Optimizer:
    """AdamW over the parameters of a drafter that every process holds. With several processes `reduce`, `step` and
    `moments` are collectives: all processes call them."""

    def __init__(self, parameters: Sequence[nn.Parameter], num_processes: int = 1, **settings: Any) -> None:
        """`settings` are AdamW's: lr, betas, weight_decay."""
        self._parameters, self._num_processes = list(parameters), num_processes
        self._inner: Any  # AdamW, or torch's wrapper around it
        if num_processes == 1:
            self._inner = torch.optim.AdamW(self._parameters, fused=True, **settings)
            return
        # Imported here: it loads FSDP and torch.jit, seconds that a single process need not spend.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self._inner = ZeroRedundancyOptimizer(self._parameters, torch.optim.AdamW, fused=True, **settings)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """AdamW's parameter groups: where the learning rate is set."""
        groups: list[dict[str, Any]] = self._inner.param_groups
        return groups

    def zero_grad(self) -> None:
        self._inner.zero_grad(set_to_none=True)

    def reduce(self) -> None:
        """Sum the gradients over all processes."""
        if self._num_processes == 1:
            return
        for parameter in self._parameters:
            # A parameter without a gradient still takes part: all processes must issue the same collectives.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        # All are issued before the first is awaited: a backend may overlap them.
        for work in [dist.all_reduce(parameter.grad, async_op=True) for parameter in self._parameters]:
            work.wait()

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to `max_norm`, if they are larger; returns their norm before."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm, foreach=True)

    def step(self) -> None:
        """AdamW by the owner of each parameter, which every process then receives."""
        self._inner.step()

    def moments(self) -> list[dict[str, Tensor]]:
        """On rank 0 AdamW's state of each parameter: step, exp_avg, exp_avg_sq; empty before the first step, and on
        the other ranks."""
        if self._num_processes == 1:
            return [dict(self._inner.state.get(parameter, {})) for parameter in self._parameters]
        self._inner.consolidate_state_dict(to=0)
        state = self._inner.state_dict()["state"] if dist.get_rank() == 0 else {}
        return [dict(state.get(number) or {}) for number in range(len(self._parameters))]

    def restore(self, moments: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from the current parameters and from `moments` of all of them (empty: from zero)."""
        if not any(moments):
            return
        if self._num_processes == 1:
            for parameter, kept in zip(self._parameters, moments, strict=True):
                if kept:
                    # The fused optimizer keeps its step count on the parameter's device too.
                    self._inner.state[parameter] = {name: value.to(parameter.device) for name, value in kept.items()}
            return
        groups = [{**group, "params": list(range(len(self._parameters)))} for group in self._inner.param_groups]
        self._inner.load_state_dict({"state": {number: dict(kept) for number, kept in enumerate(moments)},
                                     "param_groups": groups})
        # ZeroRedundancyOptimizer leaves step counts on the CPU; fused AdamW reads them on the parameter's device.
        for parameter, kept in self._inner.optim.state.items():
            kept["step"] = kept["step"].to(parameter.device)
