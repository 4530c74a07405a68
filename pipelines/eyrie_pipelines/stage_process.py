"""Start a stage program, wait for it, retry it, and report how it ended.

A stage is always a child process with the command line of `catalog.command`: the same program in a pod, in a test, on a
laptop.

- stdout and stderr are appended to `log.txt` next to the spec; the program writes its progress to `events.jsonl`;
- SIGTERM is forwarded, and this process then exits with 143 (interrupted; the stage resumes when it is run again);
- a transient failure, or a program killed by a signal, is retried up to three times with growing pauses; after a kill
  the count starts again if the program has got further than ever before (`run_records`);
- a program that met a full disk is run again when there is space, however long that takes;
- a capture or training on several GPUs of this machine is torchrun and its processes. torchrun ends with 1 whichever
  way one of them ended: without a failure record that is retried like a signal;
- a permanent failure raises StageFailed with the program's message and hint;
- stages that measure take the machine's measuring lock themselves, since concurrent measurements would distort each
  other; a stage started by hand waits for the same lock.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from eyrie_api.artifacts import read_manifest, write_model
from eyrie_api.contract.records import Failure
from eyrie_api.contract.stages import StageSpec
from eyrie_api.errors import DiskFull
from eyrie_api.full_disk import MIN_FREE_BYTES, free_bytes, is_short, wait_for_room
from eyrie_api.processes import log_lines
from eyrie_pipelines.run_records import FAILURE_FILE, Attempts, StageFailed, positions, read_stage_failure
from eyrie_pipelines.several_gpus import is_first_node, is_node, under_torchrun
from eyrie_workers.catalog import command, sweep_command

INTERRUPTED_EXIT_CODE = 143
MAX_ATTEMPTS = 3
BACKOFF_S = (1.0, 5.0)
"""Pauses before the second and third attempt; EYRIE_RETRY_BACKOFF_S overrides both (tests)."""

OUTER_TMPDIR = "EYRIE_OUTER_TMPDIR"
"""The TMPDIR that the runner replaced for kfp's scratch files. Stages get it back: the measuring lock is a file in
TMPDIR and must be the same for every process of the machine."""


def run_stage_program(spec: StageSpec, directory: Path, processes: int = 1) -> None:
    """Run a stage program in its directory until it has written its manifest.

    processes   of this machine, for the stages of `several_gpus.DIVIDED_STAGES`.

    Raises StageFailed when it ended without one MAX_ATTEMPTS times and got no further. Exits this process with 143
    after SIGTERM or SIGINT.
    """
    alone = command(spec.stage, directory)
    arguments = under_torchrun(alone, processes) if is_node() or processes > 1 else alone
    run_in_directory(spec, directory, arguments, several=processes > 1)
    if is_first_node():
        read_manifest(directory)  # exit 0 without a manifest is a defect of the stage: report it here


def run_in_directory(spec: StageSpec, directory: Path, arguments: list[str], *, several: bool = False) -> None:
    """Run a program of a stage, which may be the one before it, in the stage's directory until it succeeds. Raises as
    `run_stage_program`."""
    directory.mkdir(parents=True, exist_ok=True)
    wait_for_room(directory)
    write_model(directory / "spec.json", spec)
    for failure in _run_until_done(spec.stage, [directory], arguments, several=several):
        raise StageFailed(failure.message, failure.hint)


def run_sweep_program(directories: Sequence[Path], rungs: Sequence[float], processes: int = 1) -> None:
    """Run the sweep program, on several GPUs in as many processes, until each candidate has its manifest or its
    failure.

    Raises StageFailed when it ended with neither. Exits this process with 143 after SIGTERM or SIGINT.
    """
    first, alone, several = directories[0], sweep_command(directories, rungs), processes > 1
    arguments = under_torchrun(alone, processes) if several else alone
    for directory in directories:
        (directory / FAILURE_FILE).unlink(missing_ok=True)
        if directory != first:
            (directory / "log.txt").write_text(f"trained in one process with {first.name}: see its log\n")
    failures = _run_until_done("sweep", directories, arguments, several=several, hint="; or set sweep.shared_passes to "
                               "never: candidates then train one by one")
    for directory in directories if not failures else ():
        read_manifest(directory)


def _run_until_done(what: str, directories: Sequence[Path], arguments: list[str], *, several: bool,
                    hint: str = "") -> list[Failure]:
    """Run a program until it succeeds; returns the failures of the stages in these directories when it is not run
    again. Raises StageFailed where there are none then, SystemExit."""
    attempts, log = Attempts(), directories[0] / "log.txt"
    while True:
        code, interrupted = _run_with_room(arguments, directories, {"EYRIE_DEVICE": "cuda"} if several else {})
        if code == 0:
            return []
        if interrupted:
            raise SystemExit(INTERRUPTED_EXIT_CODE)
        failures = [failure for directory in directories if (failure := read_stage_failure(directory)) is not None]
        if is_node() and all(failure.transient for failure in failures):
            # A peer may have ended. A node must not restart its program alone: the peers would not rejoin it. The
            # TrainJob's runtime restarts all nodes, and fails the TrainJob after its own limit.
            raise SystemExit(code if code > 0 else 1)
        # Killed from outside (out of memory, kill): the stage resumes from its ledger or checkpoint.
        killed = code < 0 or code == INTERRUPTED_EXIT_CODE or several
        retryable = all(failure.transient for failure in failures) if failures else killed
        attempts = attempts.after_failure() if failures else attempts.after_kill(positions(directories))
        if failures and (not retryable or attempts.count == MAX_ATTEMPTS):
            return failures
        if not retryable or attempts.count == MAX_ATTEMPTS:
            lines = [line for line in log_lines(log) if any(map(str.isalnum, line))]  # torchrun's last line is "====="
            last = f"; last line of its log: {lines[-1]}" if lines else ""
            if code < 0:
                raise StageFailed(f"the program was killed by {signal.Signals(-code).name} {MAX_ATTEMPTS} times and "
                                  f"got no further{last}", "if memory ran out, lower the batch sizes of this stage; "
                                  f"then retry the job{hint}")
            raise StageFailed(f"the program ended with exit code {code}{last}", f"read {log}, then retry the job{hint}")
        pause = float(os.environ.get("EYRIE_RETRY_BACKOFF_S", BACKOFF_S[attempts.count - 1]))
        print(f"{what}: attempt {attempts.count} of {MAX_ATTEMPTS} ended with {code}; retrying in {pause} s",
              flush=True)
        time.sleep(pause)


def _run_with_room(arguments: list[str], directories: Sequence[Path],
                   defaults: Mapping[str, str]) -> tuple[int, bool]:
    """`_run_once`, again and again while the disk is full: that is no attempt, and ends when space is freed. As much as
    was free was not enough, so twice of it is waited for."""
    first = directories[0]
    while True:
        code, interrupted = _run_once(arguments, first, defaults)
        if interrupted or not _met_full_disk(code, directories):
            return code, interrupted
        for directory in directories:
            (directory / FAILURE_FILE).unlink(missing_ok=True)
        wait_for_room(first, max(MIN_FREE_BYTES, 2 * free_bytes(first)))


def _met_full_disk(code: int, directories: Sequence[Path]) -> bool:
    """By the exit code; or, since torchrun ends with 1 whichever way a process ended, by the failure records, or by the
    disk where those did not fit. A node must not start its program again alone."""
    if code != 1 or is_node():
        return code == DiskFull.exit_code
    failures = [failure for directory in directories if (failure := read_stage_failure(directory)) is not None]
    return any(failure.reason == DiskFull.reason for failure in failures) or (not failures and is_short(directories[0]))


def _run_once(arguments: list[str], directory: Path, defaults: Mapping[str, str]) -> tuple[int, bool]:
    """Start the program once and wait: (exit code, whether a signal to stop arrived meanwhile).

    defaults   environment variables that the program gets unless they are set already.
    """
    interrupted = False
    child: subprocess.Popen[bytes] | None = None
    environment = {**defaults, **os.environ}
    if (outer := environment.pop(OUTER_TMPDIR, None)) is not None:
        environment.pop("TMPDIR", None)
        if outer:
            environment["TMPDIR"] = outer

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        if child is not None:
            child.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with (directory / "log.txt").open("ab") as log:
            child = subprocess.Popen(arguments, cwd=directory, env=environment, stdout=log, stderr=subprocess.STDOUT,
                                     stdin=subprocess.DEVNULL)
            if interrupted:  # race: the signal arrived after the handler was set and before `child` was assigned
                child.terminate()
            return child.wait(), interrupted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
