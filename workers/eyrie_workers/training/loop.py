"""The optimiser's loop, one step at a time.

`Trainer` owns what changes: parameters, moments, counters. It knows neither files nor signals: the stage program asks
for a step, and between two steps may save, export, evaluate or stop. Everything a step does is a function of the state
before it and the step's number, which is what makes a resumed run equal an uninterrupted one.

    trainer = Trainer(objective, schedule, spec, read)
    while not trainer.finished:
        report = trainer.step()
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from eyrie_api.errors import LossDiverged
from eyrie_api.v1alpha1.job import TrainSpec
from eyrie_workers.training.objective import Moment, Objective
from eyrie_workers.training.packing import Schedule
from eyrie_workers.training.state import Counters
from eyrie_workers.training.unroll import PackedDocuments

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
    return spec.learning_rate * warm * shape


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
    """Runs an objective over a schedule."""

    def __init__(self, objective: Objective, schedule: Schedule, spec: TrainSpec,
                 read: Callable[[Sequence[int]], PackedDocuments]) -> None:
        self.objective, self.schedule, self.spec = objective, schedule, spec
        self.counters = Counters()
        self._read = read
        self._parameters = [p for p in objective.drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self._parameters, lr=spec.learning_rate, betas=(spec.beta1, spec.beta2),
                                           weight_decay=spec.weight_decay, fused=True)

    @property
    def finished(self) -> bool:
        """Whether every step has been done."""
        return self.counters.step >= self.schedule.num_steps

    def step(self) -> StepReport:
        """Do the next step. Raises LossDiverged, before any parameter has changed, when the loss or its gradient is
        not a number."""
        number, started = self.counters.step, time.perf_counter()
        plan = self.schedule.at(number)
        documents = self._read(plan.rows)
        waited = time.perf_counter() - started
        rate = learning_rate_at(number, self.schedule.num_steps, self.spec)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        outcome = self.objective(documents, Moment(number, self.schedule.num_steps, self.spec.seed))
        outcome.loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.spec.max_grad_norm, foreach=True)
        loss, norm = float(outcome.loss.detach()), float(grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise LossDiverged(
                f"loss was {loss} with gradient norm {norm} at step {number + 1} of {self.schedule.num_steps}",
                f"lower train.learning_rate (now {self.spec.learning_rate:g}) or train.max_grad_norm "
                f"(now {self.spec.max_grad_norm:g}), or lengthen train.warmup_ratio")
        self.optimizer.step()
        self._count(documents, outcome.supervised, loss, started, waited)
        return StepReport(step=number + 1, epoch=plan.epoch, loss=loss, learning_rate=rate, grad_norm=norm,
                          tokens=documents.token_ids.numel(), supervised_tokens=outcome.supervised)

    def _count(self, documents: PackedDocuments, supervised: int, loss: float, started: float, waited: float) -> None:
        before, old = self.counters, self.counters.loss_ema
        self.counters = replace(
            before, step=before.step + 1, tokens=before.tokens + documents.token_ids.numel(),
            supervised_tokens=before.supervised_tokens + supervised,
            seconds=before.seconds + time.perf_counter() - started, data_wait_s=before.data_wait_s + waited,
            loss_ema=loss if old is None else _EMA * old + (1 - _EMA) * loss)
