"""Times Eyrie's train stage per step: `python -m benchmarks.peers.drive_eyrie --task task.json`.

Evaluations and the export lie between steps and are not timed; peak memory includes them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.peers.spent import Spent
from eyrie_api.contract.reports import TrainReport
from eyrie_api.contract.stages import TrainStage
from eyrie_workers.stage_program import Stage
from eyrie_workers.stages.train import prepare


def train(task: dict[str, Any]) -> None:
    """Train a drafter on the stored states and record what the steps cost."""
    spent, out = Spent(task["skip"]), Path(task["out"])
    run = prepare(TrainStage.model_validate(task["spec"]), Stage(out, quiet=True))
    while not run.finished:
        spent.begin()
        before = run.trainer.counters.computed_tokens
        report = run.trainer.step()
        spent.end(report.tokens, run.trainer.counters.computed_tokens - before, report.loss)
        run.after_step(report)
    run.close()
    result = run.result().report
    assert isinstance(result, TrainReport)
    spent.write(out / "spent.json", drafter=str(out / result.checkpoints[-1].path))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=Path, required=True)
    train(json.loads(parser.parse_args().task.read_text()))
