"""The small files of a run: who failed first, and how far its stages have got.

    run/failure.json                the first stage of the run that failed, and why: written once, read by every task
    stages/<stage>/failure.json     the failure of a stage, written by its program
    stages/<stage>/events.jsonl     its progress, which tells a run, or a stage program, that dies again and again from
                                    one that gets further each time

Each of them can be written again. A damaged one therefore counts as absent, and is logged: an error instead would end
the driver's step of the job, every time, and for a record that other jobs look at, theirs too.
"""

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from eyrie_api.artifacts import MANIFEST, read_sealed
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.records import STAGE_RECORD, Failure, ProgressRecord
from eyrie_api.contract.stages import StageName
from eyrie_api.errors import Permanent

log = logging.getLogger(__name__)

ModelT = TypeVar("ModelT", bound=Frozen)

RUN_DIR = "run"
FAILURE_FILE = "failure.json"
"""In `run/` the failure of the run; in a stage's directory the failure of that stage."""

_TAIL_BYTES = 1 << 16

Positions = Mapping[tuple[str, str], float]
"""By stage directory and unit: a stage counts rows, then tokens, and another unit begins at zero."""


def read_record(path: Path, kind: type[ModelT]) -> ModelT | None:
    """The record in a file, sealed or not; None where there is none or it is damaged."""
    try:
        return read_sealed(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s is damaged and counts as absent: %s", path, " ".join(str(error).split())[:200])
        return None


class StageFailed(Permanent):
    """A stage ended without a manifest; carries the stage program's own reason, message and hint."""


class RunFailure(Frozen):
    """`run/failure.json`: the first stage of a run that failed."""

    stage: StageName
    key: str = ""
    failure: Failure


def read_failure(job_dir: Path) -> RunFailure | None:
    """The failure of the run in this job directory; None when no stage has failed. Damaged, the failed stage is run and
    fails again, which writes it again."""
    return read_record(job_dir / RUN_DIR / FAILURE_FILE, RunFailure)


def read_stage_failure(directory: Path) -> Failure | None:
    """The failure a stage program wrote into its directory; None when there is none, or it is damaged."""
    return read_record(directory / FAILURE_FILE, Failure)


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
    latest = {}
    for directory in directories:
        if (last := _last_progress(directory)) is not None:
            latest[directory.name, last.unit] = last.done
        if (directory / MANIFEST).exists():
            latest[directory.name, MANIFEST] = 1.0
    return latest


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
