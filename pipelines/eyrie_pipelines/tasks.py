"""The bodies of the pipeline's tasks: build a stage's spec, run its program, record the first failure.

Each component of `kfp_pipeline` calls one function of this module, so that the logic is testable without kfp. A task
takes the job directory and references, and returns references (`stage_specs`).

- `stage_process` runs the stage program; `work_area` downloads its inputs and uploads its output where the work area is
  an artifact store;
- the first failure of a run is written to `run/failure.json`. kfp.local starts the queued members of a fan-out after
  one has failed, and Kubeflow retries a failed task: both read the file and stop.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from eyrie_api.artifacts import MANIFEST, digest_model, read_manifest, read_report, write_model
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.records import Failure
from eyrie_api.contract.reports import BenchmarkReport, RegenerateReport, TrainReport, TuneReport
from eyrie_api.contract.stages import Manifest, StageName, StageSpec, TrainStage
from eyrie_api.decisions.leaderboard import select_for_proof
from eyrie_api.errors import ArtifactMissing, Conflict, EyrieError, Transient
from eyrie_pipelines import stage_specs
from eyrie_pipelines.run_records import (
    FAILURE_FILE,
    RUN_DIR,
    RunFailure,
    StageFailed,
    read_failure,
    read_stage_failure,
)
from eyrie_pipelines.runner import JOB_FILE, JobFile
from eyrie_pipelines.several_gpus import SHARES, TRAINJOB_VARIABLE, measure_on_shares, num_processes
from eyrie_pipelines.stage_process import run_in_directory, run_stage_program, run_sweep_program
from eyrie_pipelines.work_area import WorkArea
from eyrie_workers.catalog import command, stage_dir

ReportT = TypeVar("ReportT", bound=Frozen)


# In the order in which the pipeline calls them.


def prefetch(job_dir: str, spec_digest: str) -> str:
    """Fill the cluster's model cache with the target. Its progress and failure are the first stage's."""
    with _recording_failure(job_dir, spec_digest, "regenerate") as job:
        spec, directory = stage_specs.regenerate_spec(job, Path(job_dir)), stage_dir(Path(job_dir), "regenerate")
        with WorkArea.of(Path(job_dir)).before(directory):
            run_in_directory(spec, directory, command(spec.stage, directory, before=True))
        return job.spec.target.model


def regenerate(job_dir: str, spec_digest: str) -> str:
    with _recording_failure(job_dir, spec_digest, "regenerate") as job:
        done = _run(job_dir, stage_specs.regenerate_spec(job, Path(job_dir)))
        # Checked here: the benchmark stage would fail for the same reason after hours of training.
        stage_specs.check_held_out(job, stage_report(job_dir, done, RegenerateReport))
        return done


def capture(job_dir: str, spec_digest: str, _rows: str) -> str:
    with _recording_failure(job_dir, spec_digest, "capture") as job:
        return _run(job_dir, stage_specs.capture_spec(job, Path(job_dir)),
                    processes=num_processes(job.resolved.num_processes("capture")))


def list_candidates(job_dir: str, spec_digest: str) -> list[str]:
    with _recording_failure(job_dir, spec_digest, "train") as job:
        return [candidate.name for candidate in job.resolved.candidates]


def sweep(job_dir: str, spec_digest: str, store: str) -> str:
    """Train all candidates in one program, if the job is to (`ResolvedJob.trains_together`)."""
    root, pending = Path(job_dir), dict[str, Path]()
    with _recording_failure(job_dir, spec_digest, "train") as job, contextlib.ExitStack() as stages:
        names = [candidate.name for candidate in job.resolved.candidates if job.resolved.trains_together]
        for name in names:
            spec, directory = stage_specs.train_spec(job, root, name), stage_dir(root, "train", name)
            needed = stages.enter_context(WorkArea.of(root).stage(spec, directory, concurrent=len(names)))
            if needed and not _is_finished(spec, directory):
                pending[name] = directory
                directory.mkdir(parents=True, exist_ok=True)
                write_model(directory / "spec.json", spec)
        if pending:
            processes = num_processes(job.resolved.num_processes("train"))
            run_sweep_program(list(pending.values()), job.spec.sweep.rungs, min(processes, len(pending)))
    # The first that failed permanently.
    failed = next((name for name, directory in pending.items() if read_stage_failure(directory) is not None), None)
    if failed is not None:
        with _recording_failure(job_dir, spec_digest, "train", failed):
            raise StageFailed(f"candidate {failed} failed", "correct it and retry the job: the others are trained")
    return store


def train(job_dir: str, spec_digest: str, _store: str, candidate: str) -> str:
    with _recording_failure(job_dir, spec_digest, "train", candidate) as job:
        spec = stage_specs.train_spec(job, Path(job_dir), candidate)
        if TRAINJOB_VARIABLE in os.environ:
            return _run_trainjob(job_dir, spec, spec_digest)
        return _run(job_dir, spec, candidate, num_processes(job.resolved.num_processes("train")))


def _run_trainjob(job_dir: str, spec: TrainStage, spec_digest: str) -> str:
    """Train one candidate in a TrainJob. Its nodes run this same task without EYRIE_TRAINJOB."""
    # Imported here: it takes a quarter of the time in which a task starts, and most tasks create no TrainJob.
    from eyrie_pipelines import trainjob

    directory = stage_dir(Path(job_dir), "train", spec.candidate)
    work = WorkArea.of(Path(job_dir))
    work.download_manifest(directory)
    if not _is_finished(spec, directory):
        client = trainjob.TrainJobClient.in_cluster()
        arguments = ["train", "--job-dir", job_dir, "--spec-digest", spec_digest, "--key", spec.candidate]
        name = trainjob.name_of(spec.job_id, spec.candidate, digest_model(spec))
        request = trainjob.TrainJobRequest.model_validate_json(os.environ[TRAINJOB_VARIABLE])
        result = client.run(trainjob.render(request, name, client.namespace, arguments,
                                            os.environ[trainjob.RUN_VARIABLE]))
        work.begin()
        first = read_failure(Path(job_dir))
        if first is not None:
            raise StageFailed(first.failure.message, first.failure.hint)
        if result.state == "failed":
            raise StageFailed(f"TrainJob {name} failed: {result.message}",
                              f"read the logs of its pods in namespace {client.namespace}, then retry the job")
        work.download_manifest(directory)
        read_manifest(directory)
    return stage_specs.reference("train", spec.candidate)


def list_checkpoints(job_dir: str, spec_digest: str, _trained: list[str]) -> list[str]:
    """Names of the exported drafters of all candidates, and of the drafters from elsewhere."""
    with _recording_failure(job_dir, spec_digest, "train") as job:
        return [checkpoint.name for checkpoint in checkpoints(job_dir, job)]


def benchmark(job_dir: str, spec_digest: str, checkpoint: str) -> str:
    with _recording_failure(job_dir, spec_digest, "benchmark", checkpoint) as job:
        root, refs = Path(job_dir), checkpoints(job_dir, job)
        specs = {ref.name: stage_specs.benchmark_spec(job, root, ref, first=ref == refs[0]) for ref in refs}
        spec = specs[stage_specs.find_checkpoint(refs, checkpoint).name]
        # Set by the runner of one machine, not on a cluster, nor in a child that has one of the shares. All checkpoints
        # that have no manifest yet are then measured, on several GPUs at once.
        if shares := tuple(tuple(share.split(",")) for share in os.environ.get(SHARES, "").split(";") if share):
            missing = [name for name, each in specs.items()
                       if not _is_finished(each, stage_dir(root, "benchmark", name))]
            if len(missing) > 1:
                measure_on_shares(job_dir, spec_digest, missing, shares)
            if (failed := read_failure(root)) is not None:
                raise StageFailed(f"{failed.stage} {failed.key} failed".rstrip(),
                                  "correct that stage and retry the job")
        return _run(job_dir, spec, checkpoint)


def select(job_dir: str, benchmarked: list[str]) -> str:
    """Select the checkpoint with the best average over suites; a rival only with `promotion.rivals: promote`."""
    with _recording_failure(job_dir, None, "benchmark") as job:
        rivals = job.spec.promotion.rivals == "promote"
        return select_for_proof([stage_report(job_dir, ref, BenchmarkReport) for ref in benchmarked],
                                rivals=rivals).checkpoint


def tune(job_dir: str, spec_digest: str, checkpoint: str) -> str:
    """Tune the draft tree of the selected checkpoint; with `promotion.must_beat: rivals` that of the best rival too."""
    with _recording_failure(job_dir, spec_digest, "tune") as job:
        refs = checkpoints(job_dir, job)
        return _run(job_dir, stage_specs.tune_spec(
            job, Path(job_dir), stage_specs.find_checkpoint(refs, checkpoint),
            stage_specs.rival_to_beat(job.resolved, refs, benchmark_reports(job_dir, refs), checkpoint)))


def prove(job_dir: str, spec_digest: str, checkpoint: str, tuned: str) -> str:
    """Measure the tuned checkpoint in the engine that will serve it."""
    with _recording_failure(job_dir, spec_digest, "prove") as job:
        refs, rival = checkpoints(job_dir, job), stage_report(job_dir, tuned, TuneReport).rival
        spec = stage_specs.prove_spec(
            job, Path(job_dir), stage_specs.find_checkpoint(refs, checkpoint), tuned,
            None if rival is None else stage_specs.find_checkpoint(refs, rival.checkpoint))
        # The incumbent is the only input of a stage that is not part of the job: by the time of a retry the endpoint
        # may serve another drafter, and a finished comparison is void.
        directory, work = stage_dir(Path(job_dir), "prove"), WorkArea.of(Path(job_dir))
        work.download_manifest(directory)
        if (directory / MANIFEST).exists() and not _is_finished(spec, directory):
            shutil.rmtree(directory)
            work.remove(directory)
        return _run(job_dir, spec)


def hardware(job_dir: str, spec_digest: str, checkpoint: str, profile: str) -> str:
    """Measure the proven checkpoint, and no drafter, on one kind of hardware."""
    with _recording_failure(job_dir, spec_digest, "hardware", profile) as job:
        ref = stage_specs.find_checkpoint(checkpoints(job_dir, job), checkpoint)
        return _run(job_dir, stage_specs.hardware_spec(job, Path(job_dir), ref, profile), profile)


@contextlib.contextmanager
def _recording_failure(job_dir: str, spec_digest: str | None, stage: StageName, key: str = "") -> Iterator[JobFile]:
    """Yield the job, and write the first failure of a run to `run/failure.json`; raise StageFailed at once when the
    file exists."""
    root = Path(job_dir)
    work = WorkArea.of(root)
    work.begin()
    first = read_failure(root)
    if first is not None:
        raise StageFailed(f"the run has already failed in stage {first.stage} {first.key}".rstrip(),
                          "nothing to do here: correct that stage and retry the job")
    try:
        yield load_job(job_dir, spec_digest)
    except Transient:  # the store is unavailable: the runner restarts the task
        raise
    except EyrieError as error:
        reported = read_stage_failure(stage_dir(root, stage, key)) if isinstance(error, StageFailed) else None
        failure = reported or Failure(reason=error.reason, message=error.message, hint=error.hint,
                                      exit_code=error.exit_code, time=datetime.now(UTC))
        if read_failure(root) is None:  # race: a stage on another node may have recorded its failure first; keep that
            write_model(root / RUN_DIR / FAILURE_FILE, RunFailure(stage=stage, key=key, failure=failure))
            work.upload(root / RUN_DIR / FAILURE_FILE)
        raise StageFailed(f"{stage} {key}".rstrip() + f": {failure.reason}: {failure.message}",
                          failure.hint) from error


def load_job(job_dir: str, spec_digest: str | None = None) -> JobFile:
    """`job.json`, checked against the digest the run was started with. Raises ArtifactMissing or Conflict."""
    path = Path(job_dir) / JOB_FILE
    try:
        job = JobFile.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise ArtifactMissing(f"no job file at {path}", "start the run through eyrie_pipelines.local") from None
    if spec_digest is not None and spec_digest != digest_model(job):
        raise Conflict(f"{path} is not the job this run was started for", "cancel the run and start it again")
    return job


def train_reports(job_dir: str, job: JobFile) -> list[TrainReport]:
    """Reports of every candidate. Read from the manifests rather than passed between tasks: kfp does not accept the
    collected outputs of one fan-out as input of another."""
    return [stage_report(job_dir, stage_specs.reference("train", candidate.name), TrainReport)
            for candidate in job.resolved.candidates]


def checkpoints(job_dir: str, job: JobFile) -> tuple[stage_specs.CheckpointRef, ...]:
    """Every drafter that is benchmarked."""
    return stage_specs.benchmarked(job.resolved, train_reports(job_dir, job))


def benchmark_reports(job_dir: str, refs: Sequence[stage_specs.CheckpointRef]) -> list[BenchmarkReport]:
    return [stage_report(job_dir, stage_specs.reference("benchmark", ref.name), BenchmarkReport) for ref in refs]


def stage_manifest(job_dir: str, ref: str) -> Manifest:
    """The manifest of a finished stage, by its reference. Raises ArtifactMissing or ArtifactCorrupt."""
    WorkArea.of(Path(job_dir)).download_manifest(Path(job_dir) / ref)
    return read_manifest(Path(job_dir) / ref)


def stage_report(job_dir: str, ref: str, kind: type[ReportT]) -> ReportT:
    """The report of a finished stage. As `stage_manifest`."""
    WorkArea.of(Path(job_dir)).download_manifest(Path(job_dir) / ref)
    return read_report(Path(job_dir) / ref, kind)


def _run(job_dir: str, spec: StageSpec, key: str = "", processes: int = 1) -> str:
    """Run one stage of a job to its manifest; return its reference. Raises StageFailed, or exits 143 on SIGTERM."""
    directory = stage_dir(Path(job_dir), spec.stage, key)
    with WorkArea.of(Path(job_dir)).stage(spec, directory) as needed:
        if needed:
            run_stage_program(spec, directory, processes)
    return stage_specs.reference(spec.stage, key)


def _is_finished(spec: StageSpec, directory: Path) -> bool:
    return (directory / MANIFEST).exists() and read_manifest(directory).spec_digest == digest_model(spec)
