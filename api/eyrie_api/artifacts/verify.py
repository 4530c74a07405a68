"""Compare files of a finished stage with its manifest: a drafter on a volume, before its engine loads it.

    python -m eyrie_api.artifacts.verify --path jobs/j1/stages/train/c1/checkpoints/c3

What no stage made (a published drafter, files of the user) has no digest and passes.
"""

import argparse
import sys
from pathlib import Path

from eyrie_api.artifacts import verify_part
from eyrie_api.errors import EyrieError, report_error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare files of a finished stage with its manifest.")
    parser.add_argument("--path", type=Path, required=True, help="a file or directory of a stage's output")
    options = parser.parse_args(argv)
    try:
        verify_part(options.path)
    except EyrieError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
