"""The drafter's layer in few passes over memory: RMSNorm with its linear layer, the gated MLP, rotary embedding.

On a CPU half the time of an unfused step is elementwise passes, each reading and writing a whole activation, and most
of its memory is what autograd saves for them. Three functions with hand-written gradients save the inputs and one
number per row, and recompute the rest in the backward pass (elementwise work only; no product is repeated):

    y = rms(x) W'                        saves x, 1/rms
    y = x + (silu(g) * u) D',  [g u] = rms(x) G'       saves x, 1/rms, [g u]; with `recompute` x, 1/rms alone

With r = 1 / sqrt(mean(x^2) + eps), n = x r w and dn the gradient of n,

    dw = sum over rows of dn x r        dx = r (dn w - x r mean(dn w x r))

    d silu(g) = sigma(g) (1 + g (1 - sigma(g)))

Weights may be of lower precision than x: products are computed in the weight's dtype, norms, sums and the residual
stream in x's. Rows of a product are padded with zeros (`training.matmul`), and zero rows stay zero.

`reference_normed_linear` and `reference_mlp` are the formulas; tests compare with them in float64.

    M rows, H hidden, I intermediate, O outputs
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_workers.training.matmul import matmul, pad_rows, round_up_rows


def reference_normed_linear(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms(x) W' as a formula."""
    return F.linear(F.rms_norm(x, (x.shape[-1],), norm, eps).to(weight.dtype), weight)


def reference_mlp(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float) -> Tensor:
    """x + (silu(g) * u) D' as a formula."""
    gate, up = reference_normed_linear(x, norm, gate_up, eps).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """[M, 1]"""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: Tensor, inverse: Tensor, norm: Tensor, dtype: torch.dtype, padded_rows: int) -> Tensor:
    """x r w in `dtype`, with zero rows up to `padded_rows`. Computed in x's dtype and rounded once."""
    num_rows = x.shape[0]
    out = x.new_empty(padded_rows, x.shape[1])
    torch.mul(x, inverse, out=out[:num_rows])
    out[:num_rows].mul_(norm)
    out[num_rows:] = 0
    return out.to(dtype)


def _norm_backward(grad: Tensor, x: Tensor, inverse: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dw) from dn [M, H], which is overwritten."""
    plain = x * inverse
    grad_norm = torch.linalg.vecdot(grad, plain, dim=0)
    grad.mul_(norm)
    mean = torch.linalg.vecdot(grad, plain, dim=1).div_(x.shape[-1]).unsqueeze(1)
    return grad.sub_(plain.mul_(mean)).mul_(inverse), grad_norm


class _NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, inverse, norm, weight)
        ctx.padded_rows = round_up_rows(x.shape[0], x.device)
        return matmul(_normed(x, inverse, norm, weight.dtype, ctx.padded_rows), weight.T)[: x.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        x, inverse, norm, weight = ctx.saved_tensors
        grad = pad_rows(grad, weight.dtype, ctx.padded_rows)
        grad_weight = matmul(grad.T, _normed(x, inverse, norm, weight.dtype, ctx.padded_rows))
        grad_x, grad_norm = _norm_backward(matmul(grad, weight)[: x.shape[0]].to(x.dtype), x, inverse, norm)
        return grad_x if ctx.needs_input_grad[0] else None, grad_norm, grad_weight, None


def normed_linear(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [M, H] normed with weight [H], times weight [O, H] transposed, in the matrix's dtype: [M, O]."""
    y: Tensor = _NormedLinear.apply(x, norm, weight, eps)
    return y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, inverse, norm)
        return (x * inverse).mul_(norm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, inverse, norm = ctx.saved_tensors
        return *_norm_backward(grad.clone(), x, inverse, norm), None


def rms_norm(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis of x [M, H] (arXiv:1910.07467), in x's dtype."""
    y: Tensor = _Norm.apply(x, norm, eps)
    return y


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float,
                recompute: bool) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.padded_rows = round_up_rows(x.shape[0], x.device)
        gated = matmul(_normed(x, inverse, norm, gate_up.dtype, ctx.padded_rows), gate_up.T)
        gate, up = gated.chunk(2, -1)
        out = matmul(F.silu(gate).mul_(up), down.T)[: x.shape[0]] + x
        ctx.save_for_backward(x, inverse, norm, gate_up, down)
        ctx.gated = None if recompute else gated
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        x, inverse, norm, gate_up, down = ctx.saved_tensors
        rows = pad_rows(grad, down.dtype, ctx.padded_rows)
        normed = _normed(x, inverse, norm, gate_up.dtype, ctx.padded_rows)
        gated = matmul(normed, gate_up.T) if ctx.gated is None else ctx.gated
        ctx.gated = None
        gate, up = gated.chunk(2, -1)
        acted, grad_acted = F.silu(gate), matmul(rows, down)
        grad_down = matmul(rows.T, acted * up)
        # In place: [g u] is not read again, and its gradient takes its memory.
        torch.ops.aten.silu_backward.grad_input(grad_acted * up, gate, grad_input=gate)
        torch.mul(grad_acted, acted, out=up)
        grad_x, grad_norm = _norm_backward(matmul(gated, gate_up)[: x.shape[0]].to(x.dtype), x, inverse, norm)
        return grad_x.add_(grad), grad_norm, matmul(gated.T, normed), grad_down, None, None


def mlp(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float, recompute: bool = False) -> Tensor:
    """x + (silu(g) * u) D' with [g u] = rms(x) G'.

    x [M, H]   norm [H]   gate_up [2I, H]   down [H, I]   ->   [M, H] in x's dtype
    recompute  save nothing of width I: one more product, 2I fewer numbers per row.
    """
    y: Tensor = _Mlp.apply(x, norm, gate_up, down, eps, recompute)
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos_sin)
        return _turned(x, cos_sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _turned(grad, ctx.saved_tensors[0], -1.0), None


def _turned(x: Tensor, cos_sin: Tensor, sign: float) -> Tensor:
    cos, sin = cos_sin.view(x.shape[0], 2, *(1,) * (x.dim() - 2), -1).to(x.dtype).unbind(1)
    (first, second), half = x.chunk(2, -1), x.shape[-1] // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=sign)
    return out


def apply_rotary(x: Tensor, cos_sin: Tensor) -> Tensor:
    """`targets.operators.rotate` with its gradient, the inverse rotation. x [M, ..., E], cos_sin [M, 2, E / 2]."""
    y: Tensor = _Rotate.apply(x, cos_sin)
    return y
