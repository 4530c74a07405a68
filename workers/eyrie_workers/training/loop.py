"""The training loop, one optimizer step at a time.

`Trainer` owns what changes: parameters, moments, counters. It touches neither files nor signals, nor the source of its
batches (`training.batches`): the stage program calls `step`, and between two steps may save, export, evaluate or
stop. A step is a function of the state before it and the step's number, so a resumed run equals an uninterrupted one.

    trainer = Trainer(objective, schedule, spec, loader)
    while not trainer.finished:
        report = trainer.step()
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import LossDiverged
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.training.batches import BatchLoader, Schedule, StepBatch, micro_batches
from eyrie_workers.training.distributed import SINGLE_PROCESS, DistContext, Optimizer
from eyrie_workers.training.objective import Objective, Outcome, StepContext, TargetDistribution
from eyrie_workers.training.state import Counters, trainable_parameters

DEFAULT_LEARNING_RATE = 1e-3
"""Peak learning rate where neither the spec nor the family sets one."""

_WSD_DECAY_SHARE = 0.2
_EMA = 0.95
"""Decay of the displayed loss; no decision depends on it."""


def expected_steps(done: Counters, num_steps: int, max_seconds: float | None) -> int:
    """Steps of a whole run: those of its schedule, or fewer where `max_seconds` will end it before, at the mean speed
    so far. Warm-up, decay and checkpoints are shares of this number, so that they end with the run.

    The first step counts as time, and not as speed: on a GPU it compiles kernels, and would use up the warm-up.
    """
    if max_seconds is None or done.step == 0:
        return num_steps
    left_s, later_s = max_seconds - done.spent_s, done.spent_s - done.first_s
    if left_s <= 0.0:
        return min(num_steps, done.step)
    if later_s <= 0.0:
        return num_steps
    return min(num_steps, done.step + max(1, int(left_s * (done.step - 1) / later_s)))


def learning_rate_at(step: int, num_steps: int, spec: TrainSpec) -> float:
    """Learning rate of step `step` (0-based) of `num_steps`: linear warm-up times the schedule. Never exactly 0.

    wsd (warmup-stable-decay: MiniCPM, arXiv:2404.06395) stays at its peak and falls linearly over the last fifth, so
    a longer run has the same beginning as a shorter one.
    """
    warm = min(1.0, (step + 1) / max(1, round(spec.warmup_ratio * num_steps)))
    if spec.schedule == "constant":
        shape = 1.0
    elif spec.schedule == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    else:
        shape = min(1.0, (num_steps - step) / max(1.0, _WSD_DECAY_SHARE * num_steps))
    return peak_learning_rate(spec) * warm * shape


def peak_learning_rate(spec: TrainSpec) -> float:
    return DEFAULT_LEARNING_RATE if spec.learning_rate is None else spec.learning_rate


@dataclass(frozen=True)
class StepReport:
    step: int
    """Steps done, this one included."""

    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    """Before clipping."""

    tokens: int
    supervised_tokens: int


class Trainer:
    """Runs an objective over a schedule, as one process of a data-parallel run."""

    def __init__(self, objective: Objective[Any], schedule: Schedule, spec: TrainSpec, loader: BatchLoader,
                 dist: DistContext = SINGLE_PROCESS, columns: Sequence[int] | None = None) -> None:
        """`columns`: positions of the objective's layers among those of the loader's batches; None: all."""
        self.objective, self.schedule, self.spec, self.dist = objective, schedule, spec, dist
        self.loader, self._columns = loader, columns
        self.counters = Counters()
        self.uncounted_s = 0.0
        """Since the last count of `Counters.spent_s`; the caller adds what it takes between steps."""

        parameters = [parameter for _, parameter in trainable_parameters(objective.drafter)]
        self.optimizer = Optimizer(parameters, dist.size, lr=peak_learning_rate(spec), betas=(spec.beta1, spec.beta2),
                                   weight_decay=spec.weight_decay)

    @property
    def num_steps(self) -> int:
        """Of the whole run, as far as it is known."""
        return expected_steps(self.counters, self.schedule.num_steps, self.spec.max_seconds)

    @property
    def finished(self) -> bool:
        return self.counters.step >= self.num_steps

    def step(self) -> StepReport:
        """Do the next step. Raises LossDiverged, before any parameter changes, when the loss or its gradient is not
        finite."""
        number, started = self.counters.step, time.perf_counter()
        batch = self.loader.take(number)
        waited_s = time.perf_counter() - started
        return self.train_on(batch, started, waited_s)

    def train_on(self, batch: StepBatch, started: float, waited_s: float = 0.0,
                 targets: TargetDistribution | None = None) -> StepReport:
        """Do the next step on its batch.

        started, waited_s  when the step began (`time.perf_counter`), and the seconds of it spent waiting for the batch.
        targets            the batch's target distribution, where it has been computed already (`stages.sweep`).
        """
        number, num_steps = self.counters.step, self.num_steps
        # 1. Learning rate: from the counters, so that nothing of the schedule needs saving.
        rate = learning_rate_at(number, num_steps, self.spec)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        # 2. Forward and backward on this process's documents. The loss is already divided by counts of the whole batch.
        documents = batch.documents if self._columns is None else batch.documents.with_layers(self._columns)
        outcome = self._accumulate(documents, self.context(batch), targets)
        # 3. Gradients: summed over processes, then clipped by the norm of the sum, as a single process would.
        self.optimizer.reduce()
        grad_norm = self.optimizer.clip(self.spec.max_grad_norm)
        # 4. Totals of all processes, in one collective. float64: float32 rounds counts above 2^24. Loss and norm are
        #    read together: the host waits for a GPU once in a step.
        own_loss, norm = torch.stack([outcome.loss.double(), grad_norm.detach().double()]).tolist()
        counted = time.perf_counter()
        loss, supervised, tokens, flops, computed, spent_s = self.dist.all_sum(torch.tensor(
            [own_loss, outcome.supervised, batch.num_tokens, outcome.flops, outcome.computed,
             (self.uncounted_s + counted - started) / self.dist.size], dtype=torch.float64)).tolist()
        # 5. Divergence, before the update: parameters and saved state stay those of the last good step. All processes
        #    see the same sums, so all of them raise.
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise LossDiverged(
                f"loss was {loss} with gradient norm {norm} at step {number + 1} of {num_steps}",
                f"lower train.learning_rate (now {peak_learning_rate(self.spec):g}) or train.max_grad_norm "
                f"(now {self.spec.max_grad_norm:g}), or lengthen train.warmup_ratio")
        # 6. Update, and count.
        self.optimizer.step()
        before, average = self.counters, self.counters.loss_ema
        self.counters = replace(
            before, step=before.step + 1, tokens=before.tokens + round(tokens),
            supervised_tokens=before.supervised_tokens + round(supervised), flops=before.flops + flops,
            computed_tokens=before.computed_tokens + round(computed),
            seconds=before.seconds + time.perf_counter() - started, data_wait_s=before.data_wait_s + waited_s,
            spent_s=before.spent_s + spent_s, first_s=before.first_s if before.step else spent_s,
            loss_ema=loss if average is None else _EMA * average + (1 - _EMA) * loss)
        self.uncounted_s = time.perf_counter() - counted
        return StepReport(step=number + 1, epoch=batch.plan.epoch, loss=loss, learning_rate=rate, grad_norm=norm,
                          tokens=round(tokens), supervised_tokens=round(supervised))

    def _accumulate(self, documents: PackedBatch, context: StepContext,
                    targets: TargetDistribution | None) -> Outcome:
        """Add the gradients of this process's documents, in micro-batches; their outcome, without a graph."""
        parts = micro_batches(documents, self.spec.max_tokens_per_gpu)
        if len(parts) == 1:
            outcome = self.objective(documents, context, targets)
            outcome.loss.backward()
            return replace(outcome, loss=outcome.loss.detach())
        assert context.starts is not None
        contexts = [replace(context, starts=context.starts[numbers.start:numbers.stop]) for numbers, _ in parts]
        ends = list(accumulate(part.token_ids.numel() for _, part in parts))
        # Each micro-batch is weighted by counts of the whole step, which are known once the targets of all of them are:
        # targets come first, and are kept.
        counted = []
        for (_, part), part_context, end in zip(parts, contexts, ends, strict=True):
            # A part's targets are looked up in the table of the whole batch.
            own = None if targets is None else replace(
                targets, row_T=targets.row_T[end - part.token_ids.numel():end])
            counted.append(self.objective.count(part, part_context, own))
        total = context.total(torch.stack([counts for _, counts in counted]).sum(0))
        outcomes = []
        for (_, part), part_context, (own, _) in zip(parts, contexts, counted, strict=True):
            outcome = self.objective(part, replace(part_context, total=lambda _: total), own)
            outcome.loss.backward()  # gradients add up in the parameters; the part's graph is freed
            outcomes.append(replace(outcome, loss=outcome.loss.detach()))
        return Outcome(torch.stack([outcome.loss for outcome in outcomes]).sum(),
                       sum(outcome.supervised for outcome in outcomes),
                       flops=sum(outcome.flops for outcome in outcomes),
                       computed=sum(outcome.computed for outcome in outcomes))

    def context(self, batch: StepBatch) -> StepContext:
        return StepContext(batch.plan.step, self.num_steps, self.spec.seed, batch.starts, self.dist.all_sum)
