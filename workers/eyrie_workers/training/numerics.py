"""The operators of training: matrix products, the layer in few passes over memory, the loss; with their gradients.

**Products.** PyTorch computes float32 products on a CPU with MKL. On AMD processors MKL uses 256-bit instructions only;
oneDNN, which PyTorch includes and uses for bfloat16, uses all the processor has. Measured on one core of an EPYC with
AVX-512, [512, 512] x [512, 4096] in float32: MKL 91 GFLOP/s, oneDNN 213. Both are plain float32 arithmetic; the order
of summation differs. So on such processors float32 products go to oneDNN, elsewhere to PyTorch's choice. oneDNN
compiles a kernel for every shape it meets (1 to 2.5 ms each, measured; ten products a layer, three passes, seven steps)
and is a fifth slower at odd row counts, and batches of packed documents never have the same number of rows twice.
Buffers that enter a product therefore have their rows rounded up to a size from a short list (`round_up_rows`), the
rest zero: at most a sixteenth more arithmetic, or 31 rows. On a GPU nothing is compiled by shape, and nothing rounded.

**The layer.** On a CPU half the time of an unfused step is elementwise passes, each reading and writing a whole
activation, and most of its memory is what autograd saves for them. Functions with hand-written gradients save the
inputs and one number per row, and recompute the rest in the backward pass (elementwise work only; no product is
repeated):

    y = rms(x) W'                        saves x, 1/rms
    y = x + (silu(g) * u) D',  [g u] = rms(x) G'       saves x, 1/rms, [g u]; with `recompute` x, 1/rms alone

With r = 1 / sqrt(mean(x^2) + eps), n = x r w and dn the gradient of n,

    dw = sum over rows of dn x r        dx = r (dn w - x r mean(dn w x r))

    d silu(g) = sigma(g) (1 + g (1 - sigma(g)))

Weights may be of lower precision than x: products are computed in the weight's dtype, norms, sums and the residual
stream in x's. `reference_normed_linear` and `reference_mlp` are the formulas; tests compare with them in float64.

**The loss.** `eyrie_kernels.soft_target_loss` defines the losses and their gradients; its Triton kernel computes CUDA
tensors. The CPU form here computes the same formulas in chunks whose logits fit the last-level cache. The
straightforward form builds logits [N, D] for the N predictions of all unrolled steps, their softmax and both
gradients: four such arrays for seven steps. Here each chunk's logits are turned into its loss and its share of the
gradients, in the forward pass, because the loss is the end of the computation; backward scales them.

    M rows, N rows or predictions, I inputs or intermediate, O outputs, H hidden, R rows of the target table,
    D draft vocabulary
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_kernels.soft_target_loss import LK_ETA, TINY, Loss, product
from eyrie_kernels.soft_target_loss import soft_target_loss as kernel_soft_target_loss

# --- products --------------------------------------------------------------------------------------------------------

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


# --- the layer -------------------------------------------------------------------------------------------------------


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
    out = x.new_empty(padded_rows, x.shape[1])  # one buffer: multiplied, scaled and padded in place
    torch.mul(x, inverse, out=out[:num_rows])
    out[:num_rows].mul_(norm)
    out[num_rows:] = 0
    return out.to(dtype)


def _norm_backward(grad: Tensor, x: Tensor, inverse: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dw) from dn [M, H], which is overwritten."""
    plain = x * inverse  # x r
    grad_norm = torch.linalg.vecdot(grad, plain, dim=0)
    grad.mul_(norm)  # dn w
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
        # n is computed again from x and 1/rms: an elementwise pass, in place of [M, H] kept for every unrolled step.
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
        out = matmul(F.silu(gate).mul_(up), down.T)[: x.shape[0]] + x  # the residual stream keeps x's dtype
        ctx.save_for_backward(x, inverse, norm, gate_up, down)
        ctx.gated = None if recompute else gated
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        x, inverse, norm, gate_up, down = ctx.saved_tensors
        rows = pad_rows(grad, down.dtype, ctx.padded_rows)
        # Elementwise work is repeated in either case; with `recompute` the product with G' as well.
        normed = _normed(x, inverse, norm, gate_up.dtype, ctx.padded_rows)
        gated = matmul(normed, gate_up.T) if ctx.gated is None else ctx.gated
        ctx.gated = None
        gate, up = gated.chunk(2, -1)
        acted, grad_acted = F.silu(gate), matmul(rows, down)
        grad_down = matmul(rows.T, acted * up)  # before `up` is overwritten below
        # In place: [g u] is not read again, and its gradient takes its memory.
        torch.ops.aten.silu_backward.grad_input(grad_acted * up, gate, grad_input=gate)
        torch.mul(grad_acted, acted, out=up)
        grad_x, grad_norm = _norm_backward(matmul(gated, gate_up)[: x.shape[0]].to(x.dtype), x, inverse, norm)
        # The residual connection: x enters the sum unchanged.
        return grad_x.add_(grad), grad_norm, matmul(gated.T, normed), grad_down, None, None


def mlp(x: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor, eps: float, recompute: bool = False) -> Tensor:
    """x + (silu(g) * u) D' with [g u] = rms(x) G'.

    x [M, H]   norm [H]   gate_up [2I, H]   down [H, I]   ->   [M, H] in x's dtype
    recompute  save nothing of width I: one more product, 2I fewer numbers per row.
    """
    y: Tensor = _Mlp.apply(x, norm, gate_up, down, eps, recompute)
    return y


@dataclass(frozen=True)
class PostAttention:
    """Output projection, norm and MLP of a decoder layer. Matrices in the compute dtype, norm as stored.

        h = x + W_o attended        y = h + W_d (silu(g) * u),   [g u] = W_gu rms(h)

    out [H, q]   norm [H]   gate_up [2I, H]   down [H, I]
    """

    out: Tensor
    norm: Tensor
    gate_up: Tensor
    down: Tensor
    rms_eps: float

    def __call__(self, x_TH: Tensor, attended_TQ: Tensor, recompute: bool = False) -> Tensor:
        """[T, H] residual stream and [T, q] attended values -> [T, H]. recompute: see `mlp`."""
        x_TH = x_TH + linear(attended_TQ, self.out)
        return mlp(x_TH, self.norm, self.gate_up, self.down, self.rms_eps, recompute)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos_sin)
        return _turned(x, cos_sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _turned(grad, ctx.saved_tensors[0], -1.0), None  # a rotation's transpose is its inverse


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


# --- the loss --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetTable:
    """The target's distribution at each of R needed positions: looked up by every unrolled step.

    probabilities  [R, D] the softmax over the draft vocabulary; or, where it is stored sparsely, a function from rows
                   [N] to dense rows [N, D], which then exist for one chunk of predictions at a time.
    mass_R         the target's probability of the whole draft vocabulary.
    inside_R       bool: the target's most probable token over all of V is in the draft vocabulary.
    choice_R       int64: the target's most probable token, a draft id where `inside_R`, arbitrary elsewhere.
    """

    probabilities: Tensor | Callable[[Tensor], Tensor]
    mass_R: Tensor
    inside_R: Tensor
    choice_R: Tensor

    def rows(self, index_N: Tensor) -> Tensor:
        """[N, D] the distributions of some rows."""
        if isinstance(self.probabilities, Tensor):
            return self.probabilities.index_select(0, index_N)
        return self.probabilities(index_N)


# A chunk's logits in elements: 1 Mi floats are 4 MiB, which with its temporaries stays near the last cache.
_CHUNK_ELEMENTS = 1 << 20


def _chunk_loss(logits: Tensor, target: Tensor, mass: Tensor, kind: Loss) -> tuple[Tensor, Tensor]:
    """Loss of each row, and d loss / d logits, which reuses the memory of `logits` or `target`."""
    log_q = torch.log_softmax(logits, -1)
    if kind == "kl":
        loss = torch.linalg.vecdot(target, log_q).neg_()
        return loss, log_q.exp_().sub_(target)
    kl = torch.linalg.vecdot(target, log_q).neg_() if kind == "lk_hybrid" else None
    q = log_q.exp_()
    scaled = target * mass[:, None]
    below = (q < scaled).to(q.dtype)
    accepted = torch.minimum(q, scaled).sum(-1)
    # d(1 - a)/dz = q (sum(q m) - m), in one buffer; q itself is still needed by lk_hybrid.
    grad = (torch.linalg.vecdot(q, below)[:, None] - below).mul_(q)
    if kind == "tv":
        return 1 - accepted, grad
    if kind == "lk":
        bounded = accepted.clamp(min=TINY)
        return -bounded.log(), grad.div_(bounded[:, None])
    assert kl is not None
    # The weight of kl in the mixture is a constant to the gradient, as the paper has it.
    share = (-LK_ETA * accepted).exp()
    loss = share * kl + (1 - share) * (1 - accepted)
    return loss, grad.mul_((1 - share)[:, None]).add_(q.sub_(target).mul_(share[:, None]))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, table: TargetTable, row: Tensor, share: Tensor, kind: Loss,
                choose: bool) -> tuple[Tensor, Tensor, Tensor]:
        # Products run in the weight's dtype; softmax, loss and the sum of weight gradients in at least float32.
        num_rows, draft_vocab, wide = x.shape[0], weight.shape[0], torch.promote_types(x.dtype, torch.float32)
        mass = table.mass_R
        losses = torch.zeros(num_rows, dtype=wide, device=x.device)
        choice = torch.zeros(num_rows if choose else 0, dtype=torch.int64, device=x.device)
        # Predictions of weight 0 are skipped, unless their first choice is wanted.
        kept = torch.arange(num_rows, device=x.device) if choose else share.nonzero().squeeze(1)
        grad_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=x.device) if ctx.needs_input_grad[1] else None
        # Multiples of 32 rows: the row counts that `matmul` has compiled kernels for.
        for chosen in kept.split(min(1024, max(64, _CHUNK_ELEMENTS // draft_vocab // 32 * 32))):
            # 1. Logits of the chunk; the padding rows are dropped again.
            rows = pad_rows(x.index_select(0, chosen), weight.dtype)
            logits = matmul(rows, weight.T)[: chosen.numel()].to(wide)
            if choose:
                choice[chosen] = logits.argmax(-1)
            # 2. Loss and its gradient with respect to the logits.
            table_row = row.index_select(0, chosen)
            loss, grad = _chunk_loss(logits, table.rows(table_row).to(wide), mass.index_select(0, table_row), kind)
            losses[chosen] = loss
            # 3. The chunk's share of both gradients.
            if grad_x is not None or grad_weight is not None:
                grad = pad_rows(grad.mul_(share.index_select(0, chosen)[:, None]), weight.dtype)
            if grad_x is not None:
                grad_x[chosen] = matmul(grad, weight)[: chosen.numel()].to(x.dtype)
            if grad_weight is not None:  # None where the output matrix is the target's, which is not trained
                grad_weight += matmul(grad.T, rows)
        ctx.grads = grad_x, None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.mark_non_differentiable(losses, choice)
        return torch.dot(losses, share.to(wide)), losses, choice

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _losses: Tensor, _choice: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.grads
        ctx.grads = None  # both are large, and used once
        if grad != 1:
            grad_x, grad_weight = (None if part is None else part * grad for part in (grad_x, grad_weight))
        return grad_x, grad_weight, None, None, None, None, None


def soft_target_loss(x: Tensor, weight: Tensor, table: TargetTable, row: Tensor, share: Tensor, kind: Loss = "kl",
                     choose: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """sum over n of share[n] * loss(x[n] W', table[row[n]]).

    x       [N, H]   states before the output matrix.
    weight  [D, H]
    row     [N]      int64, each prediction's row of `table`.
    share   [N]      float32, weight of each prediction in the sum; those of weight 0 are left out.
    choose  also find each row's most probable token; rows of weight 0 are then computed as well.
    returns (the sum, with gradients to x and weight), losses [N] (0 where left out), choices [N] or [0].
    """
    if x.is_cuda:
        # The kernel reads a dense table by index; a sparse one gives it the rows of one chunk at a time.
        return kernel_soft_target_loss(x, weight, table.probabilities, table.mass_R, row, share, kind, choose)
    result: tuple[Tensor, Tensor, Tensor] = _ChunkedLoss.apply(x, weight, table, row, share, kind, choose)
    return result


# --- the rate of this machine ----------------------------------------------------------------------------------------

_PROBE_SIZE, _PROBE_S = 1024, 0.1
_GPU_PROBE_SIZE = 8192  # a smaller product ends before a GPU reaches its rate


def peak_flops(dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[float, float]:
    """Floating-point operations of a large square product per wall second and per CPU second, the fastest of several
    within 0.1 s: the denominator of MFU."""
    size = _PROBE_SIZE if torch.device(device).type == "cpu" else _GPU_PROBE_SIZE
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    # The fastest, because other programs can only slow a product down. `item` waits for a GPU.
    wall, cpu, started = float("inf"), float("inf"), time.perf_counter()
    while time.perf_counter() - started < _PROBE_S:
        before, spent = time.perf_counter(), time.process_time()
        matmul(a, b).sum().item()
        wall, cpu = min(wall, time.perf_counter() - before), min(cpu, time.process_time() - spent)
    operations = 2.0 * size**3
    return operations / wall, operations / max(cpu, 1e-9)
