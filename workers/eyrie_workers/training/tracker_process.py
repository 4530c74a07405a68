"""Sends a training's metrics to one tracker, from a process of its own that reads the training's `events.jsonl`.

    training -> events.jsonl -> this process -> tracker

No step of the training waits for a tracker: the file is the queue. Its end does, for END_S at most. A tracker that is
away is tried again with growing pauses, and gets everything from the record as soon as it answers, even in a later run
of the same training. Of a failure the record says `TrackerFailed`, once, and `TrackerRecovered` where it ended.

A killed training repeats the steps since its last save, with the same values, so the record may have a step twice, and
the last step in part. Therefore rows are sent when they are complete, and of what was recorded before the training
resumed only the steps that it does not repeat.

The process ends when its standard input does, which the training holds open: also when the training is killed. It has
then END_S seconds to send the rest.

    python -m eyrie_workers.training.tracker_process mlflow      started by `start_trackers`, alone
"""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.records import MetricRecord
from eyrie_workers.catalog import TRACKERS_DIR
from eyrie_workers.stage_program import Stage
from eyrie_workers.training.trackers import Row, TrackedRun, open_tracker, shown

END_S = 60.0
"""Seconds that a tracker has after the training's last step: its package may still be connecting then."""

_INTERRUPTED_END_S = 5.0
"""Seconds that an interrupted training waits: a pod that is stopped has 30 s, and uploads its state in them."""

_POLL_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
_FINISHED = b"finished"
_COMPLETE = "the job's own record is complete"


class Following(Frozen):
    """The first line of the process's standard input."""

    run: TrackedRun
    stage_dir: str
    resumed_from: int
    """Steps before this run of the training."""

    recorded_bytes: int
    """Size of the record when this run of the training began."""


class RecordedRows:
    """The rows of a record that may still grow, each once and in order of step."""

    def __init__(self, following: Following) -> None:
        self._path = Path(following.stage_dir) / "events.jsonl"
        self._before, self._resumed_from = following.recorded_bytes, following.resumed_from
        self._position, self._last = 0, -1
        self._open: dict[int, Row] = {}

    def complete(self, *, ended: bool) -> Iterator[Row]:
        """Rows that no further metric belongs to: those below the newest step, and all of a training that has ended."""
        for record in self._read():
            row = self._open.get(record.step, Row(step=record.step, time=record.time, values={}))
            self._open[record.step] = row.model_copy(update={"values": {**row.values, record.name: record.value}})
        newest = max(self._open, default=0)
        for step in sorted(self._open):
            if step < newest or ended:
                row = self._open.pop(step)
                if step > self._last:
                    self._last = step
                    yield row

    def _read(self) -> Iterator[MetricRecord]:
        """Metrics of the lines that were completed since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            lines = file.read().split(b"\n")[:-1]
        for line in lines:
            is_before = self._position < self._before
            self._position += len(line) + 1
            try:
                record = MetricRecord.model_validate_json(line)
            except ValidationError:
                continue  # another kind of record
            if not is_before or record.step <= self._resumed_from:
                yield record


class _Training:
    """The training's end, as this process sees it."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.finished = False

    def wait_for_end(self) -> None:
        """Return when the training has closed its end of the pipe, or was killed."""
        self.finished = sys.stdin.buffer.read().strip() == _FINISHED
        self.ended.set()


def _follow(name: str, following: Following, training: _Training, stage: Stage) -> int:
    """Send until the training has ended; the exit code."""
    pause_s, has_failed = _FIRST_PAUSE_S, False

    def give_up() -> None:
        if not has_failed:
            stage.event("TrackerFailed", f"{name} has not taken the last metrics within {END_S:g} s; {_COMPLETE}",
                        warning=True)
        os._exit(1)  # the tracker's package may hold the interpreter at a normal exit

    def limit_end() -> None:
        training.wait_for_end()
        timer = threading.Timer(END_S, give_up)
        timer.daemon = True
        timer.start()

    threading.Thread(target=limit_end, daemon=True).start()
    while True:
        try:
            tracker, rows = open_tracker(name, following.run), RecordedRows(following)
            while True:
                ended = training.ended.is_set()  # before reading: nothing is recorded after it
                for row in rows.complete(ended=ended):
                    tracker.write(row)
                if has_failed:
                    has_failed, pause_s = False, _FIRST_PAUSE_S
                    stage.event("TrackerRecovered", f"{name} has the metrics recorded so far")
                if ended:
                    tracker.close(finished=training.finished)
                    return 0
                training.ended.wait(_POLL_S)
        except Exception as error:  # noqa: BLE001 - whatever a tracker's package raises ends no training
            if not has_failed:
                stage.event("TrackerFailed", f"{name}: {shown(error, os.environ)}; training continues, {name} is tried "
                                             f"again, and {_COMPLETE}", warning=True)
            has_failed = True
            if training.ended.is_set():
                return 1
        training.ended.wait(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class TrackerProcess:
    """A running process of one tracker, as the training sees it."""

    def __init__(self, name: str, following: Following) -> None:
        """Raises OSError when the process cannot be started."""
        # A session of its own: a signal to the training's process group would end it before the last rows are sent.
        self._process = subprocess.Popen([sys.executable, "-m", __name__, name], stdin=subprocess.PIPE,
                                         cwd=following.run.directory, start_new_session=True)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        with suppress(OSError):  # it has ended already, and has said why in the log
            self._stdin.write(following.model_dump_json().encode() + b"\n")
            self._stdin.flush()

    def end(self, *, finished: bool) -> None:
        """The training writes no more metrics."""
        with suppress(OSError):
            self._stdin.write(_FINISHED if finished else b"")
            self._stdin.close()

    def wait(self, *, finished: bool) -> None:
        """Wait until everything is sent, for a limited time. The process ends by itself after its own."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S + 1 if finished else _INTERRUPTED_END_S)


def start_trackers(names: Sequence[str], stage: Stage, *, key: str, job_id: str, candidate: str,
                   settings: Mapping[str, object], resumed_from: int) -> list[TrackerProcess]:
    """A process for each tracker that a spec names. One that cannot be started is said, and left out."""
    record = stage.out_dir / "events.jsonl"
    started = []
    for name in names:
        directory = stage.out_dir / TRACKERS_DIR / name
        directory.mkdir(parents=True, exist_ok=True)
        run = TrackedRun.model_validate({"key": key, "job_id": job_id, "candidate": candidate, "settings": settings,
                                         "directory": str(directory)})
        try:
            started.append(TrackerProcess(name, Following(
                run=run, stage_dir=str(stage.out_dir), resumed_from=resumed_from,
                recorded_bytes=record.stat().st_size if record.exists() else 0)))
        except OSError as error:
            stage.event("TrackerFailed", f"{name}: its process cannot be started ({error.strerror}); {_COMPLETE}",
                        warning=True)
    return started


def main(argv: Sequence[str]) -> int:
    """The program: follow one training's record until it ends."""
    (name,) = argv
    following = Following.model_validate_json(sys.stdin.buffer.readline())
    with (Path(following.run.directory) / ".lock").open("w") as lock:
        # That of the run before, if it was killed, may still be sending.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _follow(name, following, _Training(), Stage(Path(following.stage_dir)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
