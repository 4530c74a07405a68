"""The drafter's output matrix and its loss against the target's distribution: the dispatch, and the form for CPUs.

`eyrie_kernels.soft_target_loss` defines the losses and their gradients; its Triton kernel computes CUDA tensors. The
CPU form here computes the same formulas in chunks whose logits fit the last-level cache, with `training.matmul`. The
straightforward form builds logits [N, D] for the N predictions of all unrolled steps, their softmax and both
gradients: four such arrays for seven steps. Here each chunk's logits are turned into its loss and its share of the
gradients, in the forward pass, because the loss is the end of the computation; backward scales them.

    N predictions, R rows of the target table, H hidden, D draft vocabulary
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_kernels.soft_target_loss import LK_ETA, TINY, Loss
from eyrie_kernels.soft_target_loss import soft_target_loss as kernel_soft_target_loss
from eyrie_workers.training.losses import DenseTable, TargetTable
from eyrie_workers.training.matmul import matmul, pad_rows

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


def _chunk_rows(draft_vocab_size: int) -> int:
    """Rows per chunk: multiples of 32, the row counts that `matmul` has compiled kernels for."""
    return min(1024, max(64, _CHUNK_ELEMENTS // draft_vocab_size // 32 * 32))


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
        for chosen in kept.split(_chunk_rows(draft_vocab)):
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
        rows = table.probabilities_RD if isinstance(table, DenseTable) else table.rows
        return kernel_soft_target_loss(x, weight, rows, table.mass_R, row, share, kind, choose)
    found: tuple[Tensor, Tensor, Tensor] = _ChunkedLoss.apply(x, weight, table, row, share, kind, choose)
    return found
