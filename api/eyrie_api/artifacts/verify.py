"""What an engine's pod checks of files on its volumes before the engine opens them.

    python -m eyrie_api.artifacts.verify --path jobs/j1/stages/train/c1/checkpoints/c3
    python -m eyrie_api.artifacts.verify --rules '{"home": "/var/lib/eyrie"}' --opened /models/chat

`--path` compares files of a finished stage with its manifest: those of a drafter. What no stage made (a published
drafter, files of the user) has no digest and passes. `--opened` judges what paths lead to by rules for files
(`eyrie_api.file_rules`).
"""

import argparse
import sys
from pathlib import Path

from eyrie_api.artifacts import verify_part
from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.errors import EyrieError, report_error
from eyrie_api.file_rules import check_path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check files before an engine opens them.")
    parser.add_argument("--path", type=Path, help="a file or directory of a stage's output, compared with its manifest")
    parser.add_argument("--rules", type=ReadRules.model_validate_json, help="for what the engine opens, as JSON")
    parser.add_argument("--opened", nargs="*", default=[], help="directories that the engine opens")
    options = parser.parse_args(argv)
    if options.opened and options.rules is None:
        parser.error("--opened needs --rules")
    try:
        for path in options.opened:
            check_path("the engine's directory", path, options.rules)
        if options.path is not None:
            verify_part(options.path)
    except EyrieError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
