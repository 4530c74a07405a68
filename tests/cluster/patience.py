"""Waiting for what comes about by itself. EYRIE_TEST_PATIENCE stretches every deadline, for crowded machines."""

import os
import time
from collections.abc import Callable
from typing import Any

PATIENCE = float(os.environ.get("EYRIE_TEST_PATIENCE", "1"))
DEADLINE_S = 90.0
"""Generous: API servers of tests share two cores with everything else."""


def eventually(found: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S, every_s: float = 0.1) -> Any:
    """The first true answer of `found`."""
    end = time.monotonic() + deadline_s * PATIENCE
    while time.monotonic() < end:
        answer = found()
        if answer:
            return answer
        time.sleep(every_s)
    raise AssertionError(f"not within {deadline_s * PATIENCE:.0f} s: {what}")
