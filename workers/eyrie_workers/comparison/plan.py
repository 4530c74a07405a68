"""The plan of a comparison: from one spec to stage specs, variants and blocks. Pure.

Equal budgets. All families train from one store. With a budget in *tokens* they have the same schedule: the same
documents in the same batches in the same order (`training.packing.Schedule` depends on rows, batch size, seed and
epochs alone, which are shared). With a budget in *seconds* each family first trains briefly, to measure its speed on
this machine, and then trains for the epochs that fit its seconds. Either way a training run is a function of its spec
and can be resumed, which a run that is ended by the clock cannot.

Equal measurement. Every variant answers every block: the same prompts, temperatures, concurrencies and noise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyrie_api.decisions.training_defaults import tokens_per_step
from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.benchmark import BenchmarkSpec, RivalSpec
from eyrie_api.v1alpha1.capture import CaptureSpec
from eyrie_api.v1alpha1.data import DataSpec
from eyrie_api.v1alpha1.drafter import DrafterSpec
from eyrie_api.v1alpha1.engine import DraftTreeShape
from eyrie_api.v1alpha1.families import Family, TreeKind
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.regeneration import RegenerateSpec
from eyrie_api.v1alpha1.stages import BenchmarkStage, CaptureStage, RegenerateStage, TrainStage
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_api.v1alpha1.training import TrainSpec
from eyrie_workers.comparison.forms import OFF, forms_of, shape
from eyrie_workers.measurement.variant import Variant, undrafted

JOB_ID = "compare"
_CALIBRATION_STEPS = 24
"""Optimiser steps that measure a family's training speed: enough for all phases, in a few seconds."""

_MOST_EPOCHS = 1000.0  # TrainSpec.epochs
_SUFFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}


class Budget(Frozen):
    """The budget of each family's training."""

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
    """Families to train; n-gram lookup and off are always compared."""

    rivals: tuple[RivalSpec, ...] = Field((), max_length=16)
    """Drafters that are measured and not trained, each in one form: the tree if its family has one, else the chain."""

    budget: Budget
    regenerate: RegenerateSpec = RegenerateSpec()
    capture: CaptureSpec = CaptureSpec()
    drafter: DrafterSpec = DrafterSpec()
    """The shape all families share, as far as it fits them; its `family` is not read."""

    train: TrainSpec = TrainSpec()
    """Settings common to all families; `epochs` and `max_steps` follow from the budget."""

    benchmark: BenchmarkSpec = BenchmarkSpec()
    """Suites (`max_prompts`: blocks of one request), temperatures, tokens per answer. Its `tree` is the depth of every
    variant, and width and nodes of all trees."""

    concurrencies: tuple[Annotated[int, Field(ge=1, le=256)], ...] = Field((1, 4), min_length=1, max_length=8)
    """Concurrent requests. The leaderboard ranks by the first value."""

    @model_validator(mode="after")
    def _each_once(self) -> "CompareSpec":
        for name in ("families", "concurrencies"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} {list(values)} has a duplicate: name each once")
        titles = [rival.checkpoint for rival in self.rivals]
        if len(set(titles)) != len(titles):
            raise ValueError(f"rivals {titles} has a duplicate: copy one of them to a directory of another name")
        if any(rival.method != "drafter" for rival in self.rivals):
            raise ValueError("rivals names ngram or off, which every comparison has, or nextn, which only SGLang "
                             "computes: leave it out")
        if self.benchmark.tree.top_k == 1 or self.benchmark.tree.static:
            raise ValueError(f"benchmark.tree {self.benchmark.tree.label()} is not a dynamic tree: chains and static "
                             "trees are derived from it; give a top_k above 1")
        return self


def variants_of(families: Sequence[str], tree: DraftTreeShape, rivals: Mapping[str, str] | None = None
                ) -> tuple[Variant, ...]:
    """Off, then every form of every family, then n-gram, then the rivals (name -> family)."""
    drafted = tuple(
        Variant(title=form.title, family=family, kind=form.kind, tree=shape(form.kind, tree), source=form.source)
        for family in (*families, "ngram") for form in forms_of(family))
    kinds: dict[str, TreeKind] = {name: "tree" if any(form.kind == "tree" for form in forms_of(family)) else "chain"
                                  for name, family in (rivals or {}).items()}
    others = tuple(Variant(title=name, family=name, kind=kind, tree=shape(kind, tree), source="not trained here")
                   for name, kind in kinds.items())
    return (undrafted(OFF, "the same engine, nothing drafted"), *drafted, *others)


# Stages


def regenerate_stage(spec: CompareSpec) -> RegenerateStage:
    """Answers that all families train on; no suite's prompt among them."""
    return RegenerateStage(job_id=JOB_ID, target=spec.target, data=spec.data, regenerate=spec.regenerate,
                           exclude_prompts=tuple(suite.path for suite in spec.benchmark.suites))


def capture_stage(spec: CompareSpec, rows_dir: str) -> CaptureStage:
    """One store with the states that every family reads."""
    return CaptureStage(job_id=JOB_ID, target=spec.target, capture=spec.capture, rows_dir=rows_dir,
                        families=spec.families)


def train_stage(spec: CompareSpec, family: str, store_dir: str, epochs: float) -> TrainStage:
    """One family's training; for equal `epochs` all families see the same documents in the same order."""
    return TrainStage(
        job_id=JOB_ID, candidate=family, target=spec.target, store_dir=store_dir,
        drafter=spec.drafter.model_copy(update={"family": family}),
        train=spec.train.model_copy(update={"epochs": epochs, "max_steps": None, "num_checkpoints": 1}))


def suites_stage(spec: CompareSpec, held_out_file: str) -> BenchmarkStage:
    """The stage spec from which `measurement.benchmark.session` reads suites."""
    return BenchmarkStage(job_id=JOB_ID, checkpoint=JOB_ID, candidate=JOB_ID, target=spec.target,
                          benchmark=spec.benchmark, drafter_dir="", held_out_file=held_out_file)


def calibration_epochs(spec: CompareSpec, store_tokens: int) -> float:
    """Epochs of the training that measures a family's speed; at most one pass over the store."""
    return min(1.0, _CALIBRATION_STEPS * tokens_per_step(spec.train) / store_tokens)


def epochs_for_tokens(tokens: float, store_tokens: int) -> float:
    """Epochs that make this many packed tokens. Raises InvalidInput beyond the most epochs of a training.

    Rows held out for evaluation are counted as trained on, so slightly fewer tokens are trained than requested, equally
    for all families.
    """
    return _possible(tokens / store_tokens, f"a budget of {tokens:.0f} tokens", store_tokens)


def epochs_for_seconds(seconds: float, calibrated_epochs: float, calibrated_seconds: float,
                       store_tokens: int) -> float:
    """Epochs that take this many seconds at the calibrated speed."""
    return _possible(calibrated_epochs * seconds / calibrated_seconds, f"a budget of {seconds:g} seconds", store_tokens)


def _possible(epochs: float, what: str, store_tokens: int) -> float:
    if epochs > _MOST_EPOCHS:
        raise InvalidInput(f"{what} is {epochs:.0f} epochs of the {store_tokens} captured tokens; at most "
                           f"{_MOST_EPOCHS:.0f} are allowed", "give more conversations, or a smaller budget")
    return float(f"{epochs:.6g}")


# Measuring


@dataclass(frozen=True)
class Block:
    """What all variants answer before the next block begins: prompts of a suite at a concurrency and temperature."""

    suite: str
    concurrency: int
    temperature: float
    index: int
    """Selects the prompts of the suite."""

    turn: int
    """Selects the order of the variants."""

    @property
    def key(self) -> tuple[str, int, float, int]:
        """Identifies the block in the ledger."""
        return (self.suite, self.concurrency, self.temperature, self.index)


def num_blocks(concurrency: int, max_prompts: int) -> int:
    """Blocks per suite. Above concurrency 1 a block has 2 x concurrency requests, so a third of the blocks suffice."""
    return max_prompts if concurrency == 1 else -(-max_prompts // 3)


def blocks_of(spec: CompareSpec) -> Iterator[Block]:
    """All blocks, alternating concurrencies, suites and temperatures, so a change of the machine's speed during the
    measurement affects all of them."""
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
