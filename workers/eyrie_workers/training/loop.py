"""The optimiser's loop, one step at a time.

`Trainer` owns what changes: parameters, moments, counters. It knows neither files nor signals, nor where its batches
come from (`training.batch_loader`): the stage program asks for a step, and between two steps may save, export, evaluate
or stop. Everything a step does is a function of the state before it and the step's number, which is what makes a
resumed run equal an uninterrupted one.

    trainer = Trainer(objective, schedule, spec, feed)
    while not trainer.finished:
        report = trainer.step()
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from eyrie_api.errors import LossDiverged
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.training.batch_loader import Batch, BatchLoader
from eyrie_workers.training.distributed import SINGLE_PROCESS, DistContext
from eyrie_workers.training.objective import Objective, StepContext, TargetDistribution
from eyrie_workers.training.optimiser import adamw
from eyrie_workers.training.packing import Schedule
from eyrie_workers.training.state import Counters, trainable_parameters

DEFAULT_LEARNING_RATE = 1e-3
"""Peak of a run whose spec leaves it to the family, and whose family has no other wish."""

_WSD_DECAY_SHARE = 0.2
_EMA = 0.95


def learning_rate_at(step: int, num_steps: int, spec: TrainSpec) -> float:
    """Learning rate of step `step` (0-based) of `num_steps`: linear warm-up times the schedule. Never exactly 0.

    wsd (warm up, stay, decay: MiniCPM, arXiv:2404.06395) stays at its peak and falls linearly over the last fifth, so
    that a longer run shares its beginning with a shorter one.
    """
    warm = min(1.0, (step + 1) / max(1, round(spec.warmup_ratio * num_steps)))
    if spec.schedule == "constant":
        shape = 1.0
    elif spec.schedule == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    else:
        shape = min(1.0, (num_steps - step) / max(1.0, _WSD_DECAY_SHARE * num_steps))
    return peak_of(spec) * warm * shape


def peak_of(spec: TrainSpec) -> float:
    """The peak learning rate."""
    return DEFAULT_LEARNING_RATE if spec.learning_rate is None else spec.learning_rate


@dataclass(frozen=True)
class StepReport:
    """What one optimiser step did."""

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
    """Runs an objective over a schedule, in this process's part of a dist."""

    def __init__(self, objective: Objective, schedule: Schedule, spec: TrainSpec,
                 feed: BatchLoader, dist: DistContext = SINGLE_PROCESS, columns: Sequence[int] | None = None) -> None:
        """`columns`: places of the objective's layers among those that the feed yields; None: all."""
        self.objective, self.schedule, self.spec, self.dist = objective, schedule, spec, dist
        self.feed, self._columns = feed, columns
        self.counters = Counters()
        self.optimizer = adamw([parameter for _, parameter in trainable_parameters(objective.drafter)], dist.rank,
                               dist.size,
                               lr=peak_of(spec), betas=(spec.beta1, spec.beta2), weight_decay=spec.weight_decay)

    @property
    def finished(self) -> bool:
        """Whether every step has been done."""
        return self.counters.step >= self.schedule.num_steps

    def step(self) -> StepReport:
        """Do the next step. Raises LossDiverged, before any parameter has changed, when the loss or its gradient is
        not a number."""
        number, started = self.counters.step, time.perf_counter()
        batch = self.feed.take(number)
        waited = time.perf_counter() - started
        return self.learn(batch, started, waited)

    def learn(self, batch: Batch, started: float, waited: float = 0.0,
              lesson: TargetDistribution | None = None) -> StepReport:
        """Do the next step on its batch, which others may have read, and its teacher, which others may have asked."""
        number, num_steps = self.counters.step, self.schedule.num_steps
        rate = learning_rate_at(number, num_steps, self.spec)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        documents = batch.documents if self._columns is None else batch.documents.with_layers(self._columns)
        outcome = self.objective(documents, self.moment(batch), lesson)
        outcome.loss.backward()
        self.optimizer.reduce()
        grad_norm = self.optimizer.clip(self.spec.max_grad_norm)
        told = self.dist.total(torch.tensor([float(outcome.loss.detach()), outcome.supervised, batch.num_tokens,
                                              outcome.flops, outcome.computed], dtype=torch.float64)).tolist()
        loss, supervised, tokens, flops, norm = told[0], round(told[1]), round(told[2]), told[3], float(grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise LossDiverged(
                f"loss was {loss} with gradient norm {norm} at step {number + 1} of {num_steps}",
                f"lower train.learning_rate (now {peak_of(self.spec):g}) or train.max_grad_norm "
                f"(now {self.spec.max_grad_norm:g}), or lengthen train.warmup_ratio")
        self.optimizer.step()
        before, old = self.counters, self.counters.loss_ema
        self.counters = replace(
            before, step=before.step + 1, tokens=before.tokens + tokens,
            supervised_tokens=before.supervised_tokens + supervised, flops=before.flops + flops,
            computed_tokens=before.computed_tokens + round(told[4]),
            seconds=before.seconds + time.perf_counter() - started, data_wait_s=before.data_wait_s + waited,
            loss_ema=loss if old is None else _EMA * old + (1 - _EMA) * loss)
        return StepReport(step=number + 1, epoch=batch.plan.epoch, loss=loss, learning_rate=rate, grad_norm=norm,
                          tokens=tokens, supervised_tokens=supervised)

    def moment(self, batch: Batch) -> StepContext:
        """Where the run stands with this batch."""
        return StepContext(batch.plan.step, self.schedule.num_steps, self.spec.seed, batch.starts, self.dist.total)
