"""How far the stages of a job have got: tells a run that dies again and again from one that gets further each time."""

import contextlib
import os
from pathlib import Path

from pydantic import ValidationError

from eyrie_api.artifacts import MANIFEST
from eyrie_api.v1alpha1.records import STAGE_RECORD, ProgressRecord

_TAIL_BYTES = 1 << 16


def work_done(job_dir: Path) -> tuple[int, float]:
    """Finished stages, and the progress of the others in their own units."""
    finished, done = 0, 0.0
    stages = job_dir / "stages"
    for directory in (*stages.glob("*/"), *stages.glob("*/*/")):
        if (directory / MANIFEST).exists():
            finished += 1
        elif (directory / "events.jsonl").exists():
            done += _last_progress(directory / "events.jsonl")
    return finished, done


def _last_progress(events: Path) -> float:
    with events.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValidationError):  # torn, or cut by the seek
                record = STAGE_RECORD.validate_json(line)
                if isinstance(record, ProgressRecord):
                    return record.done
    return 0.0
