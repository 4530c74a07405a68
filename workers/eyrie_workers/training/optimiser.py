"""AdamW, whole in one process or in slices over several (ZeRO, stage 2: arXiv:1910.02054).

Data-parallel training that keeps everything on every GPU needs, with float32 parameters, gradients and two moments, 16
bytes per parameter on each. In slices a process keeps its part of the moments and, after the backward pass, of the
gradients:

    backward          whole gradients, one layer's worth of them at most (a drafter has few)
    reduce-scatter    each process gets the sum of its slice; the whole gradients are let go
    clip              by the norm over all slices
    step              AdamW on the slice
    all-gather        everyone has the new parameters

The traffic is that of an all-reduce. What `fully_shard` (FSDP2) would save besides, the parameters between two steps,
is gathered at the first use of a step anyway: a drafter is one or two layers deep, and all of it is in use at once.

In slices, parameters are laid end to end and padded to a multiple of the processes. Nothing of this shows on disk:
`moments` puts the slices together under the names of the parameters and `restore` cuts them anew, so that a run saved
by four processes goes on upon one, or three.

    P parameters in all, W processes
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimiser(Protocol):
    """What the loop and the saved state ask of either."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """AdamW's: where the learning rate is set."""
        ...

    def zero_grad(self) -> None:
        """Forget the gradients."""
        ...

    def reduce(self) -> None:
        """Sum the gradients over all processes."""
        ...

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to `max_norm`, if they are larger; their norm before."""
        ...

    def step(self) -> None:
        """Change the parameters."""
        ...

    def moments(self) -> list[dict[str, Tensor]]:
        """For each parameter what AdamW keeps of it: step, exp_avg, exp_avg_sq; empty before the first step."""
        ...

    def restore(self, moments: Sequence[Mapping[str, Tensor]]) -> None:
        """Go on from the parameters as they are now and from `moments` of all of them (empty ones: from nothing)."""
        ...


def adamw(parameters: Sequence[nn.Parameter], rank: int, size: int, **settings: Any) -> Optimiser:
    """AdamW for this one of `size` processes. `settings` are torch's: lr, betas, weight_decay."""
    return WholeAdamW(parameters, **settings) if size == 1 else ShardedAdamW(parameters, rank, size, **settings)


class WholeAdamW:
    """torch's, with every gradient and moment here."""

    def __init__(self, parameters: Sequence[nn.Parameter], **settings: Any) -> None:
        self._parameters = list(parameters)
        self._inner = torch.optim.AdamW(self._parameters, fused=True, **settings)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """AdamW's: where the learning rate is set."""
        return self._inner.param_groups

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._inner.zero_grad(set_to_none=True)

    def reduce(self) -> None:
        """Nothing to sum."""

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to `max_norm`, if they are larger; their norm before."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, max_norm, foreach=True)

    def step(self) -> None:
        """Change the parameters."""
        self._inner.step()

    def moments(self) -> list[dict[str, Tensor]]:
        """For each parameter what AdamW keeps of it: step, exp_avg, exp_avg_sq; empty before the first step."""
        return [dict(self._inner.state.get(parameter, {})) for parameter in self._parameters]

    def restore(self, moments: Sequence[Mapping[str, Tensor]]) -> None:
        """Go on from `moments`. The fused optimiser keeps its step count where the parameter is, as the rest."""
        for parameter, kept in zip(self._parameters, moments, strict=True):
            if kept:
                self._inner.state[parameter] = {name: value.to(parameter.device) for name, value in kept.items()}


class ShardedAdamW:
    """AdamW over parameters that all processes hold alike. Every method is called by all of them, in step."""

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
        """AdamW's: where the learning rate is set."""
        return self._inner.param_groups

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        self._slice.grad = None

    def reduce(self) -> None:
        """Sum the gradients over all processes, each keeping its slice; the whole gradients are let go."""
        whole = self._flat([parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad
                            for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None
        part = torch.empty_like(self._slice.data)
        dist.reduce_scatter_tensor(part, whole)
        self._slice.grad = part

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to `max_norm`, if they are larger; their norm before."""
        assert self._slice.grad is not None
        square = self._slice.grad.square().sum(dtype=torch.float64)
        dist.all_reduce(square)
        norm = square.sqrt()
        self._slice.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(self._slice.dtype))
        return norm

    def step(self) -> None:
        """AdamW on the slice, and the new parameters to everyone."""
        self._inner.step()
        whole = torch.empty(self._length * self._size, dtype=self._slice.dtype, device=self._slice.device)
        dist.all_gather_into_tensor(whole, self._slice.data)
        self._spread(whole, [parameter.data for parameter in self._parameters])

    def moments(self) -> list[dict[str, Tensor]]:
        """For each parameter what AdamW keeps of it: step, exp_avg, exp_avg_sq; empty before the first step."""
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
        """Go on from the parameters as they are now and from `moments` of all of them (empty ones: from nothing)."""
        self._slice.data.copy_(self._cut(self._flat([parameter.data for parameter in self._parameters])))
        if not any(moments):
            return
        state: dict[str, Tensor] = {"step": moments[0]["step"].to(self._slice.device)}
        for name in _MOMENTS:
            state[name] = self._cut(self._flat([kept[name].to(self._slice.device) for kept in moments]))
        self._inner.state[self._slice] = state

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """[P + padding], the tensors end to end."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        return torch.cat([flat, flat.new_zeros(self._padding)]) if self._padding else flat

    def _cut(self, whole: Tensor) -> Tensor:
        return whole[self._rank * self._length:(self._rank + 1) * self._length].clone()

    def _spread(self, whole: Tensor, into: Sequence[Tensor]) -> None:
        start = 0
        for tensor in into:
            tensor.copy_(whole[start:start + tensor.numel()].view_as(tensor))
            start += tensor.numel()
