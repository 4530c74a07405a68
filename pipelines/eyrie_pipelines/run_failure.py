"""`run/failure.json`: the first stage of a run that failed, and why. Written once per run, read by every task."""

from datetime import UTC, datetime
from pathlib import Path

from eyrie_api.errors import EyrieError, Permanent
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.records import Failure
from eyrie_api.v1alpha1.stages import StageName
from eyrie_pipelines.run_records import read_record

RUN_DIR = "run"
FAILURE_FILE = "failure.json"
"""In `run/` the failure of the run; in a stage's directory the failure of that stage."""


class StageFailed(Permanent):
    """A stage ended without a manifest; carries the stage program's own reason, message and hint."""

    reason = "StageFailed"


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


def failure_of(error: EyrieError, directory: Path) -> Failure:
    """The record of an error: the stage program's own where the program reported one."""
    reported = read_stage_failure(directory) if isinstance(error, StageFailed) else None
    return reported or Failure(reason=error.reason, message=error.message, hint=error.hint, exit_code=error.exit_code,
                               time=datetime.now(UTC))
