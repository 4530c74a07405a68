"""`python -m eyrie_pipelines.task_program train|benchmark`: one task of the pipeline as a program of its own.

    train       on each node of a TrainJob (`trainjob`): the train task without EYRIE_TRAINJOB. It downloads the stage's
                inputs and runs the stage program under torchrun; node 0 uploads the output
    benchmark   on a share of this machine's GPUs (`several_gpus`), those of CUDA_VISIBLE_DEVICES
"""

import argparse
import sys

from eyrie_pipelines import tasks
from eyrie_pipelines.run_records import StageFailed


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one candidate, or measure one checkpoint.")
    parser.add_argument("task", choices=("train", "benchmark"))
    parser.add_argument("--job-dir", required=True)
    parser.add_argument("--spec-digest", required=True)
    parser.add_argument("--key", required=True, help="the candidate, or the checkpoint")
    args = parser.parse_args()
    try:
        if args.task == "train":
            tasks.train(args.job_dir, args.spec_digest, "", args.key)
        else:
            tasks.benchmark(args.job_dir, args.spec_digest, args.key)
    except StageFailed as failed:
        print(failed, file=sys.stderr)
        sys.exit(failed.exit_code)


if __name__ == "__main__":
    main()
