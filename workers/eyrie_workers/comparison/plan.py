"""What a comparison will do, as values: one spec in; stage specs, variants and blocks out. Pure.

Equal budgets. All families learn from one store. With a budget in *tokens* they get the same schedule: the same
documents in the same batches in the same order (`training.packing.Schedule` depends on rows, batch size, seed and
epochs alone, and those are shared). With a budget in *seconds* each family first trains briefly, to tell how fast it
learns on this machine, and then gets as many epochs as its seconds buy. Either way a training is a function of its
spec, so that one that was killed goes on; a run that stopped by the clock could not.

Equal measuring. Every variant answers every block: the same prompts, temperatures, concurrencies and noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.benchmark import BenchmarkSpec
from eyrie_api.v1alpha1.capture import CaptureSpec
from eyrie_api.v1alpha1.data import DataSpec
from eyrie_api.v1alpha1.draft_tree import DraftTreeShape
from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_api.v1alpha1.families import Family
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.regeneration import RegenerateSpec
from eyrie_api.v1alpha1.stages import BenchmarkStage, CaptureStage, RegenerateStage, TrainStage
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.comparison.forms import OFF, Kind, forms_of, shape

JOB_ID = "compare"
_CALIBRATION_STEPS = 24
"""Optimiser steps that tell how fast a family learns: of all its phases, and few seconds."""

_MOST_EPOCHS = 1000.0  # TrainSpec.epochs
_SUFFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}


class Budget(Frozen):
    """What each family's training may take."""

    kind: Literal["tokens", "seconds"]
    amount: float = Field(gt=0.0)

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """`tokens=300k`, `seconds=60`. Raises InvalidInput."""
        kind, _, amount = text.strip().lower().partition("=")
        scale = _SUFFIXES.get(amount[-1:], 1.0)
        try:
            value = float(amount[:-1] if amount[-1:] in _SUFFIXES else amount) * scale
        except ValueError:
            value = 0.0
        if kind not in ("tokens", "seconds") or not 0.0 < value < 1e15:
            raise InvalidInput(f"--budget {text!r} is not a budget", "write tokens=300k or seconds=60")
        return cls(kind="tokens" if kind == "tokens" else "seconds", amount=value)

    def label(self) -> str:
        """`seconds=60`."""
        return f"{self.kind}={self.amount:g}" if self.amount < 1e6 else f"{self.kind}={self.amount / 1e6:g}m"


class CompareSpec(Frozen):
    """A whole comparison."""

    target: TargetSpec
    data: DataSpec
    families: tuple[Family, ...] = Field(min_length=1, max_length=16)
    """Trained; n-gram lookup and off always take part."""

    budget: Budget
    regenerate: RegenerateSpec = RegenerateSpec()
    capture: CaptureSpec = CaptureSpec()
    drafter: DrafterSpec = DrafterSpec()
    """The shape all families share, as far as it fits them; its `family` is not read."""

    train: TrainSpec = TrainSpec()
    """What all families share; `epochs` and `max_steps` follow from the budget."""

    benchmark: BenchmarkSpec = BenchmarkSpec()
    """Suites (`max_prompts`: blocks of one request), temperatures, tokens per answer. Its `tree` is the depth of every
    variant, and width and nodes of all trees."""

    concurrencies: tuple[Annotated[int, Field(ge=1, le=256)], ...] = Field((1, 4), min_length=1, max_length=8)
    """Requests decoded at once. The leaderboard ranks at the first."""

    @model_validator(mode="after")
    def _each_once(self) -> "CompareSpec":
        for name in ("families", "concurrencies"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} {list(values)} holds one twice: name each once")
        if self.benchmark.tree.top_k == 1 or self.benchmark.tree.static:
            raise ValueError(f"benchmark.tree {self.benchmark.tree.label()} is no tree that grows: the bench makes "
                             "chains and static trees from it; give a top_k above 1")
        return self


class Variant(Frozen):
    """One line of the bench: a family in a form, n-gram, or off."""

    title: str
    family: str
    """Of a trained drafter; `ngram`, `off`."""

    kind: Kind
    tree: DraftTreeShape | None
    source: str = ""

    @property
    def shape(self) -> str:
        """The kind, with `num_steps/top_k/num_draft_tokens`."""
        if self.tree is None:
            return "nothing drafted"
        return f"{self.kind} {self.tree.num_steps}/{self.tree.top_k}/{self.tree.num_draft_tokens}"


def variants_of(families: Sequence[str], tree: DraftTreeShape) -> tuple[Variant, ...]:
    """Off, then every form of every family, then n-gram."""
    drafted = tuple(
        Variant(title=form.title, family=family, kind=form.kind, tree=shape(form.kind, tree), source=form.source)
        for family in (*families, "ngram") for form in forms_of(family))
    return (Variant(title=OFF, family=OFF, kind="off", tree=None, source="the same engine, nothing drafted"), *drafted)


# Stages


def regenerate_stage(spec: CompareSpec) -> RegenerateStage:
    """The answers all families learn from; no suite's prompt among them."""
    return RegenerateStage(job_id=JOB_ID, target=spec.target, data=spec.data, regenerate=spec.regenerate,
                           exclude_prompts=tuple(suite.path for suite in spec.benchmark.suites))


def capture_stage(spec: CompareSpec, rows_dir: str) -> CaptureStage:
    """One store with what every family reads."""
    return CaptureStage(job_id=JOB_ID, target=spec.target, capture=spec.capture, rows_dir=rows_dir,
                        families=spec.families)


def train_stage(spec: CompareSpec, family: str, store_dir: str, epochs: float) -> TrainStage:
    """One family's training; for equal `epochs` all families see the same documents in the same order."""
    return TrainStage(
        job_id=JOB_ID, candidate=family, target=spec.target, store_dir=store_dir,
        drafter=spec.drafter.model_copy(update={"family": family}),
        train=spec.train.model_copy(update={"epochs": epochs, "max_steps": None, "num_checkpoints": 1}))


def suites_stage(spec: CompareSpec, held_out_file: str) -> BenchmarkStage:
    """What `measurement.benchmark.session` reads suites by."""
    return BenchmarkStage(job_id=JOB_ID, checkpoint=JOB_ID, candidate=JOB_ID, target=spec.target,
                          benchmark=spec.benchmark, drafter_dir="", held_out_file=held_out_file)


def calibration_epochs(spec: CompareSpec, store_tokens: int) -> float:
    """A training just long enough to tell a family's speed; at most once through the store."""
    return min(1.0, _CALIBRATION_STEPS * spec.train.max_tokens_per_batch / store_tokens)


def epochs_for_tokens(tokens: float, store_tokens: int) -> float:
    """How often through the store makes this many packed tokens. Raises InvalidInput beyond what a training may have.

    Rows held out for evaluation count as if trained on, so a little less is trained than asked for; alike for all.
    """
    return _possible(tokens / store_tokens, f"a budget of {tokens:.0f} tokens", store_tokens)


def epochs_for_seconds(seconds: float, calibrated_epochs: float, calibrated_seconds: float,
                       store_tokens: int) -> float:
    """How often through the store so many seconds are, for a family of the calibrated speed."""
    return _possible(calibrated_epochs * seconds / calibrated_seconds, f"a budget of {seconds:g} seconds", store_tokens)


def _possible(epochs: float, what: str, store_tokens: int) -> float:
    if epochs > _MOST_EPOCHS:
        raise InvalidInput(f"{what} is {epochs:.0f} times through the {store_tokens} captured tokens; at most "
                           f"{_MOST_EPOCHS:.0f} are allowed", "give more conversations, or a smaller budget")
    return float(f"{epochs:.6g}")


# Measuring


@dataclass(frozen=True)
class Block:
    """One question to all variants: some prompts of a suite, decoded so many at once at a temperature."""

    suite: str
    concurrency: int
    temperature: float
    index: int
    """Which prompts of the suite, and which variant begins."""

    turn: int

    @property
    def key(self) -> tuple[str, int, float, int]:
        """What makes two entries answers to the same question."""
        return (self.suite, self.concurrency, self.temperature, self.index)


def num_blocks(concurrency: int, max_prompts: int) -> int:
    """Blocks per suite. One of several requests holds 2 x concurrency of them, and a third of as many are enough."""
    return max_prompts if concurrency == 1 else -(-max_prompts // 3)


def blocks_of(spec: CompareSpec) -> Iterator[Block]:
    """All blocks, round by round: concurrency, suites and temperatures in turn, so that a machine that changes while
    it measures changes for all of them."""
    rounds = max(num_blocks(c, suite.max_prompts) for c in spec.concurrencies for suite in spec.benchmark.suites)
    turn = 0
    for index in range(rounds):
        for concurrency in spec.concurrencies:
            for suite in spec.benchmark.suites:
                if index >= num_blocks(concurrency, suite.max_prompts):
                    continue
                for temperature in spec.benchmark.temperatures:
                    yield Block(suite.name, concurrency, temperature, index, turn)
                    turn += 1
