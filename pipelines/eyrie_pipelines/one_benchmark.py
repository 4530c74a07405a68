"""`python -m eyrie_pipelines.one_benchmark`: the benchmark of one checkpoint on a share of the GPUs (`gpu_shares`)."""

import argparse
import sys

from eyrie_pipelines import tasks
from eyrie_pipelines.run_failure import StageFailed


def main() -> None:
    """Measure one checkpoint."""
    parser = argparse.ArgumentParser(description="Measure one checkpoint on the GPUs of CUDA_VISIBLE_DEVICES.")
    parser.add_argument("--job-dir", required=True)
    parser.add_argument("--spec-digest", required=True)
    parser.add_argument("--checkpoint", required=True)
    args = parser.parse_args()
    try:
        tasks.benchmark(args.job_dir, args.spec_digest, args.checkpoint)
    except StageFailed as failed:
        print(failed, file=sys.stderr)
        sys.exit(failed.exit_code)


if __name__ == "__main__":
    main()
