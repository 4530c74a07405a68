"""The EAGLE-3 objective: training-time test, in parts that bound its memory (EAGLE-3, arXiv:2503.01840).

The unroll itself is `drafters.eagle3.unroll`. This module selects which positions are unrolled and how far, and splits
a batch into parts when its activations exceed a memory bound.

    T packed tokens, R roots, S steps, H hidden, D draft vocabulary, V vocabulary
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyrie_api.decisions.training_cost import StepSetting, mean_root_bytes, roots_per_part
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.drafters.eagle3.flops import step_flops, trained_drafter
from eyrie_workers.drafters.eagle3.model import Eagle3Drafter, Eagle3Weights
from eyrie_workers.drafters.eagle3.unroll import SharedProjections, shared_projections, unroll
from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.targets.device import device_scope
from eyrie_workers.targets.operators import OutputHead, Rotary
from eyrie_workers.training.activation_budget import activation_budget
from eyrie_workers.training.matmul import round_up_rows
from eyrie_workers.training.objective import (
    DistillationObjective,
    Outcome,
    Prediction,
    StepContext,
    TargetDistribution,
    draw_positions,
)
from eyrie_workers.training.soft_target_loss import soft_target_loss
from eyrie_workers.training.unroll_plan import UnrollPlan, plan_unroll, split_plan


class TrainingTimeTest(DistillationObjective):
    """Eagle3Drafter unrolled `ttt_length` steps against the frozen target's embedding and output matrix.

    Step s at root i and step s - 1 at root i + 1 predict the same token from nearly the same context, so unrolling
    every root repeats every prediction `ttt_length` times. A random `unrolled_fraction` of the roots, drawn per
    optimiser step, is unrolled beyond step 0. Step 0, on which all later steps depend, is trained at every root; for
    the first `single_step_ratio` of the run it is the only step. Measured on a half-trained quickstart target for equal
    arithmetic (400 k token predictions, one run each): theoretical speed-up 3.95 with all roots unrolled from the
    start, 4.32 after 30 % of the arithmetic on the first step only, 4.73 with a third of the roots unrolled.
    """

    def __init__(self, drafter: Eagle3Drafter, embed_VH: Tensor, output: OutputHead, spec: TrainSpec, *,
                 max_positions: int, dtype: torch.dtype = torch.float32,
                 max_kept_bytes: int | None = None) -> None:
        """`max_kept_bytes`: most activations kept at a time; None: the device's budget."""
        super().__init__(drafter.vocabulary, output, spec, dtype=dtype)
        config = drafter.config
        self._drafter, self._embed_VH = drafter, embed_VH
        self._unrolled_fraction, self._single_step_ratio = spec.unrolled_fraction, spec.single_step_ratio
        self._recompute = spec.grad_checkpoint
        self._max_kept_bytes = activation_budget(self.device) if max_kept_bytes is None else max_kept_bytes
        self._rotary = Rotary(config.rope, config.head_dim, max_positions + self.steps)

    @property
    def drafter(self) -> Eagle3Drafter:
        """The module being trained."""
        return self._drafter

    def flops(self, plan: UnrollPlan) -> int:
        """See `drafters.eagle3.flops`."""
        return step_flops(self._drafter.config, plan)

    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """The unroll without splitting: true tokens at every step and the drafter's own states, also in evaluation."""
        weights = self._drafter.weights(self.dtype)
        projections = shared_projections(weights, self._rotary, self._embed_VH, documents, plan.positions)
        states = tuple(step.state for step in unroll(weights, self._rotary, projections, plan, self._recompute))
        return Prediction(states, weights.lm_head,
                          computed=sum(round_up_rows(alive, self.device) for alive in plan.alive if alive))

    def __call__(self, documents: PackedBatch, context: StepContext | None = None,
                 targets: TargetDistribution | None = None) -> Outcome:
        """As `DistillationObjective`, with the roots split into parts when their activations exceed the bound."""
        plan = self.plan(documents, context)
        plans = [plan] if context is None else split_plan(plan, self._max_roots(plan))
        if len(plans) == 1:
            return super().__call__(documents, context, targets)
        with device_scope(self.device):
            return self._in_parts(documents, plan, plans, context, targets)

    def _in_parts(self, documents: PackedBatch, plan: UnrollPlan, plans: Sequence[UnrollPlan],
                  context: StepContext | None, targets: TargetDistribution | None) -> Outcome:
        supervision = self.supervise(documents, plans, plan, context, targets)
        flops = self.flops(plan)
        documents, plan = documents.inputs().to(self.device), plan.to(self.device)
        weights = self._drafter.weights(self.dtype)
        projections = shared_projections(weights, self._rotary, self._embed_VH, documents, plan.positions)
        results: list[tuple[Tensor, Tensor]] = []
        ends = list(accumulate((part.num_predictions for part in plans), initial=0))

        def loss_of(number: int, projections: SharedProjections, weights: Eagle3Weights) -> Tensor:
            """The loss of one part of the roots."""
            predictions = slice(ends[number], ends[number + 1])
            part = plans[number].to(self.device)
            states = [step.state for step in unroll(weights, self._rotary, projections, part, self._recompute)]
            loss, losses_N, choice_N = soft_target_loss(
                torch.cat(states), weights.lm_head, supervision.targets.table, supervision.row_N[predictions],
                supervision.share_N[predictions], self._loss, choose=False)
            results.append((losses_N, choice_N))
            return loss

        loss = loss_in_parts(len(plans), loss_of, projections, weights)
        losses_N, choice_N = (torch.cat(column) for column in zip(*results, strict=True))
        computed = sum(round_up_rows(alive, self.device) for part in plans for alive in part.alive if alive)
        return supervision.outcome(loss, losses_N, choice_N, evaluating=False, flops=flops, computed=computed)

    def _max_roots(self, plan: UnrollPlan) -> int:
        """Roots unrolled at a time, from the activations saved per root: on a CPU of one with all steps, on a GPU of
        the mean."""
        config, steps = self._drafter.config, sum(alive > 0 for alive in plan.alive)
        if self.device.type == "cpu":
            kept = 12 * config.hidden_size + (0 if self._recompute else 2 * config.intermediate_size)
            return roots_per_part(self._max_kept_bytes, kept * max(1, steps) * self.dtype.itemsize)
        setting = StepSetting(compute_bytes=self.dtype.itemsize, recompute=self._recompute)
        return roots_per_part(self._max_kept_bytes, mean_root_bytes(trained_drafter(config), plan.alive, setting))

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """In training, some roots unrolled; in evaluation (no step context), all roots and steps."""
        if context is None:
            return plan_unroll(documents.loss_mask, documents.lengths, self.steps)
        single = context.step < self._single_step_ratio * context.num_steps
        deep = None
        if not single and self._unrolled_fraction < 1.0:
            deep = draw_positions(documents, context, self._unrolled_fraction)
        return plan_unroll(documents.loss_mask, documents.lengths, 1 if single else self.steps, deep)


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_parts: int, loss_of: Callable[[int, Sequence[Tensor]], Tensor],
                *tensors: Tensor) -> Tensor:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        # In a leaf's own bfloat16 every further part would be rounded to 8 bits of the sum so far.
        totals: list[Tensor | None] = [None] * len(leaves)
        loss = torch.zeros((), dtype=torch.float64)
        for number in range(num_parts):
            # The backward pass of a part runs at once and adds to the leaves: its graph is freed before the next part.
            with torch.enable_grad():
                part = loss_of(number, leaves)
            part.backward()
            loss += part.detach()
            totals = [_added(total, leaf) for total, leaf in zip(totals, leaves, strict=True)]
        ctx.grads = totals
        return loss.to(part.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        # On the device, by 1 as well: to compare the factor, the host would wait for it.
        return None, None, *(None if own is None else own.mul_(grad) for own in grads)


def _added(total: Tensor | None, leaf: Tensor) -> Tensor | None:
    """`total` and the leaf's gradient, in at least float32; the leaf's own is freed."""
    grad, leaf.grad = leaf.grad, None
    if grad is None:
        return total
    return grad.to(torch.promote_types(grad.dtype, torch.float32)) if total is None else total.add_(grad)


def loss_in_parts(num_parts: int, loss_of: Callable[[int, SharedProjections, Eagle3Weights], Tensor],
                  projections: SharedProjections, weights: Eagle3Weights) -> Tensor:
    """Sum over parts of loss_of(part, projections, weights), with the gradient of each part computed before the next.

    The roots of a batch share only the projections and the weights. A part's activations can be freed when its
    gradients with respect to these two are known: memory is that of one part, and nothing is recomputed.
    """
    shared = (projections.embed, projections.fused, projections.q, projections.k, projections.v)

    def loss_from_leaves(number: int, leaves: Sequence[Tensor]) -> Tensor:
        return loss_of(number, SharedProjections(*leaves[: len(shared)]), weights.with_unrolled(leaves[len(shared):]))

    if not torch.is_grad_enabled():
        return torch.stack([loss_of(number, projections, weights) for number in range(num_parts)]).sum()
    loss: Tensor = _InParts.apply(num_parts, loss_from_leaves, *shared, *weights.unrolled())
    return loss
