"""Before the first stage, on a cluster with a model cache: fill it with the job's target.

A task of its own, because a download of an hour must not hold the GPUs of the stage. It works in the directory of the
first stage, from that stage's spec, and reports there: until the target is in the cache, a job shows its first stage as
running, with the bytes that arrive. It leaves no manifest. What it did is in the cache and not in the job: a job that
is retried after somebody emptied the cache fills it again.
"""

import argparse
import os
import sys
from pathlib import Path

from eyrie_api.contract.stages import RegenerateStage
from eyrie_api.errors import DiskFull, EyrieError, InvalidInput, report_error
from eyrie_workers.catalog import MODEL_CACHE_VARIABLE
from eyrie_workers.stage_program import INTERRUPTED_EXIT_CODE, Interrupted, Stage, open_stage, stop_on_signals
from eyrie_workers.targets.model_cache import cache_of_this_pod
from eyrie_workers.targets.prefetch import fill


def main(argv: list[str] | None = None) -> int:
    """`python -m eyrie_workers.stages.prefetch --spec spec.json --out manifest.json`, as a stage program."""
    parser = argparse.ArgumentParser(description="Fill the model cache with a job's target.")
    parser.add_argument("--spec", type=Path, required=True, help="JSON file: the spec of the job's first stage")
    parser.add_argument("--out", type=Path, required=True, help="manifest of that stage; it is not written")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out.resolve()
    stage = Stage(out.parent)
    try:
        with stop_on_signals(stage), open_stage(RegenerateStage, stage, arguments.spec, out) as opened:
            cache = cache_of_this_pod()
            if cache is None:
                raise InvalidInput(f"{MODEL_CACHE_VARIABLE} is not set: there is no model cache to fill",
                                   "set it to a directory, or leave this program out")
            fill(cache, opened.spec.target, stage)
        return 0
    except Interrupted:
        sys.stdout.flush()
        os._exit(INTERRUPTED_EXIT_CODE)  # the threads of the download would otherwise be waited for
    except DiskFull as error:  # of the job's directory
        return error.exit_code
    except EyrieError as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
