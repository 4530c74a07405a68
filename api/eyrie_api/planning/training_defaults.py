"""Tokens of a training step where the job names none, by hardware, and whether a GPU holds them. Pure; `eyrie plan` and
the train stage read it.

A GPU computes products of a few thousand rows at its rate, and the optimizer's own work is the same for any number of
tokens: a step wants as many as its memory holds, up to `GPU_TOKENS`, and fewer where the data is so little that a run
would have few steps. A CPU is at its rate with a few hundred rows, and small steps train faster per token there.
"""

import re
from dataclasses import dataclass, replace
from math import ceil

from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import GpuTooSmall
from eyrie_api.planning.training_cost import (
    StepBytes,
    StepSetting,
    StepWork,
    TrainedDrafter,
    expected_work,
    largest_tokens,
    needed_bytes,
)

_GB = 10**9
_NAMED_GB = re.compile(r"(\d+)GB")
_KNOWN_GB = {"H200": 141, "H100-NVL": 94, "H100": 80}
"""By part of a node label that names no size."""

CPU_TOKENS_PER_STEP = 2048
GPU_TOKENS = 16_384
"""Per GPU and step, also where its memory holds more: with these an H100 reaches half of its fastest product already
(docs/results/gpu.md), and whether drafters learn as well from larger steps has not been measured."""

_STEPS_PER_EPOCH = 64
"""Fewest of a run that leaves the tokens of a step open, where CPU_TOKENS_PER_STEP allow as many. The demo's data
trained in 20 steps of GPU_TOKENS to a theoretical speed-up of 1.46, in 160 of CPU_TOKENS_PER_STEP to 2.77
(docs/results/training.md)."""

_FEWEST_TOKENS = 1024
"""Below this a GPU is far from its rate, and a job that leaves the number open is refused instead."""


def with_tokens(train: TrainSpec, num_gpus: int, epoch_tokens: int) -> TrainSpec:
    """The spec with the numbers of tokens that it leaves open.

    num_gpus      processes that each have a GPU; 0: all compute on CPUs.
    epoch_tokens  of the rows that are trained on.
    """
    at_a_time, step = train.max_tokens_per_gpu or (GPU_TOKENS if num_gpus else None), train.max_tokens_per_batch
    if step is None:
        step = num_gpus * (at_a_time or 0)
        while step >= 2 * CPU_TOKENS_PER_STEP and step * _STEPS_PER_EPOCH > epoch_tokens:
            step //= 2
    return train.model_copy(update={
        "max_tokens_per_gpu": at_a_time, "max_tokens_per_batch": step or CPU_TOKENS_PER_STEP})


def tokens_per_step(train: TrainSpec) -> int:
    """Packed tokens of a step, over all processes, of a spec of `with_tokens`."""
    assert train.max_tokens_per_batch is not None
    return train.max_tokens_per_batch


def gpu_bytes(gpu_type: str | None) -> int | None:
    """Memory of a GPU by its node label (`NVIDIA-H100-80GB-HBM3`); None where the label does not say."""
    named = named_gb(gpu_type)
    return None if named is None else named * _GB


def named_gb(gpu_type: str | None) -> int | None:
    """The same in GB, as the label names it."""
    label = (gpu_type or "").replace(" ", "-")
    named = _NAMED_GB.search(label)
    if named is not None:
        return int(named[1])
    return next((size for part, size in _KNOWN_GB.items() if part in label), None)


@dataclass(frozen=True)
class TrainingOnGpus:
    """What the memory of a training run depends on; `train` as `with_tokens` returns it."""

    drafter: TrainedDrafter
    train: TrainSpec
    num_gpus: int
    supervised_share: float
    """Of the data's tokens."""

    row_tokens: float
    """Mean of a row."""

    compute_bytes: int = 2
    top_k: int | None = None
    streamed_bytes: int = 0
    """Of the target that computes the states on each of the GPUs (`training_cost.streamed_bytes`)."""

    def need(self, device_bytes: int) -> StepBytes:
        """Bytes of a step on each GPU of this size."""
        return needed_bytes(self.drafter, self._work(self.tokens), self._setting, device_bytes)

    @property
    def tokens(self) -> int:
        """Most tokens that one GPU computes at a time."""
        step = -(-tokens_per_step(self.train) // self.num_gpus)
        return min(step, self.train.max_tokens_per_gpu or step)

    def fitted(self, device_bytes: int, usable: int, longest_row: int) -> "TrainingOnGpus":
        """With half, a quarter, ... of the tokens at a time where a GPU does not hold all: for a job that leaves
        `max_tokens_per_gpu` open. The step keeps its tokens and is computed in micro-batches, so the drafter is the
        same up to rounding. Never fewer than the longest row, which would be cut; unchanged where none fits."""
        tokens = self.tokens
        while tokens >= max(_FEWEST_TOKENS, longest_row):
            smaller = replace(self, train=self.train.model_copy(update={"max_tokens_per_gpu": tokens}))
            if smaller.need(device_bytes).total <= usable:
                return smaller
            tokens //= 2
        return self

    def require(self, device_bytes: int, device: str, usable: int) -> StepBytes:
        """The need of a step. Raises GpuTooSmall when it is more than `usable` bytes, with the number to change."""
        need = self.need(device_bytes)
        if need.total <= usable:
            return need
        # With fewer tokens at a time the same step is computed in micro-batches.
        fitting = largest_tokens(self.drafter, self._work, replace(self._setting, accumulating=True), device_bytes)
        part = f"{need.largest} {need.components[need.largest] / _GB:.1f} GB"
        stored = "set capture.mode to 'store', or " if self.streamed_bytes else ""
        raise GpuTooSmall(
            f"a training step of {self.tokens} tokens needs {need.total / _GB:.1f} GB on each GPU ({part}), and "
            f"{device} has {usable / _GB:.1f} GB for it",
            stored + (f"lower train.max_tokens_per_gpu to {fitting}" if fitting else
                      "use GPUs with more memory or more of them, or lower drafter.intermediate_size or "
                      "drafter.draft_vocab_size"))

    @property
    def _setting(self) -> StepSetting:
        return StepSetting(compute_bytes=self.compute_bytes, num_ranks=self.num_gpus, top_k=self.top_k,
                           streamed_bytes=self.streamed_bytes, recompute=self.train.grad_checkpoint,
                           accumulating=tokens_per_step(self.train) > self.num_gpus * self.tokens)

    def _work(self, tokens: int) -> StepWork:
        work = expected_work(tokens, supervised_share=self.supervised_share, ttt_length=self.train.ttt_length,
                             unrolled_fraction=self.train.unrolled_fraction, row_tokens=self.row_tokens)
        # The targets of all micro-batches exist before the first is trained on.
        share = tokens_per_step(self.train) / self.num_gpus
        return replace(work, teacher_rows=ceil(work.teacher_rows * max(1.0, share / tokens)))
