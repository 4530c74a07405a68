"""Exit of Eyrie's programs on a user error: two lines on stderr and the exit code of the error's class.

    error: Reason: message
    hint: what to do instead

The command line `eyrie` prints through `eyrie_api.cli.screen`, in the same form or as JSON.
"""

import sys

from eyrie_api.errors import EyrieError


def report_error(error: EyrieError) -> int:
    """Print an error and its hint on stderr; returns the program's exit code."""
    print(f"error: {error.reason}: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code
