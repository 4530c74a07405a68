"""What every family's training has in common: from packed documents to one loss, and to the hits evaluation counts.

Whatever its architecture, a drafter stands at a position i whose next token is settled and proposes tokens i+2, i+3,
..: step s proposes token i+2+s, and the target's opinion of it is its final state at i+1+s. So which positions propose
(`training.unroll_plan`), who teaches (`training.losses`), how much each prediction weighs and what counts as a hit are
the same for all, and `DistillationObjective` holds them. A family brings what is its own: states at (position, step),
and the output matrix that reads them. The loop knows neither TTT nor any family: to it all are an `Objective`.

    T packed tokens, R roots, S steps, N predictions of all steps, H hidden, D draft vocabulary, V vocabulary
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.features.topk_logits import topk_rows
from eyrie_workers.targets.device import CPU, device_scope
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.training.losses import Normalisation, TargetTable, compute_target_table, shares
from eyrie_workers.training.softloss import Loss, soft_loss
from eyrie_workers.training.topk_logits import table_from_topk
from eyrie_workers.training.unroll_plan import UnrollPlan, plan_unroll


@dataclass(frozen=True)
class Outcome:
    """What one batch yields.

    loss        scalar with gradients when training.
    step_losses [S'] one value per unrolled step that had roots.
    supervised  token predictions of the batch, over all steps.
    hits        per step: [R_s] bool, the drafter's first choice is the target's. Roots of step s are the first R_s of
                step s - 1, so "all right so far" is a product of prefixes. Empty unless asked for: finding the first
                choice costs 4 % of a training step.
    """

    loss: Tensor
    step_losses: Tensor
    supervised: int
    hits: tuple[Tensor, ...] = ()
    flops: int = 0
    """Arithmetic that learning from the batch needed (`drafters.eagle3.flops`)."""

    computed: int = 0
    """Token predictions computed, those included that fill up a round number of rows."""


def alone(x: Tensor) -> Tensor:
    """The sum over one process."""
    return x


@dataclass(frozen=True)
class StepContext:
    """Where in a training run a batch stands: all that may decide how it is treated."""

    step: int
    """0-based."""

    num_steps: int
    seed: int
    starts: tuple[int, ...] | None = None
    """Where each document begins in the step's whole batch, when the batch is one process's part of it."""

    total: Callable[[Tensor], Tensor] = alone
    """Sums over all processes of the run."""


@dataclass(frozen=True)
class TargetDistribution:
    """The teacher of one batch: its table, and the row of it that a packed position is found in (-1: none)."""

    row_T: Tensor
    teacher: TargetTable


class Objective(Protocol):
    """How one family learns from captured documents."""

    @property
    def drafter(self) -> nn.Module:
        """The module whose parameters are trained."""
        ...

    @property
    def target_key(self) -> tuple[int, bool]:
        """Objectives over the same states with the same key may share a targets."""
        ...

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """What of a batch is computed at a context; None: when it is judged."""
        ...

    def target_distribution(self, documents: PackedBatch, positions: Tensor) -> TargetDistribution:
        """The teacher at the given packed positions, ascending."""
        ...

    def __call__(self, documents: PackedBatch, context: StepContext | None = None,
                 targets: TargetDistribution | None = None) -> Outcome:
        """Loss of a batch at a step of training; without a context the batch is evaluated: all unrolled, hits counted.

        targets  the teacher of the batch, when it has been asked already (`stages.sweep`).

        A function of its arguments and the parameters alone. A batch without roots has loss 0.
        """
        ...


@dataclass(frozen=True)
class Supervision:
    """Who teaches each prediction of a plan, step by step in the order of its roots, and how much it weighs.

    step_N, position_N  [N] int64: its step; the packed position whose final state the target judges it by.
    row_N               [N] int64: row of the targets's table.
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
        """What a batch yields, of its loss, each prediction's loss and, when judged, each prediction's first choice."""
        inside_N = self.targets.teacher.inside_R[self.row_N]
        counts_S = torch.bincount(self.step_N, weights=inside_N).clamp(min=1.0)
        hits: tuple[Tensor, ...] = ()
        if evaluating:
            hits_N = (choice_N == self.targets.teacher.choice_R[self.row_N]) & inside_N
            hits = hits_N.split([alive for alive in self.plan.alive if alive])
        supervised = self.plan.num_predictions
        return Outcome(loss, torch.bincount(self.step_N, weights=losses_N * inside_N) / counts_S, supervised, hits,
                       flops, supervised if computed is None else computed)


@dataclass(frozen=True)
class Prediction:
    """What a family says at the positions and steps of a plan.

    states  per step with roots: [R_s, H] of its first R_s roots, as `heads` reads them.
    heads   [D, H], or one for each step.
    extra   [N] a further loss of each prediction, which weighs what its first does; None: none (EAGLE-1's regression).
    flops   arithmetic of forward and backward, as far as it was counted.
    computed  rows of `states` with those that only fill up a round number; None: none does.
    """

    states: tuple[Tensor, ...]
    heads: Tensor | tuple[Tensor, ...]
    extra: Tensor | None = None
    flops: int = 0
    computed: int | None = None


class DistillationObjective(ABC):
    """An objective of a family that predicts over the draft vocabulary and is taught the target's distribution.

    A subclass says `drafter` and `predict`; `plan`, when it does not train every root at every step.
    """

    def __init__(self, vocabulary: DraftVocabulary, lm_head_VH: Tensor, spec: TrainSpec, *, steps: int | None = None,
                 dtype: torch.dtype = torch.float32) -> None:
        """`steps`: how many tokens it looks ahead at most; default: the spec's ttt_length."""
        self.dtype = dtype
        self.steps = spec.ttt_length if steps is None else steps
        self.vocabulary = vocabulary
        self.device = lm_head_VH.device
        self._draft_ids_D, self._t2d_V = vocabulary.ids.to(self.device), vocabulary.t2d.to(self.device)
        self._lm_head_VH = lm_head_VH
        self._step_decay = spec.step_decay
        self._normalisation: Normalisation = spec.normalisation
        self._loss: Loss = spec.loss

    @property
    @abstractmethod
    def drafter(self) -> nn.Module:
        """The module being trained."""

    @abstractmethod
    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """States at every root and step of the layout. `judged`: as in serving, on its own proposals where it has any;
        without, as it is trained."""

    @property
    def target_key(self) -> tuple[int, bool]:
        """Objectives over the same states with the same key may share a targets."""
        return self._draft_ids_D.numel(), self._loss != "kl"

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """Every root, every step."""
        return plan_unroll(documents.loss_mask, documents.lengths, self.steps)

    def target_distribution(self, documents: PackedBatch, positions: Tensor) -> TargetDistribution:
        """The teacher at the given packed positions, ascending."""
        here = documents.token_ids.device
        positions = positions.to(here)
        row_T = torch.full_like(documents.token_ids, -1)
        row_T[positions] = torch.arange(positions.numel(), device=here)
        row_T = row_T.to(self.device)
        if documents.topk_logits is not None:
            with here:
                rows = topk_rows(documents.loss_mask, documents.lengths)[positions]
                teacher = table_from_topk(documents.topk_logits, rows, self._draft_ids_D.numel())
            return TargetDistribution(row_T, teacher.to(self.device))
        last = documents.last.index_select(0, positions).to(self.device)
        return TargetDistribution(row_T, compute_target_table(last, self._lm_head_VH, self._draft_ids_D, self._t2d_V,
                                               weigh=self._loss != "kl"))

    def supervise(self, documents: PackedBatch, plans: Sequence[UnrollPlan], plan: UnrollPlan,
                  context: StepContext | None, targets: TargetDistribution | None) -> Supervision:
        """Who teaches what `plan` predicts, computed in the order of `plans`, its parts. Layouts and documents as
        they were planned: on the processor."""
        targets = targets or self.target_distribution(documents, plan.target_positions())
        asked = [prediction_positions(part) for part in plans]
        step_N, position_N = (torch.cat(column) for column in zip(*asked, strict=True))
        lengths = torch.tensor(documents.lengths, device=CPU)
        document_T = torch.repeat_interleave(torch.arange(lengths.numel(), device=CPU), lengths)
        document_N = document_T[position_N].to(self.device)
        step_N, position_N = step_N.to(self.device), position_N.to(self.device)
        row_N, inside_T = targets.row_T[position_N], targets.teacher.inside_R
        share_N = shares(step_N, document_N, inside_T[row_N], self.steps, self._step_decay, self._normalisation,
                         alone if context is None else context.total)
        return Supervision(targets, plan, step_N, position_N, row_N, share_N)

    def __call__(self, documents: PackedBatch, context: StepContext | None = None,
                 targets: TargetDistribution | None = None) -> Outcome:
        """Predict, compare, weigh. Planning is done on the processor, the rest where the target's matrix lies."""
        plan = self.plan(documents, context)
        with device_scope(self.device):
            return self._learn(documents, plan, context, targets)

    def _learn(self, documents: PackedBatch, plan: UnrollPlan, context: StepContext | None,
               targets: TargetDistribution | None) -> Outcome:
        evaluating = context is None
        told = self.supervise(documents, [plan], plan, context, targets)
        if plan.num_predictions == 0:
            return Outcome(self.nothing(), torch.zeros(0), 0)
        found = self.predict(documents.to(self.device), plan.to(self.device), evaluating)
        if isinstance(found.heads, Tensor):
            loss, losses_N, choice_N = soft_loss(torch.cat(found.states), found.heads, told.targets.teacher, told.row_N,
                                                 told.share_N, self._loss, choose=evaluating)
        else:
            sizes = [state.shape[0] for state in found.states]
            each = [soft_loss(state, head, told.targets.teacher, row, share, self._loss, choose=evaluating)
                    for state, head, row, share in zip(found.states, found.heads, told.row_N.split(sizes),
                                                       told.share_N.split(sizes), strict=False)]
            loss = torch.stack([one[0] for one in each]).sum()
            losses_N, choice_N = torch.cat([one[1] for one in each]), torch.cat([one[2] for one in each])
        if found.extra is not None:
            loss = loss + torch.dot(found.extra, told.share_N.to(found.extra.dtype))
        return told.outcome(loss, losses_N, choice_N, evaluating=evaluating, flops=found.flops, computed=found.computed)

    def nothing(self) -> Tensor:
        """A loss of 0 that every parameter has a gradient of."""
        return torch.stack([parameter.sum() * 0 for parameter in self.drafter.parameters()]).sum()


def draw_positions(documents: PackedBatch, context: StepContext, share: float) -> Tensor:
    """[T] bool: a random share of the positions, drawn anew at every step and alike however many processes share it."""
    if context.starts is None:
        end = documents.token_ids.numel()
    else:  # the tokens of the step's whole batch, as far as this part of it reaches
        end = max(start + length for start, length in zip(context.starts, documents.lengths, strict=True))
    draws = np.random.default_rng((context.seed, context.step, 0xDEEB)).random(end)
    if context.starts is not None:
        draws = np.concatenate([draws[start:start + length]
                                for start, length in zip(context.starts, documents.lengths, strict=True)])
    return torch.from_numpy(draws < share)


def prediction_positions(plan: UnrollPlan) -> tuple[Tensor, Tensor]:
    """Of every prediction, step by step: its step, and the packed position the teacher is asked at."""
    alive = torch.tensor(plan.alive, device=plan.roots.device)
    steps = torch.repeat_interleave(torch.arange(alive.numel(), device=alive.device), alive)
    roots = torch.cat([plan.roots[:alive] for alive in plan.alive])
    return steps, roots + 1 + steps
