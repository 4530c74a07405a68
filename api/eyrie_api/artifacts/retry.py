"""Requests to an artifact store that is away for a while: tried again until it answers."""

import time
from collections.abc import Callable
from typing import TypeVar

from eyrie_api.errors import Transient

T = TypeVar("T")

RETRY_S = 900.0
"""How long a request is tried: what it would save is up to hours of work."""


def while_unavailable(action: Callable[[], T]) -> T:
    """Call `action` until it succeeds, for up to RETRY_S of Transient errors; raises the last one then."""
    deadline = time.monotonic() + RETRY_S
    while True:
        try:
            return action()
        except Transient as error:
            if time.monotonic() >= deadline:
                raise
            print(f"store: {error}", flush=True)
            time.sleep(min(error.after_s, 30.0))
