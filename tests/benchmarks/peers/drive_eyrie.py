"""Times Eyrie's train stage per step: `python -m tests.benchmarks.peers.drive_eyrie --task task.json`.

Evaluations and the export lie between steps and are not timed; peak memory includes them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent
sys.path.insert(0, str(PEERS))  # the drivers share `spent`; the peers' know no other package of ours

from spent import Spent  # noqa: E402

from eyrie_api.v1alpha1.stages import TrainStage  # noqa: E402
from eyrie_workers.stage_program import Stage  # noqa: E402
from eyrie_workers.stages.train import prepare  # noqa: E402


def train(task: dict[str, Any]) -> None:
    """Its store -> a drafter."""
    spent, out = Spent(task["skip"]), Path(task["out"])
    run = prepare(TrainStage.model_validate(task["spec"]), Stage(out, quiet=True))
    while not run.finished:
        spent.begin()
        before = run.trainer.counters.computed_tokens
        report = run.trainer.step()
        spent.end(report.tokens, run.trainer.counters.computed_tokens - before, report.loss)
        run.follow_up(report)
    run.close()
    told = run.result().report
    spent.write(out / "spent.json", drafter=str(out / told.checkpoints[-1].path))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", type=Path, required=True)
    train(json.loads(parser.parse_args().task.read_text()))
