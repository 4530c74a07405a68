"""Tokens of a training step where the job names none, by hardware. Pure; `eyrie plan` and the train stage read it.

A GPU computes products of a few thousand rows at its rate, and the optimiser's own work is the same for any number of
tokens: a step wants as many as its memory holds, up to a number beyond which more only make fewer steps. A CPU is at
its rate with a few hundred rows, and small steps train faster per token there.
"""

from eyrie_api.decisions.training_cost import StepSetting, TrainedDrafter, expected_work, largest_tokens
from eyrie_api.v1alpha1.training import TrainSpec

CPU_TOKENS_PER_STEP = 2048
GPU_TOKENS = 16_384
"""Per GPU and step."""

# A batch whose size is not known to fit must fit at its worst: every token supervised, every document as long as it.
_WORST_SHARE = 1.0


def expected_setting(train: TrainSpec, *, compute_bytes: int, num_ranks: int, top_k: int | None = None) -> StepSetting:
    """The setting of a job's step on GPUs whose target is stored in 16 bits."""
    return StepSetting(compute_bytes=compute_bytes, num_ranks=num_ranks, recompute=train.grad_checkpoint, top_k=top_k)


def tokens_that_fit(drafter: TrainedDrafter, train: TrainSpec, setting: StepSetting, device_bytes: int) -> int:
    """Most tokens that one GPU computes at a time, if every one of them is supervised; 0 if none do."""
    return largest_tokens(drafter, lambda tokens: expected_work(
        tokens, supervised_share=_WORST_SHARE, ttt_length=train.ttt_length,
        unrolled_fraction=train.unrolled_fraction, row_tokens=tokens), setting, device_bytes)


def with_tokens(train: TrainSpec, num_gpus: int, most: int | None = None) -> TrainSpec:
    """The spec with the numbers of tokens that it leaves open.

    num_gpus  processes that each have a GPU; 0: all compute on CPUs.
    most      tokens that one GPU can compute at a time, where that is known.
    """
    at_a_time = train.max_tokens_per_gpu
    if at_a_time is None and num_gpus:
        at_a_time = GPU_TOKENS if most is None else min(GPU_TOKENS, most)
    step = train.max_tokens_per_batch
    if step is None:
        step = num_gpus * (at_a_time or 0) or CPU_TOKENS_PER_STEP
    return train.model_copy(update={"max_tokens_per_gpu": at_a_time, "max_tokens_per_batch": step})


def tokens_per_step(train: TrainSpec, num_gpus: int = 0) -> int:
    """Packed tokens of a step, over all processes."""
    tokens = with_tokens(train, num_gpus).max_tokens_per_batch
    assert tokens is not None
    return tokens
