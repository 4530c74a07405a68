"""Trains the candidates of a sweep together: one read of the hidden states and one target distribution for all.

    python -m eyrie_workers.stages.sweep --train <dir a> --train <dir b> ... [--rungs 0.25,0.5]

On N GPUs or processes of a machine (`torchrun --nproc-per-node N -m ...`) each takes every N-th candidate. What is
shared is then shared within a process; at a rung the processes exchange what their candidates have reached, and decide
the same. A sweep interrupted on N processes resumes on any other number.

Each directory holds the `spec.json` of a train stage, and afterwards what that stage would have left there:
checkpoints, events, manifest. The sweep is not a stage of its own: the train program, run later on such a directory,
finds its manifest and does nothing; in an unfinished one it resumes that candidate from its saved state.
A pipeline may therefore run the sweep first, or not at all.

`group_candidates` finds what can be shared: same target, store, mix, seed and batch size means the same documents at
every step. Within a group, states are read and decoded once, and the target's distribution is computed once for every
position that any candidate needs (once per size of draft vocabulary), in training and in evaluation. Drafters of
different families, layers, widths, learning rates, losses, depths and training lengths share a group. A candidate that
fails does not stop the others; one that is ahead of the others after an interruption waits for them.

**Rungs** (successive halving, arXiv:1502.07943) spend less on candidates that will not win: at each given share of the
longest candidate's steps, the half of a family with the lower theoretical speed-up on held-out rows stops, with a
checkpoint. With rungs at a quarter and a half, eight candidates cost the steps of four, and early steps are the cheap
ones (`train.single_step_ratio`). Families are not halved against one another: they learn at different rates, and the
benchmark decides between them. A rung is placed at the last scheduled evaluation at or before its share. What was
decided there is stored with every candidate's state before one is stopped, so an interrupted sweep keeps to it.

The theoretical speed-up counts no drafting cost and grows with `ttt_length`: train an axis over `ttt_length` to the end
(`sweep.rungs: []`). `benchmarks.sweep` measures what a sweep costs and saves.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from eyrie_api.artifacts import write_model
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.stages import TrainStage
from eyrie_api.errors import DiskFull, EyrieError, report_error
from eyrie_workers import stage_program
from eyrie_workers.catalog import STATE_DIR
from eyrie_workers.hidden_states.packed_batch import PackedBatch
from eyrie_workers.stages.rank_program import end_with_launcher, refuse
from eyrie_workers.stages.train import NUM_EVALUATIONS, TrainingRun, prepare
from eyrie_workers.targets.loading import resolve, target_digest
from eyrie_workers.training.batches import Features, checkpoint_steps, open_features
from eyrie_workers.training.distributed import SINGLE_PROCESS, DistContext
from eyrie_workers.training.evaluation import Evaluation, HitCounts
from eyrie_workers.training.loop import StepReport
from eyrie_workers.training.objective import Objective, StepContext, TargetDistribution

_RUNGS = "rungs.json"


def group_candidates(candidates: Mapping[str, TrainStage]) -> dict[str, list[str]]:
    """Names of the candidates that see the same documents at the same steps, in the order given, by what they have in
    common. Pure."""
    groups: dict[str, list[str]] = {}
    for name, spec in candidates.items():
        train = spec.train
        common = (spec.target.model_dump_json(), spec.store_dir, spec.rows, train.seed, train.max_tokens_per_batch,
                  train.max_tokens_per_gpu, train.threads)
        groups.setdefault("\n".join(map(str, common)), []).append(name)
    return groups


def slower_half(speedups: Mapping[str, float]) -> set[str]:
    """The half, rounded down, with the lower speed-up; of equal ones the later. Pure."""
    ranked = sorted(speedups, key=lambda name: -speedups[name])
    return set(ranked[len(ranked) - len(ranked) // 2:])


class DecidedRungs(Frozen):
    """What was decided at the rungs, stored with the state of every candidate."""

    spec_digest: str
    goes_on: dict[int, dict[str, bool]] = {}
    """By step, then by name of the candidate's directory."""

    @classmethod
    def of(cls, run: TrainingRun) -> "DecidedRungs":
        """Of a run; empty where nothing was decided, or of another spec."""
        try:
            stored = cls.model_validate_json((run.stage.out_dir / STATE_DIR / _RUNGS).read_text())
        except (FileNotFoundError, ValueError):
            return cls(spec_digest=run.digest)
        return stored if stored.spec_digest == run.digest else cls(spec_digest=run.digest)

    def write(self, run: TrainingRun) -> None:
        (run.stage.out_dir / STATE_DIR).mkdir(exist_ok=True)
        write_model(run.stage.out_dir / STATE_DIR / _RUNGS, self)


def rung_steps(num_steps: int, rungs: Sequence[float]) -> tuple[int, ...]:
    """The steps after which the slower half stops: scheduled evaluations at or before each share. Pure."""
    scheduled = checkpoint_steps(num_steps, NUM_EVALUATIONS)
    steps = {max([step for step in scheduled if step <= share * num_steps] or scheduled[:1]) for share in rungs}
    return tuple(sorted(steps - {num_steps}))


class CandidateGroup:
    """This process's runs of a group, which read their batches from one loader. There may be none."""

    def __init__(self, runs: Mapping[str, TrainingRun], rungs: Sequence[float] = (),
                 dist: DistContext = SINGLE_PROCESS, order: Sequence[str] = ()) -> None:
        """`order`: names of all candidates of all processes, as given; ties at a rung are decided by it."""
        self._runs, self._dist, self._order = dict(runs), dist, order or tuple(runs)
        self.failed: dict[str, EyrieError] = {}
        longest = max(runs.values(), key=lambda run: run.trainer.schedule.num_steps, default=None)
        self._loader = None if longest is None else longest.trainer.loader
        num_steps = max(dist.gather(0 if longest is None else longest.trainer.schedule.num_steps))
        self._rungs, self._num_steps = rung_steps(num_steps, rungs), num_steps
        for run in runs.values():
            run.rung_steps = frozenset(self._rungs)

    def train(self) -> None:
        """Train until every candidate has finished or failed. Raises Interrupted once each has saved its state."""
        for stop in (*self._rungs, self._num_steps):
            # Until every candidate of this process has done `stop` steps, has finished or failed.
            while active := self._active():
                # Interrupted runs resume at the step of their last save, which differs: those behind catch up first.
                step = min(run.trainer.counters.step for run in active.values())
                if step >= stop:
                    break
                try:
                    self._step({name: run for name, run in active.items() if run.trainer.counters.step == step}, step)
                except EyrieError as error:  # of what the group shares: reading its batches
                    # Not raised: the other processes wait for this one at the next rung.
                    self.failed |= dict.fromkeys(active, error)
            if stop in self._rungs:
                self._halve(stop)

    def _active(self) -> dict[str, TrainingRun]:
        return {name: run for name, run in self._runs.items() if not run.finished and name not in self.failed}

    def _halve(self, step: int) -> None:
        """Stop the slower half of each family. What was decided before an interruption stays: a candidate that was
        saved before the rung is measured again, and its figure may be another."""
        reached = [run.trainer.counters.step for run in self._active().values()]
        known = {name: (run.family.name, run.speedups[step]) for name, run in self._runs.items()
                 if step in run.speedups}
        stored = {name: DecidedRungs.of(run) for name, run in self._runs.items()}
        before = next((rungs.goes_on[step] for rungs in stored.values() if step in rungs.goes_on), None)
        gathered = self._dist.gather((reached, known, before))
        if not any(step in steps for steps, _, _ in gathered):
            return  # an interrupted sweep resumed behind this rung, which was decided before
        decided = next((decided for _, _, decided in gathered if decided is not None), None)
        if decided is None:
            everywhere = {name: entry for _, entries, _ in gathered for name, entry in entries.items()}
            by_family: dict[str, dict[str, float]] = {}
            for name in self._order:
                if name in everywhere:
                    family, speedup = everywhere[name]
                    by_family.setdefault(family, {})[name] = speedup
            slower = {name for speedups in by_family.values() for name in slower_half(speedups)}
            decided = {Path(name).name: name not in slower for name in everywhere}
        for name, run in self._runs.items():
            DecidedRungs(spec_digest=run.digest, goes_on={**stored[name].goes_on, step: decided}).write(run)
        self._dist.gather(None)  # every process has written the decision before any candidate is stopped by it
        for name, run in self._active().items():
            goes_on = decided.get(Path(name).name, True)
            # Before the run is saved as finished: killed in between, it comes here again.
            run.stage.metric("rung", step, float(goes_on))  # 1 goes on, 0 ends
            if not goes_on:
                run.stop_early(f"the other half of {len(decided)} candidates had a higher theoretical speed-up")

    def _step(self, runs: Mapping[str, TrainingRun], step: int) -> None:
        """One optimizer step of each run, on one batch and one set of target distributions."""
        started = time.perf_counter()
        if not runs:
            return
        # 1. Shared: read the batch, copy it to the device, compute the target's distributions.
        assert self._loader is not None
        batch = self._loader.take(step)
        batch = replace(batch, documents=batch.documents.with_states_on(next(iter(runs.values())).device))
        waited = time.perf_counter() - started
        targets = shared_targets({name: run.trainer.objective for name, run in runs.items()}, batch.documents,
                                 {name: run.trainer.context(batch) for name, run in runs.items()})
        # 2. Each run's own step. Its counters are charged an equal share of the time that step 1 took.
        shared_s = (time.perf_counter() - started) / len(runs)
        reports: dict[str, StepReport] = {}
        for name, run in runs.items():
            try:
                reports[name] = run.trainer.train_on(batch, time.perf_counter() - shared_s, waited / len(runs),
                                                  targets[name])
            except EyrieError as error:
                self.failed[name] = error
        # 3. Shared: evaluate the runs whose schedule asks for it.
        due = {name: runs[name] for name in reports if runs[name].evaluation_due}
        evaluations = evaluate_together(due) if due else {}
        # 4. Each run exports and saves. Interrupted is raised after the last of them, so that every run has saved.
        saved, went_on = False, list[TrainingRun]()
        for name, report in reports.items():
            try:
                runs[name].after_step(report, evaluations.get(name))
                went_on.append(runs[name])
            except stage_program.Interrupted:
                saved = True
            except EyrieError as error:
                self.failed[name] = error
        if saved:
            for run in went_on:  # the signal came between two of them
                run.save()
            raise stage_program.Interrupted


def shared_targets(objectives: Mapping[str, Objective[Any]], documents: PackedBatch,
                   contexts: Mapping[str, StepContext]) -> dict[str, TargetDistribution]:
    """Each objective's target distribution for a batch, computed once for all with the same draft vocabulary.

    Objectives without a context are evaluated rather than trained.
    """
    by_key: dict[tuple[str, bool], list[str]] = {}
    for name, objective in objectives.items():
        by_key.setdefault(objective.target_key, []).append(name)
    targets: dict[str, TargetDistribution] = {}
    for names in by_key.values():
        # The union of all positions: each objective looks up its own by packed position.
        positions = torch.cat([objectives[name].plan(documents, contexts.get(name)).target_positions
                               for name in names]).unique()
        targets |= dict.fromkeys(names, objectives[names[0]].target_distribution(documents, positions))
    return targets


@torch.no_grad()
def evaluate_together(runs: Mapping[str, TrainingRun]) -> dict[str, Evaluation]:
    """What `evaluate` returns for each run of a group, from one read of the held-out rows and shared targets."""
    objectives = {name: run.trainer.objective for name, run in runs.items()}
    counts = {name: HitCounts(objective.steps) for name, objective in objectives.items()}
    first = next(iter(runs.values()))
    for documents in (batch.with_states_on(first.device) for batch in first.held_out()):
        targets = shared_targets(objectives, documents, {})
        for name, run in runs.items():
            counts[name].add(objectives[name](documents.with_layers(run.columns), None, targets[name]))
    return {name: count.evaluation() for name, count in counts.items()}


def sweep(directories: Sequence[Path], rungs: Sequence[float] = (), dist: DistContext = SINGLE_PROCESS) -> int:
    """Train the specs in these directories; the exit code: 0, or that of the first candidate that failed.

    All directories of a process are open at once, each with its lock, manifest and failure.json, as if its train
    program ran alone.
    """
    order = [str(directory.resolve()) for directory in directories]
    stages = [stage_program.Stage(Path(name)) for name in order[dist.rank::dist.size]]
    opened: dict[str, stage_program.OpenStage[TrainStage]] = {}
    codes: dict[str, int] = {}
    try:
        with stage_program.stop_on_signals(*stages), ExitStack() as stack:
            for stage in stages:
                name = str(stage.out_dir)
                try:
                    candidate = stack.enter_context(stage_program.open_stage(
                        TrainStage, stage, stage.out_dir / "spec.json", stage.out_dir / "manifest.json"))
                except EyrieError as error:  # locked, or its spec is invalid: the other candidates are trained
                    codes[name] = report_error(error)
                else:
                    if not candidate.finished:
                        opened[name] = candidate
            for name, outcome in _train_all(opened, rungs, dist, order).items():
                if isinstance(outcome, EyrieError):
                    stage_program.write_failure(opened[name].stage, outcome)
                    codes[name] = report_error(outcome)
                else:
                    opened[name].finish(outcome)
    except stage_program.Interrupted:  # each open stage has logged it
        return stage_program.INTERRUPTED_EXIT_CODE
    except DiskFull as error:
        return stage_program.end_on_full_disk(error)
    # Every process ends with the same code, and only now: torchrun stops all as soon as one ends with another than 0.
    codes = {name: code for gathered in dist.gather(codes) for name, code in gathered.items()}
    return next((codes[name] for name in order if name in codes), 0)


def _train_all(opened: Mapping[str, stage_program.OpenStage[TrainStage]], rungs: Sequence[float], dist: DistContext,
               order: Sequence[str]) -> dict[str, stage_program.Result | EyrieError]:
    """Train this process's candidates, one group after the other. Raises Interrupted."""
    outcomes: dict[str, stage_program.Result | EyrieError] = {}
    groups = group_candidates({name: candidate.spec for name, candidate in opened.items()})
    targets = {key: opened[names[0]].spec.target for key, names in groups.items()}
    digest_once = cache(lambda target: target_digest(resolve(target)))
    # All processes go through all groups in the same order: they meet at each group's rungs.
    for key, target in {key: target for own in dist.gather(targets) for key, target in own.items()}.items():
        names = groups.get(key, ())
        try:  # on rank 0 alone, whether or not it has a candidate of this group
            digest = dist.on_main(partial(digest_once, target))
        except EyrieError as error:
            outcomes |= dict.fromkeys(names, error)
            continue
        runs: dict[str, TrainingRun] = {}
        features: Features | None = None
        for name in names:
            spec = opened[name].spec
            try:
                stage_program.check_models(spec)
                embeddings = next((run.embeddings for run in runs.values()), None)
                features = features or open_features(spec.store_dir, spec.target)
                runs[name] = prepare(spec, opened[name].stage, embeddings=embeddings, features=features,
                                     digest=digest)
            except EyrieError as error:
                outcomes[name] = error
        group = CandidateGroup(runs, rungs, dist, order)
        try:
            group.train()
            outcomes |= {name: run.result() for name, run in runs.items() if name not in group.failed}
        finally:
            for run in runs.values():
                run.close()
        outcomes |= group.failed
    return outcomes


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Train the candidates of a sweep together.")
    parser.add_argument("--train", type=Path, action="append", required=True, metavar="DIR",
                        help="directory with the spec.json of a train stage; once per candidate")
    parser.add_argument("--rungs", default="", help="shares of the steps at which the slower half stops: 0.25,0.5")
    arguments = parser.parse_args(argv)
    rungs = [float(share) for share in arguments.rungs.split(",") if share]
    end_with_launcher()
    try:
        dist = DistContext.from_environment()
    except EyrieError as error:
        return refuse(error, arguments.train)
    try:
        return sweep(arguments.train, rungs, dist)
    finally:
        dist.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
