"""Run one box of the pipeline: write the stage's spec, start its program, wait, tell the truth about how it ended.

A box is a thin kfp component (`drafter`); its body is one call into this room. The stage itself is always a child
process with the command line of `catalog.command`, so a stage is the same program in a pod, in a test, on a laptop:

- stdout and stderr are appended to `log.txt` beside the spec; progress goes to `events.jsonl`, written by the program;
- SIGTERM is handed on, and the box then ends with the stage's own exit code (143: interrupted, goes on when run again);
- a transient failure, or a program that was killed, is tried again up to three times, with growing pauses;
- a permanent failure raises StageFailed with reason, message and hint, after noting them in `run/failure.json`;
- stages that measure take the machine's measuring lock themselves: two measurements at once would both be wrong, and a
  run started by hand must queue behind the same lock as ours.

Where the work area is an artifact store, `work` brings a box's inputs before and its output back after; see there.

kfp.local still starts the queued members of a fan-out after one has failed. They find `run/failure.json` and stop.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TypeVar

from eyrie_api.artifacts import MANIFEST, digest_model, read_manifest, write_model
from eyrie_api.decisions.leaderboard import select_best
from eyrie_api.decisions.sweep import expand
from eyrie_api.errors import ArtifactMissing, Conflict, EyrieError, Permanent, Transient
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.records import Failure
from eyrie_api.v1alpha1.reports import BenchmarkReport, RegenerateReport, TrainReport
from eyrie_api.v1alpha1.stages import StageName, StageSpec, TrainStage
from eyrie_pipelines import steps, trainjob
from eyrie_pipelines.work_area import WorkArea, is_first_node, patiently
from eyrie_workers.catalog import command, stage_dir, sweep_command

RUN_DIR = "run"
FAILURE_FILE = "failure.json"
INTERRUPTED_EXIT_CODE = 143
MAX_ATTEMPTS = 3
BACKOFF_S = (1.0, 5.0)
"""Pauses before the second and third attempt; EYRIE_RETRY_BACKOFF_S overrides both (tests)."""

OUTER_TMPDIR = "EYRIE_OUTER_TMPDIR"
"""Where the runner keeps the TMPDIR it replaced for kfp's scratch files; stages get the old one back, since the
measuring lock must be the same file for every process of the machine."""


ReportT = TypeVar("ReportT", bound=Frozen)


class StageFailed(Permanent):
    """A stage ended without a manifest; carries the stage program's own reason, message and hint."""

    reason = "StageFailed"


class RunFailure(Frozen):
    """`run/failure.json`: the first stage of a run that failed."""

    stage: StageName
    key: str = ""
    failure: Failure


# The boxes, in the order the pipeline calls them. Each takes the job directory and references, and returns references.


def regenerate(job_dir: str, spec_digest: str) -> str:
    """The target answers the conversations anew."""
    with _telling(job_dir, "regenerate"):
        job = load_job(job_dir, spec_digest)
        done = _run(job_dir, steps.regenerate_spec(job))
        # Known now: better told before hours of training than by the benchmark after them.
        steps.check_held_out(job, _report(job_dir, done, RegenerateReport))
        return done


def capture(job_dir: str, spec_digest: str, _rows: str) -> str:
    """The target's hidden states are recorded."""
    with _telling(job_dir, "capture"):
        return _run(job_dir, steps.capture_spec(load_job(job_dir, spec_digest), Path(job_dir)))


def list_candidates(job_dir: str, spec_digest: str) -> list[str]:
    """Names of the sweep's candidates."""
    with _telling(job_dir, "train"):
        return [candidate.name for candidate in expand(load_job(job_dir, spec_digest).spec)]


def sweep(job_dir: str, spec_digest: str, store: str) -> str:
    """All candidates are trained by one program, where that is how the job trains them."""
    failed = None
    with _telling(job_dir, "train"):
        job = load_job(job_dir, spec_digest)
        if steps.trains_together(job.spec):
            candidates = {one.name: one.spec for one in expand(job.spec)}
            specs = {name: steps.train_spec(job, Path(job_dir), candidates, name) for name in candidates}
            failed = _train_together(job_dir, specs, job.spec.sweep.rungs)
    if failed is not None:
        with _telling(job_dir, "train", failed):
            raise StageFailed(f"candidate {failed} failed", "hint it and retry the job: the others are trained")
    return store


def train(job_dir: str, spec_digest: str, _store: str, candidate: str) -> str:
    """One candidate is trained."""
    with _telling(job_dir, "train", candidate):
        job = load_job(job_dir, spec_digest)
        candidates = {one.name: one.spec for one in expand(job.spec)}
        spec = steps.train_spec(job, Path(job_dir), candidates, candidate)
        order = trainjob.order_of_environment()
        return _run(job_dir, spec, candidate) if order is None else _order(job_dir, spec, spec_digest, order)


def _order(job_dir: str, spec: TrainStage, spec_digest: str, order: trainjob.Order) -> str:
    """Have one candidate trained by a TrainJob, whose nodes are this box without the order."""
    directory = stage_dir(Path(job_dir), "train", spec.candidate)
    work = WorkArea.of(Path(job_dir))
    work.bring_report(directory)
    if not (directory / MANIFEST).exists() or read_manifest(directory).spec_digest != digest_model(spec):
        trainer = trainjob.Trainer.of_pod()
        arguments = ["--job-dir", job_dir, "--spec-digest", spec_digest, "--candidate", spec.candidate]
        name = trainjob.name_of(spec.job_id, spec.candidate, digest_model(spec))
        end = trainer.carry_out(trainjob.render(order, name, trainer.namespace, arguments))
        work.begin()
        first = read_failure(Path(job_dir))
        if first is not None:
            raise StageFailed(first.failure.message, first.failure.hint)
        if end.state == "failed":
            raise StageFailed(f"TrainJob {name} failed: {end.message}",
                              f"read the logs of its pods in namespace {trainer.namespace}, then retry the job")
        work.bring_report(directory)
        read_manifest(directory)
    return steps.reference("train", spec.candidate)


def list_checkpoints(job_dir: str, spec_digest: str, _trained: list[str]) -> list[str]:
    """Names of the exported drafters of all candidates."""
    with _telling(job_dir, "train"):
        job = load_job(job_dir, spec_digest)
        return [checkpoint.name for checkpoint in steps.list_checkpoints(_train_reports(job_dir, job))]


def benchmark(job_dir: str, spec_digest: str, checkpoint: str) -> str:
    """One checkpoint is measured."""
    with _telling(job_dir, "benchmark", checkpoint):
        job = load_job(job_dir, spec_digest)
        reports = _train_reports(job_dir, job)
        ref = steps.find_checkpoint(reports, checkpoint)
        first = steps.list_checkpoints(reports)[0].name == checkpoint
        return _run(job_dir, steps.benchmark_spec(job, Path(job_dir), ref, first=first), checkpoint)


def select(job_dir: str, benchmarked: list[str]) -> str:
    """The checkpoint with the best average over suites."""
    with _telling(job_dir, "benchmark"):
        return select_best([_report(job_dir, ref, BenchmarkReport) for ref in benchmarked]).checkpoint


def tune(job_dir: str, spec_digest: str, checkpoint: str) -> str:
    """The chosen checkpoint's draft tree is tuned."""
    with _telling(job_dir, "tune"):
        job = load_job(job_dir, spec_digest)
        ref = steps.find_checkpoint(_train_reports(job_dir, job), checkpoint)
        return _run(job_dir, steps.tune_spec(job, Path(job_dir), ref))


def prove(job_dir: str, spec_digest: str, checkpoint: str, tuned: str) -> str:
    """The tuned checkpoint is tried in the engine that will serve it."""
    with _telling(job_dir, "prove"):
        job = load_job(job_dir, spec_digest)
        ref = steps.find_checkpoint(_train_reports(job_dir, job), checkpoint)
        spec = steps.prove_spec(job, Path(job_dir), ref, tuned)
        _clear_of_another_incumbent(spec, stage_dir(Path(job_dir), "prove"))
        return _run(job_dir, spec)


def _clear_of_another_incumbent(spec: StageSpec, directory: Path) -> None:
    """Remove a finished proof that was made of another spec. The incumbent is the one thing a job's stages depend on
    that the job does not say: a retry finds the endpoint serving something else, and an old comparison is no proof."""
    work = WorkArea.of(directory.parent.parent)
    work.bring_report(directory)
    if (directory / MANIFEST).exists() and read_manifest(directory).spec_digest != digest_model(spec):
        shutil.rmtree(directory)
        work.remove(directory)


@contextlib.contextmanager
def _telling(job_dir: str, stage: StageName, key: str = "") -> Iterator[None]:
    """Note the first failure of a run in `run/failure.json`; refuse to begin when there is one."""
    root = Path(job_dir)
    work = WorkArea.of(root)
    work.begin()
    first = read_failure(root)
    if first is not None:
        raise StageFailed(f"the run has already failed in stage {first.stage} {first.key}".rstrip(),
                          "nothing to do here: hint that stage and retry the job")
    try:
        yield
    except Transient:  # the store is away: whoever runs the box starts it again
        raise
    except EyrieError as error:
        failure = _failure_of(error, stage_dir(root, stage, key))
        if read_failure(root) is None:  # another pod's may have come here meanwhile
            write_model(root / RUN_DIR / FAILURE_FILE, RunFailure(stage=stage, key=key, failure=failure))
            patiently(lambda: work.put(root / RUN_DIR / FAILURE_FILE))
        raise StageFailed(f"{stage} {key}".rstrip() + f": {failure.reason}: {failure.message}",
                          failure.hint) from error


def load_job(job_dir: str, spec_digest: str | None = None) -> steps.JobFile:
    """`job.json`, checked against the digest the run was started with. Raises ArtifactMissing or Conflict."""
    path = Path(job_dir) / steps.JOB_FILE
    try:
        job = steps.JobFile.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise ArtifactMissing(f"no job file at {path}", "start the run through eyrie_pipelines.local") from None
    if spec_digest is not None and digest_model(job) != spec_digest:
        raise Conflict(f"{path} is not the job this run was started for", "cancel the run and start it again")
    return job


def _train_reports(job_dir: str, job: steps.JobFile) -> list[TrainReport]:
    """Of every candidate. Read from the manifests rather than from the boxes' outputs: kfp cannot hand one fan-out's
    collected outputs into another fan-out."""
    return [_report(job_dir, steps.reference("train", one.name), TrainReport) for one in expand(job.spec)]


def _report(job_dir: str, ref: str, kind: type[ReportT]) -> ReportT:
    WorkArea.of(Path(job_dir)).bring_report(Path(job_dir) / ref)
    report = read_manifest(Path(job_dir) / ref).report_as(kind)
    assert isinstance(report, kind)
    return report


def _run(job_dir: str, spec: StageSpec, key: str = "") -> str:
    """Run one stage of a job to its manifest; return its reference. Raises StageFailed, or exits 143 on SIGTERM."""
    directory = stage_dir(Path(job_dir), spec.stage, key)
    with WorkArea.of(Path(job_dir)).stage(spec, directory) as needed:
        if needed:
            run_program(spec, directory)
    return steps.reference(spec.stage, key)


def read_failure(job_dir: Path) -> RunFailure | None:
    """What the run in this job directory failed of, if it did."""
    try:
        return RunFailure.model_validate_json((job_dir / RUN_DIR / FAILURE_FILE).read_text())
    except FileNotFoundError:
        return None


def _failure_of(error: EyrieError, directory: Path) -> Failure:
    own = _stage_failure(directory) if isinstance(error, StageFailed) else None
    return own or Failure(reason=error.reason, message=error.message, hint=error.hint, exit_code=error.exit_code,
                          time=datetime.now(UTC))


def _stage_failure(directory: Path) -> Failure | None:
    try:
        return Failure.model_validate_json((directory / FAILURE_FILE).read_text())
    except FileNotFoundError:
        return None


def run_program(spec: StageSpec, directory: Path) -> None:
    """Run a stage program in its directory until it has written its manifest.

    Raises StageFailed when it ended without one, after the attempts a transient failure deserves. Exits this process
    with 143 when we were asked to stop.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_model(directory / "spec.json", spec)
    node = trainjob.is_node()
    starting = trainjob.torchrun_command(directory) if node else command(spec.stage, directory)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        code, asked = _run_once(starting, directory)
        if code == 0:
            if is_first_node():
                read_manifest(directory)  # exit 0 without a manifest is a defect of the stage: say so here
            return
        if asked:
            raise SystemExit(INTERRUPTED_EXIT_CODE)
        failure = _stage_failure(directory)
        if node and (failure is None or failure.transient):
            # It may be a peer that went. A node does not start again by itself, for its peers would not know: the
            # runtime starts them all, and says when it gives up.
            raise SystemExit(code if code > 0 else 1)
        # Killed from outside (out of memory, an operator's hand): its ledger or checkpoint lets it go on.
        may_pass = failure.transient if failure is not None else code < 0 or code == INTERRUPTED_EXIT_CODE
        if not may_pass or attempt == MAX_ATTEMPTS:
            if failure is None:
                raise StageFailed(*_explain(code, directory))
            raise StageFailed(failure.message, failure.hint)
        _wait(spec.stage, attempt, code)


def _train_together(job_dir: str, specs: Mapping[str, TrainStage], rungs: Sequence[float]) -> str | None:
    """Train the candidates that are not trained yet; the first that failed for good, if one did."""
    root = Path(job_dir)
    work = WorkArea.of(root)
    todo: dict[str, Path] = {}
    with contextlib.ExitStack() as stages:
        for name, spec in specs.items():
            directory = stage_dir(root, "train", name)
            needed = stages.enter_context(work.stage(spec, directory, among=len(specs)))
            if needed and not _is_made_of(spec, directory):
                todo[name] = directory
                directory.mkdir(parents=True, exist_ok=True)
                write_model(directory / "spec.json", spec)
        if todo:
            run_sweep(list(todo.values()), rungs)
    return next((name for name, directory in todo.items() if _stage_failure(directory) is not None), None)


def _is_made_of(spec: StageSpec, directory: Path) -> bool:
    return (directory / MANIFEST).exists() and read_manifest(directory).spec_digest == digest_model(spec)


def run_sweep(directories: Sequence[Path], rungs: Sequence[float]) -> None:
    """Run the sweep program until each candidate has its manifest or its failure.

    Raises StageFailed when it ended with neither. Exits this process with 143 when we were asked to stop.
    """
    first = directories[0]
    for directory in directories:
        (directory / FAILURE_FILE).unlink(missing_ok=True)
        if directory != first:
            (directory / "log.txt").write_text(f"trained together with {first.name}: its log is this one's too\n")
    for attempt in range(1, MAX_ATTEMPTS + 1):
        code, asked = _run_once(sweep_command(directories, rungs), first)
        if code == 0:
            for directory in directories:
                read_manifest(directory)
            return
        if asked:
            raise SystemExit(INTERRUPTED_EXIT_CODE)
        failures = [found for directory in directories if (found := _stage_failure(directory)) is not None]
        may_pass = all(one.transient for one in failures) if failures else code < 0 or code == INTERRUPTED_EXIT_CODE
        if not may_pass or attempt == MAX_ATTEMPTS:
            if failures:
                return
            message, hint = _explain(code, first)
            raise StageFailed(message, f"{hint}; or set sweep.together to never: candidates then train one by one")
        _wait("sweep", attempt, code)


def _wait(what: str, attempt: int, code: int) -> None:
    pause = float(os.environ.get("EYRIE_RETRY_BACKOFF_S", BACKOFF_S[attempt - 1]))
    print(f"{what}: attempt {attempt} of {MAX_ATTEMPTS} ended with {code}; again in {pause} s", flush=True)
    time.sleep(pause)


def _explain(code: int, directory: Path) -> tuple[str, str]:
    """Message and hint for a program that ended without saying why."""
    log = directory / "log.txt"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    last = f"; its last line was: {lines[-1][:300]}" if lines else ""
    if code < 0:
        return (f"the program was killed by {signal.Signals(-code).name} {MAX_ATTEMPTS} times{last}",
                "if memory ran out, lower the batch sizes of this stage; then retry the job")
    return f"the program ended with exit code {code}{last}", f"read {log}, then retry the job"


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    if (outer := environment.pop(OUTER_TMPDIR, None)) is not None:
        environment.pop("TMPDIR", None)
        if outer:
            environment["TMPDIR"] = outer
    return environment


def _run_once(arguments: list[str], directory: Path) -> tuple[int, bool]:
    """One start of the program: (exit code, whether we were asked to stop meanwhile)."""
    asked = False
    child: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if child is not None:
            child.send_signal(number)

    previous = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with (directory / "log.txt").open("ab") as log:
            child = subprocess.Popen(arguments, cwd=directory, env=_environment(), stdout=log, stderr=subprocess.STDOUT,
                                     stdin=subprocess.DEVNULL)
            if asked:  # the signal came between installing the handler and having a child
                child.terminate()
            return child.wait(), asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
