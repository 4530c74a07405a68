"""Matrix products of training: by the fastest library for this processor, at row counts it has compiled before.

PyTorch computes float32 products on a CPU with MKL. On AMD processors MKL uses 256-bit instructions only; oneDNN,
which PyTorch includes and uses for bfloat16, uses all the processor has. Measured on one core of an EPYC
with AVX-512, [512, 512] x [512, 4096] in float32: MKL 91 GFLOP/s, oneDNN 213. Both are plain float32 arithmetic; the
order of summation differs. So on such processors float32 products go to oneDNN, elsewhere to PyTorch's choice.

oneDNN compiles a kernel for every shape it meets (1 to 2.5 ms each, measured; ten products a layer, three passes, seven
steps) and is a fifth slower at odd row counts. Batches of packed documents never have the same number of rows twice.
Therefore buffers that enter a product have their rows rounded up to a size from a short list (`round_up_rows`), the
rest zero: at most a sixteenth more arithmetic, or 31 rows. On a GPU nothing is compiled by shape, and nothing rounded.

    M, N rows, I inputs, O outputs
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_kernels.soft_target_loss import product

_SMALLEST = 32


@cache
def _onednn_is_faster() -> bool:
    """Decided by the processor's vendor and not by a timing: a resumed run must sum in the same order."""
    cpuinfo = Path("/proc/cpuinfo")
    amd = cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text()
    return amd and torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_supported()


def round_up_rows(num_rows: int, device: torch.device) -> int:
    """`num_rows`; on a CPU up to the next multiple of 32 or, from 1024 on, of a sixteenth of the power of two below."""
    if device.type != "cpu":
        return num_rows
    grain = max(_SMALLEST, (1 << max(0, num_rows.bit_length() - 1)) // 16)
    return -(-num_rows // grain) * grain


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [M, I] times b [I, O], outside autograd; transposed views cost no copy."""
    if a.dtype == torch.float32 and a.device.type == "cpu" and _onednn_is_faster() and a.numel() and b.numel():
        y: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b).T, None, "none", [], "")
        return y
    return a @ b


def matmul_as(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`matmul` converted to `dtype`; on CUDA its float32 sums are not rounded to bfloat16 first."""
    return product(a, b, dtype) if a.is_cuda else matmul(a, b).to(dtype)


def _dense(x: Tensor) -> Tensor:
    """oneDNN multiplies a view with gaps by its reference loops, a thousand times slower: copy it."""
    return x if x.is_contiguous() or x.T.is_contiguous() else x.contiguous()


def pad_rows(x: Tensor, dtype: torch.dtype, num_rows: int | None = None) -> Tensor:
    """x [M, I] in `dtype`, with zero rows up to `num_rows` or the rounded count; x itself if none is needed."""
    num_rows = round_up_rows(x.shape[0], x.device) if num_rows is None else num_rows
    if num_rows == x.shape[0]:
        return x.to(dtype)
    out = x.new_empty((num_rows, *x.shape[1:]), dtype=dtype)
    out[: x.shape[0]] = x
    out[x.shape[0]:] = 0
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = pad_rows(x, weight.dtype)
        ctx.save_for_backward(rows, weight)
        ctx.num_rows, ctx.dtype = x.shape[0], x.dtype
        return matmul(rows, weight.T)[: ctx.num_rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        rows, weight = ctx.saved_tensors
        grad = pad_rows(grad, weight.dtype, rows.shape[0])
        back = matmul(grad, weight)[: ctx.num_rows].to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return back, matmul(grad.T, rows)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, I] times weight [O, I] transposed, in the weight's dtype: [M, O]."""
    y: Tensor = _Linear.apply(x, weight)
    return y
