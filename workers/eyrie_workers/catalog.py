"""The table of stages: what runs, from what, to what, on what. Torch-free: pipelines and planners read it.

A job's directory on one machine is laid out by this table alone:

    <job>/stages/<stage>[/<key>]/   spec.json, events.jsonl, log.txt, then the stage's files, then manifest.json

A folder `state/` in it is what a killed stage goes on from; once the manifest is there nobody reads it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyrie_api.v1alpha1.stages import StageName

STATE_DIR = "state"
"""Not hidden: what is hidden is being written aside, and stays on its machine."""

DAMAGED_SUFFIX = ".damaged"
"""Of the note beside a shard whose bytes are not what was written: capture, run again, makes that shard anew."""

STORE_ADDRESS_FILE = "read-at.txt"
"""In the directory of a feature store that was not brought to this machine: the address it is read at."""


@dataclass(frozen=True)
class Stage:
    """One stage program."""

    name: StageName
    module: str
    inputs: tuple[StageName, ...]
    keyed_by: str
    """What `key` means: empty for a stage that runs once per job."""

    needs_accelerator: bool
    condition: str
    """The condition that becomes True when it has succeeded."""

    together: str = ""
    """A program that does the work of several members of the stage in one process, if there is one."""


CATALOG: dict[StageName, Stage] = {
    stage.name: stage
    for stage in (
        Stage("regenerate", "eyrie_workers.stages.regenerate", (), "", True, "Regenerated"),
        Stage("capture", "eyrie_workers.stages.capture", ("regenerate",), "", True, "Captured"),
        Stage("train", "eyrie_workers.stages.train", ("capture",), "candidate", True, "Trained",
              together="eyrie_workers.stages.sweep"),
        Stage("benchmark", "eyrie_workers.stages.benchmark", ("train",), "checkpoint", True, "Benchmarked"),
        Stage("tune", "eyrie_workers.stages.tune", ("benchmark",), "", True, "Tuned"),
        Stage("prove", "eyrie_workers.stages.prove", ("tune",), "", True, "Proved"),
    )
}


def stage_dir(job_dir: Path, stage: StageName, key: str = "") -> Path:
    """Where a stage of a job works."""
    return job_dir / "stages" / stage / key if key else job_dir / "stages" / stage


def command(stage: StageName, directory: Path) -> list[str]:
    """The command line of a stage program; the same in a pod, in a test and on a laptop."""
    return [
        sys.executable, "-m", CATALOG[stage].module,
        "--spec", str(directory / "spec.json"), "--out", str(directory / "manifest.json"),
    ]


def sweep_command(directories: Sequence[Path], rungs: Sequence[float]) -> list[str]:
    """The command line that trains several candidates in one process; each directory holds the spec of one."""
    named = [part for directory in directories for part in ("--train", str(directory))]
    return [sys.executable, "-m", CATALOG["train"].together, *named, "--rungs", ",".join(f"{one:g}" for one in rungs)]
