"""The EAGLE-3 objective: from packed documents to one loss, and to the hits that evaluation counts.

A family of drafters trains by any objective with these two verbs (`Objective`): the loop knows neither TTT nor EAGLE.

    T packed tokens, R roots, S steps, H hidden, D draft vocabulary, V vocabulary
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from eyrie_workers.drafters.eagle3 import Eagle3Drafter, Eagle3Weights
from eyrie_workers.drafters.rotary import Rotary
from eyrie_workers.features.opinions import opinion_rows
from eyrie_workers.training.flops import step_flops
from eyrie_workers.training.layout import UnrollLayout, lay_out, parts
from eyrie_workers.training.losses import Normalisation, Teacher, shares, teach
from eyrie_workers.training.opinions import teacher_of
from eyrie_workers.training.products import rounded
from eyrie_workers.training.softloss import Loss, soft_loss
from eyrie_workers.training.unroll import Ground, PackedDocuments, lay_ground, unroll


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
    """Arithmetic that learning from the batch needed (`training.flops`)."""

    computed: int = 0
    """Token predictions computed, those included that fill up a round number of rows."""


def _alone(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Moment:
    """Where in a training run a batch stands: all that may decide how it is treated."""

    step: int
    """0-based."""

    num_steps: int
    seed: int
    starts: tuple[int, ...] | None = None
    """Where each document begins in the step's whole batch, when the batch is one process's part of it."""

    total: Callable[[Tensor], Tensor] = _alone
    """Sums over all processes of the run."""


@dataclass(frozen=True)
class Lesson:
    """The teacher of one batch: its table, and the row of it that a packed position is found in (-1: none)."""

    row_T: Tensor
    teacher: Teacher


class Objective(Protocol):
    """How one family learns from captured documents."""

    @property
    def drafter(self) -> nn.Module:
        """The module whose parameters are trained."""
        ...

    def __call__(self, documents: PackedDocuments, moment: Moment | None = None,
                 lesson: "Lesson | None" = None) -> Outcome:
        """Loss of a batch at a moment of training; without a moment it is judged: everything unrolled, hits counted.

        lesson  the teacher of the batch, when it has been asked already (`training.together`).

        A function of its arguments and the parameters alone. A batch without roots has loss 0.
        """
        ...


# What autograd may keep of the roots unrolled at a time.
MAX_KEPT_BYTES = 64 << 20


class TrainingTimeTest:
    """Eagle3Drafter unrolled `ttt_length` steps against the frozen target's embedding and output matrix.

    Step s at root i and step s - 1 at root i + 1 predict the same token from nearly the same context, so unrolling
    every root says everything `ttt_length` times. `unrolled_fraction` of the roots, drawn per optimiser step, go
    beyond step 0; step 0, which is what all later steps build on, is trained at every root, and for the first
    `single_step_ratio` of the run alone. Measured on a half-trained quickstart target for equal arithmetic (400 k
    token predictions, one run each): theoretical speed-up 3.95 with all roots unrolled from the start, 4.32 after
    30 % of the arithmetic on the first step alone, 4.73 with a third of the roots unrolled.
    """

    def __init__(self, drafter: Eagle3Drafter, embed_VH: Tensor, lm_head_VH: Tensor, *, ttt_length: int,
                 step_decay: float, max_positions: int, unrolled_fraction: float = 1.0,
                 single_step_ratio: float = 0.0, dtype: torch.dtype = torch.float32, loss: Loss = "kl",
                 normalisation: Normalisation = "token", recompute: bool = False,
                 max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        config = drafter.config
        self._drafter, self._embed_VH, self._lm_head_VH = drafter, embed_VH, lm_head_VH
        self._ttt_length, self._step_decay, self.dtype = ttt_length, step_decay, dtype
        self._unrolled_fraction, self._single_step_ratio = unrolled_fraction, single_step_ratio
        self._loss, self._normalisation, self._recompute = loss, normalisation, recompute
        self._max_kept_bytes = max_kept_bytes
        self._draft_ids_D = drafter.vocabulary.ids
        self._rotary = Rotary(config.rope, config.head_dim, max_positions + ttt_length)

    @property
    def drafter(self) -> Eagle3Drafter:
        """The module being trained."""
        return self._drafter

    def __call__(self, documents: PackedDocuments, moment: Moment | None = None,
                 lesson: Lesson | None = None) -> Outcome:
        """Unroll, compare, weigh. See `training.layout` for what is supervised, `training.losses` for how."""
        layout = self.plan(documents, moment)
        lesson = lesson or self.teach(documents, layout.teacher_positions())
        judged = moment is None
        cuts = [layout] if judged else parts(layout, self._most_roots(layout))
        asked = [_asked(cut) for cut in cuts]
        step_N, position_N = (torch.cat(column) for column in zip(*asked, strict=True))
        row_N, inside_T = lesson.row_T[position_N], lesson.teacher.inside_R
        document_T = torch.repeat_interleave(torch.arange(len(documents.lengths)), torch.tensor(documents.lengths))
        share_N = shares(step_N, document_T[position_N], inside_T[row_N], self._ttt_length, self._step_decay,
                         self._normalisation, _alone if moment is None else moment.total)
        if layout.num_supervised == 0:
            return Outcome(self._zero(), torch.zeros(0), 0)
        weights = self._drafter.weights(self.dtype)
        ground = lay_ground(weights, self._rotary, self._embed_VH, documents, layout.positions)
        told: list[tuple[Tensor, Tensor]] = []

        def lose(number: int, ground: Ground, weights: Eagle3Weights) -> Tensor:
            """The loss of one part of the roots."""
            before = sum(steps.numel() for steps, _ in asked[:number])
            mine = slice(before, before + asked[number][0].numel())
            states = [step.state for step in unroll(weights, self._rotary, ground, cuts[number], self._recompute)]
            loss, losses_N, choice_N = soft_loss(torch.cat(states), weights.lm_head, lesson.teacher, row_N[mine],
                                                 share_N[mine], self._loss, choose=judged)
            told.append((losses_N, choice_N))
            return loss

        loss = lose(0, ground, weights) if len(cuts) == 1 else in_parts(len(cuts), lose, ground, weights)
        losses_N, choice_N = (torch.cat(column) for column in zip(*told, strict=True))
        inside_N = inside_T[row_N]
        counts_S = torch.bincount(step_N, weights=inside_N).clamp(min=1.0)
        hits_N = (choice_N == lesson.teacher.choice_R[row_N]) & inside_N if judged else torch.zeros(0)
        return Outcome(loss, torch.bincount(step_N, weights=losses_N * inside_N) / counts_S, layout.num_supervised,
                       hits_N.split([alive for alive in layout.alive if alive]) if judged else (),
                       step_flops(self._drafter.config, layout),
                       sum(rounded(alive) for cut in cuts for alive in cut.alive if alive))

    def _most_roots(self, layout: UnrollLayout) -> int:
        """Roots unrolled at a time, from what one keeps for its gradient."""
        config, steps = self._drafter.config, sum(alive > 0 for alive in layout.alive)
        kept = 12 * config.hidden_size + (0 if self._recompute else 2 * config.intermediate_size)
        return max(32, self._max_kept_bytes // (kept * max(1, steps) * self.dtype.itemsize) // 32 * 32)

    @property
    def teacher_key(self) -> tuple[int, bool]:
        """Objectives over the same states with the same key may share a lesson."""
        return self._draft_ids_D.numel(), self._loss != "kl"

    def plan(self, documents: PackedDocuments, moment: Moment | None) -> UnrollLayout:
        """What of a batch is computed at a moment."""
        if moment is None:
            return lay_out(documents.loss_mask, documents.lengths, self._ttt_length)
        single = moment.step < self._single_step_ratio * moment.num_steps
        deep = None
        if not single and self._unrolled_fraction < 1.0:
            draws = np.random.default_rng((moment.seed, moment.step, 0xDEEB)).random(_end(documents, moment))
            if moment.starts is not None:
                draws = np.concatenate([draws[start:start + length]
                                        for start, length in zip(moment.starts, documents.lengths, strict=True)])
            deep = torch.from_numpy(draws < self._unrolled_fraction)
        return lay_out(documents.loss_mask, documents.lengths, 1 if single else self._ttt_length, deep)

    def teach(self, documents: PackedDocuments, positions: Tensor) -> Lesson:
        """The teacher at the given packed positions, ascending."""
        row_T = torch.full_like(documents.token_ids, -1)
        row_T[positions] = torch.arange(positions.numel())
        if documents.opinion is not None:
            rows = opinion_rows(documents.loss_mask, documents.lengths)[positions]
            return Lesson(row_T, teacher_of(documents.opinion, rows, self._draft_ids_D.numel()))
        last = documents.last.index_select(0, positions)
        return Lesson(row_T, teach(last, self._lm_head_VH, self._draft_ids_D, self._drafter.t2d,
                                   weigh=self._loss != "kl"))

    def _zero(self) -> Tensor:
        return torch.stack([parameter.sum() * 0 for parameter in self._drafter.parameters()]).sum()


def _asked(layout: UnrollLayout) -> tuple[Tensor, Tensor]:
    """Of every prediction, step by step: its step, and the packed position the teacher is asked at."""
    steps = torch.repeat_interleave(torch.arange(len(layout.alive)), torch.tensor(layout.alive))
    roots = torch.cat([layout.roots[:alive] for alive in layout.alive])
    return steps, roots + 1 + steps


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, num_parts: int, lose: Callable[[int, Sequence[Tensor]], Tensor], *tensors: Tensor) -> Tensor:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        loss = torch.zeros((), dtype=torch.float64)
        for number in range(num_parts):
            with torch.enable_grad():
                part = lose(number, leaves)
            part.backward()
            loss += part.detach()
        ctx.grads = [leaf.grad for leaf in leaves]
        return loss.to(part.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        return None, None, *(grads if grad == 1 else [None if one is None else one * grad for one in grads])


def in_parts(num_parts: int, lose: Callable[[int, Ground, Eagle3Weights], Tensor], ground: Ground,
             weights: Eagle3Weights) -> Tensor:
    """sum over parts of lose(part, ground, weights), each part's gradient made before the next part begins.

    Roots of a batch share nothing but ground and weights. So a part's activations are done with when its gradients to
    these two are known: memory is that of one part, and nothing is computed twice.
    """
    on = (ground.embed, ground.fused, ground.q, ground.k, ground.v)

    def lose_with(number: int, leaves: Sequence[Tensor]) -> Tensor:
        return lose(number, Ground(*leaves[: len(on)]), weights.with_unrolled(leaves[len(on):]))

    if not torch.is_grad_enabled():
        return torch.stack([lose(number, ground, weights) for number in range(num_parts)]).sum()
    loss: Tensor = _InParts.apply(num_parts, lose_with, *on, *weights.unrolled())
    return loss


def _end(documents: PackedDocuments, moment: Moment) -> int:
    """Tokens of the step's whole batch, as far as this part of it reaches."""
    if moment.starts is None:
        return documents.token_ids.numel()
    return max(start + length for start, length in zip(moment.starts, documents.lengths, strict=True))


def join(rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> PackedDocuments:
    """Pack (token_ids [T], loss_mask [T], aux [T, A, H], last [T, H]) rows end to end."""
    token_ids, loss_mask, aux, last = zip(*rows, strict=True)
    return PackedDocuments(torch.cat(token_ids), torch.cat(loss_mask), torch.cat(aux), torch.cat(last),
                           tuple(ids.numel() for ids in token_ids))
