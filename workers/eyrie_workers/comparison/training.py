"""The stages of a comparison, each a program in a directory of its own, called as it is and safe to run again.

    DIR/regenerate   DIR/capture   DIR/calibrate/<family>   DIR/train/<family>   DIR/spent.jsonl

A family whose training fails is left out and said, for the others' half hour must not be lost with it.

Processor time is counted around each call and kept in `spent.jsonl`, a line when a call begins and one when it ends. A
call that was killed has no second line: what it used is then not known, and not guessed.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from eyrie_api.artifacts import MANIFEST, read_manifest, write_model
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
    """A stage program ended without its artifact; it has said why."""

    reason = "StageFailed"

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, failure.hint)
        self.failure = failure


class Stopped(BaseException):
    """A stage was asked to stop; run again, it goes on. A BaseException, like `program.Interrupted`."""


@dataclass(frozen=True)
class Learnt:
    """One family's drafter and what its training took."""

    report: TrainReport
    directory: Path
    cpu_seconds: float | None
    """Of all calls that worked on it, starting and evaluating included; None when one of them was killed."""

    epochs: float

    @property
    def checkpoint(self) -> CheckpointReport:
        """The last one."""
        return self.report.checkpoints[-1]


@dataclass
class Training:
    """Everything up to the measuring."""

    spec: CompareSpec
    home: Path
    tell: Callable[[str, Path], None]
    """Called with what begins, and the directory whose `events.jsonl` says how far it is."""

    learnt: dict[str, Learnt] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each stage, from its manifest."""

    _parts: int = 0

    @property
    def rows_dir(self) -> Path:
        """Output of regenerate."""
        return self.home / "regenerate"

    @property
    def store_dir(self) -> Path:
        """Output of capture."""
        return self.home / "capture"

    def run(self) -> CaptureReport:
        """All stages; what exists is not done again. Raises StageFailed when nothing can be measured for it."""
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
            told = self._attempt(f"training {family}", family,
                                 plan.train_stage(spec, family, str(self.store_dir), epochs[family]), out)
            if told is not None:
                self.learnt[family] = Learnt(told, out / told.checkpoints[-1].path,
                                             cpu_seconds(self.home / SPENT, f"train/{family}"), epochs[family])
                self.seconds[f"train {family}"] = told.seconds
        if not self.learnt and self.failed:
            raise StageFailed(self._failure_of(spec.families[0]))
        return store

    def measuring(self, out: Path) -> None:
        """Say that the last part begins."""
        self._begin("measuring", out, False)

    def _begin(self, what: str, out: Path, done: bool) -> None:
        self._parts += 1
        if not done:
            per_family = 1 if self.spec.budget.kind == "tokens" else 2
            total = 3 + per_family * len(self.spec.families)
            self.tell(f"{self._parts} of {total}: {what}", out)

    def _epochs(self, store_tokens: int) -> Mapping[str, float]:
        """Of every family, by the budget."""
        spec, budget = self.spec, self.spec.budget
        if budget.kind == "tokens":
            return dict.fromkeys(spec.families, plan.epochs_for_tokens(budget.amount, store_tokens))
        some = plan.calibration_epochs(spec, store_tokens)
        found: dict[str, float] = {}
        for family in spec.families:
            told = self._attempt(f"how fast {family} learns", family,
                                 plan.train_stage(spec, family, str(self.store_dir), some),
                                 self.home / "calibrate" / family)
            if told is not None:
                found[family] = plan.epochs_for_seconds(budget.amount, some, told.seconds, store_tokens)
        return found

    def _attempt(self, what: str, family: str, spec: Frozen, out: Path) -> TrainReport | None:
        try:
            return self._stage(what, train, spec, out, TrainReport)  # type: ignore[arg-type]
        except StageFailed as error:
            self.failed[family] = f"{error.failure.reason}: {error.message}"
            return None

    def _failure_of(self, family: str) -> Failure:
        for room in ("train", "calibrate"):
            file = self.home / room / family / "failure.json"
            if file.exists():
                return Failure.model_validate_json(file.read_bytes())
        raise AssertionError(f"{family} failed without saying so")

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
        report = read_manifest(out / MANIFEST).report_as(kind)
        assert isinstance(report, kind)
        return report


class CpuRecord(Frozen):
    """A line of `spent.jsonl`: the beginning or the end of one call."""

    name: str
    begins: bool = False
    cpu_s: float | None = None


@dataclass
class _Counted:
    """Counts processor time into a file; not of a stage that is done already."""

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
    """What all calls of this name used; None when one of them did not come to its end."""
    calls = [record for record in JsonlLedger(path, CpuRecord).entries if record.name == name]
    ended = [record.cpu_s for record in calls if record.cpu_s is not None]
    return sum(ended) if 2 * len(ended) == len(calls) else None
