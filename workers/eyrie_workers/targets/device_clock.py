"""Seconds that a device spends on some of its work, measured without waiting for it.

A GPU computes after the call that started the computation has returned: the clock of the host around that call measures
the start alone, and waiting for the end would leave the GPU idle before the next one. Events in its stream measure it.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceClock:
    """Seconds of the blocks that ran in `running()`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure what the block starts on the device."""
        if self._device.type != "cuda":
            started = time.monotonic()
            yield
            self._seconds += time.monotonic() - started
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))
        while self._pending[0][1].query() and len(self._pending) > 1:
            self._count(*self._pending.popleft())

    @property
    def seconds(self) -> float:
        """Seconds so far. Waits for what is running."""
        while self._pending:
            begin, end = self._pending.popleft()
            end.synchronize()
            self._count(begin, end)
        return self._seconds

    def _count(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._seconds += begin.elapsed_time(end) / 1e3
