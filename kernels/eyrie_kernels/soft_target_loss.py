"""Output matrix and loss against a soft target, fused: no array as large as predictions x vocabulary is built.

Prediction t of a drafter has state x_t and is compared with row index[t] of a table of target distributions; the steps
of an unroll look up the same rows repeatedly, so the table holds every needed position once. Predictions are processed
in chunks. A chunk's logits are one matrix product; one kernel turns each row of them into its loss and its gradient;
two more products give the gradients of x and W, and the chunk's memory is reused:

    z = x W'    q = softmax(z)    g = weight * d loss / dz    dx = g W    dW += g' x   (summed in float32)

so of [T, D] at most `_CHUNK_ELEMENTS` logits exist. Gradients are computed in the forward pass, because the loss is the
end of the computation; backward scales them (as Liger's fused linear cross-entropy does, arXiv:2410.10989). A kernel
that keeps even a chunk's logits out of memory (Cut Your Losses, arXiv:2411.09009) repeats a product of 2 T D H
operations, a third more arithmetic; the chunk costs 10 D bytes of traffic per row next to 6 D H operations instead.

Losses of a row, p the target, q the drafter, a = sum min(p, q) the probability that a sampled token is accepted
(arXiv:2211.17192); tv, lk and lk_hybrid are arXiv:2602.23881's:

    kl          its gradient is that of the cross-entropy -sum p log q, whose value is reported
    tv          1 - a = total variation distance
    lk          -log a
    lk_hybrid   h kl + (1 - h) tv,  h = exp(-3 a) held constant     (3 is the paper's best setting)

    d kl / dz = q sum(p) - p     d tv / dz = q (sum(q m) - m),  m = [q < p]     d lk / dz = (d tv / dz) / a

For tv, lk and lk_hybrid's acceptance, p is multiplied by `mass`, the target's probability of the whole draft
vocabulary: these losses measure acceptance, and a token outside the draft vocabulary is never accepted.

`reference_soft_target_loss` is the specification, for this kernel and for the CPU form in
`eyrie_workers.training.numerics`. On CPU tensors the kernel of a chunk is replaced by these formulas; chunks,
products and gradients are the same. The kernel's lower bound is memory traffic:
logits and table read once, gradients written once. It reads a row two or three times, but the row (128 KiB for 32768
tokens) is still in the L2 cache then.

    T predictions, U rows of the table, H hidden, D draft vocabulary
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_kernels.compiler import jit, launch, next_power_of_two, runs_kernels, tl

Loss = Literal["kl", "tv", "lk", "lk_hybrid"]
_KINDS: tuple[Loss, ...] = ("kl", "tv", "lk", "lk_hybrid")
LK_ETA = 3.0
TINY = 1e-8
"""Lower bound of the acceptance in the logarithm of lk."""

# Logits that exist at a time: 128 Mi floats, 4096 rows of 32768, so that adding a chunk's part to dW (12 bytes per
# element) is small next to the product that computed it.
_CHUNK_ELEMENTS = 1 << 27


class SoftTargetLoss(NamedTuple):
    """total: sum of weights * losses, with gradients to hidden and weight. losses [T]: unweighted, 0 where the weight
    is 0. choice [T] int64: the drafter's most probable token; empty unless requested."""

    total: Tensor
    losses_T: Tensor
    choice_T: Tensor


# --- the specification -------------------------------------------------------------------------------------------


def reference_losses(logits_TD: Tensor, target_TD: Tensor, mass_T: Tensor, kind: Loss) -> Tensor:
    """Losses [T], by the formulas of the module docstring."""
    log_q = logits_TD.log_softmax(-1)
    cross_entropy = -(target_TD * log_q).sum(-1)
    if kind == "kl":
        return cross_entropy
    accepted = torch.minimum(target_TD * mass_T[:, None], log_q.exp()).sum(-1)
    if kind == "tv":
        return 1 - accepted
    if kind == "lk":
        return -accepted.clamp(min=TINY).log()
    share = (-LK_ETA * accepted).exp().detach()
    return share * cross_entropy + (1 - share) * (1 - accepted)


def reference_soft_target_loss(hidden_TH: Tensor, weight_DH: Tensor, table_UD: Tensor, mass_U: Tensor, index_T: Tensor,
                               weights_T: Tensor, kind: Loss = "kl", choose: bool = True) -> SoftTargetLoss:
    """The specification of `soft_target_loss`, with gradients by autograd."""
    # Products in the weight's dtype, the softmax and everything after it in at least float32.
    wide = torch.promote_types(weight_DH.dtype, torch.float32)
    logits = (hidden_TH.to(weight_DH.dtype) @ weight_DH.T).to(wide)
    losses = reference_losses(logits, table_UD[index_T].to(wide), mass_U[index_T].to(wide), kind)
    weights = weights_T.to(wide)
    choice = logits.argmax(-1) if choose else index_T.new_empty(0)
    return SoftTargetLoss((losses * weights).sum(), torch.where(weights != 0, losses, 0.0).detach(), choice)


# --- the kernel: one chunk of rows ---------------------------------------------------------------------------------


@jit
def _slope(q, p, sum_p, mass, inner, scale_soft, scale_tv, ACCEPTANCE: tl.constexpr):
    """d loss / dz of elements: scale_soft (q sum(p) - p) + scale_tv q (inner - [q < p mass])."""
    slope = scale_soft * (q * sum_p - p)
    if ACCEPTANCE:
        slope += scale_tv * q * (inner - tl.where(q < p * mass, 1.0, 0.0))
    return slope


@jit
def _rows_kernel(logits, grads, losses, choices, table, masses, index, weights, width, ETA: tl.constexpr,
                 TINY: tl.constexpr, KIND: tl.constexpr, LEARN: tl.constexpr, CHOOSE: tl.constexpr,
                 BLOCK: tl.constexpr):
    """One row: its loss, its gradient times its weight, its most probable token.

    KIND 0 kl, 1 tv, 2 lk, 3 lk_hybrid. `grads` may be `logits`: pass 3 reads a block before it writes it.
    """
    WIDE = logits.dtype.element_ty
    ACCEPTANCE: tl.constexpr = KIND >= 1
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    grads += row * width
    weight = tl.load(weights + row).to(WIDE)
    lane = tl.arange(0, BLOCK)
    target = tl.load(index + row).to(tl.int64)
    mass = tl.load(masses + target).to(WIDE)
    table += target * width

    # Pass 1: log-sum-exp of the row and its product with the target, rescaled to the largest logit seen so far.
    most = tl.full((), -float("inf"), WIDE)
    total = tl.full((), 0.0, WIDE)
    p_dot_z = tl.full((), 0.0, WIDE)
    sum_p = tl.full((), 0.0, WIDE)
    choice = tl.full((), 0, tl.int64)
    for start in range(0, width, BLOCK):
        inside = start + lane < width
        z = tl.load(logits + start + lane, inside, other=-float("inf"))
        highest = tl.max(z, 0)
        if CHOOSE:
            here = start + tl.argmax(z, 0, tie_break_left=True)
            choice = tl.where(highest > most, here.to(tl.int64), choice)
        new = tl.maximum(most, highest)
        total = total * tl.exp(most - new) + tl.sum(tl.exp(z - new), 0)
        most = new
        p = tl.load(table + start + lane, inside, other=0.0).to(WIDE)
        sum_p += tl.sum(p, 0)
        p_dot_z += tl.sum(p * tl.where(inside, z, 0.0), 0)
    lse = most + tl.log(total)
    if CHOOSE:
        tl.store(choices + row, choice)
    loss = sum_p * lse - p_dot_z

    # Pass 2, for the losses of acceptance: a = sum min(q, p), and the sum of q where it is below p.
    scale_soft = weight
    scale_tv = weight
    inner = tl.full((), 0.0, WIDE)
    if ACCEPTANCE:
        accepted = tl.full((), 0.0, WIDE)
        for start in range(0, width, BLOCK):
            inside = start + lane < width
            q = tl.exp(tl.load(logits + start + lane, inside, other=-float("inf")) - lse)
            p = tl.load(table + start + lane, inside, other=0.0).to(WIDE) * mass
            accepted += tl.sum(tl.minimum(q, p), 0)
            inner += tl.sum(tl.where(q < p, q, 0.0), 0)
        if KIND == 1:
            loss = 1.0 - accepted
            scale_soft = scale_soft * 0.0
        elif KIND == 2:
            bounded = tl.maximum(accepted, TINY)
            loss = -tl.log(bounded)
            scale_soft = scale_soft * 0.0
            scale_tv = weight / bounded
        else:
            share = tl.exp(-ETA * accepted)
            loss = share * loss + (1.0 - share) * (1.0 - accepted)
            scale_soft = weight * share
            scale_tv = weight * (1.0 - share)
    tl.store(losses + row, tl.where(weight == 0, 0.0, loss))

    # Pass 3: gradients.
    if LEARN:
        for start in range(0, width, BLOCK):
            inside = start + lane < width
            q = tl.exp(tl.load(logits + start + lane, inside, other=-float("inf")) - lse)
            p = tl.load(table + start + lane, inside, other=0.0).to(WIDE)
            slope = _slope(q, p, sum_p, mass, inner, scale_soft, scale_tv, ACCEPTANCE)
            tl.store(grads + start + lane, slope.to(grads.dtype.element_ty), inside)


def launch_rows(logits: Tensor, grads: Tensor, losses: Tensor, choice: Tensor | None, table: Tensor, mass: Tensor,
                index: Tensor, weights: Tensor, kind: Loss) -> None:
    """Fill losses [C], gradients times weights [C, D] unless `grads` is `losses`, and choices [C] unless None."""
    if not runs_kernels(logits):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            unweighted = reference_losses(leaf, table[index].to(leaf.dtype), mass[index].to(leaf.dtype), kind)
        slopes = None if grads is losses else torch.autograd.grad(unweighted, leaf, weights)[0]
        if choice is not None:
            choice.copy_(logits.argmax(-1))
        losses.copy_(torch.where(weights != 0, unweighted.detach(), 0.0))
        if slopes is not None:  # last: `grads` may be the logits' own memory
            grads.copy_(slopes)
        return
    width = logits.shape[1]
    launch(_rows_kernel, (logits.shape[0],), logits, grads, losses, losses if choice is None else choice, table, mass,
           index, weights, width, ETA=LK_ETA, TINY=TINY, KIND=_KINDS.index(kind), LEARN=grads is not losses,
           CHOOSE=choice is not None, BLOCK=min(4096, next_power_of_two(width)), num_warps=8)


# --- autograd ----------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b as `dtype`. On CUDA a bfloat16 product is not rounded on its way to float32."""
    if a.is_cuda and dtype != a.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


class _SoftTargetLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, table: Tensor | Callable[[Tensor], Tensor], mass: Tensor,
                index: Tensor, weights: Tensor, kind: Loss, choose: bool) -> tuple[Tensor, Tensor, Tensor]:
        (num_rows, _), vocab = hidden.shape, weight.shape[0]
        wide = torch.promote_types(weight.dtype, torch.float32)
        to_hidden, to_weight = ctx.needs_input_grad[:2]
        learning = to_hidden or to_weight
        losses = torch.zeros(num_rows, dtype=wide, device=hidden.device)
        choice = torch.zeros(num_rows if choose else 0, dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if to_hidden else None
        # Summed over chunks: in the weight's own bfloat16 each addition would round. A frozen output matrix has none.
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=hidden.device) if to_weight else None
        # Rows of weight 0 are computed too: to leave them out, the host would have to wait for their number.
        size = max(64, _CHUNK_ELEMENTS // vocab // 32 * 32)
        for start in range(0, num_rows, size):
            rows = slice(start, start + size)
            x = hidden[rows].to(weight.dtype)
            logits = product(x, weight.T, wide)
            # Without gradients the losses are passed in their place; in full precision gradients overwrite the logits.
            grad = losses[rows] if not learning else logits if wide == weight.dtype else torch.empty_like(
                logits, dtype=weight.dtype)
            part = grad if not learning else losses[rows]
            targets = ((table, mass, index[rows]) if isinstance(table, Tensor) else  # or the rows of this chunk alone
                       (table(index[rows]), mass[index[rows]], torch.arange(x.shape[0], device=x.device)))
            launch_rows(logits, grad, part, choice[rows] if choose else None, *targets, weights[rows].to(wide), kind)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += product(grad.T, x, wide)
        ctx.grads = grad_hidden, grad_weight
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses, choice)
        return torch.dot(losses, weights.to(wide)), losses, choice

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _losses: Tensor, _choice: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.grads
        ctx.grads = None  # both are large, and used once
        # Scaled on the device, by 1 as well: to compare the factor, the host would wait for it.
        if grad_hidden is not None:
            grad_hidden.mul_(grad.to(grad_hidden.dtype))
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def soft_target_loss(hidden_TH: Tensor, weight_DH: Tensor, table_UD: Tensor | Callable[[Tensor], Tensor],
                     mass_U: Tensor, index_T: Tensor, weights_T: Tensor, kind: Loss = "kl",
                     choose: bool = False) -> SoftTargetLoss:
    """sum over t of weights[t] * loss(hidden[t] weight', table[index[t]]).

    hidden   [T, H]   states before the output matrix; converted to weight's dtype for the products.
    weight   [D, H]
    table    [U, D]   target distributions over the draft vocabulary: each row sums to 1. Or a function from rows [C] of
                      the table to those distributions [C, D], called once for each chunk of predictions.
    mass     [U]      the target's probability of the whole draft vocabulary.
    index    [T]      int64 rows of the table, valid where the weight is 0 as well.
    weights  [T]      a prediction of weight 0 has loss 0 and no gradient.
    choose   also find each row's most probable token, of rows of weight 0 too.
    returns  see `SoftTargetLoss`. Call backward at most once: it frees the stored gradients.
    """
    return SoftTargetLoss(*_SoftTargetLoss.apply(
        hidden_TH, weight_DH, table_UD, mass_U, index_T, weights_T, kind, choose))
