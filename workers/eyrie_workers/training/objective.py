"""The EAGLE-3 objective: from packed documents to one loss, and to the hits that evaluation counts.

A family of drafters trains by any objective with these two verbs (`Objective`): the loop knows neither TTT nor EAGLE.

    T packed tokens, R roots, S steps, H hidden, D draft vocabulary, V vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from eyrie_workers.drafters.eagle3 import Eagle3Drafter
from eyrie_workers.drafters.rotary import Rotary
from eyrie_workers.training.layout import UnrollLayout, lay_out
from eyrie_workers.training.losses import Teacher, step_loss, teach, total_loss
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


@dataclass(frozen=True)
class Moment:
    """Where in a training run a batch stands: all that may decide how it is treated."""

    step: int
    """0-based."""

    num_steps: int
    seed: int


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
                 single_step_ratio: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        config = drafter.config
        self._drafter, self._embed_VH, self._lm_head_VH = drafter, embed_VH, lm_head_VH
        self._ttt_length, self._step_decay, self._dtype = ttt_length, step_decay, dtype
        self._unrolled_fraction, self._single_step_ratio = unrolled_fraction, single_step_ratio
        self._draft_ids_D = drafter.vocabulary.ids
        self._rotary = Rotary(config.rope, config.head_dim, max_positions + ttt_length)

    @property
    def drafter(self) -> Eagle3Drafter:
        """The module being trained."""
        return self._drafter

    def __call__(self, documents: PackedDocuments, moment: Moment | None = None) -> Outcome:
        """Unroll, compare, weigh. See `training.layout` for what is supervised, `training.losses` for how."""
        layout = self._lay_out(documents, moment)
        taught_T, teacher = self._teach(documents, layout)
        losses, hits = [], []
        for step in unroll(self._drafter.weights(self._dtype), self._rotary, self._embed_VH, documents, layout):
            opinion = teacher.take(taught_T[step.teacher])
            losses.append(step_loss(step.logits, opinion))
            if moment is None:
                hits.append((step.logits.detach().argmax(-1) == opinion.choice_R) & opinion.inside_R)
        if not losses:
            return Outcome(self._zero(), torch.zeros(0), 0)
        return Outcome(total_loss(losses, self._step_decay), torch.stack([loss.detach() for loss in losses]),
                       layout.num_supervised, tuple(hits))

    def _lay_out(self, documents: PackedDocuments, moment: Moment | None) -> UnrollLayout:
        if moment is None:
            return lay_out(documents.loss_mask, documents.lengths, self._ttt_length)
        single = moment.step < self._single_step_ratio * moment.num_steps
        deep = None
        if not single and self._unrolled_fraction < 1.0:
            draws = np.random.default_rng((moment.seed, moment.step, 0xDEEB)).random(documents.token_ids.numel())
            deep = torch.from_numpy(draws < self._unrolled_fraction)
        return lay_out(documents.loss_mask, documents.lengths, 1 if single else self._ttt_length, deep)

    def _teach(self, documents: PackedDocuments, layout: UnrollLayout) -> tuple[Tensor, Teacher]:
        """The teacher at every position some step asks about, once; and each packed position's row in it."""
        asked_T = torch.zeros(documents.token_ids.numel(), dtype=torch.bool)
        for step, num_alive in enumerate(layout.alive):
            asked_T[layout.roots[:num_alive] + 1 + step] = True
        positions = asked_T.nonzero().squeeze(1)
        row_T = torch.full_like(documents.token_ids, -1)
        row_T[positions] = torch.arange(positions.numel())
        if positions.numel() == 0:
            return row_T, Teacher(torch.zeros(0, self._draft_ids_D.numel()), torch.zeros(0, dtype=torch.bool),
                                  torch.zeros(0, dtype=torch.int64))
        return row_T, teach(documents.last.index_select(0, positions), self._lm_head_VH, self._draft_ids_D,
                            self._drafter.t2d)

    def _zero(self) -> Tensor:
        return torch.stack([parameter.sum() * 0 for parameter in self._drafter.parameters()]).sum()


def join(rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> PackedDocuments:
    """Pack (token_ids [T], loss_mask [T], aux [T, A, H], last [T, H]) rows end to end."""
    token_ids, loss_mask, aux, last = zip(*rows, strict=True)
    return PackedDocuments(torch.cat(token_ids), torch.cat(loss_mask), torch.cat(aux), torch.cat(last),
                           tuple(ids.numel() for ids in token_ids))
