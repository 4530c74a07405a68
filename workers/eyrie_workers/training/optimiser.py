"""AdamW, in a single process or sharded over several (ZeRO, stage 2: arXiv:1910.02054).

Data-parallel training that replicates everything needs, with float32 parameters, gradients and two moments, 16 bytes
per parameter on each GPU. Sharded, a process keeps its slice of the moments and, after the backward pass, of the
gradients:

    backward          full gradients (a drafter has one or two layers)
    reduce-scatter    each process receives the sum of its slice; the full gradients are freed
    clip              by the norm over all slices
    step              AdamW on the slice
    all-gather        every process receives the new parameters

The traffic is that of an all-reduce. `fully_shard` (FSDP2) would also shard the parameters between two steps, and
gather them at the beginning of each step: a drafter is one or two layers deep, and all of it is in use at once.

Sharded parameters are concatenated and padded to a multiple of the number of processes. The saved state does not
contain this: `moments` reassembles the slices under the names of the parameters and `restore` cuts them again, so a run
saved by four processes resumes on one, or three.

    P parameters in all, W processes
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")


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
        """AdamW's state of each parameter: step, exp_avg, exp_avg_sq; empty before the first step."""
        ...

    def restore(self, moments: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from the current parameters and from `moments` of all of them (empty: from zero)."""
        ...


def adamw(parameters: Sequence[nn.Parameter], rank: int, size: int, **settings: Any) -> Optimiser:
    """AdamW for the process `rank` of `size`. `settings` are torch's: lr, betas, weight_decay."""
    return WholeAdamW(parameters, **settings) if size == 1 else ShardedAdamW(parameters, rank, size, **settings)


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
    """AdamW over parameters that every process holds in full. Every method is a collective: all processes call it."""

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int, size: int, **settings: Any) -> None:
        """`settings` are AdamW's: lr, betas, weight_decay."""
        self._parameters = list(parameters)
        self._rank, self._size = rank, size
        total = sum(parameter.numel() for parameter in self._parameters)
        self._padding = -total % size
        self._length = (total + self._padding) // size
        self._slice = nn.Parameter(self._cut(self._flat([parameter.data for parameter in self._parameters])))
        self._inner = torch.optim.AdamW([self._slice], fused=True, **settings)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """AdamW's parameter groups: where the learning rate is set."""
        return self._inner.param_groups

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        self._slice.grad = None

    def reduce(self) -> None:
        """Sum the gradients over all processes, each keeping its slice; the full gradients are freed."""
        # A parameter without a gradient still takes part: the slices of all processes must have the same layout.
        whole = self._flat([parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad
                            for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None
        part = torch.empty_like(self._slice.data)
        dist.reduce_scatter_tensor(part, whole)
        self._slice.grad = part

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to `max_norm`, if they are larger; returns their norm before."""
        assert self._slice.grad is not None
        # The norm of the whole gradient, so that every process scales by the same factor. Accumulated in
        # float64: it is a sum over all parameters.
        square = self._slice.grad.square().sum(dtype=torch.float64)
        dist.all_reduce(square)
        norm = square.sqrt()
        self._slice.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(self._slice.dtype))
        return norm

    def step(self) -> None:
        """AdamW on the slice; every process then receives all new parameters."""
        self._inner.step()
        whole = torch.empty(self._length * self._size, dtype=self._slice.dtype, device=self._slice.device)
        dist.all_gather_into_tensor(whole, self._slice.data)
        self._spread(whole, [parameter.data for parameter in self._parameters])

    def moments(self) -> list[dict[str, Tensor]]:
        """AdamW's state of each parameter: step, exp_avg, exp_avg_sq; empty before the first step."""
        state = self._inner.state.get(self._slice)
        if not state:
            return [{} for _ in self._parameters]
        found: list[dict[str, Tensor]] = [{"step": state["step"].clone()} for _ in self._parameters]
        for name in _MOMENTS:
            whole = torch.empty(self._length * self._size, dtype=self._slice.dtype, device=self._slice.device)
            dist.all_gather_into_tensor(whole, state[name])
            pieces = [torch.empty_like(parameter.data) for parameter in self._parameters]
            self._spread(whole, pieces)
            for kept, piece in zip(found, pieces, strict=True):
                kept[name] = piece
        return found

    def restore(self, moments: Sequence[Mapping[str, Tensor]]) -> None:
        """Continue from the current parameters and from `moments` of all of them (empty: from zero)."""
        self._slice.data.copy_(self._cut(self._flat([parameter.data for parameter in self._parameters])))
        if not any(moments):
            return
        state: dict[str, Tensor] = {"step": moments[0]["step"].to(self._slice.device)}
        for name in _MOMENTS:
            state[name] = self._cut(self._flat([kept[name].to(self._slice.device) for kept in moments]))
        self._inner.state[self._slice] = state

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """[P + padding], the tensors concatenated."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return torch.cat([flat, flat.new_zeros(self._padding)]) if self._padding else flat

    def _cut(self, whole: Tensor) -> Tensor:
        return whole[self._rank * self._length:(self._rank + 1) * self._length].clone()

    def _spread(self, whole: Tensor, into: Sequence[Tensor]) -> None:
        start = 0
        for tensor in into:
            tensor.copy_(whole[start:start + tensor.numel()].view_as(tensor))
            start += tensor.numel()
