"""Trains the candidates of a sweep together: one read of the states and one teacher for all of them.

    python -m eyrie_workers.stages.sweep --train <dir a> --train <dir b> ... [--rungs 0.25,0.5]

Each directory holds the `spec.json` of a train stage and afterwards what that stage would have left there:
checkpoints, events, manifest. It is no stage of its own: the train program, run later on such a directory, finds its
manifest and has nothing to do, and run on one that is not finished goes on from its state, alone. So a pipeline may
call this first, or not at all.

What candidates share they share by `groups`: same target, store, seed and batch size means the same documents at every
step. Of one group, states are read and decoded once, and the target is asked once about every position that any
candidate asks about (once per size of draft vocabulary), in training and in evaluation. Drafters of other families,
layers, widths, rates, losses, depths and lengths of training go together. A candidate that fails, or was further when
all were killed, stands aside; the others go on.

**Rungs** (successive halving, arXiv:1502.07943) spend less on what will not win: at each given share of the longest
candidate's steps, the half of a family with the lower simulated speed-up on held-out rows stops there, with a
checkpoint. With rungs at a quarter and a half, eight candidates cost the steps of four, and early steps are the cheap
ones (`train.single_step_ratio`). Families are not halved against one another: they learn at different paces, and
which is best is for the benchmark to say. A rung stands at the last of the evaluations that are due anyway before its
share. What each candidate reached there is in its saved state, so that a sweep that was killed decides as it would
have.

Simulated speed-up counts no drafting cost and grows with `ttt_length`: an axis over that one is better trained to the
end (`sweep.rungs: []`). What it costs and saves is measured by `tests.benchmarks.sweep`.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.stages import TrainStage
from eyrie_workers.features.packed_batch import PackedBatch
from eyrie_workers.stage_program import INTERRUPTED_EXIT_CODE, Interrupted, Result, Stage, run_program
from eyrie_workers.stages.train import NUM_EVALUATIONS, Run, prepare
from eyrie_workers.training.batch_loader import Features, open_features
from eyrie_workers.training.evaluation import Evaluation, Tally
from eyrie_workers.training.loop import StepReport
from eyrie_workers.training.objective import Objective, StepContext, TargetDistribution
from eyrie_workers.training.packing import checkpoint_steps


def groups(candidates: Mapping[str, TrainStage]) -> list[tuple[str, ...]]:
    """Names of the candidates that see the same documents at the same steps, in the order given. Pure."""
    together: dict[str, list[str]] = {}
    for name, spec in candidates.items():
        key = "\n".join((spec.target.model_dump_json(), spec.store_dir, str(spec.train.seed),
                         str(spec.train.max_tokens_per_batch), str(spec.train.threads)))
        together.setdefault(key, []).append(name)
    return [tuple(names) for names in together.values()]


def losers(speedups: Mapping[str, float]) -> set[str]:
    """The half, rounded down, with the lower speed-up; among equals the later. Pure."""
    ranked = sorted(speedups, key=lambda name: -speedups[name])
    return set(ranked[len(ranked) - len(ranked) // 2:])


def rung_steps(num_steps: int, rungs: Sequence[float]) -> tuple[int, ...]:
    """The steps after which the slower half stops: evaluations that are due anyway, at or before each share. Pure."""
    due = checkpoint_steps(num_steps, NUM_EVALUATIONS)
    found = {max([step for step in due if step <= share * num_steps] or due[:1]) for share in rungs}
    return tuple(sorted(found - {num_steps}))


class Together:
    """Several runs over one feed."""

    def __init__(self, runs: Mapping[str, Run], rungs: Sequence[float] = ()) -> None:
        self._runs = dict(runs)
        self.failed: dict[str, EyrieError] = {}
        longest = max(runs.values(), key=lambda run: run.trainer.schedule.num_steps)
        self._feed = longest.trainer.feed
        self._rungs = rung_steps(longest.trainer.schedule.num_steps, rungs)
        for run in runs.values():
            run.evaluate_also_at(self._rungs)

    def to_the_end(self) -> None:
        """Train all until each is finished or failed. Raises Interrupted once every one is saved."""
        while active := self._active():
            # Those that were killed at an earlier step catch up first.
            step = min(run.trainer.counters.step for run in active.values())
            if step in self._rungs:
                self._halve(step)
                active = self._active()
            self._step({name: run for name, run in active.items() if run.trainer.counters.step == step}, step)

    def _active(self) -> dict[str, Run]:
        return {name: run for name, run in self._runs.items() if not run.finished and name not in self.failed}

    def _halve(self, step: int) -> None:
        """Stop the slower half of each family; those count that stopped here before all were killed."""
        standing: dict[str, dict[str, float]] = {}
        for name, run in self._runs.items():
            if step in run.standing:
                standing.setdefault(run.family.name, {})[name] = run.standing[step]
        for speedups in standing.values():
            for name in losers(speedups):
                if not self._runs[name].finished and name not in self.failed:
                    self._runs[name].stop_here(f"the other half of {len(speedups)} candidates simulated faster")

    def _step(self, runs: Mapping[str, Run], step: int) -> None:
        started = time.perf_counter()
        if not runs:
            return
        batch = self._feed.take(step)
        waited = time.perf_counter() - started
        lessons = teach_all({name: run.trainer.objective for name, run in runs.items()}, batch.documents,
                            {name: run.trainer.moment(batch) for name, run in runs.items()})
        shared = (time.perf_counter() - started) / len(runs)
        reports: dict[str, StepReport] = {}
        for name, run in runs.items():
            try:
                reports[name] = run.trainer.learn(batch, time.perf_counter() - shared, waited / len(runs),
                                                  lessons[name])
            except EyrieError as error:
                self.failed[name] = error
        due = {name: runs[name] for name in reports if runs[name].is_evaluated_at(step + 1)}
        evaluations = evaluate_all(due) if due else {}
        interrupted = False
        for name, report in reports.items():
            try:
                runs[name].follow_up(report, evaluations.get(name))
            except Interrupted:
                interrupted = True
            except EyrieError as error:
                self.failed[name] = error
        if interrupted:
            raise Interrupted


def teach_all(objectives: Mapping[str, Objective], documents: PackedBatch,
              moments: Mapping[str, StepContext]) -> dict[str, TargetDistribution]:
    """Each objective's teacher of a batch, asked once for all of the same draft vocabulary. Without a moment, an
    objective is judged."""
    asked: dict[tuple[int, bool], list[str]] = {}
    for name, objective in objectives.items():
        asked.setdefault(objective.teacher_key, []).append(name)
    lessons: dict[str, TargetDistribution] = {}
    for names in asked.values():
        positions = torch.cat([objectives[name].plan(documents, moments.get(name)).teacher_positions()
                               for name in names]).unique()
        lessons |= dict.fromkeys(names, objectives[names[0]].teach(documents, positions))
    return lessons


@torch.no_grad()
def evaluate_all(runs: Mapping[str, Run]) -> dict[str, Evaluation]:
    """What `evaluate` says of each run of a group, over one read of the held-out rows and one teacher."""
    objectives = {name: run.trainer.objective for name, run in runs.items()}
    counts = {name: Tally(run.spec.train.ttt_length) for name, run in runs.items()}
    for documents in next(iter(runs.values())).held_out():
        lessons = teach_all(objectives, documents, {})
        for name, run in runs.items():
            counts[name].add(objectives[name](documents.with_layers(run.columns), None, lessons[name]))
    return {name: count.evaluation() for name, count in counts.items()}


def sweep(directories: Sequence[Path], rungs: Sequence[float] = ()) -> int:
    """Train what the directories' specs say; the exit code: 0, or that of the first candidate that failed.

    The train programs stand inside one another, so that each has its lock, its manifest and its failure as if alone;
    the innermost does the work of all.
    """
    todo: list[tuple[TrainStage, Stage]] = []
    outcome: dict[str, Result | EyrieError] = {}

    def stand_in(number: int) -> int:
        if number == len(directories):
            _train_all(todo, rungs, outcome)
            return 0
        directory = directories[number]
        entered = False

        def work(spec: TrainStage, stage: Stage) -> Result:
            nonlocal entered
            entered = True
            todo.append((spec, stage))
            code = stand_in(number + 1)
            if code == INTERRUPTED_EXIT_CODE:
                raise Interrupted
            found = outcome[str(stage.out_dir)]
            if isinstance(found, EyrieError):
                raise found
            inner.append(code)
            return found

        inner: list[int] = []
        code = run_program(TrainStage, work, ["--spec", str(directory / "spec.json"),
                                              "--out", str(directory / "manifest.json")])
        if not entered:  # finished before, or refused
            return stand_in(number + 1) or code
        return code or inner[0]

    return stand_in(0)


def _train_all(todo: Sequence[tuple[TrainStage, Stage]], rungs: Sequence[float],
               outcome: dict[str, Result | EyrieError]) -> None:
    stages = {str(stage.out_dir): (spec, stage) for spec, stage in todo}
    innermost = todo[-1][1] if todo else None
    for names in groups({name: spec for name, (spec, _) in stages.items()}):
        runs: dict[str, Run] = {}
        features: Features | None = None
        for name in names:
            spec, stage = stages[name]
            try:
                ends = next((run.ends for run in runs.values()), None)
                features = features or open_features(spec.store_dir, spec.target)
                runs[name] = prepare(spec, stage, ends=ends, features=features)
            except EyrieError as error:
                outcome[name] = error
        if not runs:
            continue
        for run in runs.values():  # a signal reaches the innermost program alone
            run.heed(lambda: innermost is not None and innermost.stop_requested)
        together = Together(runs, rungs)
        try:
            together.to_the_end()
        finally:
            for run in runs.values():
                run.close()
        outcome |= together.failed
        outcome |= {name: run.result() for name, run in runs.items() if name not in together.failed}


def main(argv: Sequence[str]) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description="Train the candidates of a sweep together.")
    parser.add_argument("--train", type=Path, action="append", required=True, metavar="DIR",
                        help="directory with the spec.json of a train stage; once per candidate")
    parser.add_argument("--rungs", default="", help="shares of the steps at which the slower half stops: 0.25,0.5")
    told = parser.parse_args(argv)
    return sweep(told.train, [float(share) for share in told.rungs.split(",") if share])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
