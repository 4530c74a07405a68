"""What the training of all families has in common: from packed documents to one loss, and to the hits of evaluation.

Whatever its architecture, a drafter reads the accepted text up to position i, whose next token is known, and proposes
tokens i+2, i+3, ..: step s proposes token i+2+s, and is compared with the target's distribution computed from its final
state at i+1+s. So the positions that propose (`training.unroll_plan`), the target's distributions, the weight of each
prediction and the definition of a hit are the same for all families, and `Objective` holds them. A family adds its
states at (position, step), and the output matrix that reads them.

**Target distributions.** The drafter is trained on the softmax of the target's logits (`targets.operators`),
renormalised over the draft vocabulary: the best distribution it can represent (EAGLE-3, arXiv:2503.01840 section 3.1).
Where the target's most probable token is outside that vocabulary, no draft token can match it; such positions are left
out of the loss.

**Weights.** A step's loss is a mean over its supervised predictions, for each unrolled step separately, and the steps
are weighted by `decay ** s`. Dividing by all positions of a batch, prompts and padding included, would make the
effective learning rate depend on the length of the prompts. Two means are available:

    token      every prediction of a step has the same weight
    sequence   every document of a step has the same weight, however long its answer

All counts are over the whole batch of a step, on all processes, so that the loss does not depend on how the batch was
split.

    T packed tokens, R roots or rows of the target table, S steps, N predictions of all steps, H hidden,
    D draft vocabulary, V target vocabulary
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyrie_api.artifacts import digest_bytes
from eyrie_api.contract.training import TrainSpec
from eyrie_kernels.soft_target_loss import Loss
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.hidden_states.shard_format import TopKLogits
from eyrie_workers.hidden_states.topk_logits import rebuild_distribution, topk_rows
from eyrie_workers.targets.device import CPU, device_scope
from eyrie_workers.targets.draft_vocabulary import DraftVocabulary
from eyrie_workers.targets.operators import OutputHead
from eyrie_workers.training.numerics import TargetTable, matmul_as, pad_rows, soft_target_loss
from eyrie_workers.training.unroll_plan import UnrollPlan, plan_unroll

Normalization = Literal["token", "sequence"]
DrafterT = TypeVar("DrafterT", bound=nn.Module)

# Elements of the target's logits computed at a time. 1 Mi floats are 4 MiB, near a core's last cache; a GPU needs
# products large enough for all its multiprocessors, and 64 Mi floats are 256 MiB.
_MAX_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 26}
_TABLE_ROWS = 256  # of the target's distributions that are looked up at once


@dataclass(frozen=True)
class TargetHead:
    """The target's output head, and which of its rows the drafter predicts.

    output      of the target; its matrix is [V, H]
    ids_D       [D] int64 target ids of the draft vocabulary, ascending, on the matrix's device.
    member_V    [V] bool membership, on the matrix's device.
    vocabulary  the same on the CPU: the host does not wait for a GPU to know them.
    """

    output: OutputHead
    ids_D: Tensor
    member_V: Tensor
    vocabulary: DraftVocabulary

    @staticmethod
    def of(output: OutputHead, vocabulary: DraftVocabulary) -> "TargetHead":
        """On the device of the matrix, in its dtype."""
        device = output.weight_VH.device
        return TargetHead(output, vocabulary.ids.to(device), vocabulary.t2d.to(device),
                          DraftVocabulary(vocabulary.ids.cpu(), vocabulary.vocab_size))


@torch.no_grad()
def compute_target_table(last_RH: Tensor, head: TargetHead, weigh: bool = True) -> TargetTable:
    """The target's distributions at the positions whose final states are given.

    last_RH      [R, H]  states after the target's final norm; R may be 0.
    weigh        whether `mass` is computed; otherwise it is 1 everywhere.

    The vocabulary is processed in blocks, of which the running maximum, the running log-sum-exp and the logits of the
    draft ids are kept: [R, V] is never built, and the target's matrix is read once.
    """
    num_rows, draft_vocab, device = last_RH.shape[0], head.ids_D.numel(), last_RH.device
    table_RD = torch.empty(num_rows, draft_vocab, device=device)
    most_R = torch.full((num_rows,), -torch.inf, device=device)
    first_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
    total_R = torch.full((num_rows,), -torch.inf, device=device)
    # Products in the output matrix's dtype; maximum, log-sum-exp and softmax in float32.
    rows = pad_rows(last_RH, head.output.weight_VH.dtype)
    size = max(1024, _MAX_LOGITS[device.type] // max(1, num_rows) // 1024 * 1024)
    # How many draft ids lie before each block of columns, and before the end: on the CPU, so that no GPU is waited for.
    starts = torch.arange(0, head.output.weight_VH.shape[0] + size, size, device=head.vocabulary.ids.device)
    ends: list[int] = torch.searchsorted(head.vocabulary.ids, starts).tolist()
    for number, block_VH in enumerate(head.output.weight_VH.split(size)):
        logits_RV = head.output.capped(matmul_as(rows, block_VH.T, torch.float32)[:num_rows])
        block_most_R, block_first_R = logits_RV.max(-1)
        # Strictly greater: of equal logits in two blocks the earlier block's token is kept.
        first_R = torch.where(block_most_R > most_R, block_first_R + number * size, first_R)
        most_R = torch.maximum(most_R, block_most_R)
        # Draft ids are ascending, so those of this block are one slice of the table.
        ids = head.ids_D[ends[number]: ends[number + 1]] - number * size
        table_RD[:, ends[number]: ends[number + 1]] = (
            logits_RV if ids.numel() == logits_RV.shape[1] else logits_RV.index_select(1, ids))
        if weigh:
            total_R = torch.logaddexp(total_R, logits_RV.logsumexp(-1))
    mass_R = (table_RD.logsumexp(-1) - total_R).exp_() if weigh else torch.ones(num_rows, device=device)
    torch.softmax(table_RD, -1, out=table_RD)
    return TargetTable(table_RD, mass_R, head.member_V[first_R],
                      torch.searchsorted(head.ids_D, first_R).clamp_(max=max(0, draft_vocab - 1)))


def topk_table(topk_logits: TopKLogits, draft_vocab_size: int) -> TargetTable:
    """The table of stored top-k logits (`hidden_states.topk_logits`) of the needed positions, on their device. It stays
    as sparse as it is stored."""
    def dense(index_N: Tensor) -> Tensor:
        return rebuild_distribution(topk_logits.map(lambda x: x.index_select(0, index_N)), draft_vocab_size)

    # A choice of -1 marks a most probable token outside the draft vocabulary.
    return TargetTable(dense, topk_logits.mass, topk_logits.choice >= 0,
                       topk_logits.choice.clamp_min(0).to(torch.int64))


def step_weights(ttt_length: int, decay: float) -> list[float]:
    """Weights of the unrolled steps: `decay ** s`, scaled to sum 1, so that the learning rate does not depend on S."""
    raw = [decay**step for step in range(ttt_length)]
    return [weight / sum(raw) for weight in raw]


def shares(step_N: Tensor, document_N: Tensor, num_documents: int, counts_N: Tensor, ttt_length: int, decay: float,
           normalization: Normalization, total: Callable[[Tensor], Tensor]) -> Tensor:
    """[N] float32: the factor of each prediction's loss; over all processes they sum to 1.

    step_N      the unrolled step of each prediction, < `ttt_length`.
    document_N  its document, < `num_documents`.
    counts_N    bool: whether it is supervised; the share of the others is 0.
    total       sums a tensor over all processes; called once by every process, also without predictions.

    Everything stays on the device: the host does not wait for a count.
    """
    # float64: sums over a whole batch are divided by one another below.
    counted = counts_N.to(torch.float64)
    predicted_S, supervised_S = (sum_by(step_N, weight, ttt_length) for weight in (torch.ones_like(counted), counted))
    unit_N = counted
    if normalization == "sequence":
        cell_N = document_N * ttt_length + step_N
        per_cell = sum_by(cell_N, counted, num_documents * ttt_length)
        unit_N = counted / per_cell.clamp(min=1.0)[cell_N]
        supervised_S = (per_cell > 0).view(-1, ttt_length).sum(0, dtype=torch.float64)  # documents of the step
    predicted_S, supervised_S = total(torch.stack([predicted_S, supervised_S])).unbind(0)
    # Weights over the steps that exist in this batch: with short answers the last ones may have no root anywhere.
    # Row s of the table holds the weights where s + 1 steps exist: a look-up, because the number is on the device.
    num_steps = (predicted_S > 0).sum().clamp(min=1)
    rows = [step_weights(steps, decay) + [0.0] * (ttt_length - steps) for steps in range(1, ttt_length + 1)]
    table_SS = torch.tensor(rows, dtype=torch.float64, device=CPU).to(counted.device, non_blocking=True)
    weight_S = table_SS.index_select(0, num_steps.view(1) - 1)[0]
    return (unit_N * (weight_S / supervised_S.clamp(min=1.0))[step_N]).float()


def sum_by(index_N: Tensor, weight_N: Tensor, size: int) -> Tensor:
    """[size] sum of the weights of each index. `bincount` does the same, and reads its size back from a GPU."""
    return weight_N.new_zeros(size).index_add_(0, index_N, weight_N)


@dataclass(frozen=True)
class Outcome:
    """What an objective computes for one batch.

    loss        scalar, with gradients in training.
    supervised  token predictions of the batch, over all steps.
    hits        per step: [R_s] bool, the drafter's most probable token is the target's. Roots of step s are the first
                R_s of step s - 1, so "all hits so far" is a product of prefixes. Empty in training: finding the most
                probable token costs 4 % of a training step.
    confidences per step, in evaluation of a drafter with a confidence head: [R_s] its logits that predictions are hits.
    flops       arithmetic that training on the batch needs (`Objective.flops`).
    computed    token predictions computed, including those that pad to a round number of rows.
    """

    loss: Tensor
    supervised: int
    hits: tuple[Tensor, ...] = ()
    confidences: tuple[Tensor, ...] = ()
    flops: int = 0
    computed: int = 0


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


@dataclass(frozen=True)
class Supervision:
    """The target and the weight of each prediction of a plan, step by step in the order of its roots.

    row_N    [N] int64: each prediction's row of the target table.
    share_N  [N] float32: its share of the loss (`shares`).
    """

    targets: TargetDistribution
    row_N: Tensor
    share_N: Tensor

    def log_probabilities(self, index_M: Tensor, ids_MK: Tensor) -> Tensor:
        """[M, K] of some draft ids at some predictions, bounded from below by what float32 can hold."""
        parts = [self.targets.table.rows(self.row_N[index]).gather(1, ids)
                 for index, ids in zip(index_M.split(_TABLE_ROWS), ids_MK.split(_TABLE_ROWS), strict=True)]
        return torch.cat(parts).clamp_min(torch.finfo(torch.float32).tiny).log()


@dataclass(frozen=True)
class Prediction:
    """What a family computes at the positions and steps of a plan.

    states    per step with roots: [R_s, H] of its first R_s roots, as `heads` reads them.
    heads     [D, H], or one for each step.
    extra     [N] another loss of each prediction, weighted as its first (EAGLE-1's regression), or a function that has
              it from the target's distributions (LiLiCorr); None: none.
    computed  rows of `states` including those that pad to a round number; None: no row is padding.
    accepted  [N] logits of the probability that each prediction is accepted, trained with the first; None: none.
    base      states [N, H'] and matrix of the same predictions without what reads the drafted tokens, whose loss takes
              a share of the first's (`Objective.base_share`); None: none.
    """

    states: tuple[Tensor, ...]
    heads: Tensor | tuple[Tensor, ...]
    extra: Tensor | Callable[[Supervision], Tensor] | None = None
    computed: int | None = None
    accepted: Tensor | None = None
    base: tuple[Tensor, Tensor] | None = None


class Objective(ABC, Generic[DrafterT]):
    """How one family is trained on captured documents: over the draft vocabulary, on the target's distribution.

    A subclass defines `flops` and `predict`; and `plan`, if it does not train every root at every step.
    """

    def __init__(self, drafter: DrafterT, vocabulary: DraftVocabulary | int, output: OutputHead, spec: TrainSpec, *,
                 steps: int | None = None, dtype: torch.dtype = torch.float32) -> None:
        """drafter: the module whose parameters are trained. vocabulary: of its outputs; a number: all those tokens.
        output: the target's. dtype: of matrix products. steps: most tokens predicted ahead of a root; None: the spec's
        ttt_length."""
        if isinstance(vocabulary, int):
            vocabulary = DraftVocabulary(torch.arange(vocabulary), vocabulary)
        self.drafter, self.vocabulary, self.dtype = drafter, vocabulary, dtype
        self.steps = spec.ttt_length if steps is None else steps
        self.device = output.weight_VH.device
        self._scope = device_scope(self.device)
        self.loss_kind: Loss = spec.loss
        self._recompute, self._step_decay = spec.grad_checkpoint, spec.step_decay
        self._normalization: Normalization = spec.normalization
        self._head = TargetHead.of(output, vocabulary)
        self._vocabulary_digest = digest_bytes(vocabulary.ids.cpu().numpy().tobytes())

    @abstractmethod
    def flops(self, plan: UnrollPlan) -> int:
        """Arithmetic that a plan's loss and gradient require. The plan is on the CPU: its indices are read."""

    @abstractmethod
    def predict(self, documents: PackedBatch, plan: UnrollPlan, evaluating: bool) -> Prediction:
        """States at every root and step of the plan.

        evaluating  as in serving, from the drafter's own proposals where it reads any; otherwise as it is trained.
        """

    def calibrate(self, temperatures: tuple[float, ...]) -> None:
        """Let the drafter be exported with those of its confidences (`Evaluation.temperatures`)."""

    def base_share(self, context: StepContext) -> float:
        """The share of the loss that is `Prediction.base`'s at a training step."""
        return 0.0

    @property
    def target_key(self) -> tuple[str, bool]:
        """Objectives over the same states with equal keys may share a target distribution."""
        return self._vocabulary_digest, self.loss_kind != "kl"

    def plan(self, documents: PackedBatch, context: StepContext | None) -> UnrollPlan:
        """What is computed of a batch at a training step; without a context, in evaluation. Here every root and step.
        """
        return plan_unroll(documents.loss_mask, documents.lengths, self.steps)

    def target_distribution(self, documents: PackedBatch, positions: Tensor) -> TargetDistribution:
        """The target's distributions at the given packed positions, ascending; positions and tokens on the CPU."""
        topk_logits, rows = documents.topk_logits, positions
        if topk_logits is not None:
            rows = topk_rows(documents.loss_mask, documents.lengths)[positions]
        rows, positions = self._here(rows), self._here(positions)
        # From a packed position to its row: candidates of a sweep share one table and look up their own positions.
        row_T = torch.full((documents.token_ids.numel(),), -1, device=self.device)
        row_T[positions] = torch.arange(positions.numel(), device=self.device)
        if topk_logits is not None:
            needed = topk_logits.map(lambda x: self._here(x).index_select(0, rows))
            return TargetDistribution(row_T, topk_table(needed, self.vocabulary.size))
        last_RH = self._here(documents.last).index_select(0, rows)
        # Only the losses that measure acceptance read the mass of the draft vocabulary.
        return TargetDistribution(row_T, compute_target_table(last_RH, self._head, weigh=self.loss_kind != "kl"))

    def _here(self, x: Tensor) -> Tensor:
        """x on this objective's device. A blocking copy would wait for everything that a GPU still has to do."""
        return x.to(self.device, non_blocking=True)

    def supervise(self, documents: PackedBatch, plans: Sequence[UnrollPlan], context: StepContext | None,
                  targets: TargetDistribution | None) -> Supervision:
        """Targets and weights of what the parts `plans` of one plan predict, in that order. Plans and documents are on
        the CPU."""
        targets = targets or self.target_distribution(documents, plans[0].target_positions)
        # Of every prediction its step, and the packed position whose final state gives its target: step by step in the
        # order of the roots, as the states of an unroll are concatenated.
        step_N = torch.cat([torch.full((alive,), step, device=CPU) for part in plans
                            for step, alive in enumerate(part.alive)])
        root_N = torch.cat([part.roots[:alive] for part in plans for alive in part.alive])
        position_N = root_N + 1 + step_N
        lengths = torch.tensor(documents.lengths, device=CPU)
        document_T = torch.repeat_interleave(torch.arange(lengths.numel(), device=CPU), lengths)
        step_N, position_N, document_N = map(self._here, (step_N, position_N, document_T[position_N]))
        row_N, inside_R = targets.row_T[position_N], targets.table.inside_R
        # The weights come from counts over all parts and all processes, so that splitting a batch changes no gradient.
        share_N = shares(step_N, document_N, lengths.numel(), inside_R[row_N], self.steps, self._step_decay,
                         self._normalization, local_sum if context is None else context.total)
        return Supervision(targets, row_N, share_N)

    def count(self, documents: PackedBatch, context: StepContext,
              targets: TargetDistribution | None = None) -> tuple[TargetDistribution, Tensor]:
        """The batch's target distribution, and what `context.total` would be given: [2, S] predictions of each step,
        and those that are supervised."""
        counts: list[Tensor] = []

        def recorded(x: Tensor) -> Tensor:
            counts.append(x)
            return x

        plan = self.plan(documents, context)
        with self._scope:
            supervision = self.supervise(documents, [plan], replace(context, total=recorded), targets)
        return supervision.targets, counts[0]

    def __call__(self, documents: PackedBatch, context: StepContext | None = None,
                 targets: TargetDistribution | None = None) -> Outcome:
        """Loss of a batch at a training step. Without a context the batch is evaluated: all unrolled, hits counted.

        targets  the batch's target distribution, where it has been computed already (`stages.sweep`).

        A function of its arguments and the parameters alone. A batch without roots has loss 0. Planning runs on the
        CPU, the rest on the device of the target's output matrix.
        """
        plan = self.plan(documents, context)
        with self._scope:
            return self.compute(documents, plan, context, targets)

    def compute(self, documents: PackedBatch, plan: UnrollPlan, context: StepContext | None,
                targets: TargetDistribution | None) -> Outcome:
        """Predict, compare, weigh: `__call__` of a planned batch, in the scope of the device."""
        evaluating = context is None
        # 1. Targets and weights. Also without roots: `shares` sums over all processes, and every process must call it.
        supervision = self.supervise(documents, [plan], context, targets)
        if plan.num_predictions == 0:
            # A gradient of 0 for every parameter: the gradients of all processes are summed.
            zeros = [parameter.sum() * 0 for parameter in self.drafter.parameters()]
            return Outcome(torch.stack(zeros).sum(), 0)
        # 2. The family's states. It gets no target: `inputs` leaves out what predictions are compared with.
        prediction = self.predict(documents.inputs().to(self.device), plan.to(self.device), evaluating)
        # 3. Logits and loss: one pass where all steps share an output matrix, otherwise one per step.
        table, sizes = supervision.targets.table, [state.shape[0] for state in prediction.states]
        if isinstance(prediction.heads, Tensor):
            states_NH = torch.cat(prediction.states)
            loss, losses_N, choice_N = soft_target_loss(states_NH, prediction.heads, table, supervision.row_N,
                                                        supervision.share_N, self.loss_kind, evaluating)
            share = 0.0 if context is None or prediction.base is None else self.base_share(context)
            if prediction.base is not None and share > 0.0:
                base_loss, _, _ = soft_target_loss(*prediction.base, table, supervision.row_N, supervision.share_N,
                                                   self.loss_kind, evaluating)
                loss = (1.0 - share) * loss + share * base_loss
            if prediction.accepted is not None and not evaluating:
                loss = loss + self._acceptance_loss(prediction.accepted, states_NH.detach(), prediction.heads.detach(),
                                                    supervision, losses_N)
        else:
            per_step = [soft_target_loss(state, head, table, row, share, self.loss_kind, evaluating)
                        for state, head, row, share in zip(prediction.states, prediction.heads,
                                                           supervision.row_N.split(sizes),
                                                           supervision.share_N.split(sizes), strict=False)]
            loss = torch.stack([step_loss for step_loss, _, _ in per_step]).sum()
            choice_N = torch.cat([choice for _, _, choice in per_step])
        # 4. The family's own further loss, with the same weights.
        if prediction.extra is not None:
            extra_N = prediction.extra if isinstance(prediction.extra, Tensor) else prediction.extra(supervision)
            loss = loss + torch.dot(extra_N, supervision.share_N.to(extra_N.dtype))
        # 5. In evaluation the hits. A target token outside the draft vocabulary cannot be proposed: it is never one.
        hits: tuple[Tensor, ...] = ()
        confidences: tuple[Tensor, ...] = ()
        if evaluating:
            hits_N = (choice_N == table.choice_R[supervision.row_N]) & table.inside_R[supervision.row_N]
            hits = hits_N.split([alive for alive in plan.alive if alive])
            if prediction.accepted is not None:
                confidences = prediction.accepted.split([alive for alive in plan.alive if alive])
        supervised = plan.num_predictions
        return Outcome(loss, supervised, hits, confidences, self.flops(plan), prediction.computed or supervised)

    def _acceptance_loss(self, logits_N: Tensor, states_NH: Tensor, head_VH: Tensor, supervision: Supervision,
                         losses_N: Tensor) -> Tensor:
        """Cross-entropy of predicted acceptance against 1 - tv, the probability that verification accepts a token of
        the drafter's distribution: DSpark's loss of its confidence head (arXiv:2607.05147), as weighted as the first.
        """
        if self.loss_kind != "tv":  # another pass over the output matrix, without gradients
            losses_N = soft_target_loss(states_NH, head_VH, supervision.targets.table, supervision.row_N,
                                        supervision.share_N, "tv")[1]
        each_N = F.binary_cross_entropy_with_logits(logits_N, (1 - losses_N).clamp(0, 1).to(logits_N.dtype),
                                                    reduction="none")
        return torch.dot(each_N, supervision.share_N.to(each_N.dtype))


def plan_drawn(documents: PackedBatch, context: StepContext | None, spec: TrainSpec) -> UnrollPlan:
    """An unroll in which a random `unrolled_fraction` of the roots goes beyond step 0, and for the first
    `single_step_ratio` of the run none; in evaluation (no step context) all roots and steps."""
    if context is None:
        return plan_unroll(documents.loss_mask, documents.lengths, spec.ttt_length)
    single = context.step < spec.single_step_ratio * context.num_steps
    deep = None
    if not single and spec.unrolled_fraction < 1.0:
        deep = draw_positions(documents, context, spec.unrolled_fraction)
    return plan_unroll(documents.loss_mask, documents.lengths, 1 if single else spec.ttt_length, deep)


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
