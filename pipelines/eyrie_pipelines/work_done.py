"""How far the stages of a job have got: tells a run, or a stage program, that dies again and again from one that gets
further each time."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from eyrie_api.artifacts import MANIFEST
from eyrie_api.v1alpha1.records import STAGE_RECORD, ProgressRecord

_TAIL_BYTES = 1 << 16

Positions = Mapping[tuple[str, str], float]
"""By stage directory and unit: a stage counts rows, then tokens, and another unit begins at zero."""


@dataclass(frozen=True)
class Attempts:
    """Ends of a program without a result, counted while it gets no further."""

    count: int = 0
    furthest: Positions = field(default_factory=dict)

    def after_kill(self, now: Positions) -> "Attempts":
        """The program was killed at these positions. Further than ever before, the count starts again. Compared with
        the furthest, not with the last: of a program that cannot resume, kills at random positions end that soon."""
        further = any(done > self.furthest.get(key, -1.0) for key, done in now.items())
        furthest = {key: max(done, self.furthest.get(key, done)) for key, done in now.items()}
        return Attempts(1 if further else self.count + 1, {**self.furthest, **furthest})

    def after_failure(self) -> "Attempts":
        """It has recorded a failure, whatever it had done before."""
        return Attempts(self.count + 1, self.furthest)


def work_done(job_dir: Path) -> tuple[int, float]:
    """Finished stages, and the progress of the others in their own units."""
    finished, done = 0, 0.0
    stages = job_dir / "stages"
    for directory in (*stages.glob("*/"), *stages.glob("*/*/")):
        if (directory / MANIFEST).exists():
            finished += 1
        elif (last := _last_progress(directory)) is not None:
            done += last.done
    return finished, done


def positions(directories: Iterable[Path]) -> Positions:
    """The latest progress of each of these stages; a finished one has its manifest as another unit."""
    found = {}
    for directory in directories:
        if (last := _last_progress(directory)) is not None:
            found[directory.name, last.unit] = last.done
        if (directory / MANIFEST).exists():
            found[directory.name, MANIFEST] = 1.0
    return found


def _last_progress(directory: Path) -> ProgressRecord | None:
    try:
        with (directory / "events.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValidationError):  # torn, or cut by the seek
            record = STAGE_RECORD.validate_json(line)
            if isinstance(record, ProgressRecord):
                return record
    return None
