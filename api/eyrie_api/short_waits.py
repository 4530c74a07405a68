"""Shorter pauses of a server whose event loop shares the GIL with threads."""

import gc
import sys


def prefer_short_waits() -> None:
    """Reduce the pauses of this process; call it once, when everything is imported and before it serves.

    By default a thread keeps the GIL for 5 ms while others wait, and each full garbage collection takes 100 ms or more
    for the imported modules, none of which is garbage: `gc.freeze` excludes them.
    """
    sys.setswitchinterval(0.001)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
