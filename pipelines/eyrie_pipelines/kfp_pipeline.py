"""The pipeline: the order in which the stages of a job run. One definition for both runners.

    [prefetch ->] regenerate -> capture -> sweep -> each candidate: train -> each checkpoint: benchmark
    -> select -> tune -> prove -> with prove.hardware: the first profile -> each other profile

On a cluster with a model cache, the prefetch task fills it with a target of the Hub first (`define(prefetched=True)`).
A job with `drafters` trains nothing: its pipeline (`define(trains=False)`) begins with the names of those drafters,
after the prefetch task.

The sweep task trains all candidates of a job in one program where that is cheaper (`ResolvedJob.trains_together`); the
train tasks then find their manifests. Otherwise it returns at once, and a cluster's pipeline is compiled without it.

On one machine `eyrie_pipelines.local` calls the pipeline under kfp.local. For a cluster `placement` passes a function
to `define` that places each task, and compiles the result. The components install nothing at run time and contain calls
into `tasks` and `run_artifacts` alone, so that all logic is testable without kfp.

Stages find their inputs in the work area, by references in parameters. Artifacts are for people: what a stage made
becomes a typed artifact (`run_artifacts`), and the stages that use it receive it, so that Kubeflow shows the lineage.

Differences of kfp.local 2.17 from a cluster, and how the definition avoids them:

- integers in collected lists become floats: only strings are passed between tasks;
- conditions are substituted as text and evaluated, and an error silently skips the branch: the pipeline has no
  conditions; tasks with nothing to do return at once, and decisions are made in Python;
- a fan-out runs at most two tasks at once whatever is configured: `parallelism=1` here, since measuring needs the whole
  machine and two training runs on the same cores take as long as in turn; on several GPUs the first benchmark
  task measures all checkpoints (`several_gpus`);
- its cache key contains neither our code nor the contents of a path: caching is off, and finished stages are recognised
  by their manifests; `code_version` is an argument so that a cluster's cache, if it is enabled, has a correct key;
- the workspace is deleted after a run, even a directory the caller passed: none is used; stages work in the job's own
  directory.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kfp import dsl

from eyrie_api.contract.stages import StageName

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
def regenerate(job_dir: str, spec_digest: str, code_version: str, answers: dsl.Output[dsl.Dataset]) -> str:
    """Regenerate the answers of the conversations with the target."""
    from eyrie_pipelines import run_artifacts, tasks

    done = tasks.regenerate(job_dir, spec_digest)
    run_artifacts.write_dataset(job_dir, done, answers)
    return done


@_component
def capture(job_dir: str, spec_digest: str, code_version: str, rows: str, answers: dsl.Input[dsl.Dataset],
            states: dsl.Output[dsl.Dataset]) -> str:
    """Record the target's hidden states."""
    from eyrie_pipelines import run_artifacts, tasks

    done = tasks.capture(job_dir, spec_digest, rows)
    run_artifacts.write_dataset(job_dir, done, states)
    return done


@_component
def list_candidates(job_dir: str, spec_digest: str, code_version: str) -> list:  # type: ignore[type-arg]
    """Expand the sweep."""
    from eyrie_pipelines import tasks

    return tasks.list_candidates(job_dir, spec_digest)


@_component
def sweep(job_dir: str, spec_digest: str, code_version: str, store: str, states: dsl.Input[dsl.Dataset]) -> str:
    """Train all candidates in one process."""
    from eyrie_pipelines import tasks

    return tasks.sweep(job_dir, spec_digest, store)


@_component
def train(job_dir: str, spec_digest: str, code_version: str, store: str, candidate: str,
          states: dsl.Input[dsl.Dataset], drafter: dsl.Output[dsl.Model], learning: dsl.Output[dsl.Metrics]) -> str:
    """Train one candidate."""
    from eyrie_pipelines import run_artifacts, tasks

    done = tasks.train(job_dir, spec_digest, store, candidate)
    run_artifacts.write_training(job_dir, done, drafter, learning)
    return done


@_component
def list_checkpoints(job_dir: str, spec_digest: str, code_version: str, trained: list,  # type: ignore[type-arg]
                     drafters: dsl.Input[list[dsl.Model]], checkpoints: dsl.Output[dsl.Model]) -> list:  # type: ignore[type-arg]
    """Name the exported drafters."""
    from eyrie_pipelines import run_artifacts, tasks

    names = tasks.list_checkpoints(job_dir, spec_digest, trained)
    run_artifacts.write_checkpoints(job_dir, spec_digest, names, checkpoints)
    return names


@_component
def list_drafters(job_dir: str, spec_digest: str, code_version: str, checkpoints: dsl.Output[dsl.Model]) -> list:  # type: ignore[type-arg]
    """Name the drafters that were trained elsewhere."""
    from eyrie_pipelines import run_artifacts, tasks

    names = tasks.list_checkpoints(job_dir, spec_digest, [])
    run_artifacts.write_checkpoints(job_dir, spec_digest, names, checkpoints)
    return names


@_component
def benchmark(job_dir: str, spec_digest: str, code_version: str, checkpoint: str,
              checkpoints: dsl.Input[dsl.Model], figures: dsl.Output[dsl.Metrics]) -> str:
    """Measure one checkpoint."""
    from eyrie_pipelines import run_artifacts, tasks

    done = tasks.benchmark(job_dir, spec_digest, checkpoint)
    run_artifacts.write_metrics(job_dir, done, figures)
    return done


@_component
def select(job_dir: str, code_version: str, benchmarked: list, checkpoints: dsl.Input[dsl.Model],  # type: ignore[type-arg]
           figures: dsl.Input[list[dsl.Metrics]], winner: dsl.Output[dsl.Model]) -> str:
    """Select the checkpoint with the best average over suites."""
    from eyrie_pipelines import run_artifacts, tasks

    best = tasks.select(job_dir, benchmarked)
    run_artifacts.write_winner(job_dir, best, winner)
    return best


@_component
def tune(job_dir: str, spec_digest: str, code_version: str, checkpoint: str, winner: dsl.Input[dsl.Model],
         tuning: dsl.Output[dsl.Metrics]) -> str:
    """Measure the grid of draft-tree shapes."""
    from eyrie_pipelines import run_artifacts, tasks

    done = tasks.tune(job_dir, spec_digest, checkpoint)
    run_artifacts.write_metrics(job_dir, done, tuning)
    return done


@_component
def prove(job_dir: str, spec_digest: str, code_version: str, checkpoint: str, tuned: str,
          winner: dsl.Input[dsl.Model], tuning: dsl.Input[dsl.Metrics], proof: dsl.Output[dsl.Metrics],
          report: dsl.Output[dsl.HTML]) -> str:
    """Measure the tuned drafter in the engine that will serve it."""
    from eyrie_pipelines import run_artifacts, tasks

    done = tasks.prove(job_dir, spec_digest, checkpoint, tuned)
    run_artifacts.write_metrics(job_dir, done, proof)
    run_artifacts.write_report(job_dir, spec_digest, report)
    return done


train_all = sweep
"""The parameter `sweep` of the pipeline hides the component of that name."""

TaskKind = StageName | Literal["prefetch"] | None
"""How a task is placed: as a stage, as the task that fills the model cache, or as a small task between stages."""


@_component
def hardware(job_dir: str, spec_digest: str, code_version: str, checkpoint: str, profile: str, after: str,
             winner: dsl.Input[dsl.Model], served: dsl.Output[dsl.Metrics]) -> str:
    """Measure the proven drafter on one kind of hardware."""
    from eyrie_pipelines import run_artifacts, tasks

    done = tasks.hardware(job_dir, spec_digest, checkpoint, profile)
    run_artifacts.write_metrics(job_dir, done, served)
    return done


def define(place: Callable[[Any, TaskKind, str], Any] | None = None, *, benchmarks: int | None = 1,
           together: bool = True, prefetched: bool = False, profiles: Sequence[str] = (), trains: bool = True) -> Any:
    """The whole job as a kfp pipeline.

    place       applies a placement to a task, given its kind and the name of its hardware profile, if it is measured
                on one; None on one machine, which trains one candidate at a time
    benchmarks  how many checkpoints are measured in parallel; more than one where each has GPUs of its own
    together    whether there is a task that trains all candidates; it is placed like a training run
    prefetched  whether there is a task that fills the model cache first
    profiles    names of `prove.hardware`: a task each, since each is placed on hardware of its own
    trains      whether the job trains; else it has the tasks from the benchmarks on
    """

    def placed(task: Any, kind: TaskKind = None, profile: str = "") -> Any:
        # No kfp cache: its key does not cover what a stage program reads.
        task.set_caching_options(False)
        return task if place is None else place(task, kind, profile)

    def training(job: dict[str, Any], rows: Any) -> Any:
        """The tasks from the answers in `rows` to the exported drafters."""
        store = placed(capture(**job, rows=rows.outputs["Output"], answers=rows.outputs["answers"]), "capture")
        states = store.outputs["states"]
        candidates = placed(list_candidates(**job))
        ready = placed(train_all(**job, store=store.outputs["Output"], states=states), "train") if together else store
        with dsl.ParallelFor(candidates.output, parallelism=1 if place is None else None) as candidate:
            # After the sweep task it only reads a manifest, which needs no GPU.
            trained = placed(train(**job, store=ready.outputs["Output"], candidate=candidate, states=states),
                             None if together else "train")
        return placed(list_checkpoints(**job, trained=dsl.Collected(trained.outputs["Output"]),
                                       drafters=dsl.Collected(trained.outputs["drafter"])))

    @dsl.pipeline(name="train-drafter", description="Train, measure, tune and prove a speculative-decoding drafter.")  # type: ignore[untyped-decorator]
    def train_drafter(job_dir: str, spec_digest: str, code_version: str, target: str, data: str, sweep: str) -> str:
        """The whole job. `job_dir` contains `job.json`; all output of the run is written below it. `target`, `data` and
        `sweep` are for people (`runner.JobFile.run_parameters`)."""
        job = {"job_dir": job_dir, "spec_digest": spec_digest, "code_version": code_version}
        code = {"job_dir": job_dir, "code_version": code_version}
        first = placed(regenerate(**job), "regenerate") if trains else placed(list_drafters(**job))
        if prefetched:
            first.after(placed(prefetch(**job), "prefetch"))
        exported = training(job, first) if trains else first
        checkpoints = exported.outputs["checkpoints"]
        with dsl.ParallelFor(exported.outputs["Output"], parallelism=benchmarks) as checkpoint:
            measured = placed(benchmark(**job, checkpoint=checkpoint, checkpoints=checkpoints), "benchmark")
        best = placed(select(**code, benchmarked=dsl.Collected(measured.outputs["Output"]), checkpoints=checkpoints,
                             figures=dsl.Collected(measured.outputs["figures"])))
        chosen, winner = best.outputs["Output"], best.outputs["winner"]
        tuned = placed(tune(**job, checkpoint=chosen, winner=winner), "tune")
        proven = placed(prove(**job, checkpoint=chosen, tuned=tuned.outputs["Output"], winner=winner,
                              tuning=tuned.outputs["tuning"]), "prove")
        after = proven
        for number, profile in enumerate(profiles):
            compared = placed(hardware(**job, checkpoint=chosen, profile=profile, after=after.outputs["Output"],
                                       winner=winner), "hardware", profile)
            after = compared if number == 0 else after  # the others are compared with the first
        return proven.outputs["Output"]  # type: ignore[no-any-return]

    return train_drafter
