"""What the training of all families has in common: from packed documents to one loss, and to the hits of evaluation.

Whatever its architecture, a drafter reads the accepted text up to position i, whose next token is known, and proposes
tokens i+2, i+3, ..: step s proposes token i+2+s, and is compared with the target's distribution computed from its final
state at i+1+s. So the positions that propose (`training.unroll_plan`), the target distributions and the weight of each
prediction (`training.losses`) and the definition of a hit are the same for all families, and `DistillationObjective`
holds them. A family adds its states at (position, step), and the output matrix that reads them. The training loop
depends on neither TTT nor any family: it sees an `Objective`.

    T packed tokens, R roots, S steps, N predictions of all steps, H hidden, D draft vocabulary, V vocabulary
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from eyrie_api.artifacts import digest_bytes
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_kernels.soft_target_loss import Loss
from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.features.topk_logits import topk_rows
from eyrie_workers.targets.device import CPU, device_scope
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.operators import OutputHead
from eyrie_workers.training.losses import (
    Normalisation,
    TargetHead,
    TargetTable,
    compute_target_table,
    shares,
    sum_by,
)
from eyrie_workers.training.soft_target_loss import soft_target_loss
from eyrie_workers.training.topk_logits import TopKTable
from eyrie_workers.training.unroll_plan import UnrollPlan, plan_unroll


@dataclass(frozen=True)
class Outcome:
    """What an objective computes for one batch.

    loss        scalar, with gradients in training.
    step_losses [S'] mean per unrolled step that had roots.
    supervised  token predictions of the batch, over all steps.
    hits        per step: [R_s] bool, the drafter's most probable token is the target's. Roots of step s are the first
                R_s of step s - 1, so "all hits so far" is a product of prefixes. Empty in training: finding the most
                probable token costs 4 % of a training step.
    """

    loss: Tensor
    step_losses: Tensor
    supervised: int
    hits: tuple[Tensor, ...] = ()
    flops: int = 0
    """Arithmetic that training on the batch needs (`DistillationObjective.flops`)."""

    computed: int = 0
    """Token predictions computed, including those that pad to a round number of rows."""


def local_sum(x: Tensor) -> Tensor:
    """The sum over a single process: x itself."""
    return x


@dataclass(frozen=True)
class StepContext:
    """Position of a batch in a training run: everything besides the batch that may change how it is trained on."""

    step: int
    """0-based."""

    num_steps: int
    seed: int
    starts: tuple[int, ...] | None = None
    """First token of each document in the step's whole batch, where this batch is one process's part of it."""

    total: Callable[[Tensor], Tensor] = local_sum
    """Sums a tensor over all processes of the run."""


@dataclass(frozen=True)
class TargetDistribution:
    """The target's distributions for one batch: their table, and each packed position's row in it (-1: none)."""

    row_T: Tensor
    table: TargetTable

    def of_tokens(self, start: int, stop: int) -> "TargetDistribution":
        """Those of some of the batch's packed tokens."""
        return TargetDistribution(self.row_T[start:stop], self.table)


class Objective(Protocol):
    """How one family is trained on captured documents."""

    @property
    def drafter(self) -> nn.Module:
        """The module whose parameters are trained."""
        ...

    @property
    def target_key(self) -> tuple[str, bool]:
        """Objectives over the same states with equal keys may share a target distribution."""
        ...

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """What is computed of a batch at a training step; None: in evaluation."""
        ...

    def target_distribution(self, documents: PackedBatch, positions: Tensor) -> TargetDistribution:
        """The target's distributions at the given packed positions, ascending."""
        ...

    def count(self, documents: PackedBatch, context: StepContext,
              targets: TargetDistribution | None = None) -> tuple[TargetDistribution, Tensor]:
        """The batch's target distribution, and what `context.total` would be given: [2, S] predictions of each step,
        and those that are supervised."""
        ...

    def __call__(self, documents: PackedBatch, context: StepContext | None = None,
                 targets: TargetDistribution | None = None) -> Outcome:
        """Loss of a batch at a training step. Without a context the batch is evaluated: all unrolled, hits counted.

        targets  the batch's target distribution, where it has been computed already (`stages.sweep`).

        A function of its arguments and the parameters alone. A batch without roots has loss 0.
        """
        ...


@dataclass(frozen=True)
class Supervision:
    """The target and the weight of each prediction of a plan, step by step in the order of its roots.

    step_N, position_N  [N] int64: its step; the packed position whose final state gives its target.
    row_N               [N] int64: its row of the target table.
    share_N             [N] float32: its share of the loss (`training.losses.shares`).
    """

    targets: TargetDistribution
    plan: UnrollPlan
    step_N: Tensor
    position_N: Tensor
    row_N: Tensor
    share_N: Tensor

    def outcome(self, loss: Tensor, losses_N: Tensor, choice_N: Tensor, *, evaluating: bool, flops: int = 0,
                computed: int | None = None) -> Outcome:
        """The outcome from the loss, each prediction's loss and, in evaluation, each prediction's most probable token.
        """
        # A target token outside the draft vocabulary cannot be proposed: it counts in no mean and is never a hit.
        inside_N = self.targets.table.inside_R[self.row_N]
        num_steps = sum(alive > 0 for alive in self.plan.alive)
        counts_S = sum_by(self.step_N, inside_N.double(), num_steps).clamp(min=1.0)
        means_S = sum_by(self.step_N, losses_N * inside_N, num_steps) / counts_S
        hits: tuple[Tensor, ...] = ()
        if evaluating:
            hits_N = (choice_N == self.targets.table.choice_R[self.row_N]) & inside_N
            hits = hits_N.split([alive for alive in self.plan.alive if alive])
        supervised = self.plan.num_predictions
        return Outcome(loss, means_S, supervised, hits, flops, supervised if computed is None else computed)


@dataclass(frozen=True)
class Prediction:
    """What a family computes at the positions and steps of a plan.

    states  per step with roots: [R_s, H] of its first R_s roots, as `heads` reads them.
    heads   [D, H], or one for each step.
    extra   [N] another loss of each prediction, weighted as its first; None: none (EAGLE-1's regression).
    computed  rows of `states` including those that pad to a round number; None: no row is padding.
    """

    states: tuple[Tensor, ...]
    heads: Tensor | tuple[Tensor, ...]
    extra: Tensor | None = None
    computed: int | None = None


class DistillationObjective(ABC):
    """Objective of a family that predicts over the draft vocabulary and is trained on the target's distribution.

    A subclass defines `drafter`, `flops` and `predict`; and `plan`, if it does not train every root at every step.
    """

    def __init__(self, vocabulary: DraftVocabulary, output: OutputHead, spec: TrainSpec, *, steps: int | None = None,
                 dtype: torch.dtype = torch.float32) -> None:
        """`output`: of the target. `steps`: most tokens predicted ahead of a root; default: the spec's ttt_length."""
        self.dtype = dtype
        self.steps = spec.ttt_length if steps is None else steps
        self.vocabulary = vocabulary
        self.device = output.weight_VH.device
        self._vocabulary_digest = digest_bytes(vocabulary.ids.cpu().numpy().tobytes())
        self._head = TargetHead.of(output, vocabulary)
        self._step_decay = spec.step_decay
        self._normalisation: Normalisation = spec.normalisation
        self._loss: Loss = spec.loss

    @property
    @abstractmethod
    def drafter(self) -> nn.Module:
        """The module being trained."""

    @abstractmethod
    def flops(self, plan: UnrollPlan) -> int:
        """Arithmetic that a plan's loss and gradient require. The plan is on the CPU: its indices are read."""

    @abstractmethod
    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """States at every root and step of the plan.

        evaluating  as in serving, from the drafter's own proposals where it reads any; otherwise as it is trained.
        """

    @property
    def target_key(self) -> tuple[str, bool]:
        """Objectives over the same states with equal keys may share a target distribution."""
        return self._vocabulary_digest, self._loss != "kl"

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """Every root, every step."""
        return plan_unroll(documents.loss_mask, documents.lengths, self.steps)

    def target_distribution(self, documents: PackedBatch, positions: Tensor) -> TargetDistribution:
        """The target's distributions at the given packed positions, ascending; positions and tokens on the CPU."""
        topk_logits, rows = documents.topk_logits, positions
        if topk_logits is not None:
            rows = topk_rows(documents.loss_mask, documents.lengths)[positions]
        rows, positions = self._here(rows), self._here(positions)
        row_T = torch.full((documents.token_ids.numel(),), -1, device=self.device)
        row_T[positions] = torch.arange(positions.numel(), device=self.device)
        if topk_logits is not None:
            needed = topk_logits.map(lambda x: self._here(x).index_select(0, rows))
            return TargetDistribution(row_T, TopKTable(needed, self.vocabulary.size))
        last_RH = self._here(documents.last).index_select(0, rows)
        return TargetDistribution(row_T, compute_target_table(last_RH, self._head, weigh=self._loss != "kl"))

    def _here(self, x: Tensor) -> Tensor:
        """x on this objective's device. A blocking copy would wait for everything that a GPU still has to do."""
        return x.to(self.device, non_blocking=True)

    def supervise(self, documents: PackedBatch, plans: Sequence[UnrollPlan], plan: UnrollPlan,
                  context: StepContext | None, targets: TargetDistribution | None) -> Supervision:
        """Targets and weights of what `plan` predicts, in the order of its parts `plans`. Plans and documents are on
        the CPU."""
        targets = targets or self.target_distribution(documents, plan.target_positions)
        step_N, position_N = (torch.cat(column) for column in zip(*map(prediction_positions, plans), strict=True))
        lengths = torch.tensor(documents.lengths, device=CPU)
        document_T = torch.repeat_interleave(torch.arange(lengths.numel(), device=CPU), lengths)
        step_N, position_N, document_N = map(self._here, (step_N, position_N, document_T[position_N]))
        row_N, inside_R = targets.row_T[position_N], targets.table.inside_R
        # The weights come from counts over all parts and all processes, so that splitting a batch changes no gradient.
        share_N = shares(step_N, document_N, lengths.numel(), inside_R[row_N], self.steps, self._step_decay,
                         self._normalisation, local_sum if context is None else context.total)
        return Supervision(targets, plan, step_N, position_N, row_N, share_N)

    def count(self, documents: PackedBatch, context: StepContext,
              targets: TargetDistribution | None = None) -> tuple[TargetDistribution, Tensor]:
        """The batch's target distribution, and [2, S] predictions of each step, and those that are supervised."""
        counts: list[Tensor] = []

        def recorded(x: Tensor) -> Tensor:
            counts.append(x)
            return x

        plan = self.plan(documents, context)
        with device_scope(self.device):
            supervision = self.supervise(documents, [plan], plan, replace(context, total=recorded), targets)
        return supervision.targets, counts[0]

    def __call__(self, documents: PackedBatch, context: StepContext | None = None,
                 targets: TargetDistribution | None = None) -> Outcome:
        """Predict, compare, weigh. Planning runs on the CPU, the rest on the device of the target's output matrix."""
        plan = self.plan(documents, context)
        with device_scope(self.device):
            return self._compute(documents, plan, context, targets)

    def _compute(self, documents: PackedBatch, plan: UnrollPlan, context: StepContext | None,
                 targets: TargetDistribution | None) -> Outcome:
        evaluating = context is None
        # 1. Targets and weights. Also without roots: `shares` sums over all processes, and every process must call it.
        supervision = self.supervise(documents, [plan], plan, context, targets)
        if plan.num_predictions == 0:
            return Outcome(self.zero_loss(), torch.zeros(0), 0)
        # 2. The family's states.
        prediction = self.predict(documents.inputs().to(self.device), plan.to(self.device), evaluating)
        # 3. Logits and loss: one pass where all steps share an output matrix, otherwise one per step.
        table = supervision.targets.table
        if isinstance(prediction.heads, Tensor):
            loss, losses_N, choice_N = soft_target_loss(
                torch.cat(prediction.states), prediction.heads, table, supervision.row_N, supervision.share_N,
                self._loss, choose=evaluating)
        else:
            sizes = [state.shape[0] for state in prediction.states]
            per_step = [soft_target_loss(state, head, table, row, share, self._loss, choose=evaluating)
                        for state, head, row, share in zip(prediction.states, prediction.heads,
                                                           supervision.row_N.split(sizes),
                                                           supervision.share_N.split(sizes), strict=False)]
            loss = torch.stack([step_loss for step_loss, _, _ in per_step]).sum()
            losses_N = torch.cat([losses for _, losses, _ in per_step])
            choice_N = torch.cat([choice for _, _, choice in per_step])
        # 4. The family's own further loss, with the same weights.
        if prediction.extra is not None:
            loss = loss + torch.dot(prediction.extra, supervision.share_N.to(prediction.extra.dtype))
        return supervision.outcome(loss, losses_N, choice_N, evaluating=evaluating, flops=self.flops(plan),
                                   computed=prediction.computed)

    def zero_loss(self) -> Tensor:
        """A loss of 0 with a gradient of 0 for every parameter: the gradients of all processes are summed."""
        return torch.stack([parameter.sum() * 0 for parameter in self.drafter.parameters()]).sum()


def draw_positions(documents: PackedBatch, context: StepContext, share: float) -> Tensor:
    """[T] bool: a random share of the positions, a function of seed and step, independent of the number of processes.
    """
    # Draws belong to the tokens of the step's whole batch; each process takes those of its own documents.
    if context.starts is None:
        end = documents.token_ids.numel()
    else:
        end = max(start + length for start, length in zip(context.starts, documents.lengths, strict=True))
    draws = np.random.default_rng((context.seed, context.step, 0xDEEB)).random(end)
    if context.starts is not None:
        draws = np.concatenate([draws[start:start + length]
                                for start, length in zip(context.starts, documents.lengths, strict=True)])
    return torch.from_numpy(draws < share)


def prediction_positions(plan: UnrollPlan) -> tuple[Tensor, Tensor]:
    """Of every prediction, step by step: its step, and the packed position whose final state gives its target."""
    alive = torch.tensor(plan.alive, device=plan.roots.device)
    steps = torch.repeat_interleave(torch.arange(alive.numel(), device=alive.device), alive)
    roots = torch.cat([plan.roots[:alive] for alive in plan.alive])
    return steps, roots + 1 + steps
