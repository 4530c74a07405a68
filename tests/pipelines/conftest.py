"""Rehearsed runs: the real runner, kfp.local and stage frame; only the stages do no work."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.sweep import SweepAxis, SweepSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.tuning import DrafterUse
from eyrie_api.full_disk import free_bytes
from eyrie_api.planning.resolve import derive
from eyrie_pipelines import local
from eyrie_pipelines.runner import JobFile
from tests.small_disk import small_disk

REHEARSAL = Path(__file__).parent / "rehearsal"


class Rehearsal:
    """The directory from which rehearsed stages read how to behave."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.plan()

    def plan(self, **words: list[str]) -> None:
        """How stages behave, by name (`train__base` for `train/base`)."""
        (self.home / "plan.json").write_text(json.dumps({k.replace("__", "/"): v for k, v in words.items()}))

    def let_go(self) -> None:
        """Let the stages go on whose word is `wait`."""
        (self.home / "go").touch()

    def sweeps(self) -> list[str]:
        """The `--rungs` argument of every start of the sweep program."""
        log = self.home / "sweeps.log"
        return log.read_text().splitlines() if log.exists() else []

    def starts(self) -> list[str]:
        """Every start of a stage, in order."""
        log = self.home / "starts.log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    home = tmp_path / "rehearsal"
    home.mkdir()
    monkeypatch.setenv("EYRIE_REHEARSAL", str(home))
    monkeypatch.setenv("EYRIE_RETRY_BACKOFF_S", "0.01")
    monkeypatch.setenv("PYTHONPATH", f"{REHEARSAL}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return Rehearsal(home)


@pytest.fixture
def job_dir(tmp_path: Path) -> Iterator[Path]:
    """A job directory whose name holds a space and the word kfp.local would rewrite; ends what still runs in it."""
    directory = tmp_path / "my python3 jobs" / "job-1"
    directory.mkdir(parents=True)
    yield directory
    local.stop(directory, grace_s=0.5)


def spec_of(**sections: object) -> JobSpec:
    least = {"target": TargetSpec(model="quickstart"), "data": DataSpec(sources=(DataSource(path="quickstart"),))}
    return JobSpec(**(least | sections))


def job_file(spec: JobSpec, attempt: int = 1, incumbent: DrafterUse | None = None, reuse: tuple[str, ...] = (), *,
             job_id: str = "job-1") -> JobFile:
    """The job as a driver starts it."""
    return JobFile(id=job_id, resolved=derive(spec), attempt=attempt, incumbent=incumbent, reuse=reuse)


def sweeping_spec(together: Literal["auto", "always", "never"] = "auto", **sections: object) -> JobSpec:
    axis = SweepAxis(field="train.learning_rate", values=(0.001, 0.002, 0.003))
    return spec_of(sweep=SweepSpec(axes=(axis,), shared_passes=together), **sections)


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of the test's own, of 256 MiB or of as many as the test gives."""
    with contextlib.ExitStack() as mounted:
        try:
            path = mounted.enter_context(small_disk(tmp_path / "disk", getattr(request, "param", 256) << 20))
        except PermissionError as error:
            pytest.skip(str(error))
        yield path
        for directory in path.glob("*/run"):
            local.stop(directory.parent, grace_s=0.5)


def fill(disk: Path) -> Path:
    """Leave no byte free, also while a run writes to the same disk."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        while free := free_bytes(disk):
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
            except OSError as error:
                # The run wrote between the measurement and the allocation: what is left is measured again.
                if error.errno != errno.ENOSPC:
                    raise
    return filler
