"""The one way in which tests wait for what a thread, a process or a server brings about."""

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T | None], what: str, seconds: float = 240.0, *, every_s: float = 0.01,
             process: subprocess.Popen[bytes] | subprocess.Popen[str] | None = None,
             state: Callable[[], object] = lambda: "") -> T:
    """Poll `condition` until it is true, and return its value.

    Looks every `every_s` seconds, but takes no more than a tenth of a core: what it waits for needs the same cores.
    Fails after so many seconds, with the `state` of then, or when `process`, which is to bring it about, has ended
    without.
    """
    deadline = time.monotonic() + seconds
    begun = time.process_time()
    while not (value := condition()):
        pause_s = max(every_s, min(9 * (time.process_time() - begun), 0.3))
        if process is not None and process.poll() is not None:
            value = condition()  # race: it may have become true since it was looked at
            assert value, f"the process ended before: {what}"
            return value
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what} {state()}"
        time.sleep(pause_s)
        begun = time.process_time()
    return value
