"""How one drafter is trained: objective, optimizer, schedule, checkpoints."""

from typing import Literal

from pydantic import Field

from eyrie_api.contract.model import Frozen, Probability


class TrainSpec(Frozen):
    """How one drafter is trained."""

    ttt_length: int = Field(7, ge=1, le=16)
    """Drafter steps unrolled per position. Match or exceed the depth you will serve."""

    step_decay: float = Field(0.8, gt=0.0, le=1.0)
    """Weight of TTT step s is step_decay ** s (EAGLE-3 reference: 0.8)."""

    unrolled_fraction: float = Field(0.33, gt=0.0, le=1.0)
    """Share of the answer positions unrolled beyond the first TTT step, sampled again at every optimizer step.
    Neighbouring positions predict the same tokens, so a third of them trains nearly as well at less than half of the
    cost."""

    single_step_ratio: Probability = 0.45
    """Share of the optimizer steps, at the beginning, that train the first TTT step only: the later steps build on
    it, and it costs a seventh."""

    loss: Literal["kl", "tv", "lk", "lk_hybrid"] = "kl"
    """kl: match the target's distribution. tv, lk (minus log), lk_hybrid (kl first, then tv): raise the chance that a
    sampled draft token is accepted (arXiv:2602.23881); for drafters served at temperature above 0."""

    normalization: Literal["token", "sequence"] = "token"
    """Whether every supervised token of a batch has the same weight, or every answer regardless of its length."""

    learning_rate: float | None = Field(None, gt=0.0, le=1.0)
    """Peak; default: the family's own, measured on the quickstart target, times 256 / hidden size of a wider one:
    eagle3 2e-3 at 256 and 1.25e-4 at 4096; of dflash and dspark 5e-4 at any. Published EAGLE-3 training runs use 5e-5
    to 6e-4."""

    warmup_ratio: Probability = 0.05
    """Share of the steps in which the learning rate rises linearly to its peak."""

    schedule: Literal["cosine", "wsd", "constant"] = "wsd"
    """wsd: warm up, stay, decay linearly over the last fifth."""

    weight_decay: float = Field(0.0, ge=0.0, le=1.0)
    """Of AdamW."""

    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Of AdamW."""

    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    """Of AdamW."""

    max_grad_norm: float = Field(0.5, gt=0.0, le=1e12)
    """Gradients of a larger norm are scaled down to it."""

    epochs: float = Field(4.0, gt=0.0, le=1000.0)
    """Passes over the captured rows."""

    max_steps: int | None = Field(None, ge=1, le=1_000_000_000)
    """Stop after this many optimizer steps even if epochs remain."""

    max_seconds: float | None = Field(None, gt=0.0, le=2_592_000.0)
    """Stop after this many seconds even if steps remain. Optimizer steps, evaluation, export and saves count; loading
    does not, nor do steps that a killed run repeats. The schedule ends at this limit if it comes first, so a run of
    the same seed on a faster machine is another. The last step with its evaluation and export comes on top."""

    early_stop_patience: int | None = Field(None, ge=1, le=1000)
    """Stop after this many evaluations in a row without a better theoretical speed-up on held-out rows (about ten
    per run). A wsd run stopped early misses its decay. Default: never."""

    max_tokens_per_batch: int | None = Field(None, ge=64, le=2**30)
    """Packed tokens per optimizer step, over all processes. Default: 2048 on CPUs; on GPUs max_tokens_per_gpu times
    their number, halved until an epoch has 64 steps, but not below 2048. To resume a run on another number of GPUs,
    give it."""

    max_tokens_per_gpu: int | None = Field(None, ge=64, le=2**30)
    """Packed tokens that one process computes at a time. A larger share of a step is divided into micro-batches whose
    gradients are added; a longer row is cut at this length, and the rows cut are reported. Default: 16384 on a GPU, or
    its half, its quarter, ... where the GPU holds no more, down to the longest row; no bound on a CPU."""

    num_checkpoints: int = Field(3, ge=1, le=100)
    """Exported drafters, evenly spaced over the run, the last at its end; each is benchmarked."""

    save_every_s: float = Field(600.0, gt=0.0, le=86_400.0)
    """Seconds between two saves of the resumable training state; it is also saved at every checkpoint and when the
    program is asked to stop. The state is copied to host memory and written while training continues."""

    save_every_steps: int | None = Field(None, ge=1, le=1_000_000_000)
    """Save it every so many optimizer steps as well."""

    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Seed of the weights and of the order of rows."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the matrix products; all else is float32. auto: bfloat16 where the hardware multiplies it natively."""

    grad_checkpoint: bool = False
    """Recompute MLP activations in the backward pass instead of storing them: less memory, more compute."""

    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of each process; default: all."""

    trackers: tuple[Literal["mlflow", "wandb", "tensorboard"], ...] = Field((), max_length=3)
    """Trackers that are sent the metrics while training runs. Server and credentials are the tracker's own environment
    variables where the training runs: MLFLOW_TRACKING_URI for mlflow, WANDB_API_KEY or WANDB_MODE=offline for wandb.
    tensorboard writes files in the directory of the training run. An unavailable tracker does not fail the run; after
    the last step it is given one minute."""
