"""The EAGLE-3 objective: from packed documents to one loss, and to the hits that evaluation counts.

A family of drafters trains by any objective with these two verbs (`Objective`): the loop knows neither TTT nor EAGLE.

    T packed tokens, R roots, S steps, H hidden, D draft vocabulary, V vocabulary
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from eyrie_workers.drafters.eagle3 import Eagle3Drafter
from eyrie_workers.drafters.rotary import Rotary
from eyrie_workers.training.layout import UnrollLayout, lay_out
from eyrie_workers.training.losses import Normalisation, Teacher, shares, teach
from eyrie_workers.training.softloss import Loss, soft_loss
from eyrie_workers.training.unroll import PackedDocuments, unroll


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

    def __call__(self, documents: PackedDocuments, moment: Moment | None = None) -> Outcome:
        """Loss of a batch at a moment of training; without a moment it is judged: everything unrolled, hits counted.

        A function of its arguments and the parameters alone. A batch without roots has loss 0.
        """
        ...


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
                 normalisation: Normalisation = "token", recompute: bool = False) -> None:
        config = drafter.config
        self._drafter, self._embed_VH, self._lm_head_VH = drafter, embed_VH, lm_head_VH
        self._ttt_length, self._step_decay, self.dtype = ttt_length, step_decay, dtype
        self._unrolled_fraction, self._single_step_ratio = unrolled_fraction, single_step_ratio
        self._loss, self._normalisation, self._recompute = loss, normalisation, recompute
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
        weights = self._drafter.weights(self.dtype)
        steps = list(unroll(weights, self._rotary, self._embed_VH, documents, layout, self._recompute))
        total = _alone if moment is None else moment.total
        sizes = torch.tensor([step.teacher.numel() for step in steps], dtype=torch.int64)
        step_N = torch.repeat_interleave(torch.arange(len(steps)), sizes)
        asked_N = torch.cat([step.teacher for step in steps]) if steps else torch.zeros(0, dtype=torch.int64)
        row_N, teacher = lesson.row_T[asked_N], lesson.teacher
        document_T = torch.repeat_interleave(torch.arange(len(documents.lengths)), torch.tensor(documents.lengths))
        inside_N = teacher.inside_R[row_N]
        share_N = shares(step_N, document_T[asked_N], inside_N, self._ttt_length, self._step_decay,
                         self._normalisation, total)
        if not steps:
            return Outcome(self._zero(), torch.zeros(0), 0)
        loss, losses_N, choice_N = soft_loss(torch.cat([step.state for step in steps]), weights.lm_head, teacher, row_N,
                                             share_N, self._loss, choose=moment is None)
        sums_S = torch.bincount(step_N, weights=losses_N * inside_N)
        hits_N = (choice_N == teacher.choice_R[row_N]) & inside_N if moment is None else None
        return Outcome(loss, sums_S / torch.bincount(step_N, weights=inside_N).clamp(min=1.0), layout.num_supervised,
                       () if hits_N is None else hits_N.split(sizes.tolist()))

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
        last = documents.last.index_select(0, positions)
        return Lesson(row_T, teach(last, self._lm_head_VH, self._draft_ids_D, self._drafter.t2d))

    def _zero(self) -> Tensor:
        return torch.stack([parameter.sum() * 0 for parameter in self._drafter.parameters()]).sum()


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
