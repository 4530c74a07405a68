"""Runs the stages of a comparison, each a resumable program in its own directory.

    DIR/regenerate   DIR/capture   DIR/calibrate/<family>   DIR/train/<family>   DIR/spent.jsonl

A family whose training fails is left out and reported; the others continue.

Processor time is recorded in `spent.jsonl`, one line when a stage begins and one when it ends. A killed stage has no
second line: its processor time is then reported as unknown.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from eyrie_api.artifacts import MANIFEST, read_report, write_model
from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.records import Failure
from eyrie_api.v1alpha1.reports import CaptureReport, CheckpointReport, RegenerateReport, TrainReport
from eyrie_workers.comparison import plan
from eyrie_workers.comparison.plan import CompareSpec
from eyrie_workers.jsonl_ledger import JsonlLedger
from eyrie_workers.stage_program import INTERRUPTED_EXIT_CODE, Result, SpecT, Stage, run_program
from eyrie_workers.stages.capture import capture
from eyrie_workers.stages.regenerate import regenerate
from eyrie_workers.stages.train import train

SPENT = "spent.jsonl"
ReportT = TypeVar("ReportT", bound=Frozen)


class StageFailed(EyrieError):
    """A stage program ended without its artifact; `failure` is its reason."""

    reason = "StageFailed"

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, failure.hint)
        self.failure = failure


class Stopped(BaseException):
    """A stage was interrupted; the next run resumes it. A BaseException, like `stage_program.Interrupted`."""


@dataclass(frozen=True)
class TrainedDrafter:
    """One family's drafter and the cost of its training."""

    report: TrainReport
    directory: Path
    cpu_seconds: float | None
    """Processor seconds of all runs of its stage, with start-up and evaluation; None when one of them was killed."""

    epochs: float

    @property
    def checkpoint(self) -> CheckpointReport:
        """The last exported checkpoint."""
        return self.report.checkpoints[-1]


@dataclass
class Training:
    """Runs all stages before the measurement."""

    spec: CompareSpec
    home: Path
    on_begin: Callable[[str, Path], None]
    """Called with each stage that begins, and the directory of its `events.jsonl`."""

    drafters: dict[str, TrainedDrafter] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each stage, from its manifest."""

    _parts: int = 0

    @property
    def rows_dir(self) -> Path:
        """The directory of the answered rows."""
        return self.home / "regenerate"

    @property
    def store_dir(self) -> Path:
        """The directory of the captured hidden states."""
        return self.home / "capture"

    def run(self) -> CaptureReport:
        """Run all stages that have no manifest yet. Raises StageFailed when no family could be trained."""
        spec = self.spec
        rows = self._stage("answers of the target", regenerate, plan.regenerate_stage(spec), self.rows_dir,
                           RegenerateReport)
        store = self._stage("its hidden states", capture, plan.capture_stage(spec, str(self.rows_dir)), self.store_dir,
                            CaptureReport)
        self.seconds |= {"regenerate": rows.seconds, "capture": store.seconds}
        epochs = self._epochs(store.tokens)
        for family in spec.families:
            if family in self.failed:
                self._parts += 1
                continue
            out = self.home / "train" / family
            report = self._attempt(f"training {family}", family,
                                   plan.train_stage(spec, family, str(self.store_dir), epochs[family]), out)
            if report is not None:
                self.drafters[family] = TrainedDrafter(report, out / report.checkpoints[-1].path,
                                             cpu_seconds(self.home / SPENT, f"train/{family}"), epochs[family])
                self.seconds[f"train {family}"] = report.seconds
        if not self.drafters and self.failed:
            raise StageFailed(self._failure_of(spec.families[0]))
        return store

    def measuring(self, out: Path) -> None:
        """Report that the last part, the measurement, begins."""
        self._begin("measuring", out, False)

    def _begin(self, what: str, out: Path, done: bool) -> None:
        self._parts += 1
        if not done:
            per_family = 1 if self.spec.budget.kind == "tokens" else 2
            total = 3 + per_family * len(self.spec.families)
            self.on_begin(f"{self._parts} of {total}: {what}", out)

    def _epochs(self, store_tokens: int) -> Mapping[str, float]:
        """Epochs of every family, from the budget."""
        spec, budget = self.spec, self.spec.budget
        if budget.kind == "tokens":
            return dict.fromkeys(spec.families, plan.epochs_for_tokens(budget.amount, store_tokens))
        calibration = plan.calibration_epochs(spec, store_tokens)
        epochs: dict[str, float] = {}
        for family in spec.families:
            report = self._attempt(f"training speed of {family}", family,
                                   plan.train_stage(spec, family, str(self.store_dir), calibration),
                                   self.home / "calibrate" / family)
            if report is not None:
                epochs[family] = plan.epochs_for_seconds(budget.amount, calibration, report.seconds, store_tokens)
        return epochs

    def _attempt(self, what: str, family: str, spec: Frozen, out: Path) -> TrainReport | None:
        try:
            return self._stage(what, train, spec, out, TrainReport)  # type: ignore[arg-type]
        except StageFailed as error:
            self.failed[family] = f"{error.failure.reason}: {error.message}"
            return None

    def _failure_of(self, family: str) -> Failure:
        for stage in ("train", "calibrate"):
            file = self.home / stage / family / "failure.json"
            if file.exists():
                return Failure.model_validate_json(file.read_bytes())
        raise AssertionError(f"{family} failed without a failure.json")

    def _stage(self, what: str, work: Callable[[SpecT, Stage], Result], spec: SpecT, out: Path,
               kind: type[ReportT]) -> ReportT:
        """Run one stage program in this process and return its report. Raises StageFailed, Stopped."""
        self._begin(what, out, (out / MANIFEST).exists())
        out.mkdir(parents=True, exist_ok=True)
        write_model(out / "spec.json", spec)
        with _Counted(self.home / SPENT, out.relative_to(self.home).as_posix(), (out / MANIFEST).exists()):
            code = run_program(type(spec), work, ["--spec", str(out / "spec.json"), "--out", str(out / MANIFEST)])
        if code == INTERRUPTED_EXIT_CODE:
            raise Stopped
        if code:
            raise StageFailed(Failure.model_validate_json((out / "failure.json").read_bytes()))
        return read_report(out / MANIFEST, kind)


class CpuRecord(Frozen):
    """A line of `spent.jsonl`: the beginning or the end of one call."""

    name: str
    begins: bool = False
    cpu_s: float | None = None


@dataclass
class _Counted:
    """Records the processor time of a call in a ledger, except for a stage that has its manifest already."""

    path: Path
    name: str
    done: bool
    _began: float = 0.0

    def __enter__(self) -> None:
        self._began = time.process_time()
        if not self.done:
            JsonlLedger(self.path, CpuRecord).append(CpuRecord(name=self.name, begins=True))

    def __exit__(self, *_: object) -> None:
        if not self.done:
            cpu_s = time.process_time() - self._began
            JsonlLedger(self.path, CpuRecord).append(CpuRecord(name=self.name, cpu_s=cpu_s))


def cpu_seconds(path: Path, name: str) -> float | None:
    """Processor seconds of all calls of this name; None when one of them was killed."""
    # Every call writes one line when it begins and one when it ends; a killed one has no second line.
    calls = [record for record in JsonlLedger(path, CpuRecord).entries if record.name == name]
    ended = [record.cpu_s for record in calls if record.cpu_s is not None]
    return sum(ended) if 2 * len(ended) == len(calls) else None
