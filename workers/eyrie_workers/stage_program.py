"""The frame every stage program stands in: arguments, lock, progress, interruption, manifest last.

A stage's own file holds its work as a function `(spec, Stage) -> Result`; this room turns it into a program that is
safe to kill at any line and to run again:

- a manifest of the same spec already there: nothing to do, exit 0 (unless the stage knows how to see that its artifact
  is damaged, and to hint it: then it does, and the manifest stays if the files are again what it says);
- a manifest of another spec there: refused, because an artifact is immutable;
- two programs in one directory: the second is refused (advisory lock, freed by the kernel when the holder dies);
- SIGTERM or SIGINT: `stage.pause_point()` raises Interrupted at the next safe line, exit 143; run again, it goes on;
- an EyrieError: `failure.json` with reason, message and hint, and the class's exit code.
"""

import argparse
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TypeVar

from pydantic import ValidationError

from eyrie_api.artifacts import (
    code_version,
    digest_model,
    list_files,
    read_manifest,
    write_model,
)
from eyrie_api.errors import Conflict, EyrieError, InvalidInput, Transient
from eyrie_api.program_exit import report_error
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.records import EventRecord, Failure, MetricRecord, ProgressRecord
from eyrie_api.v1alpha1.stages import Manifest, StageReport

INTERRUPTED_EXIT_CODE = 143
_PROGRESS_EVERY_S = 0.5


class Interrupted(BaseException):
    """SIGTERM or SIGINT arrived. A BaseException, so that no `except Exception` can swallow it."""


@dataclass(frozen=True)
class Result:
    """What the work leaves: a report, and the files that belong to the artifact."""

    report: StageReport
    files: Iterable[Path]


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass
class Stage:
    """What the work may use of the world: its directory, its voice, and the question whether to stop."""

    out_dir: Path
    stop_requested: bool = False
    quiet: bool = False
    _started: float = field(default_factory=time.monotonic)
    _last_progress: float = 0.0
    _first_done: float | None = None
    _phase: tuple[str, bool] | None = None

    def pause_point(self) -> None:
        """Raise Interrupted if a signal asked us to stop. Call it where everything is saved or can be redone."""
        if self.stop_requested:
            raise Interrupted

    def progress(self, done: float, total: float | None, unit: str, message: str = "") -> None:
        """Say how far the work is; rate and ETA follow from the clock. At most two lines a second are written.

        Another unit, or a total that was not known before, begins another phase with a clock of its own.
        """
        now = time.monotonic()
        phase = (unit, total is None)
        if self._first_done is None or self._phase != phase or done < self._first_done:
            self._first_done, self._started, self._phase = done, now, phase
        if now - self._last_progress < _PROGRESS_EVERY_S and done != total:
            return
        self._last_progress = now
        spent = now - self._started
        rate = (done - self._first_done) / spent if spent > 0 and done > self._first_done else None
        eta = (total - done) / rate if rate and total is not None else None
        self._write(ProgressRecord(time=_now(), done=done, total=total, unit=unit, rate=rate, eta_s=eta,
                                   message=message))

    def metric(self, name: str, step: int, value: float) -> None:
        """Log one point of a series."""
        self._write(MetricRecord(time=_now(), name=name, step=step, value=value))

    def event(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Tell a person something."""
        self._write(EventRecord(time=_now(), type="Warning" if warning else "Normal", reason=reason,
                                message=message))
        if not self.quiet:
            print(f"{reason}: {message}", flush=True)

    def _write(self, record: Frozen) -> None:
        line = record.model_dump_json() + "\n"
        # One write call on an append-mode descriptor: a line is there whole or not at all.
        descriptor = os.open(self.out_dir / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


SpecT = TypeVar("SpecT", bound=Frozen)


def run_program(kind: type[SpecT], work: Callable[[SpecT, Stage], Result], argv: list[str] | None = None,
                is_whole: Callable[[Path], bool] = lambda _: True) -> int:
    """Run one stage program and return its exit code (see the module's essay).

    is_whole   of a finished directory: whether its artifact still is what it was. Cheap: it is asked on every run.
    """
    parser = argparse.ArgumentParser(description=(work.__doc__ or kind.__doc__ or "").strip())
    parser.add_argument("--spec", type=Path, required=True, help="JSON file: the stage's spec")
    parser.add_argument("--out", type=Path, required=True, help="manifest to write; its directory is the workplace")
    arguments = parser.parse_args(argv)
    out_dir: Path = arguments.out.resolve().parent
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "failure.json").unlink(missing_ok=True)
    stage = Stage(out_dir)

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        stage.stop_requested = True

    previous = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with (out_dir / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(f"another program works in {out_dir}", "wait for it, or cancel its job") from None
            _run_locked(kind, work, arguments.spec, arguments.out.resolve(), stage, is_whole)
        return 0
    except Interrupted:
        stage.event("Interrupted", "stopped on request; run again to go on from here", warning=True)
        return INTERRUPTED_EXIT_CODE
    except EyrieError as error:
        write_model(out_dir / "failure.json", Failure(
            reason=error.reason, message=error.message, hint=error.hint, exit_code=error.exit_code,
            transient=isinstance(error, Transient), time=_now()))
        return report_error(error)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _run_locked(kind: type[SpecT], work: Callable[[SpecT, Stage], Result], spec_file: Path, out: Path,
                stage: Stage, is_whole: Callable[[Path], bool]) -> None:
    try:
        spec = kind.model_validate_json(spec_file.read_text())
    except FileNotFoundError:
        raise InvalidInput(f"--spec {spec_file} does not exist", "give the path of a stage spec") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(f"--spec {spec_file}: {'.'.join(map(str, first['loc']))}: {first['msg']} "
                           f"(got {first['input']!r})", f"see {kind.__name__} in eyrie_api.v1alpha1.stages") from error
    digest = digest_model(spec)
    before = read_manifest(out) if out.exists() else None
    if before is not None and before.spec_digest == digest and is_whole(stage.out_dir):
        return
    if before is not None and before.spec_digest != digest:
        raise Conflict(f"{out} was made from another spec", "give an empty directory, or delete the old output")
    started = _now()
    result = work(spec, stage)
    stage.pause_point()
    files = list_files(stage.out_dir, result.files)
    if before is not None and before.files == files:
        return
    write_model(out, Manifest(
        stage=spec.stage, job_id=spec.job_id, candidate=getattr(spec, "candidate", None),  # type: ignore[attr-defined]
        spec_digest=digest, code_version=code_version(), started_at=started.isoformat(),
        finished_at=_now().isoformat(), files=files, report=result.report))
