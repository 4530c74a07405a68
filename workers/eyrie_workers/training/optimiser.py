"""AdamW, in a single process or sharded over several (ZeRO: arXiv:1910.02054).

Data-parallel training that replicates everything needs, with float32 parameters, gradients and two moments, 16 bytes
per parameter on each GPU. Sharded, each process owns some parameters and keeps the moments of those alone:

    backward      full gradients in every process (a drafter has one or two layers)
    all-reduce    every process receives the sum of all gradients
    clip          by the norm of the sum
    step          AdamW by the owner of a parameter, then a broadcast of the new value

`ZeroRedundancyOptimizer` of torch does this. It replaced a hand-written reduce-scatter, which also sharded gradients,
and was chosen over `fully_shard` (FSDP2), which also shards parameters ("Several processes", docs/results/training.md).
On two gloo processes and a drafter-shaped model a step took 0.48 s with it, 0.72 s with the former, 1.10 s with the
latter, and it used the least memory of the three.

The saved state does not contain the number of processes: `moments` collects the state of every parameter and `restore`
distributes it, so a run saved by four processes resumes on one, or three.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Optimiser(Protocol):
    """What the training loop and the saved state require of an optimiser."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """AdamW's parameter groups: where the learning rate is set."""
        ...

    def zero_grad(self) -> None:
        """Free the gradients."""
        ...

    def reduce(self) -> None:
        """Sum the gradients over all processes."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to `max_norm`, if they are larger; returns their norm before."""
        ...

    def step(self) -> None:
        """Update the parameters."""
        ...

    def moments(self) -> list[dict[str, Tensor]]:
        """On rank 0 AdamW's state of each parameter: step, exp_avg, exp_avg_sq; empty before the first step."""
        ...

    def restore(self, moments: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from the current parameters and from `moments` of all of them (empty: from zero)."""
        ...


def adamw(parameters: Sequence[nn.Parameter], size: int, **settings: Any) -> Optimiser:
    """AdamW for a process of `size`. `settings` are torch's: lr, betas, weight_decay."""
    return WholeAdamW(parameters, **settings) if size == 1 else ShardedAdamW(parameters, **settings)


class WholeAdamW:
    """torch's AdamW, with all gradients and moments in this process."""

    def __init__(self, parameters: Sequence[nn.Parameter], **settings: Any) -> None:
        self._parameters = list(parameters)
        self._inner = torch.optim.AdamW(self._parameters, fused=True, **settings)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """AdamW's parameter groups: where the learning rate is set."""
        return self._inner.param_groups

    def zero_grad(self) -> None:
        """Free the gradients."""
        self._inner.zero_grad(set_to_none=True)

    def reduce(self) -> None:
        """Nothing to sum."""

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to `max_norm`, if they are larger; returns their norm before."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm, foreach=True)

    def step(self) -> None:
        """Update the parameters."""
        self._inner.step()

    def moments(self) -> list[dict[str, Tensor]]:
        """AdamW's state of each parameter: step, exp_avg, exp_avg_sq; empty before the first step."""
        return [dict(self._inner.state.get(parameter, {})) for parameter in self._parameters]

    def restore(self, moments: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from `moments`. The fused optimiser keeps its step count on the parameter's device too."""
        for parameter, kept in zip(self._parameters, moments, strict=True):
            if kept:
                self._inner.state[parameter] = {name: value.to(parameter.device) for name, value in kept.items()}


class ShardedAdamW:
    """torch's ZeroRedundancyOptimizer around AdamW; every process holds all parameters.

    `reduce`, `step` and `moments` are collectives: all processes call them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], **settings: Any) -> None:
        """`settings` are AdamW's: lr, betas, weight_decay."""
        # Imported here: it loads FSDP and torch.jit, seconds that a single process need not spend.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self._parameters = list(parameters)
        self._inner = ZeroRedundancyOptimizer(self._parameters, torch.optim.AdamW, fused=True, **settings)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """AdamW's parameter groups: where the learning rate is set."""
        groups: list[dict[str, Any]] = self._inner.param_groups
        return groups

    def zero_grad(self) -> None:
        """Free the gradients."""
        self._inner.zero_grad(set_to_none=True)

    def reduce(self) -> None:
        """Sum the gradients over all processes."""
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
        """On rank 0 AdamW's state of each parameter, on the CPU; on the other ranks nothing."""
        self._inner.consolidate_state_dict(to=0)
        state = self._inner.state_dict()["state"] if dist.get_rank() == 0 else {}
        return [dict(state.get(number) or {}) for number in range(len(self._parameters))]

    def restore(self, moments: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from the current parameters and from `moments` of all of them (empty: from zero)."""
        if not any(moments):
            return
        groups = [{**group, "params": list(range(len(self._parameters)))} for group in self._inner.param_groups]
        self._inner.load_state_dict({"state": {number: dict(kept) for number, kept in enumerate(moments)},
                                     "param_groups": groups})
        # ZeroRedundancyOptimizer leaves step counts on the CPU; fused AdamW reads them on the parameter's device.
        for parameter, kept in self._inner.optim.state.items():
            kept["step"] = kept["step"].to(parameter.device)
