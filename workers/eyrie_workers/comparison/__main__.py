"""The bench from the command line (`eyrie compare` starts this program).

    python -m eyrie_workers.comparison --target quickstart --families eagle1,eagle3 --budget seconds=60 --out DIR

What it does goes to stderr while it does it; what came of it goes to stdout, in words or with --json as the report.
"""

import contextlib
import sys

from eyrie_api.cli.screen import Screen
from eyrie_api.errors import EyrieError
from eyrie_api.v1alpha1.families import FAMILIES
from eyrie_workers.comparison.progress import Voice
from eyrie_workers.comparison.render import view
from eyrie_workers.comparison.run import PAGE, PLOTS, REPORT, compare
from eyrie_workers.comparison.settings import build_parser, read
from eyrie_workers.comparison.training import StageFailed, Stopped
from eyrie_workers.stage_program import INTERRUPTED_EXIT_CODE, Interrupted


def main(argv: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    given = build_parser(list(FAMILIES)).parse_args(argv)
    screen = Screen(as_json=given.json)
    try:
        with Voice() as voice, contextlib.redirect_stdout(voice.lines):  # stages say things on stdout
            report = compare(read(given), given.out, voice.begins)
    except StageFailed as error:
        screen.error(error)
        return error.failure.exit_code
    except EyrieError as error:
        screen.error(error)
        return error.exit_code
    except (Stopped, Interrupted, KeyboardInterrupt):
        screen.note("stopped; the same command goes on from here")
        return INTERRUPTED_EXIT_CODE
    screen.show(report, view(report, [("report", str(given.out / PAGE)), ("figures", str(given.out / REPORT)),
                                      ("plots", f"{given.out / PLOTS}/*.svg")]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
