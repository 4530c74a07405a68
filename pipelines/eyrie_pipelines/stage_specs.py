"""The spec of each stage of a job, and the stages' members: functions of values, paths and manifests.

The pipeline (`kfp_pipeline`) defines the order of the stages; this module builds their specs. Every spec is a function
of the job file (`runner.JobFile`) and of the manifests upstream, and therefore the same in a first run, a retry, on a
laptop and in a pod. Equal specs have equal digests, and a stage whose manifest carries that digest is finished. This
replaces kfp's cache, which is off because its key does not cover our code.

Paths are built from the job directory and `catalog.stage_dir` alone. References passed between the pipeline's tasks are
strings relative to the job directory (`stages/train/base`), never numbers or absolute paths: kfp.local turns the
integers of a collected list into floats and rewrites text that looks like an interpreter's name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyrie_api.artifacts import read_report
from eyrie_api.contract.load import LoadSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.reports import BenchmarkReport, RegenerateReport, TrainReport
from eyrie_api.contract.resolved import ResolvedJob
from eyrie_api.contract.stages import (
    BenchmarkStage,
    CaptureStage,
    HardwareStage,
    ProveStage,
    RegenerateStage,
    RivalDrafter,
    RowDraw,
    StageName,
    TrainStage,
    TuneStage,
)
from eyrie_api.decisions.leaderboard import best_rival
from eyrie_api.errors import ArtifactMissing, InvalidInput, NoUsableData
from eyrie_pipelines.runner import JobFile
from eyrie_workers.catalog import stage_dir

HELD_OUT = "held-out"
COPY_DIR = "drafter"
"""Where the benchmark stage keeps its copy of a drafter from elsewhere."""


class CheckpointRef(Frozen):
    """One exported drafter, as the tasks after training need it."""

    name: str
    candidate: str
    path: str
    """Relative to the job directory."""


def reference(stage: StageName, key: str = "") -> str:
    """Reference to a stage's output for the next task: its directory relative to the job's."""
    return stage_dir(Path(), stage, key).as_posix()


def regenerate_spec(job: JobFile, job_dir: Path) -> RegenerateStage:
    """The first stage. It excludes the prompts of the benchmark suites from the training data."""
    suites = tuple(suite.path for suite in job.spec.benchmark.suites if suite.path != HELD_OUT)
    # Without the mix, which chooses among the rows that are captured.
    data = job.spec.data.model_copy(update={"mix": None})
    return RegenerateStage(job_id=job.id, target=job.resolved.target, reads=job.resolved.reads, data=data,
                           engine=job.spec.engine, regenerate=job.spec.regenerate, exclude_prompts=suites,
                           reuse=tuple(str(stage_dir(job_dir.parent / earlier, "regenerate")) for earlier in job.reuse))


def check_held_out(job: JobFile, report: RegenerateReport) -> None:
    """Raises NoUsableData when a suite uses held-out prompts and none were held out."""
    for suite in job.spec.benchmark.suites:
        if suite.path == HELD_OUT and report.rows_held_out == 0:
            raise NoUsableData(
                f"suite {suite.name!r} uses held-out prompts, but none of {report.rows_read} rows was held out by "
                f"data.held_out_fraction {job.spec.data.held_out_fraction:g}",
                "raise data.held_out_fraction, give more conversations, or name a file of prompts for the suite")


def capture_spec(job: JobFile, job_dir: Path) -> CaptureStage:
    """Capture reads the output of regenerate and stores every feature that any candidate reads."""
    return CaptureStage(job_id=job.id, target=job.resolved.target, reads=job.resolved.reads, capture=job.spec.capture,
                        engine=job.spec.engine, rows_dir=str(stage_dir(job_dir, "regenerate")),
                        families=job.resolved.captured.families, init_from=job.resolved.captured.init_from,
                        aux_layers=job.resolved.captured.aux_layers, seed=job.spec.data.seed,
                        reuse=tuple(str(stage_dir(job_dir.parent / earlier, "capture")) for earlier in job.reuse))


def train_spec(job: JobFile, job_dir: Path, name: str) -> TrainStage:
    """The training of one candidate of the sweep. Raises InvalidInput for a name that is not one."""
    candidates = {candidate.name: candidate for candidate in job.resolved.candidates}
    if name not in candidates:
        raise InvalidInput(f"candidate {name!r} is not in this job's sweep",
                           f"candidates are {', '.join(sorted(candidates))}")
    candidate = candidates[name]
    rows = None if candidate.mix is None else RowDraw(
        mix=candidate.mix, seed=job.spec.data.seed, compared=job.resolved.compared_mixes)
    return TrainStage(job_id=job.id, candidate=name, target=job.resolved.target, reads=job.resolved.reads,
                      drafter=candidate.drafter, train=candidate.train, store_dir=str(stage_dir(job_dir, "capture")),
                      rows=rows)


def benchmarked(job: ResolvedJob, reports: Sequence[TrainReport]) -> tuple[CheckpointRef, ...]:
    """Every drafter that is benchmarked: those that the candidates exported, by candidate and step, then those from
    elsewhere, whose benchmark stage copies them into its output. Raises ArtifactMissing when training exported none."""
    exported = [
        CheckpointRef(name=checkpoint.name, candidate=checkpoint.candidate,
                      path=(stage_dir(Path(), "train", checkpoint.candidate) / checkpoint.path).as_posix())
        for report in reports for checkpoint in sorted(report.checkpoints, key=lambda checkpoint: checkpoint.step)]
    if job.spec.trains and not exported:
        raise ArtifactMissing("training exported no checkpoint", "raise train.epochs or train.max_steps and retry")
    brought = (CheckpointRef(name=drafter.checkpoint, candidate=drafter.checkpoint,
                             path=(stage_dir(Path(), "benchmark", drafter.checkpoint) / COPY_DIR).as_posix())
               for drafter in job.brought)
    return (*exported, *brought)


def train_reports(job: ResolvedJob, job_dir: Path) -> list[TrainReport]:
    """The training reports of all candidates. Raises ArtifactMissing when one is not trained."""
    return [read_report(stage_dir(job_dir, "train", candidate.name), TrainReport) for candidate in job.candidates]


def stage_keys(job: ResolvedJob, job_dir: Path, stage: StageName) -> list[str]:
    """Members of a stage known so far: the sweep's candidates; what is benchmarked once every candidate is trained;
    none of a stage that the job does not have."""
    if stage not in job.spec.stages:
        return []
    if stage == "train":
        return [candidate.name for candidate in job.candidates]
    if stage == "benchmark":
        try:
            return [checkpoint.name for checkpoint in benchmarked(job, train_reports(job, job_dir))]
        except ArtifactMissing:
            return []
    return list(job.spec.prove.profile_names) if stage == "hardware" else [""]


def find_checkpoint(checkpoints: Sequence[CheckpointRef], name: str) -> CheckpointRef:
    """The checkpoint of that name among those of `benchmarked`. Raises ArtifactMissing."""
    for checkpoint in checkpoints:
        if checkpoint.name == name:
            return checkpoint
    raise ArtifactMissing(f"no candidate exported a checkpoint {name!r}", "train again: eyrie retry JOB --from train")


def benchmark_spec(job: JobFile, job_dir: Path, checkpoint: CheckpointRef, *, first: bool) -> BenchmarkStage:
    """The measurement of one checkpoint. Only the first of a job also times `transformers` as a reference."""
    return BenchmarkStage(
        **_measuring(job, job_dir, checkpoint),
        rival=next((rival for rival in job.resolved.rivals if rival.checkpoint == checkpoint.name), None),
        brought=next((drafter for drafter in job.spec.drafters if drafter.checkpoint == checkpoint.name), None),
        min_speedup=job.spec.promotion.min_speedup, measure_transformers=first,
        max_concurrency=job.resolved.measured_at_once)


def rival_to_beat(job: ResolvedJob, checkpoints: Sequence[CheckpointRef], benchmarks: Sequence[BenchmarkReport],
                  checkpoint: str) -> CheckpointRef | None:
    """The rival that is tuned and proven next to the selected checkpoint: with `promotion.must_beat: rivals` the
    best."""
    rival = best_rival(benchmarks, besides=checkpoint) if job.spec.promotion.must_beat == "rivals" else None
    return None if rival is None else find_checkpoint(checkpoints, rival.checkpoint)


def tune_spec(job: JobFile, job_dir: Path, checkpoint: CheckpointRef,
              rival: CheckpointRef | None = None) -> TuneStage:
    """The grid of draft-tree shapes for the selected checkpoint, and for the rival it has to beat, if any."""
    return TuneStage(
        **_measuring(job, job_dir, checkpoint), tune=job.spec.tune, min_speedup=job.spec.promotion.min_speedup,
        rival=None if rival is None else RivalDrafter(checkpoint=rival.name, drafter_dir=str(job_dir / rival.path)),
        max_concurrency=job.resolved.measured_at_once)


def prove_spec(job: JobFile, job_dir: Path, checkpoint: CheckpointRef, tuned: str,
               rival: CheckpointRef | None = None) -> ProveStage:
    """The tuned checkpoint in the serving engine, compared with the incumbent and the tuned rival."""
    return ProveStage(
        **_measuring(job, job_dir, checkpoint), prove=job.spec.prove.model_copy(update={"hardware": None}),
        promotion=job.spec.promotion, tune_dir=str(job_dir / tuned), max_concurrency=job.spec.serve.max_concurrency,
        rival_dir=None if rival is None else str(job_dir / rival.path), incumbent=job.incumbent)


def hardware_spec(job: JobFile, job_dir: Path, checkpoint: CheckpointRef, profile: str) -> HardwareStage:
    """The proven checkpoint and no drafter on one of the job's profiles. Raises InvalidInput for a name that is not
    one."""
    prove, hardware = job.spec.prove, job.spec.prove.hardware
    placed = {} if hardware is None else {placed.name: placed for placed in hardware.profiles}
    if hardware is None or profile not in placed:
        raise InvalidInput(f"profile {profile!r} is not in this job's prove.hardware",
                           f"profiles are {', '.join(prove.profile_names) or '(none)'}")
    first = hardware.profiles[0].name
    # The incumbent may be another in a later attempt, and is not measured here.
    proof = prove_spec(job, job_dir, checkpoint, reference("tune")).model_copy(update={"incumbent": None})
    return HardwareStage(
        job_id=job.id, candidate=checkpoint.candidate, profile=placed[profile], baseline=first,
        baseline_dir=None if profile == first else str(stage_dir(job_dir, "hardware", first)), proof=proof,
        proof_dir=str(stage_dir(job_dir, "prove")),
        load=LoadSpec(concurrencies=hardware.concurrencies or prove.concurrencies, requests=max(1, prove.requests // 2),
                      repeats=2, max_new_tokens=prove.max_new_tokens, seed=job.spec.benchmark.seed))


def _measuring(job: JobFile, job_dir: Path, checkpoint: CheckpointRef) -> dict[str, Any]:
    """The fields of `MeasuringStage`."""
    held_out = any(suite.path == HELD_OUT for suite in job.spec.benchmark.suites)
    return {"job_id": job.id, "checkpoint": checkpoint.name, "candidate": checkpoint.candidate,
            "target": job.resolved.target, "reads": job.resolved.reads, "benchmark": job.spec.benchmark,
            "drafter_dir": str(job_dir / checkpoint.path), "engine": job.spec.engine,
            "held_out_file": str(stage_dir(job_dir, "regenerate") / "held_out.jsonl") if held_out else None}
