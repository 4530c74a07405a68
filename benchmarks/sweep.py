"""What a sweep costs against training its candidates one by one, and whether it finds as good a drafter.

    python -m benchmarks.sweep --out .eyrie/bench/sweep.json

Eight candidates are drawn (`sweep.random`) over learning rate, loss and width. Each is trained alone, to the end, by
the train program; then all eight by the sweep program with the default rungs, and with `--without-rungs` once more
with none, which tells what sharing the read and the teacher saves from what the rungs save. Each program is a process,
its cost what the system charges it: CPU seconds, which a busy machine lengthens less than wall seconds. A process
spends some of them before its first step (imports, the target's ends); that is measured too and taken off in
`training_ratio`, so that a small bench does not owe its figure to eight imports.

The winner is who simulates fastest on held-out rows at its last checkpoint. `regret` is what the sweep's winner lacks
against the best of the eight, both trained alone: successive halving may stop a late starter.

Conversations, states and drafters are kept next to the report; states are captured once, drafters trained each time.
"""

import argparse
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from eyrie_api.artifacts import read_report, write_model
from eyrie_api.contract.benchmark import QUICKSTART_SUITES
from eyrie_api.contract.capture import CaptureSpec
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.drafter import DrafterSpec
from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.reports import TrainReport
from eyrie_api.contract.stages import CaptureStage, RegenerateStage, StageName, StageSpec, TrainStage
from eyrie_api.contract.sweep import SweepAxis, SweepSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.contract.training import TrainSpec
from eyrie_api.planning.sweep import expand
from eyrie_workers.catalog import command, sweep_command
from eyrie_workers.machine import environment

_START_UPS = 3


class Spent(Frozen):
    """What some programs cost together."""

    cpu_s: float
    wall_s: float
    programs: int


class SweepBenchReport(Frozen):
    """The bench."""

    target: str
    candidates: tuple[str, ...]
    rungs: tuple[float, ...]
    tokens: int
    """Captured."""

    steps: dict[str, int]
    """Of each candidate in the sweep."""

    alone: Spent
    together: Spent
    together_without_rungs: Spent | None = None
    start_up_cpu_s: float
    """Of one program, before its first step."""

    cpu_ratio: float
    """Together over alone, everything counted."""

    training_ratio: float
    """The same, start-up taken off each program."""

    sharing_ratio: float | None = None
    """`training_ratio` without rungs."""

    winner_alone: str
    winner_together: str
    speedup_alone: float
    """Simulated, of the best of all trained alone."""

    speedup_together: float
    regret: float
    """`speedup_alone` less what the sweep's winner simulates when it is trained alone."""

    environment: dict[str, str]


def job_of(options: argparse.Namespace) -> JobSpec:
    """The job whose candidates are trained."""
    return JobSpec(
        target=TargetSpec(model=options.target), drafter=DrafterSpec(draft_vocab_size=options.draft_vocab_size),
        data=DataSpec(sources=(DataSource(path="quickstart"),), max_conversations=options.conversations),
        regenerate=RegenerateSpec(sampling=SamplingSpec(temperature=0.7), max_new_tokens=96, concurrency=32),
        train=TrainSpec(epochs=options.epochs, max_tokens_per_batch=1024, num_checkpoints=1, threads=options.threads),
        sweep=SweepSpec(random=options.candidates, max_candidates=options.candidates, axes=(
            SweepAxis(field="train.learning_rate", low=2e-4, high=5e-3, log=True),
            SweepAxis(field="train.loss", values=("kl", "lk_hybrid")),
            SweepAxis(field="drafter.intermediate_size", values=(256, 512, 1024)))))


def captured(home: Path, job: JobSpec) -> Path:
    """Answers and their states, made once."""
    rows, store = home / "regenerate", home / "capture"
    suites = tuple(suite.path for suite in QUICKSTART_SUITES)
    _run_stage("regenerate", rows, RegenerateStage(job_id="bench", target=job.target, data=job.data,
                                                   regenerate=job.regenerate, exclude_prompts=suites))
    _run_stage("capture", store, CaptureStage(job_id="bench", target=job.target, rows_dir=str(rows),
                                              capture=CaptureSpec(check_rows=0)))
    return store


def _run_stage(stage: StageName, directory: Path, spec: StageSpec) -> None:
    _write_spec(directory, spec)
    _spend([command(stage, directory)])


def _write_spec(directory: Path, spec: StageSpec) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_model(directory / "spec.json", spec)
    return directory


def _spend(programs: Sequence[Sequence[str]]) -> Spent:
    """Run programs one after the other. Exits with the code of the first that fails, its words on the screen."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for program in programs:
        code = subprocess.run(program, stdout=subprocess.DEVNULL, check=False).returncode
        if code:
            raise SystemExit(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
                 wall_s=time.perf_counter() - began, programs=len(programs))


def _reports(directories: Mapping[str, Path]) -> dict[str, TrainReport]:
    found = {}
    for name, directory in directories.items():
        report = read_report(directory, TrainReport)
        assert isinstance(report, TrainReport)
        found[name] = report
    return found


def _speedups(directories: Mapping[str, Path]) -> dict[str, float]:
    """Simulated, at the last checkpoint of those that were trained to the end."""
    return {name: report.checkpoints[-1].theoretical_speedup for name, report in _reports(directories).items()
            if not report.stopped_early}


def run(options: argparse.Namespace) -> SweepBenchReport:
    """The whole bench."""
    home: Path = options.out.with_suffix("")
    job = job_of(options)
    store = captured(home, job)
    candidates = {candidate.name: candidate.in_job(job) for candidate in expand(job)}

    def fresh(way: str) -> dict[str, Path]:
        shutil.rmtree(home / way, ignore_errors=True)
        return {name: _write_spec(home / way / name, TrainStage(
            job_id="bench", candidate=name, target=job.target, drafter=spec.drafter, train=spec.train,
            store_dir=str(store))) for name, spec in candidates.items()}

    ways = {way: fresh(way) for way in ("alone", "together", *(["whole"] if options.without_rungs else []))}
    rungs = job.sweep.rungs
    alone = _spend([command("train", directory) for directory in ways["alone"].values()])
    start_up = _start_up(job, store, home / "start-up")
    together = _spend([sweep_command(list(ways["together"].values()), rungs)])
    whole = _spend([sweep_command(list(ways["whole"].values()), ())]) if options.without_rungs else None

    def training(spent: Spent) -> float:
        return spent.cpu_s - spent.programs * start_up

    by_itself, in_sweep = _speedups(ways["alone"]), _speedups(ways["together"])
    best, winner = max(by_itself, key=by_itself.__getitem__), max(in_sweep, key=in_sweep.__getitem__)
    some = next(iter(_reports(ways["alone"]).values()))
    return SweepBenchReport(
        target=options.target, candidates=tuple(candidates), rungs=rungs,
        tokens=round(some.tokens / job.train.epochs),
        steps={name: report.steps for name, report in _reports(ways["together"]).items()},
        alone=alone, together=together, together_without_rungs=whole, start_up_cpu_s=start_up,
        cpu_ratio=together.cpu_s / alone.cpu_s, training_ratio=training(together) / training(alone),
        sharing_ratio=None if whole is None else training(whole) / training(alone), winner_alone=best,
        winner_together=winner, speedup_alone=by_itself[best], speedup_together=in_sweep[winner],
        regret=by_itself[best] - by_itself[winner],
        environment={name: str(value) for name, value in environment(job.target.dtype).model_dump().items()})


def _start_up(job: JobSpec, store: Path, home: Path) -> float:
    """CPU seconds of a train program that makes a single optimizer step, that step and its evaluation included: the
    least of a few."""
    shutil.rmtree(home, ignore_errors=True)
    train = job.train.model_copy(update={"max_steps": 1, "ttt_length": 1})
    directories = [_write_spec(home / str(number), TrainStage(
        job_id="bench", candidate="start-up", target=job.target, drafter=job.drafter, train=train,
        store_dir=str(store))) for number in range(_START_UPS)]
    return min(_spend([command("train", directory)]).cpu_s for directory in directories)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a sweep costs against training its candidates one by one.")
    parser.add_argument("--target", default="quickstart")
    parser.add_argument("--out", type=Path, default=Path(".eyrie/bench/sweep.json"))
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=80)
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--draft-vocab-size", type=int, default=1536)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--without-rungs", action="store_true", help="also train all eight together to the end")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and print; returns the exit code."""
    options = parse(argv)
    report = run(options)
    write_model(options.out, report)
    print(f"alone     {report.alone.cpu_s:7.1f} CPU s {report.alone.wall_s:7.1f} s   {report.alone.programs} programs")
    print(f"together  {report.together.cpu_s:7.1f} CPU s {report.together.wall_s:7.1f} s   rungs {report.rungs}")
    print(f"cost of the sweep: {report.cpu_ratio:.2f}x of {len(report.candidates)} runs, {report.training_ratio:.2f}x "
          f"without start-up ({report.start_up_cpu_s:.1f} CPU s a program)")
    if report.sharing_ratio is not None:
        print(f"without rungs: {report.sharing_ratio:.2f}x")
    print(f"winner {report.winner_together}: simulated {report.speedup_together:.2f}; best alone "
          f"{report.winner_alone}: {report.speedup_alone:.2f}; regret {report.regret:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
