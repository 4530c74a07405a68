"""The runner of one machine: a run is a process group of its own, observed through files, stopped by a signal.

kfp.local keeps its state in globals of the process (configuration, log handlers, a patched `print`) and cannot be
cancelled. So every run gets a process of its own, leader of a session: `start` launches it, `observe` reads what it
left on disk, `stop` ends the whole group within seconds, stages included. None of the three needs the process that
called `start`: a control plane that was killed finds the run again, and adopts it by `run/run.json`.

    <job>/job.json              the job, as the run reads it
    <job>/run/lock              held by the leader while it lives: two runs of a job at once are impossible
    <job>/run/run.json          who leads the run: pid, start time, boot; which attempt
    <job>/run/pipeline.log      what kfp.local and the boxes print
    <job>/run/failure.json      the stage that failed, and why (`run_stage`)
    <job>/run/result.json       how the run ended; written last
    <job>/run/{root,tmp}        kfp.local's own files

`LocalRunner` is these functions behind the protocol of `runner`.

kfp.local also replaces the text `python3` in every argument of a box, a path in it included, by `sys.executable`
unquoted. The leader therefore puts its interpreter's directory first in PATH and calls itself plainly `python3`:
the replacement becomes harmless for paths that contain that word, or a space.
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from eyrie_api.artifacts import code_version, digest_model, write_model
from eyrie_api.errors import Conflict, EyrieError, Permanent, Transient
from eyrie_api.processes import last_lines
from eyrie_api.program_exit import report_error
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_pipelines.processes import ProcessName, group_members, is_alive, name_of, stop_group
from eyrie_pipelines.run_stage import OUTER_TMPDIR, RUN_DIR, RunFailure, load_job, read_failure
from eyrie_pipelines.runner import RunFailed, RunSeen, RunState
from eyrie_pipelines.steps import JOB_FILE, JobFile

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL. A stage saves what it has at the next pause point; what it cannot save it redoes."""

_START_TIMEOUT_S = 60.0
_ALREADY_RUNNING_EXIT_CODE = 3

ModelT = TypeVar("ModelT", bound=Frozen)


class RunHandle(Frozen):
    """`run/run.json`: who leads the run."""

    run_id: str
    job_id: str
    attempt: int
    starts: int = 1
    """How often this attempt was started: more than once when the leader or the machine died."""

    process: ProcessName
    started_at: datetime


class RunResult(Frozen):
    """`run/result.json`: how the run ended."""

    run_id: str
    state: Literal["succeeded", "failed"]
    failure: RunFailure | None = None
    message: str = ""
    finished_at: datetime


class RunObservation(Frozen):
    """What can be seen of a job's latest run."""

    state: RunState
    """none: never started. gone: the leader died without a result (killed, or the machine went down)."""

    handle: RunHandle | None = None
    result: RunResult | None = None


class RunNotStarted(Permanent):
    """The run's process ended before it could say who it is."""

    reason = "RunNotStarted"


class LocalRunner:
    """Runs of one home. At most `max_runs` of them share the machine's cores."""

    def __init__(self, home: Path, *, max_runs: int = 1) -> None:
        self._home, self._max_runs = home.absolute(), max_runs

    def refresh(self, job_id: str, spec: JobSpec) -> None:
        """See `Runner`: stages work in the job's own directory."""

    def observe(self, job_id: str) -> RunSeen:
        """See `Runner`."""
        run = observe(self._dir(job_id))
        if run.handle is None:
            return RunSeen()
        failure = None
        if run.result is not None and run.result.state == "failed":
            failure = _failure_of(run.result)
        return RunSeen(state=run.state, attempt=run.handle.attempt, starts=run.handle.starts, run_id=run.handle.run_id,
                       failure=failure, leftovers=run.state != "running" and bool(leftovers(self._dir(job_id))))

    def start(self, job_id: str, spec: JobSpec, attempt: int, incumbent: DrafterUse | None) -> None:
        """See `Runner`, and `start` in this module."""
        start(self._dir(job_id), job_id, spec, attempt, incumbent)

    def stop(self, job_id: str) -> None:
        """See `Runner`."""
        stop(self._dir(job_id))

    def pause(self, job_id: str) -> None:
        """See `Runner`."""
        if observe(self._dir(job_id)).state == "running":
            pause(self._dir(job_id))

    def keep(self, job_id: str, name: str) -> None:
        """See `Runner`: this disk is where jobs are kept."""

    def forget(self, job_id: str) -> None:
        """See `Runner`."""
        stop(self._dir(job_id))

    def has_place(self, job_id: str, live: tuple[str, ...], num_running: int) -> bool:
        """See `Runner`: a place is free, and no older job waits for it. Processes count, whatever rows say."""
        older, running, older_waits = True, 0, False
        for other in live:
            if other == job_id:
                older = False
                continue
            state = observe(self._dir(other)).state
            running += state == "running"
            older_waits = older_waits or (older and state == "none")
        return running < self._max_runs and not older_waits

    def _dir(self, job_id: str) -> Path:
        return self._home / "jobs" / job_id


def _failure_of(result: RunResult) -> RunFailed:
    first = result.failure
    if first is None:
        return RunFailed(None, "", "PipelineFailed", result.message, "read run/pipeline.log, then retry the job")
    return RunFailed(first.stage, first.key, first.failure.reason, first.failure.message, first.failure.hint)


def start(job_dir: Path, job_id: str, spec: JobSpec, attempt: int = 1,
          incumbent: DrafterUse | None = None) -> RunHandle:
    """Start the job's pipeline in a process group of its own and return once it has said who it is.

    `incumbent` is what serves at the job's endpoint; the first start of an attempt decides it, a later one keeps it.
    What an earlier leader left running is ended first. Raises Conflict when a run of this job is alive, RunNotStarted
    when the process died at once (the message carries the end of its log).
    """
    job_dir = job_dir.resolve()
    seen = observe(job_dir)
    if seen.state == "running":
        raise Conflict(f"a run of job {job_id} is alive", "cancel it first")
    if seen.handle is not None:
        stop_group(seen.handle.process, GRACE_S)
    run_dir = job_dir / RUN_DIR
    run_dir.mkdir(parents=True, exist_ok=True)
    before = _read(job_dir / JOB_FILE, JobFile)
    if before is None or (before.id, before.spec, before.attempt) != (job_id, spec, attempt):
        write_model(job_dir / JOB_FILE, JobFile(id=job_id, spec=spec, attempt=attempt, incumbent=incumbent))
    with (run_dir / "pipeline.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "eyrie_pipelines.local", "--job-dir", str(job_dir), "--attempt", str(attempt)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        handle = _read(run_dir / "run.json", RunHandle)
        if handle is not None and handle.process.pid == child.pid:
            return handle
        code = child.poll()
        if code == _ALREADY_RUNNING_EXIT_CODE:
            raise Conflict(f"a run of job {job_id} is alive", "cancel it first")
        if code is not None:
            log_file = run_dir / "pipeline.log"
            raise RunNotStarted(f"the run of job {job_id} ended with {code} at once: {last_lines(log_file)}",
                                f"read {log_file}")
        time.sleep(0.02)
    child.kill()
    raise Transient(f"the run of job {job_id} did not come up within {_START_TIMEOUT_S:.0f} s")


def observe(job_dir: Path) -> RunObservation:
    """What can be seen of the latest run, from files and the process table; needs no memory of having started it."""
    run_dir = job_dir / RUN_DIR
    handle = _read(run_dir / "run.json", RunHandle)
    if handle is None:
        return RunObservation(state="none")
    alive = is_alive(handle.process)
    # The result is read after asking for the leader: it may have ended in between, and its result comes first.
    result = _read(run_dir / "result.json", RunResult)
    if result is not None and result.run_id == handle.run_id:
        return RunObservation(state=result.state, handle=handle, result=result)
    return RunObservation(state="running" if alive else "gone", handle=handle)


def stop(job_dir: Path, grace_s: float = GRACE_S) -> None:
    """End the latest run with every process of its group: SIGTERM, then SIGKILL after `grace_s` seconds."""
    handle = observe(job_dir).handle
    if handle is not None:
        stop_group(handle.process, grace_s)


def pause(job_dir: Path, grace_s: float = GRACE_S) -> None:
    """End the latest run as `stop` does, and forget it: the next start is then not counted as one after a death."""
    stop(job_dir, grace_s)
    (job_dir / RUN_DIR / "run.json").unlink(missing_ok=True)


def leftovers(job_dir: Path) -> list[int]:
    """Processes of the latest run's group that still live."""
    handle = observe(job_dir).handle
    return [] if handle is None else group_members(handle.process.pid)


def _read(path: Path, kind: type[ModelT]) -> ModelT | None:
    try:
        return kind.model_validate_json(path.read_text())
    except FileNotFoundError:
        return None


# From here on: the leader's own process.


def lead(job_dir: Path, attempt: int) -> int:
    """Be the run: claim the lock, say who we are, walk the pipeline, write the result. Returns the exit code."""
    run_dir = job_dir / RUN_DIR
    with (run_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _ALREADY_RUNNING_EXIT_CODE
        job = load_job(str(job_dir))
        process = name_of(os.getpid())
        assert process is not None
        run_id = f"{job.id}-{attempt}-{process.started_ticks}-{process.pid}"
        before = _read(run_dir / "run.json", RunHandle)
        starts = before.starts + 1 if before is not None and before.attempt == attempt else 1
        write_model(run_dir / "run.json", RunHandle(run_id=run_id, job_id=job.id, attempt=attempt, starts=starts,
                                                    process=process, started_at=datetime.now(UTC)))
        for name in ("result.json", "failure.json"):  # of an earlier run; observers tell them apart by run_id
            (run_dir / name).unlink(missing_ok=True)
        failure = _walk(job_dir, job)
        state: Literal["succeeded", "failed"] = "succeeded" if failure is None else "failed"
        write_model(run_dir / "result.json", RunResult(
            run_id=run_id, state=state, failure=read_failure(job_dir), message=failure or "",
            finished_at=datetime.now(UTC)))
        return 0 if failure is None else 1


def _walk(job_dir: Path, job: JobFile) -> str | None:
    """Run the pipeline under kfp.local; None when it succeeded, else what kfp said."""
    run_dir = job_dir / RUN_DIR
    _prepare_environment(run_dir)
    # Imported late: it takes about a second, which a refused second leader should not pay.
    from kfp import local

    from eyrie_pipelines.drafter import train_drafter

    local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(run_dir / "root"),
               enable_caching=False)
    try:
        train_drafter(job_dir=str(job_dir), spec_digest=digest_model(job), code_version=code_version())
    except RuntimeError as error:  # kfp.local's only way of saying that a box failed
        return str(error)
    finally:
        for scratch in ("root", "tmp"):
            shutil.rmtree(run_dir / scratch, ignore_errors=True)
    return None


def _prepare_environment(run_dir: Path) -> None:
    """See the module's essay: PATH and the interpreter's name; temporary files of the boxes stay in the run."""
    os.environ[OUTER_TMPDIR] = os.environ.get("TMPDIR", "")
    (run_dir / "tmp").mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(run_dir / "tmp")
    home = Path(sys.executable).parent
    if (home / "python3").exists():
        os.environ["PATH"] = f"{home}{os.pathsep}{os.environ.get('PATH', '')}"
        sys.executable = "python3"


def main() -> int:
    """`python -m eyrie_pipelines.local --job-dir D`: lead one run."""
    parser = argparse.ArgumentParser(description="Run one job's pipeline on this machine, in this process group.")
    parser.add_argument("--job-dir", type=Path, required=True, help="directory that holds job.json")
    parser.add_argument("--attempt", type=int, default=1, help="which attempt of the job this is")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            return lead(arguments.job_dir.resolve(), arguments.attempt)
        except EyrieError as error:
            return report_error(error)
    return 130


if __name__ == "__main__":
    sys.exit(main())
