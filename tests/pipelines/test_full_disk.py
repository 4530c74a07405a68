"""A full disk stops nothing for good: what meets it waits, says so, and goes on when there is space."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from eyrie_api import full_disk
from eyrie_api.artifacts import read_manifest
from eyrie_api.errors import ArtifactCorrupt, DiskFull, EyrieError
from eyrie_api.full_disk import MIN_FREE_BYTES, free_bytes, is_full, is_short, wait_for_room
from eyrie_pipelines import local
from eyrie_pipelines.processes import wait_until
from eyrie_workers.stage_program import Stage
from tests.pipelines.conftest import Rehearsal, fill, job_file, spec_of

WAITS_S = 4.0
"""A run that is still there then has waited: space is looked for every two seconds."""


def test_a_run_starts_when_there_is_space_again(disk: Path, rehearsal: Rehearsal) -> None:
    job_dir = disk / "job-1"
    job_dir.mkdir()
    rehearsal.plan(regenerate=["hang"])
    filler = fill(disk)
    with pytest.raises(DiskFull, match="0 MB are free") as caught:
        local.start(job_dir, job_file(spec_of()))
    assert "continues by itself" in caught.value.hint
    filler.unlink()
    local.start(job_dir, job_file(spec_of()))
    assert wait_until(lambda: rehearsal.starts() == ["regenerate"], 240.0)


@pytest.mark.slow
def test_a_run_whose_disk_fills_up_waits_and_ends_as_if_nothing_had_happened(disk: Path, rehearsal: Rehearsal) -> None:
    job_dir = disk / "job-1"
    job_dir.mkdir()
    begun = job_dir / "stages" / "regenerate" / "spec.json"
    rehearsal.plan(prove=["wait"])  # else the run may have ended before the disk is full
    local.start(job_dir, job_file(spec_of()))
    assert wait_until(begun.exists, 240.0)
    filler = fill(disk)
    assert not wait_until(lambda: local.observe(job_dir).state != "running", WAITS_S), "it waits"
    filler.unlink()
    rehearsal.let_go()
    assert wait_until(lambda: local.observe(job_dir).state != "running", 600.0)
    assert local.observe(job_dir).state == "succeeded"
    assert read_manifest(job_dir / "stages" / "prove").stage == "prove"


def test_a_disk_that_fills_up_between_two_stages_is_waited_for_in_the_run(disk: Path, rehearsal: Rehearsal) -> None:
    job_dir = disk / "job-1"
    job_dir.mkdir()
    filler = job_dir / "stages" / "regenerate" / "filler"
    rehearsal.plan(regenerate=["fill"], capture=["hang"])
    local.start(job_dir, job_file(spec_of()))
    assert wait_until(lambda: filler.exists() and free_bytes(disk) == 0, 60.0)
    assert not wait_until(lambda: local.observe(job_dir).state != "running", WAITS_S), "it waits"
    filler.unlink()
    assert wait_until(lambda: rehearsal.starts() == ["regenerate", "capture"], 180.0)
    seen = local.observe(job_dir)
    assert (seen.state, seen.starts) == ("running", 1)


def test_a_record_that_fits_only_in_part_is_not_written_and_the_next_one_is_whole(disk: Path) -> None:
    stage = Stage(disk, quiet=True)
    stage.event("Before", "x" * 3900)  # the next line would cross the end of the first page
    filler = fill(disk)
    with pytest.raises(OSError, match="No space left"):
        stage.event("Lost", "y" * 500)
    filler.unlink()
    stage.event("After", "z")
    reasons = [json.loads(line)["reason"] for line in (disk / "events.jsonl").read_text().splitlines()]
    assert reasons == ["Before", "After"]


def test_what_was_free_was_not_enough_so_more_is_waited_for(disk: Path) -> None:
    filler, waited, stopping = fill(disk), threading.Event(), threading.Event()
    os.truncate(filler, filler.stat().st_size - MIN_FREE_BYTES - (1 << 20))
    free = free_bytes(disk)
    assert not is_short(disk)
    thread = threading.Thread(
        target=lambda: (wait_for_room(disk, 2 * free, lambda _: stopping.wait(0.01)), waited.set()))
    thread.start()
    assert not waited.wait(0.3)
    filler.unlink()
    assert waited.wait(60.0)
    thread.join()


def test_space_that_was_freed_before_it_was_measured_is_enough_after_a_while(
        disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_disk, "_PATIENCE_S", 0.1)
    filler, free = fill(disk), 256 << 20
    os.truncate(filler, filler.stat().st_size - MIN_FREE_BYTES + (1 << 20))
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        time.sleep(0.2)
        if len(waits) == 3:
            filler.unlink()

    wait_for_room(disk, 2 * free, sleep)
    assert len(waits) == 3, "less than MIN_FREE_BYTES is never enough"


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device"), OSError(122, "Disk quota exceeded"),
    RuntimeError("PytorchStreamWriter failed: No space left on device (os error 28)"),
    ValueError("database or disk is full")])
def test_libraries_tell_a_full_disk_in_their_own_ways(error: Exception) -> None:
    assert is_full(error)


def test_the_exit_code_of_a_full_disk_is_that_of_no_other_error() -> None:
    """Else a stage that meets damaged data would wait for space, and be run again."""
    known, left = set[type[EyrieError]](), [EyrieError]
    while left:
        known.add(kind := left.pop())
        left += kind.__subclasses__()
    assert ArtifactCorrupt in known
    assert {kind for kind in known if kind.exit_code == DiskFull.exit_code} == {DiskFull}


def test_other_errors_are_not_a_full_disk() -> None:
    others = (OSError(5, "Input/output error"), RuntimeError("out of memory"), FileNotFoundError(2, "no file"))
    assert not any(map(is_full, others))
