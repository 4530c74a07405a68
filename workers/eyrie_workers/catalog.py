"""The table of stages: program, inputs, condition. Torch-free: pipelines and planners read it.

This table defines a job's directory on one machine:

    <job>/stages/<stage>[/<key>]/   spec.json, events.jsonl, log.txt, then the stage's files, then manifest.json

The folder `state/` holds what a killed stage resumes from; it is not read after the manifest exists.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyrie_api.contract.stages import StageName
from eyrie_api.contract.status import ConditionType

STATE_DIR = "state"
"""Not hidden: hidden files are temporary and are not copied between machines."""

DAMAGED_SUFFIX = ".damaged"
"""Suffix of the note next to a damaged shard; the next run of capture writes that shard again."""

TRACKERS_DIR = "trackers"
"""Folder of what experiment trackers keep on disk. Their files grow while a drafter trains."""

ROWS_FILE = "rows.jsonl"
"""The answers of regenerate, to which the stage appends a line at a time: gigabytes in a large job."""

LEDGER_PARTS = f"{ROWS_FILE}.parts"
"""Folder of an unfinished regenerate stage in an artifact store: its answers, in parts of whole lines."""

SELECTION_FILE = "selection.jsonl"
"""What an unfinished regenerate stage is going to answer: as large as the prompts of a job."""

SYNC_VARIABLE = "EYRIE_SYNC_S"
"""Environment variable of the pods of a job whose work area is an artifact store: how often unfinished work is
uploaded, in seconds."""

LOAD_RESULTS_FILE = "results.json"
"""The requests without a drafter that the first profile's measurement leaves for those of the other profiles."""

SHARD_PATTERN = "shard-*.states"
"""File names of the shards of a feature store."""

MODEL_CACHE_VARIABLE = "EYRIE_MODEL_CACHE"
"""Environment variable of the pods of a cluster that has a model cache: its directory."""

KEEPER_VARIABLE = "EYRIE_SERVER_KEEPER"
"""Environment variable of the stages of a run on one machine that has a keeper of servers: its process id, and the name
of its socket in the abstract namespace."""

STORE_ADDRESS_FILE = ".store-address"
"""File in the directory of a stage whose shards or answers are not on this machine: the address of the artifact store
where the stage puts them and later ones read them. Hidden, since it concerns this machine alone."""


@dataclass(frozen=True)
class StageEntry:
    name: StageName
    module: str
    inputs: tuple[StageName, ...]
    keyed_by: str
    """The meaning of `key`; empty for a stage that runs once per job."""

    condition: ConditionType
    """The condition that becomes True when the stage has succeeded."""

    together: str = ""
    """A program that runs several members of the stage in one process, if there is one."""

    before: str = ""
    """A program that prepares the machines for all stages, in this one's directory and from its spec, on a cluster with
    a model cache."""


CATALOG: dict[StageName, StageEntry] = {
    stage.name: stage
    for stage in (
        StageEntry("regenerate", "eyrie_workers.stages.regenerate", (), "", "Regenerated",
                   before="eyrie_workers.stages.prefetch"),
        StageEntry("capture", "eyrie_workers.stages.capture", ("regenerate",), "", "Captured"),
        StageEntry("train", "eyrie_workers.stages.train", ("capture",), "candidate", "Trained",
                   together="eyrie_workers.stages.sweep"),
        StageEntry("benchmark", "eyrie_workers.stages.benchmark", ("train",), "checkpoint", "Benchmarked"),
        StageEntry("tune", "eyrie_workers.stages.tune", ("benchmark",), "", "Tuned"),
        StageEntry("prove", "eyrie_workers.stages.prove", ("tune",), "", "Proved"),
        StageEntry("hardware", "eyrie_workers.stages.hardware", ("prove",), "profile", "HardwareCompared"),
    )
}


def stage_dir(job_dir: Path, stage: StageName, key: str = "") -> Path:
    return job_dir / "stages" / stage / key if key else job_dir / "stages" / stage


def ledger_part(offset: int) -> str:
    """Name of the part of the answers that begins at a byte, in the directory of regenerate."""
    return f"{LEDGER_PARTS}/{offset:015d}"


def command(stage: StageName, directory: Path, *, before: bool = False) -> list[str]:
    """The command line of a stage program, or of the program before it; the same in a pod, in a test and on a laptop.
    """
    return [
        sys.executable, "-m", CATALOG[stage].before if before else CATALOG[stage].module,
        "--spec", str(directory / "spec.json"), "--out", str(directory / "manifest.json"),
    ]


def sweep_command(directories: Sequence[Path], rungs: Sequence[float]) -> list[str]:
    """The command line that trains several candidates in one process; each directory holds the spec of one."""
    named = [part for directory in directories for part in ("--train", str(directory))]
    return [sys.executable, "-m", CATALOG["train"].together, *named, "--rungs", ",".join(f"{rung:g}" for rung in rungs)]
