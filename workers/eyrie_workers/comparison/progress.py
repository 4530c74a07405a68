"""Prints the progress of a comparison, read from the running stage's `events.jsonl`, which has rate and ETA.

On a terminal one line is redrawn in place; a log gets a line every 15 seconds. A stage reports to its events file
alone, whether it runs here, on a cluster or by itself, so a thread polls the file.
"""

import io
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO

from pydantic import ValidationError

from eyrie_api.cli.tables import count
from eyrie_api.quantities import duration
from eyrie_api.v1alpha1.records import STAGE_RECORD, ProgressRecord, StageRecord

_LIVE_EVERY_S = 1.0
_LOGGED_EVERY_S = 15.0


def stage_records(path: Path) -> Iterator[StageRecord]:
    """The records of an events file; an incomplete last line is skipped."""
    if not path.is_file():
        return
    for line in path.read_text().split("\n"):
        if line.endswith("}"):
            try:
                yield STAGE_RECORD.validate_json(line)
            except ValidationError:
                continue


def progress_text(record: ProgressRecord) -> str:
    """`412 k of 1 M tokens, 8.3 k/s, 1m 10s left`."""
    line = count(record.done) + (f" of {count(record.total)}" if record.total is not None else "") + f" {record.unit}"
    if record.rate is not None:
        line += f", {record.rate:.1f}/s" if record.rate < 100 else f", {count(record.rate)}/s"
    if record.eta_s is not None:
        line += f", {duration(record.eta_s)} left"
    return line + (f" ({record.message})" if record.message else "")


class _Lines(io.TextIOBase):
    """A stream for the stages' own output: each of their lines replaces the progress line."""

    def __init__(self, stream: TextIO, clear: str) -> None:
        self._stream, self._clear, self._fresh = stream, clear, True

    def write(self, text: str) -> int:
        self._stream.write((self._clear if self._fresh else "") + text)
        self._fresh = text.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


class ProgressPrinter:
    """Prints each stage and its progress to stderr. A context manager."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._stream = sys.stderr
        self.lines = _Lines(self._stream, self._clear())
        """Receives the stages' output, by `contextlib.redirect_stdout`."""

        # Written by `begin`, read by the thread; each is replaced as a whole, and a stale read costs one late line.
        self._what, self._events, self._from = "", Path(), 0
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="eyrie-progress", daemon=True)

    def __enter__(self) -> "ProgressPrinter":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        print(self._clear(), file=self._stream, end="", flush=True)

    def begin(self, what: str, directory: Path) -> None:
        """A stage begins; its events file is in `directory`."""
        self._events = directory / "events.jsonl"
        self._from = self._events.stat().st_size if self._events.exists() else 0
        self._what = what
        print(f"{self._clear()}[{duration(time.monotonic() - self._began)}] {what}", file=self._stream, flush=True)

    def _poll(self) -> None:
        last = ""
        while not self._ended.wait(_LIVE_EVERY_S if self._live else _LOGGED_EVERY_S):
            line = self._latest()
            if not line or line == last:
                continue
            last = line
            if self._live:  # a wrapped line could not be redrawn
                line = line[: shutil.get_terminal_size().columns - 3]
            print(f"{self._clear()}  {line}", file=self._stream, end="" if self._live else "\n", flush=True)

    def _clear(self) -> str:
        return "\r\x1b[K" if self._live else ""

    def _latest(self) -> str:
        if not self._events.is_file():
            return ""
        with self._events.open("rb") as file:
            file.seek(self._from)
            lines = file.read().decode(errors="replace").split("\n")
        for line in reversed(lines):
            if line.startswith('{"kind":"progress"') and line.endswith("}"):
                record = STAGE_RECORD.validate_json(line)
                return f"{self._what}: {progress_text(record)}" if isinstance(record, ProgressRecord) else ""
        return ""
