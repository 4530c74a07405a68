"""From a job to the spec of each of its stages: pure arithmetic on values and paths.

The pipeline (`drafter`) says in what order the stages run; this room says what each of them is told. Everything here is
a function of the job file and of the manifests upstream, so that a stage's spec is the same whether the run is the
first, a retry, on a laptop or in a pod: equal specs have equal digests, and a stage whose manifest carries that digest
has nothing left to do. That is our cache; kfp's own is switched off, because it cannot see that code has changed.

Paths are built from the job directory and `catalog.stage_dir` alone. References that travel between the pipeline's
boxes are strings relative to the job directory (`stages/train/base`): no number and no absolute path crosses a box
border, because kfp.local turns the integers of a collected list into floats and rewrites text that looks like an
interpreter's name.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from eyrie_api.decisions.families import named_layers, reading_defaults
from eyrie_api.decisions.sweep import expand
from eyrie_api.errors import ArtifactMissing, InvalidInput, NoUsableData
from eyrie_api.v1alpha1.job import JobSpec
from eyrie_api.v1alpha1.model import Frozen
from eyrie_api.v1alpha1.reports import CheckpointReport, RegenerateReport, TrainReport
from eyrie_api.v1alpha1.stages import (
    BenchmarkStage,
    CaptureStage,
    ProveStage,
    RegenerateStage,
    StageName,
    TrainStage,
    TuneStage,
)
from eyrie_api.v1alpha1.tuning import DrafterUse
from eyrie_workers.catalog import stage_dir

JOB_FILE = "job.json"
HELD_OUT = "held-out"


class JobFile(Frozen):
    """`job.json` in the job directory: what every box of the pipeline starts from."""

    id: str
    spec: JobSpec
    attempt: int = 1
    incumbent: DrafterUse | None = None
    """What serves at the job's endpoint, when that is a drafter: looked up once, when the attempt first started."""


class CheckpointRef(Frozen):
    """One exported drafter, as the boxes after training need it."""

    name: str
    candidate: str
    path: str
    """Relative to the job directory."""


def reference(stage: StageName, key: str = "") -> str:
    """How a box names a stage's output to the next box: its directory relative to the job's."""
    return stage_dir(Path(), stage, key).as_posix()


def regenerate_spec(job: JobFile) -> RegenerateStage:
    """The first stage. Prompts of the benchmark suites are named, so that none of them is trained on."""
    suites = tuple(suite.path for suite in job.spec.benchmark.suites if suite.path != HELD_OUT)
    return RegenerateStage(job_id=job.id, target=job.spec.target, data=job.spec.data,
                           regenerate=job.spec.regenerate, exclude_prompts=suites)


def check_held_out(job: JobFile, report: RegenerateReport) -> None:
    """Refuse to go on when a suite is to be drawn from held-out prompts and none was held out. Raises NoUsableData."""
    for suite in job.spec.benchmark.suites:
        if suite.path == HELD_OUT and report.rows_held_out == 0:
            raise NoUsableData(
                f"suite {suite.name!r} takes held-out prompts, but none of {report.rows_read} rows was held out by "
                f"data.held_out_fraction {job.spec.data.held_out_fraction:g}",
                "raise data.held_out_fraction, give more conversations, or name a file of prompts for the suite")


def capture_spec(job: JobFile, job_dir: Path) -> CaptureStage:
    """Capture reads what regenerate wrote, and stores what any candidate reads."""
    candidates = expand(job.spec)
    return CaptureStage(job_id=job.id, target=job.spec.target, capture=job.spec.capture,
                        rows_dir=str(stage_dir(job_dir, "regenerate")), families=reading_defaults(candidates),
                        aux_layers=named_layers(candidates), seed=job.spec.data.seed)


def trains_together(spec: JobSpec, num_gpus: int | None = None) -> bool:
    """Whether one program trains all candidates of a job (`sweep.together`).

    num_gpus  of one training pod; None on one machine.

    Together a sweep costs less, apart it is sooner done where there is hardware for all at once. Of machines with one
    GPU or none there are seldom enough idle for every candidate; a job whose pods have several GPUs or nodes each was
    given them to be quick, and the sweep program is one process on one device.
    """
    sweep = spec.sweep
    if sweep.together == "never" or len(expand(spec)) < 2:
        return False
    if sweep.together == "always" or num_gpus is None:
        return True
    return num_gpus <= 1 and spec.placement.train_launcher == "pod"


def train_spec(job: JobFile, job_dir: Path, candidates: Mapping[str, JobSpec], candidate: str) -> TrainStage:
    """One candidate of the sweep; `candidates` maps its name to the job with the sweep's values put in."""
    chosen = candidates.get(candidate)
    if chosen is None:
        raise InvalidInput(f"candidate {candidate!r} is not in this job's sweep",
                           f"candidates are {', '.join(sorted(candidates))}")
    return TrainStage(job_id=job.id, candidate=candidate, target=job.spec.target, drafter=chosen.drafter,
                      train=chosen.train, store_dir=str(stage_dir(job_dir, "capture")))


def list_checkpoints(reports: Sequence[TrainReport]) -> tuple[CheckpointRef, ...]:
    """Every exported drafter of every candidate, in order of candidate and step. Raises ArtifactMissing when none."""
    found = tuple(_checkpoint(checkpoint) for report in reports
                  for checkpoint in sorted(report.checkpoints, key=lambda one: one.step))
    if not found:
        raise ArtifactMissing("training exported no checkpoint", "raise train.epochs or train.max_steps and retry")
    return found


def _checkpoint(report: CheckpointReport) -> CheckpointRef:
    directory = stage_dir(Path(), "train", report.candidate) / report.path
    return CheckpointRef(name=report.name, candidate=report.candidate, path=directory.as_posix())


def find_checkpoint(reports: Sequence[TrainReport], name: str) -> CheckpointRef:
    """The checkpoint of that name. Raises ArtifactMissing."""
    for checkpoint in list_checkpoints(reports):
        if checkpoint.name == name:
            return checkpoint
    raise ArtifactMissing(f"no candidate exported a checkpoint {name!r}", "retry the job from the train stage")


def benchmark_spec(job: JobFile, job_dir: Path, checkpoint: CheckpointRef, *, first: bool) -> BenchmarkStage:
    """One checkpoint's measurement; only the first of a job also times `transformers`, the honesty check."""
    return BenchmarkStage(
        job_id=job.id, checkpoint=checkpoint.name, candidate=checkpoint.candidate, target=job.spec.target,
        benchmark=job.spec.benchmark, drafter_dir=str(job_dir / checkpoint.path),
        held_out_file=_held_out_file(job, job_dir), measure_transformers=first)


def tune_spec(job: JobFile, job_dir: Path, checkpoint: CheckpointRef) -> TuneStage:
    """The grid of draft-tree shapes, for the chosen checkpoint."""
    return TuneStage(
        job_id=job.id, checkpoint=checkpoint.name, candidate=checkpoint.candidate, target=job.spec.target,
        benchmark=job.spec.benchmark, tune=job.spec.tune, drafter_dir=str(job_dir / checkpoint.path),
        held_out_file=_held_out_file(job, job_dir))


def prove_spec(job: JobFile, job_dir: Path, checkpoint: CheckpointRef, tuned: str) -> ProveStage:
    """The tuned checkpoint in the serving engine, beside what serves now."""
    return ProveStage(
        job_id=job.id, checkpoint=checkpoint.name, candidate=checkpoint.candidate, target=job.spec.target,
        benchmark=job.spec.benchmark, prove=job.spec.prove, drafter_dir=str(job_dir / checkpoint.path),
        tune_dir=str(job_dir / tuned), engine=job.spec.serve.engine, max_concurrency=job.spec.serve.max_concurrency,
        incumbent=job.incumbent, held_out_file=_held_out_file(job, job_dir))


def _held_out_file(job: JobFile, job_dir: Path) -> str | None:
    wanted = any(suite.path == HELD_OUT for suite in job.spec.benchmark.suites)
    return str(stage_dir(job_dir, "regenerate") / "held_out.jsonl") if wanted else None
