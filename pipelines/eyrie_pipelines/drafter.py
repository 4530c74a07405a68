"""The pipeline: in what order the stages of a job run. One definition, two worlds.

    regenerate -> capture -> sweep -> each candidate: train -> each checkpoint: benchmark -> select -> tune -> prove

The sweep box trains all candidates of a job in one process where that is cheaper (`steps.trains_together`); the train
boxes find them finished. Where it is not, the box has nothing to do, or a cluster's pipeline is compiled without it.

On one machine `eyrie_pipelines.local` calls `train_drafter` under kfp.local; for a cluster `define` is given what
`placement` says of each box, and compiled (`python -m eyrie_pipelines.drafter --compile out.yaml` shows it unplaced).
The components are thin: no pip at run time, the body is one call into `run_stage`, so all logic can be tested without
kfp.

What kfp.local 2.17 does differently from a cluster, and how the definition avoids meeting it:

- integers in collected lists become floats: only strings cross a box border;
- conditions are substituted as text and evaluated, and an error skips the branch in silence: there are none; boxes that
  have nothing to do return at once, and decisions are made in Python;
- fan-out is two wide whatever one asks: `parallelism=1` here, since measuring needs the machine for itself and two
  trainings share the same cores to nobody's gain;
- its cache key sees neither our code nor the bytes behind a path: caching is off, finished stages are recognised by
  their manifests; `code_version` is an argument so that a cluster's cache, if someone turns it on, is honest;
- the workspace is deleted after a run, even a directory that was given: there is none; stages work in the job's own
  directory.
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kfp import compiler, dsl

from eyrie_api.v1alpha1.stages import StageName

# kfp.local warns about image names without "python" in them; ours says the truth and keeps it quiet.
IMAGE = "eyrie-workers-python:0.1.0"


def _box(function: Any) -> Any:
    """A thin lightweight component: our image holds our package and kfp, nothing is installed at run time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return dsl.component(base_image=IMAGE, install_kfp_package=False)(function)


@_box
def regenerate(job_dir: str, spec_digest: str, code_version: str) -> str:
    """Answer the conversations anew with the target."""
    from eyrie_pipelines import run_stage

    return run_stage.regenerate(job_dir, spec_digest)


@_box
def capture(job_dir: str, spec_digest: str, code_version: str, rows: str) -> str:
    """Record the target's hidden states."""
    from eyrie_pipelines import run_stage

    return run_stage.capture(job_dir, spec_digest, rows)


@_box
def list_candidates(job_dir: str, spec_digest: str, code_version: str) -> list:  # type: ignore[type-arg]
    """Expand the sweep."""
    from eyrie_pipelines import run_stage

    return run_stage.list_candidates(job_dir, spec_digest)


@_box
def sweep(job_dir: str, spec_digest: str, code_version: str, store: str) -> str:
    """Train all candidates together."""
    from eyrie_pipelines import run_stage

    return run_stage.sweep(job_dir, spec_digest, store)


@_box
def train(job_dir: str, spec_digest: str, code_version: str, store: str, candidate: str) -> str:
    """Train one candidate."""
    from eyrie_pipelines import run_stage

    return run_stage.train(job_dir, spec_digest, store, candidate)


@_box
def list_checkpoints(job_dir: str, spec_digest: str, code_version: str, trained: list) -> list:  # type: ignore[type-arg]
    """Name the exported drafters."""
    from eyrie_pipelines import run_stage

    return run_stage.list_checkpoints(job_dir, spec_digest, trained)


@_box
def benchmark(job_dir: str, spec_digest: str, code_version: str, checkpoint: str) -> str:
    """Measure one checkpoint."""
    from eyrie_pipelines import run_stage

    return run_stage.benchmark(job_dir, spec_digest, checkpoint)


@_box
def select(job_dir: str, code_version: str, benchmarked: list) -> str:  # type: ignore[type-arg]
    """Choose the checkpoint with the best average over suites."""
    from eyrie_pipelines import run_stage

    return run_stage.select(job_dir, benchmarked)


@_box
def tune(job_dir: str, spec_digest: str, code_version: str, checkpoint: str) -> str:
    """Measure the grid of draft-tree shapes."""
    from eyrie_pipelines import run_stage

    return run_stage.tune(job_dir, spec_digest, checkpoint)


@_box
def prove(job_dir: str, spec_digest: str, code_version: str, checkpoint: str, tuned: str) -> str:
    """Try the tuned drafter in the engine that will serve it."""
    from eyrie_pipelines import run_stage

    return run_stage.prove(job_dir, spec_digest, checkpoint, tuned)


def _anywhere(task: Any, _stage: StageName | None) -> Any:
    """On one machine every box runs in its place already."""
    return task


def define(place: Callable[[Any, StageName | None], Any] = _anywhere, trainings: int | None = 1, *,
           together: bool = True) -> Any:
    """The whole job as a kfp pipeline.

    place       says where a box runs, by its stage; None for the small boxes between stages
    trainings   how many candidates are trained side by side; None for as many as find room
    together    whether there is a box that trains all candidates; it runs where a training does
    """

    def placed(task: Any, stage: StageName | None = None) -> Any:
        # No kfp cache: its key cannot see what a stage program reads.
        return place(task.set_caching_options(False), stage)

    @dsl.pipeline(name="train-drafter", description="Train, measure, tune and prove a speculative-decoding drafter.")  # type: ignore[untyped-decorator]
    def train_drafter(job_dir: str, spec_digest: str, code_version: str) -> str:
        """The whole job. `job_dir` holds `job.json`; everything the run makes lies under it."""
        of_job = {"job_dir": job_dir, "spec_digest": spec_digest, "code_version": code_version}
        of_code = {"job_dir": job_dir, "code_version": code_version}
        rows = placed(regenerate(**of_job), "regenerate")
        store = placed(capture(**of_job, rows=rows.output), "capture")
        candidates = placed(list_candidates(**of_job))
        ready = placed(sweep(**of_job, store=store.output), "train") if together else store
        with dsl.ParallelFor(candidates.output, parallelism=trainings) as candidate:
            # After the sweep box it reads a manifest, which takes no GPU.
            trained = placed(train(**of_job, store=ready.output, candidate=candidate), None if together else "train")
        checkpoints = placed(list_checkpoints(**of_job, trained=dsl.Collected(trained.output)))
        with dsl.ParallelFor(checkpoints.output, parallelism=1) as checkpoint:
            measured = placed(benchmark(**of_job, checkpoint=checkpoint), "benchmark")
        best = placed(select(**of_code, benchmarked=dsl.Collected(measured.output)))
        tuned = placed(tune(**of_job, checkpoint=best.output), "tune")
        proven = placed(prove(**of_job, checkpoint=best.output, tuned=tuned.output), "prove")
        return proven.output  # type: ignore[no-any-return]

    return train_drafter


train_drafter = define()


def compile_to(path: Path) -> None:
    """Write the pipeline's intermediate representation for a cluster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    compiler.Compiler().compile(train_drafter, str(path))


def main() -> None:
    """`python -m eyrie_pipelines.drafter --compile out.yaml`."""
    parser = argparse.ArgumentParser(description="Compile the drafter pipeline for a cluster.")
    parser.add_argument("--compile", type=Path, required=True, metavar="OUT", help="YAML file to write")
    compile_to(parser.parse_args().compile)


if __name__ == "__main__":
    main()
