"""The prove stage: the tuned drafter in the engine that will serve it, before anybody is served by it.

    python -m eyrie_workers.stages.prove --spec spec.json --out manifest.json

Work in progress: says which setting would be proven.
"""

import sys
import time
from pathlib import Path

from eyrie_api.artifacts import read_manifest, write_model
from eyrie_api.v1alpha1.prove import ProveReport
from eyrie_api.v1alpha1.reports import TuneReport
from eyrie_api.v1alpha1.stages import ProveStage
from eyrie_api.v1alpha1.tuning import DrafterUse, Setting
from eyrie_workers.measurement.environment import environment
from eyrie_workers.measurement.session import REPORT
from eyrie_workers.stages.program import Result, Stage, run_program


def prove(spec: ProveStage, stage: Stage) -> Result:
    """Try the tuned drafter in the serving engine."""
    started = time.monotonic()
    tuned = read_manifest(Path(spec.tune_dir)).report_as(TuneReport)
    assert isinstance(tuned, TuneReport)
    use = DrafterUse(drafter_dir=spec.drafter_dir, setting=Setting(tree=tuned.winner))
    report = ProveReport(checkpoint=spec.checkpoint, path=spec.drafter_dir, engine=spec.engine, use=use,
                         skipped="nothing is asked yet", environment=environment(spec.target.dtype),
                         seconds=time.monotonic() - started)
    write_model(stage.out_dir / REPORT, report)
    return Result(report, [stage.out_dir / REPORT])


if __name__ == "__main__":
    sys.exit(run_program(ProveStage, prove))
