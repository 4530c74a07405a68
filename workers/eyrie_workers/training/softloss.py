"""The drafter's output matrix and its loss against the target's distribution, in one pass that never keeps logits.

The plain way makes logits [N, D] for the N predictions of all unrolled steps, their softmax, and both gradients: four
such arrays for seven steps. Here the predictions are taken a chunk at a time; each chunk's logits become its loss and
at once its share of the gradients, and are forgotten:

    z = x W'    q = softmax(z)    dz = weight * d loss / dz    dx = dz W    dW += dz' x

The gradients are made in the forward pass, because the loss is the end of the computation: backward only scales them.
A row's teacher is looked up by number in a table [P, D] that holds every asked position once, though up to S steps
compare with it. Rows of weight 0 are not computed.

Losses per row, p the teacher, q the drafter, a = sum min(p, q) the chance that a sampled draft token is accepted
(arXiv:2211.17192):

    kl           sum p log(p / q); its gradient is that of the cross-entropy -sum p log q, whose value is reported
    tv           1 - a = total variation distance                          (arXiv:2602.23881)
    lk           -log a                                                    (arXiv:2602.23881)
    lk_hybrid    h kl + (1 - h) tv, h = exp(-3 a) a constant to gradients   (arXiv:2602.23881; 3 is its best setting)

    d kl / dz = q - p    da / dz = q (m - sum q m), m = [q < p]    d tv / dz = -da / dz    d lk / dz = -(da / dz) / a

The last three speak of acceptance, so their teacher is not renormalised over the draft vocabulary: what the target
would say outside is lost in any case.

    N predictions, P asked positions, H hidden, D draft vocabulary
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_kernels.soft_target_loss import TableTeacher, soft_target_loss
from eyrie_workers.training.losses import TargetTable
from eyrie_workers.training.matmul import matmul, pad_rows

Loss = Literal["kl", "tv", "lk", "lk_hybrid"]
LK_ETA = 3.0
_TINY = 1e-8

# A chunk's logits in elements: 1 Mi floats are 4 MiB, which with its temporaries stays near the last cache.
_CHUNK_ELEMENTS = 1 << 20


def reference_losses(logits_ND: Tensor, teacher_ND: Tensor, mass_N: Tensor, kind: Loss) -> Tensor:
    """[N] losses as formulas, for tests."""
    log_q = logits_ND.log_softmax(-1)
    kl = -(teacher_ND * log_q).sum(-1)
    if kind == "kl":
        return kl
    accepted = torch.minimum(teacher_ND * mass_N[:, None], log_q.exp()).sum(-1)
    if kind == "tv":
        return 1 - accepted
    if kind == "lk":
        return -accepted.clamp(min=_TINY).log()
    share = (-LK_ETA * accepted).exp().detach()
    return share * kl + (1 - share) * (1 - accepted)


def _chunk_loss(logits: Tensor, teacher: Tensor, mass: Tensor, kind: Loss) -> tuple[Tensor, Tensor]:
    """Loss of each row, and d loss / d logits, which takes the memory of `logits` or `teacher`."""
    log_q = torch.log_softmax(logits, -1)
    if kind == "kl":
        loss = torch.linalg.vecdot(teacher, log_q).neg_()
        return loss, log_q.exp_().sub_(teacher)
    kl = torch.linalg.vecdot(teacher, log_q).neg_() if kind == "lk_hybrid" else None
    q = log_q.exp_()
    scaled = teacher * mass[:, None]
    below = (q < scaled).to(q.dtype)
    accepted = torch.minimum(q, scaled).sum(-1)
    # d(1 - a)/dz, written so that q is used once more
    grad = (torch.linalg.vecdot(q, below)[:, None] - below).mul_(q)
    if kind == "tv":
        return 1 - accepted, grad
    if kind == "lk":
        bounded = accepted.clamp(min=_TINY)
        return -bounded.log(), grad.div_(bounded[:, None])
    assert kl is not None
    share = (-LK_ETA * accepted).exp()
    loss = share * kl + (1 - share) * (1 - accepted)
    return loss, grad.mul_((1 - share)[:, None]).add_(q.sub_(teacher).mul_(share[:, None]))


def _chunk_rows(draft_vocab_size: int) -> int:
    return min(1024, max(64, _CHUNK_ELEMENTS // draft_vocab_size // 32 * 32))


class _SoftLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, table: Tensor, mass: Tensor, row: Tensor, share: Tensor,
                kind: Loss, choose: bool) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, draft_vocab, wide = x.shape[0], weight.shape[0], torch.promote_types(x.dtype, torch.float32)
        losses = torch.zeros(num_rows, dtype=wide, device=x.device)
        choice = torch.zeros(num_rows if choose else 0, dtype=torch.int64, device=x.device)
        kept = torch.arange(num_rows, device=x.device) if choose else share.nonzero().squeeze(1)
        grad_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=x.device) if ctx.needs_input_grad[1] else None
        for chosen in kept.split(_chunk_rows(draft_vocab)):
            rows = pad_rows(x.index_select(0, chosen), weight.dtype)
            logits = matmul(rows, weight.T)[: chosen.numel()].to(wide)
            if choose:
                choice[chosen] = logits.argmax(-1)
            told = row.index_select(0, chosen)
            loss, grad = _chunk_loss(logits, table.index_select(0, told).to(wide), mass.index_select(0, told), kind)
            losses[chosen] = loss
            if grad_x is not None or grad_weight is not None:
                grad = pad_rows(grad.mul_(share.index_select(0, chosen)[:, None]), weight.dtype)
            if grad_x is not None:
                grad_x[chosen] = matmul(grad, weight)[: chosen.numel()].to(x.dtype)
            if grad_weight is not None:  # a borrowed output matrix does not learn
                grad_weight += matmul(grad.T, rows)
        ctx.grads = grad_x, None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.mark_non_differentiable(losses, choice)
        return torch.dot(losses, share.to(wide)), losses, choice

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _losses: Tensor, _choice: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.grads
        ctx.grads = None
        if grad != 1:
            grad_x, grad_weight = (None if one is None else one * grad for one in (grad_x, grad_weight))
        return grad_x, grad_weight, None, None, None, None, None, None


def soft_loss(x: Tensor, weight: Tensor, teacher: TargetTable, row: Tensor, share: Tensor, kind: Loss = "kl",
              choose: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """sum over n of share[n] * loss(x[n] W', teacher[row[n]]).

    x       [N, H]   states before the output matrix.
    weight  [D, H]
    row     [N]      int64, each prediction's row of `teacher`.
    share   [N]      float32, weight of each prediction in the sum; those of 0 are left out.
    choose  also find each row's first choice; then rows of weight 0 are computed as well.
    returns (the sum, with gradients to x and weight), losses [N] (0 where left out), first choices [N] or [0].
    """
    if x.is_cuda:
        return by_kernel(x, weight, teacher, row, share, kind, choose)
    found: tuple[Tensor, Tensor, Tensor] = _SoftLoss.apply(
        x, weight, teacher.probabilities_RD, teacher.mass_R, row, share, kind, choose)
    return found


def by_kernel(x: Tensor, weight: Tensor, teacher: TargetTable, row: Tensor, share: Tensor, kind: Loss,
              choose: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`soft_loss` as a GPU does it: the same formulas, a chunk's rows by one kernel (`kernels.soft_target_loss`)."""
    table = TableTeacher(teacher.probabilities_RD, mass_U=teacher.mass_R)
    return soft_target_loss(x, weight, table, row, share, "ce" if kind == "kl" else kind, choose)
