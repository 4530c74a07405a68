"""A stage program as several processes, one per GPU, started by torchrun.

    torchrun --nproc-per-node N -m eyrie_workers.stages.<stage> --spec spec.json --out <dir>/manifest.json

Rank 0 is the stage program (`stage_program`): lock, events, manifest. Each time it begins to work it has the other
ranks begin the same; they read the same spec, write no events, and end when it does. All ranks raise an error of the
input alike, and each writes it to failure.json: an error of one rank alone (its GPU's memory is taken) is reported too.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from eyrie_api.contract.model import Frozen
from eyrie_api.errors import EyrieError, report_error
from eyrie_api.full_disk import disk_full, is_full
from eyrie_workers.engines.parent_death_signal import die_with_parent
from eyrie_workers.stage_program import (
    INTERRUPTED_EXIT_CODE,
    Interrupted,
    Result,
    SpecT,
    Stage,
    run_program,
    stop_on_signals,
    write_failure,
)
from eyrie_workers.training.distributed import DistContext

_GO, _END = "go", "end"


class _UnloggedStage(Stage):
    """Discards stage events on non-zero ranks."""

    def _write(self, record: Frozen) -> None:
        pass


def run_ranks(kind: type[SpecT], work: Callable[[SpecT, Stage, DistContext], Result], argv: Sequence[str],
              is_whole: Callable[[Path], bool] = lambda _: True) -> int:
    """The program of every rank; returns the exit code. Without torchrun: the stage program itself.

    work      runs on every rank; only what it returns on rank 0 is used.
    is_whole  see `stage_program.open_stage`.
    """
    end_with_launcher()
    try:
        dist = DistContext.from_environment()
    except EyrieError as error:
        return refuse(error, [_arguments(argv).out.parent])

    def main_work(spec: SpecT, stage: Stage) -> Result:
        dist.broadcast(_GO)
        return work(spec, stage, dist)

    main_work.__doc__ = work.__doc__
    try:
        if not dist.is_main:
            return _run_worker_rank(kind, work, dist, argv)
        code = run_program(kind, main_work, list(argv), is_whole)
        if code == 0:
            dist.broadcast(_END)
        return code
    finally:
        dist.close()


def end_with_launcher() -> None:
    """Under torchrun, have this rank killed when torchrun ends: it starts each rank in a session of its own, and killed
    with SIGKILL it would leave them behind. A rank whose torchrun ended before this call does not work either: it finds
    no store to form the group with."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def refuse(error: EyrieError, directories: Sequence[Path]) -> int:
    """End a rank. Whichever rank is first writes failure.json before it ends, because torchrun then stops the others;
    where all ranks of a machine find the same error, the last one's record stays."""
    for directory in directories:
        stage = _UnloggedStage(directory.resolve(), quiet=True)
        stage.out_dir.mkdir(parents=True, exist_ok=True)
        write_failure(stage, error)
    return report_error(error)


def _run_worker_rank(kind: type[SpecT], work: Callable[[SpecT, Stage, DistContext], Result], dist: DistContext,
                     argv: Sequence[str]) -> int:
    """The program of a non-zero rank: work whenever rank 0 does, until it ends; the exit code."""
    arguments = _arguments(argv)
    stage = _UnloggedStage(arguments.out.resolve().parent, quiet=True)
    try:
        with stop_on_signals(stage):
            # Rank 0 broadcasts _END when there is no (more) work: also when its manifest exists.
            while dist.broadcast(None) == _GO:
                work(kind.model_validate_json(arguments.spec.read_text()), stage, dist)
        return 0
    except Interrupted:
        return INTERRUPTED_EXIT_CODE
    except EyrieError as error:
        return refuse(error, [stage.out_dir])
    except Exception as error:
        if not is_full(error):
            raise
        return refuse(disk_full(stage.out_dir), [stage.out_dir])


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)
