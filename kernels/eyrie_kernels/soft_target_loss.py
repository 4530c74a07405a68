"""The output matrix and the loss against a soft target in one, with no array as large as predictions x vocabulary.

A drafter's prediction t has state x_t and is compared with row index[t] of a teacher's table; the steps of an unroll
ask for the same rows again and again, so the table holds every asked position once. Predictions are taken a chunk at a
time. A chunk's logits are one matrix product; one kernel turns each row of them into its loss and its gradient; two
more products bring the gradients to x and W, and the chunk is forgotten:

    z = x W'    q = softmax(z)    g = weight * d loss / dz    dx = g W    dW += g' x   (summed in float32)

so of [T, D] at most `_CHUNK_ELEMENTS` logits exist. The gradients are made in the forward pass, because a loss is the
end of a computation; backward scales them (the idea of Liger's fused linear cross-entropy, arXiv:2410.10989). A kernel
that holds even a chunk's logits back (Cut Your Losses, arXiv:2411.09009) repeats a product of 2 T D H operations, a
third more arithmetic; the chunk costs 10 D bytes of traffic per row beside the 6 D H operations instead.

Losses of a row, p the teacher, q the drafter, a = sum min(p, q) the chance that a sampled token is accepted
(arXiv:2211.17192); tv, lk and lk_hybrid are arXiv:2602.23881's:

    ce          -sum p log q
    kl          sum p log(p / q)                        the same gradient
    tv          1 - a
    lk          -log a
    lk_hybrid   h ce + (1 - h) tv,  h = exp(-3 a) held constant

    d ce / dz = q sum(p) - p     d tv / dz = q (sum(q m) - m),  m = [q < p]     d lk / dz = (d tv / dz) / a

The teacher is a table of probabilities or of logits (`TableTeacher`), or the k likeliest tokens with the mass of all
others, spread evenly over them (`TopKTeacher`): p_j = (1 - tail) softmax(kept logits)_j, else tail / (D - k). For tv
and lk the probabilities are multiplied by `mass`, the target's probability of the whole draft vocabulary.

The kernel's floor is traffic: logits and teacher read once, gradients written once. It reads a row two or three times,
but the row (128 KiB for 32768 tokens) is still in the L2 cache then.

    T predictions, U rows of the table, H hidden, D draft vocabulary, K kept tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_kernels.compiler import jit, launch, next_power_of_two, runs_kernels, tl
from eyrie_kernels.timing import Machine, Timing, main, seconds

Kind = Literal["ce", "kl", "tv", "lk", "lk_hybrid"]
_KINDS: tuple[Kind, ...] = ("ce", "kl", "tv", "lk", "lk_hybrid")
LK_ETA = 3.0
_TINY = 1e-8

# Logits that exist at a time. CPU: 2 Mi floats stay near the last cache. CUDA: 128 Mi floats, 4096 rows of 32768, so
# that adding a chunk's part to dW (12 bytes per element) is small beside the product that made it.
_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 27}


@dataclass(frozen=True)
class TableTeacher:
    """values [U, D]: probabilities that sum to 1, or logits. mass [U]: of the whole draft vocabulary; None: 1."""

    values_UD: Tensor
    form: Literal["probabilities", "logits"] = "probabilities"
    mass_U: Tensor | None = None


@dataclass(frozen=True)
class TopKTeacher:
    """ids [U, K] integers, distinct in a row; logits [U, K] (an offset per row is of no account); tail [U]."""

    ids_UK: Tensor
    logits_UK: Tensor
    tail_U: Tensor
    mass_U: Tensor | None = None


Teacher = TableTeacher | TopKTeacher


class Compared(NamedTuple):
    """total: sum of weights * losses, with gradients to hidden and weight. losses [T]: unweighted, 0 where the weight
    is 0. choice [T] int64: the drafter's first choice; empty unless asked for."""

    total: Tensor
    losses_T: Tensor
    choice_T: Tensor


# --- the specification -------------------------------------------------------------------------------------------


def probabilities(teacher: Teacher, index_T: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """[T, D]: the teacher's distributions, written out."""
    if isinstance(teacher, TableTeacher):
        rows = teacher.values_UD.index_select(0, index_T).to(dtype)
        return rows if teacher.form == "probabilities" else rows.softmax(-1)
    ids, tail = teacher.ids_UK.index_select(0, index_T).long(), teacher.tail_U.index_select(0, index_T).to(dtype)
    kept = teacher.logits_UK.index_select(0, index_T).to(dtype).softmax(-1) * (1 - tail).unsqueeze(-1)
    others = tail / max(1, vocab_size - ids.shape[1])
    return others.unsqueeze(-1).repeat(1, vocab_size).scatter_(1, ids, kept)


def reference_losses(logits_TD: Tensor, teacher_TD: Tensor, mass_T: Tensor, kind: Kind) -> Tensor:
    """[T] losses as formulas."""
    log_q = logits_TD.log_softmax(-1)
    cross_entropy = -(teacher_TD * log_q).sum(-1)
    if kind == "ce":
        return cross_entropy
    if kind == "kl":
        return cross_entropy + torch.xlogy(teacher_TD, teacher_TD).sum(-1)
    accepted = torch.minimum(teacher_TD * mass_T[:, None], log_q.exp()).sum(-1)
    if kind == "tv":
        return 1 - accepted
    if kind == "lk":
        return -accepted.clamp(min=_TINY).log()
    share = (-LK_ETA * accepted).exp().detach()
    return share * cross_entropy + (1 - share) * (1 - accepted)


def reference_soft_target_loss(hidden_TH: Tensor, weight_DH: Tensor, teacher: Teacher, index_T: Tensor,
                               weights_T: Tensor | None = None, kind: Kind = "ce") -> Compared:
    """What `soft_target_loss` computes, with everything written out and its gradient left to autograd."""
    logits = hidden_TH @ weight_DH.T
    told = probabilities(teacher, index_T, weight_DH.shape[0], logits.dtype)
    mass = torch.ones_like(logits[:, 0]) if teacher.mass_U is None else teacher.mass_U[index_T].to(logits.dtype)
    losses = reference_losses(logits, told, mass, kind)
    weights = torch.ones_like(losses) if weights_T is None else weights_T.to(losses.dtype)
    return Compared((losses * weights).sum(), torch.where(weights != 0, losses, 0.0).detach(), logits.argmax(-1))


# --- one chunk of rows: by torch, and by the kernel ----------------------------------------------------------------


def _rows_by_torch(logits: Tensor, teacher: Teacher, index: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Losses [C] and d loss / d logits [C, D]."""
    p = probabilities(teacher, index, logits.shape[1], logits.dtype)
    log_q = torch.log_softmax(logits, -1)
    cross_entropy = torch.linalg.vecdot(p, log_q).neg_() if kind in ("ce", "kl", "lk_hybrid") else None
    q = log_q.exp_()
    if kind in ("ce", "kl"):
        assert cross_entropy is not None
        if kind == "kl":
            cross_entropy += torch.xlogy(p, p).sum(-1)
        return cross_entropy, q.mul_(p.sum(-1, keepdim=True)).sub_(p)
    mass = None if teacher.mass_U is None else teacher.mass_U.index_select(0, index).to(p.dtype)
    scaled = p if mass is None else p * mass[:, None]
    below = (q < scaled).to(q.dtype)
    accepted = torch.minimum(q, scaled).sum(-1)
    grad = (torch.linalg.vecdot(q, below)[:, None] - below).mul_(q)
    if kind == "tv":
        return 1 - accepted, grad
    if kind == "lk":
        bounded = accepted.clamp(min=_TINY)
        return -bounded.log(), grad.div_(bounded[:, None])
    assert cross_entropy is not None
    share = (-LK_ETA * accepted).exp()
    loss = share * cross_entropy + (1 - share) * (1 - accepted)
    soft = q.mul_(p.sum(-1, keepdim=True)).sub_(p)
    return loss, grad.mul_((1 - share)[:, None]).add_(soft.mul_(share[:, None]))


@jit
def _slope(q, p, sum_p, mass, inner, scale_soft, scale_tv, ACCEPTANCE: tl.constexpr):
    """d loss / dz of elements: scale_soft (q sum(p) - p) + scale_tv q (inner - [q < p mass])."""
    slope = scale_soft * (q * sum_p - p)
    if ACCEPTANCE:
        slope += scale_tv * q * (inner - tl.where(q < p * mass, 1.0, 0.0))
    return slope


@jit
def _rows_kernel(logits, grads, losses, choices, values, ids, tails, masses, index, weights, width, kept,
                 ETA: tl.constexpr, TINY: tl.constexpr, KIND: tl.constexpr, FORM: tl.constexpr, MASS: tl.constexpr,
                 LEARN: tl.constexpr, CHOOSE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """One row: its loss, its gradient times its weight, its first choice.

    KIND 0 ce, 1 kl, 2 tv, 3 lk, 4 lk_hybrid. FORM 0 probabilities, 1 logits, 2 top-k. `grads` may be `logits`.
    """
    WIDE = logits.dtype.element_ty
    ACCEPTANCE: tl.constexpr = KIND >= 2
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    grads += row * width
    weight = tl.load(weights + row).to(WIDE)
    lane = tl.arange(0, BLOCK)
    lane_k = tl.arange(0, BLOCK_K)
    told = tl.load(index + row).to(tl.int64)
    mass = tl.full((), 1.0, WIDE)
    if MASS:
        mass = tl.load(masses + told).to(WIDE)
    sum_p = tl.full((), 1.0, WIDE)
    most_t = tl.full((), 0.0, WIDE)
    sum_t = tl.full((), 1.0, WIDE)
    other = tl.full((), 0.0, WIDE)
    p_k = tl.zeros([BLOCK_K], WIDE)
    id_k = tl.zeros([BLOCK_K], tl.int64)
    z_k = tl.zeros([BLOCK_K], WIDE)
    if FORM == 2:
        is_kept = lane_k < kept
        id_k = tl.load(ids + told * kept + lane_k, is_kept, other=0).to(tl.int64)
        t_k = tl.load(values + told * kept + lane_k, is_kept, other=-float("inf")).to(WIDE)
        e_k = tl.exp(t_k - tl.max(t_k, 0))
        tail = tl.load(tails + told).to(WIDE)
        p_k = e_k / tl.sum(e_k, 0) * (1.0 - tail)
        other = tail / tl.maximum(width - kept, 1).to(WIDE)
        z_k = tl.load(logits + id_k, is_kept, other=0.0)
    else:
        values += told * width

    # Pass 1: log-sum-exp of the row, and what the teacher says of it, all rescaled to the largest seen so far.
    most = tl.full((), -float("inf"), WIDE)
    total = tl.full((), 0.0, WIDE)
    p_dot_z = tl.full((), 0.0, WIDE)
    p_log_p = tl.full((), 0.0, WIDE)
    choice = tl.full((), 0, tl.int64)
    if FORM == 0:
        sum_p = tl.full((), 0.0, WIDE)
    if FORM == 1:
        most_t = tl.full((), -float("inf"), WIDE)
        sum_t = tl.full((), 0.0, WIDE)
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
        flat = tl.where(inside, z, 0.0)
        if FORM == 0:
            p = tl.load(values + start + lane, inside, other=0.0).to(WIDE)
            sum_p += tl.sum(p, 0)
            p_dot_z += tl.sum(p * flat, 0)
            if KIND == 1:
                p_log_p += tl.sum(tl.where(p > 0, p * tl.log(tl.where(p > 0, p, 1.0)), 0.0), 0)
        elif FORM == 1:
            t = tl.load(values + start + lane, inside, other=-float("inf")).to(WIDE)
            new_t = tl.maximum(most_t, tl.max(t, 0))
            shrink = tl.exp(most_t - new_t)
            e = tl.exp(t - new_t)
            sum_t = sum_t * shrink + tl.sum(e, 0)
            p_dot_z = p_dot_z * shrink + tl.sum(e * flat, 0)
            if KIND == 1:
                p_log_p = p_log_p * shrink + tl.sum(e * tl.where(inside, t, 0.0), 0)
            most_t = new_t
        else:
            p_dot_z += other * tl.sum(flat, 0)
    lse = most + tl.log(total)
    if FORM == 1:
        p_dot_z = p_dot_z / sum_t
        p_log_p = p_log_p / sum_t - most_t - tl.log(sum_t)
    if FORM == 2:
        p_dot_z += tl.sum(tl.where(is_kept, (p_k - other) * z_k, 0.0), 0)
        if KIND == 1:
            p_log_p = tl.sum(tl.where(p_k > 0, p_k * tl.log(tl.where(p_k > 0, p_k, 1.0)), 0.0), 0)
            p_log_p += tl.where(other > 0, tail * tl.log(tl.where(other > 0, other, 1.0)), 0.0)
    if CHOOSE:
        tl.store(choices + row, choice)
    loss = sum_p * lse - p_dot_z
    if KIND == 1:
        loss += p_log_p

    # Pass 2, for losses of acceptance: a = sum min(q, p), and the part of q that lies below p.
    scale_soft = weight
    scale_tv = weight
    inner = tl.full((), 0.0, WIDE)
    if ACCEPTANCE:
        accepted = tl.full((), 0.0, WIDE)
        for start in range(0, width, BLOCK):
            inside = start + lane < width
            q = tl.exp(tl.load(logits + start + lane, inside, other=-float("inf")) - lse)
            if FORM == 0:
                p = tl.load(values + start + lane, inside, other=0.0).to(WIDE) * mass
            elif FORM == 1:
                t = tl.load(values + start + lane, inside, other=-float("inf")).to(WIDE)
                p = tl.exp(t - most_t) / sum_t * mass
            else:
                p = tl.where(inside, other * mass, 0.0)
            accepted += tl.sum(tl.minimum(q, p), 0)
            inner += tl.sum(tl.where(q < p, q, 0.0), 0)
        if FORM == 2:
            q_k = tl.exp(z_k - lse)
            spread = other * mass
            accepted += tl.sum(tl.where(is_kept, tl.minimum(q_k, p_k * mass) - tl.minimum(q_k, spread), 0.0), 0)
            counted = tl.where(q_k < p_k * mass, q_k, 0.0) - tl.where(q_k < spread, q_k, 0.0)
            inner += tl.sum(tl.where(is_kept, counted, 0.0), 0)
        if KIND == 2:
            loss = 1.0 - accepted
            scale_soft = scale_soft * 0.0
        elif KIND == 3:
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

    # The last pass: gradients.
    if LEARN:
        for start in range(0, width, BLOCK):
            inside = start + lane < width
            q = tl.exp(tl.load(logits + start + lane, inside, other=-float("inf")) - lse)
            if FORM == 0:
                p = tl.load(values + start + lane, inside, other=0.0).to(WIDE)
            elif FORM == 1:
                p = tl.exp(tl.load(values + start + lane, inside, other=-float("inf")).to(WIDE) - most_t) / sum_t
            else:
                p = tl.zeros([BLOCK], WIDE) + other
            slope = _slope(q, p, sum_p, mass, inner, scale_soft, scale_tv, ACCEPTANCE)
            tl.store(grads + start + lane, slope.to(grads.dtype.element_ty), inside)
        if FORM == 2:
            tl.debug_barrier()  # the kept tokens' gradients go over what other threads of this program just wrote
            slope = _slope(tl.exp(z_k - lse), p_k, sum_p, mass, inner, scale_soft, scale_tv, ACCEPTANCE)
            tl.store(grads + id_k, slope.to(grads.dtype.element_ty), is_kept)


def _rows_by_kernel(logits: Tensor, grads: Tensor, losses: Tensor, choice: Tensor | None, teacher: Teacher,
                    index: Tensor, weights: Tensor, kind: Kind) -> None:
    """Fill losses [C], and gradients times weights [C, D] and first choices [C] where there is room for them."""
    table = isinstance(teacher, TableTeacher)
    values = teacher.values_UD if isinstance(teacher, TableTeacher) else teacher.logits_UK
    kept = 1 if isinstance(teacher, TableTeacher) else teacher.ids_UK.shape[1]
    form = 2 if isinstance(teacher, TopKTeacher) else 0 if teacher.form == "probabilities" else 1
    width = logits.shape[1]
    launch(_rows_kernel, (logits.shape[0],), logits, grads, losses, losses if choice is None else choice,
           values, index if table else teacher.ids_UK, losses if table else teacher.tail_U,  # type: ignore[union-attr]
           losses if teacher.mass_U is None else teacher.mass_U, index, weights, width, kept,
           ETA=LK_ETA, TINY=_TINY, KIND=_KINDS.index(kind), FORM=form, MASS=teacher.mass_U is not None,
           LEARN=grads is not losses,
           CHOOSE=choice is not None, BLOCK=min(4096, next_power_of_two(width)), BLOCK_K=next_power_of_two(kept),
           num_warps=8)


# --- autograd ----------------------------------------------------------------------------------------------------


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b as `dtype`. On CUDA a bfloat16 product is not rounded on its way to float32."""
    if a.is_cuda and dtype != a.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


class _SoftTargetLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher: Teacher, index: Tensor, weights: Tensor, kind: Kind,
                choose: bool) -> tuple[Tensor, Tensor, Tensor]:
        (num_rows, _), vocab = hidden.shape, weight.shape[0]
        by_kernel, wide = runs_kernels(hidden), torch.promote_types(weight.dtype, torch.float32)
        learning = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        losses = torch.zeros(num_rows, dtype=wide, device=hidden.device)
        choice = torch.zeros(num_rows if choose else 0, dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if learning else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=hidden.device) if learning else None
        size = max(64, _CHUNK_ELEMENTS[hidden.device.type] // vocab // 32 * 32)
        # Rows without weight are left out where that needs no word from the device.
        pieces: Sequence[slice | Tensor]
        if choose or by_kernel:
            pieces = [slice(start, start + size) for start in range(0, num_rows, size)]
        else:
            pieces = weights.nonzero().squeeze(1).split(size)
        for chosen in pieces:
            x, told, share = hidden[chosen].to(weight.dtype), index[chosen], weights[chosen].to(wide)
            logits = _product(x, weight.T, wide)
            picks = choice.new_empty(x.shape[0]) if choose else None
            if by_kernel:
                part = losses.new_empty(x.shape[0])
                grad = part if not learning else logits if wide == weight.dtype else torch.empty_like(
                    logits, dtype=weight.dtype)
                _rows_by_kernel(logits, grad, part, picks, teacher, told, share, kind)
            else:
                picks = logits.argmax(-1) if choose else None
                part, grad = _rows_by_torch(logits, teacher, told, kind)
                part, grad = torch.where(share != 0, part, 0.0), grad.mul_(share[:, None]).to(weight.dtype)
            if picks is not None:
                choice[chosen] = picks
            losses[chosen] = part
            if grad_hidden is not None and grad_weight is not None:
                grad_hidden[chosen] = (grad @ weight).to(hidden.dtype)
                grad_weight += _product(grad.T, x, wide)
        ctx.grads = grad_hidden, grad_weight
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(losses, choice)
        return torch.dot(losses, weights.to(wide)), losses, choice

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _losses: Tensor, _choice: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.grads
        ctx.grads = None  # both are large, and used once
        return (grad_hidden.mul_(grad.to(grad_hidden.dtype)), grad_weight.mul_(grad).to(ctx.weight_dtype),
                None, None, None, None, None)


def soft_target_loss(hidden_TH: Tensor, weight_DH: Tensor, teacher: Teacher, index_T: Tensor,
                     weights_T: Tensor | None = None, kind: Kind = "ce", choose: bool = False) -> Compared:
    """sum over t of weights[t] * loss(hidden[t] weight', teacher[index[t]]).

    hidden   [T, H]   states before the output matrix; taken to weight's dtype for the products.
    weight   [D, H]
    index    [T]      int64 rows of the teacher's table, where the weight is 0 as well.
    weights  [T]      None: 1 each. A prediction of weight 0 has loss 0 and no gradient.
    choose   also tell each row's first choice, of those of weight 0 too.
    returns  see `Compared`. Call backward at most once: the gradients are held, not computed again.
    """
    if weights_T is None:
        weights_T = torch.ones(hidden_TH.shape[0], device=hidden_TH.device)
    return Compared(*_SoftTargetLoss.apply(hidden_TH, weight_DH, teacher, index_T, weights_T, kind, choose))


def bench(machine: Machine) -> list[Timing]:
    """Forward with gradients: the whole against its arithmetic, the row kernel alone against its traffic."""
    rows, hidden, vocab, dtype = (16_384, 4096, 32_768, torch.bfloat16) if machine.cuda else (
        512, 512, 4096, torch.float32)
    x = torch.randn(rows, hidden, dtype=dtype, device=machine.device, requires_grad=True)
    weight = torch.randn(vocab, hidden, dtype=dtype, device=machine.device).div_(hidden**0.5).requires_grad_()
    table = torch.randn(rows // 4, vocab, device=machine.device).softmax(-1).to(dtype)
    index = torch.arange(rows, device=machine.device) // 4
    shape = f"T={rows} H={hidden} D={vocab} {dtype}".replace("torch.", "")
    whole = seconds(lambda: soft_target_loss(x, weight, TableTeacher(table), index).total, machine)
    timings = [Timing("soft_target_loss", shape, whole, 6 * rows * hidden * vocab / machine.flops(dtype), "flops")]
    if machine.cuda:
        logits = torch.randn(4096, vocab, device=machine.device)
        grads, losses, ones = logits.to(dtype), logits[:, 0].clone(), torch.ones(4096, device=machine.device)
        alone = seconds(lambda: _rows_by_kernel(logits, grads, losses, None, TableTeacher(table), index[:4096], ones,
                                                "ce"), machine)
        # Every fourth row of the table is new; the rest is found in the cache and is no traffic.
        traffic = logits.nbytes + grads.nbytes + table[:1024].nbytes
        floor = traffic / machine.bandwidth()
        timings.append(Timing("soft_target_loss.rows", f"C=4096 D={vocab}", alone, floor, "traffic"))
    return timings


if __name__ == "__main__":
    main(bench)
