"""The frame of every stage program: arguments, lock, progress, interruption, and the manifest written last.

A stage's own module holds its work as a function `(spec, Stage) -> Result`; `run_program` turns it into a program that
can be killed at any line and run again:

- a manifest of the same spec exists: nothing to do, exit 0 (unless the stage detects that its artifact is damaged and
  can rebuild it: then it does, and the manifest stays if the files match it again);
- a manifest of another spec exists: refused, because an artifact is immutable;
- two programs in one directory: the second is refused (advisory lock, freed by the kernel when its holder dies);
- SIGTERM or SIGINT: `stage.pause_point()` raises Interrupted at the next safe line, exit 143; the next run resumes;
- an input that differs from its manifest's digest, or a model's file that the job may not read: refused, before any
  work (`verify_inputs`);
- an EyrieError: `failure.json` with reason, message and hint, and the exit code of the error's class;
- a full disk: the same as DiskFull, with an exit code of its own, since `failure.json` may not fit.

`open_stage` is the same frame as a context manager, for a program that works on several directories at once
(`stages.sweep`).
"""

import argparse
import errno
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

from pydantic import ValidationError

from eyrie_api import artifacts
from eyrie_api.contract.drafter import PublishedDrafter
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.records import EventRecord, Failure, MetricRecord, ProgressRecord
from eyrie_api.contract.rules import rule_of
from eyrie_api.contract.stages import (
    BenchmarkStage,
    CaptureStage,
    FileEntry,
    HardwareStage,
    Manifest,
    StageReport,
    TrainStage,
)
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import Conflict, DiskFull, EyrieError, InvalidInput, Transient, report_error
from eyrie_api.file_rules import check_path
from eyrie_api.full_disk import disk_full, is_full
from eyrie_workers.catalog import ROWS_FILE, STORE_ADDRESS_FILE

INTERRUPTED_EXIT_CODE = 143
_PROGRESS_EVERY_S = 0.5


class Interrupted(BaseException):
    """SIGTERM or SIGINT arrived. A BaseException, so that no `except Exception` can swallow it."""


@dataclass(frozen=True)
class Result:
    """What a stage's work returns: a report, and the files that belong to the artifact."""

    report: StageReport
    files: Iterable[Path]
    in_store: tuple[FileEntry, ...] = ()
    """Files of the artifact that the work has put into the artifact store and that are not here."""


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass
class Stage:
    """What a stage's work is given: its directory, the writer of its event log, and the request to stop."""

    out_dir: Path
    stop_requested: bool = False
    quiet: bool = False  # write events to the log alone, not to stdout
    on_metric: Callable[[MetricRecord], None] | None = None  # called with each point of a series after it is logged
    _started: float = field(default_factory=time.monotonic)
    _last_progress: float = 0.0
    _first_done: float | None = None
    _phase: tuple[str, bool] | None = None
    _whole: "Stage | None" = None

    def part(self, name: str) -> "Stage":
        """A part of the stage's work with a folder of its own; events and the request to stop are the stage's."""
        directory = self.out_dir / name
        directory.mkdir(exist_ok=True)
        return Stage(directory, quiet=self.quiet, _whole=self)

    def pause_point(self) -> None:
        """Raise Interrupted if a stop was requested. Call it where everything is saved or can be computed again."""
        if self.stop_requested or (self._whole is not None and self._whole.stop_requested):
            raise Interrupted

    def progress(self, done: float, total: float | None, unit: str, message: str = "") -> None:
        """Log progress, with rate and ETA from the clock. At most two records a second are written.

        Another unit, or a total that was not known before, begins another phase with its own clock.
        """
        now = time.monotonic()
        phase = (unit, total is None)
        # `done` decreases where the work was begun again: a rate over both parts would be wrong.
        if self._first_done is None or self._phase != phase or done < self._first_done:
            self._first_done, self._started, self._phase = done, now, phase
        if now - self._last_progress < _PROGRESS_EVERY_S and done != total:
            return
        self._last_progress = now
        elapsed_s = now - self._started
        # Over what this process has done: a resumed stage begins at `_first_done`, which cost it no time.
        rate = (done - self._first_done) / elapsed_s if elapsed_s > 0 and done > self._first_done else None
        eta = (total - done) / rate if rate and total is not None else None
        self._write(ProgressRecord(time=_now(), done=done, total=total, unit=unit, rate=rate, eta_s=eta,
                                   message=message))

    def metric(self, name: str, step: int, value: float) -> None:
        record = MetricRecord(time=_now(), name=name, step=step, value=value)
        self._write(record)
        if self.on_metric is not None:
            self.on_metric(record)

    def event(self, reason: str, message: str, *, warning: bool = False) -> None:
        self._write(EventRecord(time=_now(), type="Warning" if warning else "Normal", reason=reason,
                                message=message))
        if not self.quiet:
            print(f"{reason}: {message}", flush=True)

    def _write(self, record: Frozen) -> None:
        line = (record.model_dump_json() + "\n").encode()
        # One write call on an append-mode descriptor: readers and other writers never see part of a line.
        directory = (self._whole or self).out_dir
        descriptor = os.open(directory / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            written = os.write(descriptor, line)
            if written < len(line):
                # A disk that becomes full takes a part of the line, and the next line would continue that part: two
                # records would be lost. So it is taken back, unless (race) another writer has appended since.
                end = os.lseek(descriptor, 0, os.SEEK_CUR)
                if end == os.fstat(descriptor).st_size:
                    os.ftruncate(descriptor, end - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


SpecT = TypeVar("SpecT", bound=Frozen)


@dataclass(frozen=True)
class OpenStage(Generic[SpecT]):
    """A stage's directory while its lock is held."""

    spec: SpecT
    stage: Stage
    finished: bool  # whether the manifest of this spec exists and its artifact is whole: there is nothing to do
    _manifest: Path
    _before: Manifest | None  # a manifest of this spec whose artifact turned out damaged
    _started: datetime

    def finish(self, result: Result) -> None:
        """Write the manifest. Raises Interrupted where a stop was requested."""
        self.stage.pause_point()
        here = artifacts.list_files(self.stage.out_dir, result.files)
        files = tuple(sorted((*here, *result.in_store), key=lambda entry: entry.path))
        if self._before is not None and self._before.files == files:
            return
        spec = self.spec
        artifacts.write_sealed(self._manifest, Manifest(
            stage=spec.stage, job_id=spec.job_id,  # type: ignore[attr-defined]
            candidate=getattr(spec, "candidate", None), spec_digest=artifacts.digest_model(spec),
            code_version=artifacts.code_version(),
            started_at=self._started.isoformat(), finished_at=_now().isoformat(), files=files, report=result.report))


@contextmanager
def open_stage(kind: type[SpecT], stage: Stage, spec_file: Path, out: Path,
               is_whole: Callable[[Path], bool] = lambda _: True) -> Iterator[OpenStage[SpecT]]:
    """Hold the lock of a stage's directory and read its spec.

    An EyrieError raised here or in the block is written to `failure.json`, Interrupted to the event log; both are
    raised again.

    stage     of the manifest's directory, which is created.
    out       the manifest.
    is_whole  of a finished directory: whether its artifact still matches the manifest. Cheap: it is called every time.
    """
    stage.out_dir.mkdir(parents=True, exist_ok=True)
    (stage.out_dir / "failure.json").unlink(missing_ok=True)
    try:
        with (stage.out_dir / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(f"another program works in {stage.out_dir}",
                               "wait for it, or cancel its job") from None
            # Only under the lock: another program may be writing the manifest until then.
            try:
                spec = kind.model_validate_json(spec_file.read_text())
            except FileNotFoundError:
                raise InvalidInput(f"--spec {spec_file} does not exist", "give the path of a stage spec") from None
            except ValidationError as error:
                first = error.errors()[0]
                raise InvalidInput(
                    f"--spec {spec_file}: {'.'.join(map(str, first['loc']))}: {rule_of(first)} "
                    f"(got {first['input']!r})", f"see {kind.__name__} in eyrie_api.contract.stages") from error
            before = artifacts.read_manifest(out) if out.exists() else None
            if before is not None and before.spec_digest != artifacts.digest_model(spec):
                raise Conflict(f"{out} was made from another spec",
                               "give an empty directory, or delete the old output")
            finished = before is not None and is_whole(stage.out_dir)
            yield OpenStage(spec, stage, finished, out, before, _now())
    except Interrupted:
        stage.event("Interrupted", "stopped on request; run again to resume", warning=True)
        raise
    except EyrieError as error:
        write_failure(stage, error)
        raise
    except Exception as error:
        if not is_full(error):
            raise
        full = disk_full(stage.out_dir)
        write_failure(stage, full)
        raise full from error


@contextmanager
def stop_on_signals(*stages: Stage) -> Iterator[None]:
    """Within the block SIGTERM and SIGINT request the stages to stop instead of ending the process."""

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        for stage in stages:
            stage.stop_requested = True

    previous = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_program(kind: type[SpecT], work: Callable[[SpecT, Stage], Result], argv: list[str] | None = None,
                is_whole: Callable[[Path], bool] = lambda _: True) -> int:
    """Run one stage program and return its exit code (see the module docstring). `is_whole`: see `open_stage`."""
    parser = argparse.ArgumentParser(description=(work.__doc__ or kind.__doc__ or "").strip())
    parser.add_argument("--spec", type=Path, required=True, help="JSON file: the stage's spec")
    parser.add_argument("--out", type=Path, required=True,
                        help="manifest to write; the stage's other files are written next to it")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out.resolve()
    stage = Stage(out.parent)
    # The handlers come first: a signal that arrives while the lock is taken is acted on at the first pause point.
    try:
        with stop_on_signals(stage), open_stage(kind, stage, arguments.spec, out, is_whole) as opened:
            if not opened.finished:
                verify_inputs(opened.spec)
                opened.finish(work(opened.spec, stage))
        return 0
    except Interrupted:
        return INTERRUPTED_EXIT_CODE
    except DiskFull as error:
        return end_on_full_disk(error)
    except EyrieError as error:
        return report_error(error)


def end_on_full_disk(error: DiskFull) -> int:
    """The exit code, once the error was printed if that is possible. The log may be on the same disk: what its buffer
    holds cannot be written at the end either, for which Python would replace the exit code."""
    try:
        report_error(error)
        sys.stdout.flush()
    except OSError:
        discarded = os.open(os.devnull, os.O_WRONLY)
        os.dup2(discarded, 1)
        os.dup2(discarded, 2)
    return error.exit_code


def verify_inputs(spec: Frozen) -> None:
    """Compare what a stage reads of earlier stages with their manifests. The feature store is not among it: its reader
    verifies each block; nor are answers in an artifact store, which `data.rows` compares. Raises
    ArtifactMissing or ArtifactCorrupt, and as `check_models`."""
    check_models(spec)
    for name in ("rows_dir", "drafter_dir", "rival_dir", "held_out_file"):
        path = getattr(spec, name, None)
        if path is not None:
            stored = (Path(path) / STORE_ADDRESS_FILE).is_file()
            artifacts.verify_part(Path(path), leave_out=(ROWS_FILE,) if stored else ())
    if isinstance(spec, HardwareStage):
        verify_inputs(spec.proof)


def check_models(spec: Frozen) -> None:
    """Judge the directories of target and published drafters, whose links may have changed since the submission. Files
    of data are judged when they are opened (`data.readers`). Raises InvalidInput."""
    rules: ReadRules | None = getattr(spec, "reads", None)
    target: TargetSpec | None = getattr(spec, "target", None)
    if target is not None:
        check_path("target.model", target.model, rules)
    if isinstance(spec, BenchmarkStage) and spec.source is not None and spec.source.path is not None:
        check_path(f"{spec.source_field}: path", spec.source.path, rules)
    heads: Iterable[PublishedDrafter | None] = ()
    if isinstance(spec, CaptureStage | TrainStage):
        heads = spec.init_from if isinstance(spec, CaptureStage) else (spec.drafter.head,)
    for head in heads:
        if head is not None:
            check_path("drafter.init_from", head.path, rules)


def write_failure(stage: Stage, error: EyrieError) -> None:
    """Write `failure.json`; where the disk is full, the exit code alone says it."""
    with suppress(OSError) if isinstance(error, DiskFull) else nullcontext():
        artifacts.write_model(stage.out_dir / "failure.json", Failure(
            reason=error.reason, message=error.message, hint=error.hint, exit_code=error.exit_code,
            transient=isinstance(error, Transient), time=_now()))
