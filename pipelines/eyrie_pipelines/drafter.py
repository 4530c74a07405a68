"""The pipeline: the order in which the stages of a job run. One definition for both runners.

    [prefetch ->] regenerate -> capture -> sweep -> each candidate: train -> each checkpoint: benchmark
    -> select -> tune -> prove

On a cluster with a model cache, the prefetch task fills it with a target of the Hub first (`define(prefetched=True)`).
The sweep task trains all candidates of a job in one program where that is cheaper (`sweep.trains_together`); the train
tasks then find their manifests. Otherwise it returns at once, and a cluster's pipeline is compiled without it.

On one machine `eyrie_pipelines.local` calls `train_drafter` under kfp.local. For a cluster `placement` passes a
function to `define` that places each task, and compiles the result (`python -m eyrie_pipelines.drafter --compile
out.yaml` writes the pipeline without placements). The components install nothing at run time and contain one call into
`tasks`, so that all logic is testable without kfp.

Differences of kfp.local 2.17 from a cluster, and how the definition avoids them:

- integers in collected lists become floats: only strings are passed between tasks;
- conditions are substituted as text and evaluated, and an error silently skips the branch: the pipeline has no
  conditions; tasks with nothing to do return at once, and decisions are made in Python;
- a fan-out runs at most two tasks at once whatever is configured: `parallelism=1` here, since measuring needs the whole
  machine and two trainings on the same cores take as long as one after the other; on several GPUs the first benchmark
  task measures all checkpoints (`gpu_shares`);
- its cache key contains neither our code nor the contents of a path: caching is off, and finished stages are recognised
  by their manifests; `code_version` is an argument so that a cluster's cache, if it is enabled, has a correct key;
- the workspace is deleted after a run, even a directory the caller passed: none is used; stages work in the job's own
  directory.
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from kfp import compiler, dsl

from eyrie_api.v1alpha1.stages import StageName

# kfp.local warns about image names without "python" in them.
IMAGE = "eyrie-workers-python:0.1.0"


def _component(function: Any) -> Any:
    """A lightweight Python component whose image contains our package and kfp: nothing is installed at run time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return dsl.component(base_image=IMAGE, install_kfp_package=False)(function)


@_component
def prefetch(job_dir: str, spec_digest: str, code_version: str) -> str:
    """Fill the model cache with the target."""
    from eyrie_pipelines import tasks

    return tasks.prefetch(job_dir, spec_digest)


@_component
def regenerate(job_dir: str, spec_digest: str, code_version: str) -> str:
    """Regenerate the answers of the conversations with the target."""
    from eyrie_pipelines import tasks

    return tasks.regenerate(job_dir, spec_digest)


@_component
def capture(job_dir: str, spec_digest: str, code_version: str, rows: str) -> str:
    """Record the target's hidden states."""
    from eyrie_pipelines import tasks

    return tasks.capture(job_dir, spec_digest, rows)


@_component
def list_candidates(job_dir: str, spec_digest: str, code_version: str) -> list:  # type: ignore[type-arg]
    """Expand the sweep."""
    from eyrie_pipelines import tasks

    return tasks.list_candidates(job_dir, spec_digest)


@_component
def sweep(job_dir: str, spec_digest: str, code_version: str, store: str) -> str:
    """Train all candidates in one process."""
    from eyrie_pipelines import tasks

    return tasks.sweep(job_dir, spec_digest, store)


@_component
def train(job_dir: str, spec_digest: str, code_version: str, store: str, candidate: str) -> str:
    """Train one candidate."""
    from eyrie_pipelines import tasks

    return tasks.train(job_dir, spec_digest, store, candidate)


@_component
def list_checkpoints(job_dir: str, spec_digest: str, code_version: str, trained: list) -> list:  # type: ignore[type-arg]
    """Name the exported drafters."""
    from eyrie_pipelines import tasks

    return tasks.list_checkpoints(job_dir, spec_digest, trained)


@_component
def benchmark(job_dir: str, spec_digest: str, code_version: str, checkpoint: str) -> str:
    """Measure one checkpoint."""
    from eyrie_pipelines import tasks

    return tasks.benchmark(job_dir, spec_digest, checkpoint)


@_component
def select(job_dir: str, code_version: str, benchmarked: list) -> str:  # type: ignore[type-arg]
    """Select the checkpoint with the best average over suites."""
    from eyrie_pipelines import tasks

    return tasks.select(job_dir, benchmarked)


@_component
def tune(job_dir: str, spec_digest: str, code_version: str, checkpoint: str) -> str:
    """Measure the grid of draft-tree shapes."""
    from eyrie_pipelines import tasks

    return tasks.tune(job_dir, spec_digest, checkpoint)


@_component
def prove(job_dir: str, spec_digest: str, code_version: str, checkpoint: str, tuned: str) -> str:
    """Measure the tuned drafter in the engine that will serve it."""
    from eyrie_pipelines import tasks

    return tasks.prove(job_dir, spec_digest, checkpoint, tuned)


TaskKind = StageName | Literal["prefetch"] | None
"""How a task is placed: as a stage, as the task that fills the model cache, or as a small task between stages."""


def _unplaced(task: Any, _kind: TaskKind) -> Any:
    """One machine: tasks need no placement."""
    return task


def define(place: Callable[[Any, TaskKind], Any] = _unplaced, trainings: int | None = 1,
           benchmarks: int | None = 1, *, together: bool = True, prefetched: bool = False) -> Any:
    """The whole job as a kfp pipeline.

    place       applies a placement to a task, given its kind
    trainings   how many candidates are trained in parallel; None for no limit
    benchmarks  how many checkpoints are measured in parallel; more than one where each has GPUs of its own
    together    whether there is a task that trains all candidates; it is placed like a training
    prefetched  whether there is a task that fills the model cache first
    """

    def placed(task: Any, kind: TaskKind = None) -> Any:
        # No kfp cache: its key does not cover what a stage program reads.
        return place(task.set_caching_options(False), kind)

    @dsl.pipeline(name="train-drafter", description="Train, measure, tune and prove a speculative-decoding drafter.")  # type: ignore[untyped-decorator]
    def train_drafter(job_dir: str, spec_digest: str, code_version: str) -> str:
        """The whole job. `job_dir` contains `job.json`; all output of the run is written below it."""
        job = {"job_dir": job_dir, "spec_digest": spec_digest, "code_version": code_version}
        code = {"job_dir": job_dir, "code_version": code_version}
        rows = placed(regenerate(**job), "regenerate")
        if prefetched:
            rows.after(placed(prefetch(**job), "prefetch"))
        store = placed(capture(**job, rows=rows.output), "capture")
        candidates = placed(list_candidates(**job))
        ready = placed(sweep(**job, store=store.output), "train") if together else store
        with dsl.ParallelFor(candidates.output, parallelism=trainings) as candidate:
            # After the sweep task it only reads a manifest, which needs no GPU.
            trained = placed(train(**job, store=ready.output, candidate=candidate), None if together else "train")
        checkpoints = placed(list_checkpoints(**job, trained=dsl.Collected(trained.output)))
        with dsl.ParallelFor(checkpoints.output, parallelism=benchmarks) as checkpoint:
            measured = placed(benchmark(**job, checkpoint=checkpoint), "benchmark")
        best = placed(select(**code, benchmarked=dsl.Collected(measured.output)))
        tuned = placed(tune(**job, checkpoint=best.output), "tune")
        proven = placed(prove(**job, checkpoint=best.output, tuned=tuned.output), "prove")
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
