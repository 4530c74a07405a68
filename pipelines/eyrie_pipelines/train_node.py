"""`python -m eyrie_pipelines.train_node`: the program of each node of a TrainJob (`trainjob`).

The train task without EYRIE_TRAINJOB: it downloads the stage's inputs and runs the stage program under torchrun; node 0
uploads the output.
"""

import argparse
import sys

from eyrie_pipelines import tasks
from eyrie_pipelines.run_failure import StageFailed


def main() -> None:
    """Train one candidate as one node."""
    parser = argparse.ArgumentParser(description="Run one node of a training.")
    parser.add_argument("--job-dir", required=True)
    parser.add_argument("--spec-digest", required=True)
    parser.add_argument("--candidate", required=True)
    args = parser.parse_args()
    try:
        tasks.train(args.job_dir, args.spec_digest, "", args.candidate)
    except StageFailed as failed:
        print(failed, file=sys.stderr)
        sys.exit(failed.exit_code)


if __name__ == "__main__":
    main()
