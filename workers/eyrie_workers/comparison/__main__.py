"""The comparison as a program (`eyrie compare` starts it).

    python -m eyrie_workers.comparison --target quickstart --families eagle1,eagle3 --budget seconds=60 --out DIR

Progress goes to stderr. The result goes to stdout, as text or, with --json, as the report.
"""

import contextlib
import sys

from eyrie_api.cli.verbs import Screen
from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.families import FAMILIES
from eyrie_workers.comparison.progress import ProgressPrinter
from eyrie_workers.comparison.render import view
from eyrie_workers.comparison.run import MARKDOWN, PAGE, PLOTS, REPORT, compare
from eyrie_workers.comparison.settings import build_parser, read
from eyrie_workers.comparison.training import StageFailed, Stopped
from eyrie_workers.stage_program import INTERRUPTED_EXIT_CODE, Interrupted


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    given = build_parser(list(FAMILIES)).parse_args(argv)
    screen = Screen(as_json=given.json)
    try:
        # Stages print to stdout, which is reserved for the result here.
        with ProgressPrinter() as progress, contextlib.redirect_stdout(progress.lines):
            report = compare(read(given), given.out, progress.begin)
    except StageFailed as error:
        screen.error(error)
        return error.failure.exit_code
    except EyrieError as error:
        screen.error(error)
        return error.exit_code
    except (Stopped, Interrupted, KeyboardInterrupt):
        screen.note("stopped; the same command resumes")
        return INTERRUPTED_EXIT_CODE
    screen.show(report, view(report, [("report", str(given.out / PAGE)), ("as Markdown", str(given.out / MARKDOWN)),
                                      ("figures", str(given.out / REPORT)), ("plots", f"{given.out / PLOTS}/*.svg")]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
