"""The runner of one machine: a run is a process group, observed through files, stopped by a signal.

kfp.local keeps its state in globals of the process (configuration, log handlers, a patched `print`) and cannot be
cancelled. So every run has its own process, which leads a session: `start` spawns it, `observe` reads its files, `stop`
ends the whole group within seconds, stages included. None of the three needs the process that called `start`: a
restarted control plane finds the run through `run/run.json`, or, where that is damaged, by the leader's command line.

    <job>/job.json              the job, as the run reads it
    <job>/run/lock              locked by the leader while it runs: a job cannot have two runs at once
    <job>/run/run.json          identity of the leader: pid, start time, boot; which attempt
    <job>/run/pipeline.log      output of kfp.local and the tasks
    <job>/run/failure.json      the stage that failed, and why (`run_records`)
    <job>/run/result.json       how the run ended; written last
    <job>/run/{root,tmp}        kfp.local's own files

kfp.local also replaces the text `python3` in every argument of a task, paths included, by `sys.executable` unquoted.
The leader therefore puts its interpreter's directory first in PATH and sets `sys.executable` to `python3`: the
replacement then changes nothing, also in paths that contain that word or a space.
"""

import argparse
import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from eyrie_api.artifacts import code_version, digest_model, write_model
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.stages import StageName
from eyrie_api.errors import Conflict, EyrieError, Permanent, Transient, report_error
from eyrie_api.full_disk import disk_full, is_full, is_short, wait_for_room, with_room
from eyrie_api.planning.facts import gpus_of
from eyrie_api.processes import last_lines
from eyrie_pipelines.processes import (
    ProcessId,
    arguments_of,
    find_process,
    group_members,
    identify,
    is_alive,
    stop_group,
)
from eyrie_pipelines.run_records import RUN_DIR, RunFailure, read_failure, read_record, work_done
from eyrie_pipelines.runner import JOB_FILE, JobFile, ObservedRun, RunFailed, Runner, RunState
from eyrie_pipelines.several_gpus import SHARES, gpu_shares
from eyrie_pipelines.stage_process import OUTER_TMPDIR
from eyrie_pipelines.tasks import load_job
from eyrie_workers.catalog import KEEPER_VARIABLE

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL. A stage saves its state at the next pause point; work since the last save is
repeated."""

_START_TIMEOUT_S = 60.0
_ALREADY_RUNNING_EXIT_CODE = 3
_LOG_FILE = "pipeline.log"
_MODULE = "eyrie_pipelines.local"
"""Of the leader's command line."""


class RunHandle(Frozen):
    """`run/run.json`: identity of the run's leader."""

    run_id: str
    job_id: str
    attempt: int
    starts: int = 1
    """How often this attempt was started without progress since: more than once if the leader or the machine died."""

    work: tuple[int, float] = (0, 0.0)
    """The stages' work when it was started (`work_done`)."""

    process: ProcessId
    started_at: datetime
    since: datetime | None = None
    """The first of these starts."""


class RunResult(Frozen):
    """`run/result.json`: how the run ended."""

    run_id: str
    state: Literal["succeeded", "failed"]
    failure: RunFailure | None = None
    message: str = ""
    finished_at: datetime


class RunNotStarted(Permanent):
    """The run's process ended before it wrote `run.json`."""


class LocalRunner(Runner):
    """Runs of one home directory, one at a time. Stages work in the job's own directory: nothing has to be downloaded
    or uploaded."""

    def __init__(self, home: Path) -> None:
        self._home = home.absolute()

    def observe(self, job_id: str) -> ObservedRun:
        return observe(self._dir(job_id))

    def start(self, job: JobFile) -> None:
        """See `Runner`, and `start` in this module. Race: a driver whose start took longer than its lease, or was
        killed before the leader's record was there, has started the run; the next observation finds it."""
        with contextlib.suppress(Conflict):
            start(self._dir(job.id), job)

    def discard(self, job_id: str, stages: Collection[StageName]) -> None:
        for stage in stages:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._dir(job_id) / "stages" / stage)

    def stop(self, job_id: str) -> None:
        stop(self._dir(job_id))

    def pause(self, job_id: str) -> None:
        if observe(self._dir(job_id)).state == "running":
            pause(self._dir(job_id))

    def delete(self, job_id: str) -> None:
        stop(self._dir(job_id))

    def has_capacity(self, job_id: str, live: tuple[str, ...], num_running: int) -> bool:
        """See `Runner`: no other job runs and no older one waits. Counts processes, not database rows."""
        is_older = True
        for other in live:
            if other == job_id:
                is_older = False
            elif (state := observe(self._dir(other)).state) == "running" or (is_older and state == "none"):
                return False
        return True

    def _dir(self, job_id: str) -> Path:
        return self._home / "jobs" / job_id


def start(job_dir: Path, job: JobFile) -> RunHandle:
    """Start the job's pipeline in its own process group and return once it has written `run.json`.

    Processes that an earlier leader left behind are stopped first. Raises Conflict when a run of this job is alive,
    RunNotStarted when the process ended at once (the message contains the end of its log), Transient when it was
    killed, DiskFull."""
    job_dir = job_dir.resolve()
    if is_short(job_dir):
        raise disk_full(job_dir)
    last = find_handle(job_dir)
    if observe(job_dir).state == "running":
        raise Conflict(f"a run of job {job.id} is alive", "cancel it first")
    if last is not None:  # its leader has ended; stages it started may still run
        stop_group(last.process, GRACE_S)
    run_dir = job_dir / RUN_DIR
    run_dir.mkdir(parents=True, exist_ok=True)
    before = read_record(job_dir / JOB_FILE, JobFile)
    job = job.after(before)
    if job != before:
        write_model(job_dir / JOB_FILE, job)
    with (run_dir / _LOG_FILE).open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", _MODULE, "--job-dir", str(job_dir), "--attempt", str(job.attempt)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        handle = read_record(run_dir / "run.json", RunHandle)
        if handle is not None and handle.process.pid == child.pid:
            return handle
        code = child.poll()
        if code == _ALREADY_RUNNING_EXIT_CODE:  # race: another process started a run after `observe`
            raise Conflict(f"a run of job {job.id} is alive", "cancel it first")
        if code is not None and code < 0:
            raise Transient(f"the run of job {job.id} was killed by signal {-code} before it wrote its record",
                            "it is started again; check the system log for the out-of-memory killer")
        if code is not None:
            log_file = run_dir / _LOG_FILE
            raise RunNotStarted(f"the run of job {job.id} ended with {code} at once: {last_lines(log_file)}",
                                f"read {log_file}")
        time.sleep(0.02)
    child.kill()
    raise Transient(f"the run of job {job.id} did not come up within {_START_TIMEOUT_S:.0f} s")


def observe(job_dir: Path) -> ObservedRun:
    """The latest run, from files and the process table; works in any process, not only the one that started it."""
    handle = find_handle(job_dir)
    if handle is None:
        return ObservedRun()
    state: RunState = "running" if is_alive(handle.process) else "gone"
    # Race: the leader may end between the two reads. Its result is read last, so that a finished run never reads as
    # gone.
    result, failure = read_record(job_dir / RUN_DIR / "result.json", RunResult), None
    if result is not None and result.run_id == handle.run_id:
        # Without a stage's own record a process between leader and stage program died: that run is gone, not failed.
        state = "gone" if result.state == "failed" and result.failure is None else result.state
        if (first := result.failure) is not None:
            failure = RunFailed(first.stage, first.key, first.failure.reason, first.failure.message, first.failure.hint)
    return ObservedRun(state, handle.attempt, handle.starts, handle.run_id, failure, since=handle.since,
                       started_at=handle.started_at,
                       leftovers=state != "running" and bool(group_members(handle.process.pid)),
                       last_words=last_lines(job_dir / RUN_DIR / _LOG_FILE) if state == "gone" else "")


def find_handle(job_dir: Path) -> RunHandle | None:
    """The leader of the latest run, which may have ended; None where none was started. Without a readable record the
    one that runs is found by its command line."""
    handle = read_record(job_dir / RUN_DIR / "run.json", RunHandle)
    # Not for jobs that were never started: every process of the machine is looked at.
    if handle is not None or not (job_dir / RUN_DIR).is_dir():
        return handle
    process = find_process(_MODULE, str(job_dir.resolve()))
    arguments = [] if process is None else arguments_of(process.pid)
    if process is None or "--attempt" not in arguments:
        return None
    attempt = int(arguments[arguments.index("--attempt") + 1])
    return RunHandle(run_id=_run_id(job_dir.name, attempt, process), job_id=job_dir.name, attempt=attempt,
                     process=process, started_at=datetime.now(UTC))


def stop(job_dir: Path, grace_s: float = GRACE_S) -> None:
    """Stop the latest run with every process of its group: SIGTERM, then SIGKILL after `grace_s` seconds."""
    handle = find_handle(job_dir)
    if handle is not None:
        stop_group(handle.process, grace_s)


def pause(job_dir: Path, grace_s: float = GRACE_S) -> None:
    """Stop the latest run and remove `run.json`: the next start then does not count as a restart after a crash."""
    stop(job_dir, grace_s)
    (job_dir / RUN_DIR / "run.json").unlink(missing_ok=True)


def live_processes(job_dir: Path) -> list[int]:
    """Running processes of the latest run's group."""
    handle = find_handle(job_dir)
    return [] if handle is None else group_members(handle.process.pid)


def _run_id(job_id: str, attempt: int, process: ProcessId) -> str:
    return f"{job_id}-{attempt}-{process.started_ticks}-{process.pid}"


# The leader's process.


def run_pipeline(job_dir: Path, attempt: int) -> int:
    """Take the lock, write `run.json`, run the pipeline, write `result.json`. Returns the exit code."""
    run_dir = job_dir / RUN_DIR
    with (run_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _ALREADY_RUNNING_EXIT_CODE
        job = load_job(str(job_dir))
        process = identify(os.getpid())
        assert process is not None
        run_id = _run_id(job.id, attempt, process)
        before = read_record(run_dir / "run.json", RunHandle)
        work = work_done(job_dir)
        now, starts, since = datetime.now(UTC), 1, None
        if before is not None and (before.attempt, before.work) >= (attempt, work):  # it got no further
            starts, since = before.starts + 1, before.since
        handle = RunHandle(run_id=run_id, job_id=job.id, attempt=attempt, starts=starts, work=work, process=process,
                           started_at=now, since=since or now)
        with_room(run_dir, lambda: write_model(run_dir / "run.json", handle))
        for name in ("result.json", "failure.json"):  # of an earlier run; observers ignore a result with another run_id
            (run_dir / name).unlink(missing_ok=True)
        is_kept = job.spec.engine.kind == "sglang" and sys.platform == "linux"
        with _server_keeper() if is_kept else contextlib.nullcontext():
            failure = _run_with_room(job_dir, job)
        state: Literal["succeeded", "failed"] = "succeeded" if failure is None else "failed"
        result = RunResult(run_id=run_id, state=state, failure=read_failure(job_dir), message=failure or "",
                           finished_at=datetime.now(UTC))
        with_room(run_dir, lambda: write_model(run_dir / "result.json", result))
        return 0 if failure is None else 1


@contextlib.contextmanager
def _server_keeper() -> Iterator[None]:
    """Run the process that keeps servers from one stage to the next."""
    name = f"eyrie-servers-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        keeper = subprocess.Popen(
            [sys.executable, "-m", "eyrie_workers.engines.server_keeper", str(os.getpid()), str(listener.fileno())],
            stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()])
    os.environ[KEEPER_VARIABLE] = f"{keeper.pid} {name}"
    try:
        yield
    finally:
        del os.environ[KEEPER_VARIABLE]
        keeper.terminate()  # and waited for: the endpoint's servers need the memory
        keeper.wait()


def _run_with_room(job_dir: Path, job: JobFile) -> str | None:
    """`_run_under_kfp`, again when the disk was full: stages wait for space themselves, but kfp's files of a task that
    begins or ends then cannot be written, nor this process's log. Ending here would count as a start without
    progress."""
    while True:
        try:
            failure = _run_under_kfp(job_dir, job)
            if failure is None or read_failure(job_dir) is not None or not is_short(job_dir):
                return failure
        except OSError as error:
            if not is_full(error):
                raise
        wait_for_room(job_dir)


def _run_under_kfp(job_dir: Path, job: JobFile) -> str | None:
    """Run the pipeline under kfp.local; None when it succeeded, else kfp's error message."""
    run_dir = job_dir / RUN_DIR
    shares = gpu_shares(gpus_of(os.environ), job.spec.engine)  # of this machine's GPUs, among measurements
    if len(shares) > 1:
        os.environ.setdefault(SHARES, ";".join(",".join(share) for share in shares))
    os.environ[OUTER_TMPDIR] = os.environ.get("TMPDIR", "")
    (run_dir / "tmp").mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(run_dir / "tmp")
    bin_dir = Path(sys.executable).parent
    if (bin_dir / "python3").exists():  # see the module docstring
        os.environ["PATH"] = f"{bin_dir}{os.pathsep}{os.environ.get('PATH', '')}"
        sys.executable = "python3"
    # Imported here: it takes about a second, which a second leader refused at the lock must not spend.
    from kfp import local

    from eyrie_pipelines.kfp_pipeline import define

    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(run_dir / "root"),
               enable_caching=False)
    try:
        define(profiles=job.spec.prove.profile_names, trains=job.spec.trains)(
            job_dir=str(job_dir), spec_digest=digest_model(job), code_version=code_version(), **job.run_parameters())
    except RuntimeError as error:  # raised by kfp.local when a task failed
        return str(error)
    finally:
        for scratch in ("root", "tmp"):
            shutil.rmtree(run_dir / scratch, ignore_errors=True)
    return None


def main() -> int:
    """`python -m eyrie_pipelines.local --job-dir D`: run one job's pipeline."""
    parser = argparse.ArgumentParser(description="Run one job's pipeline in this process group.")
    parser.add_argument("--job-dir", type=Path, required=True, help="directory that contains job.json")
    parser.add_argument("--attempt", type=int, default=1, help="number of the job's attempt")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            return run_pipeline(arguments.job_dir.resolve(), arguments.attempt)
        except EyrieError as error:
            return report_error(error)
    return 130


if __name__ == "__main__":
    sys.exit(main())
