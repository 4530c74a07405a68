"""Seconds that the phases of decoding take, on the device that computes them.

On a CPU a phase lasts from one reading of the clock to the next. On a GPU the host launches a phase and goes on, so its
clock shows the time to launch; there a mark is an event in the stream, and a phase is the time between two events. The
device passes an event later than the host records it. Times are therefore added when the engine has waited for the
device anyway (`settle`). Those of a round's proposal and verification are then known; what follows the wait (moving
accepted keys, the drafter's `extend`) is added one round later.
"""

import time
from dataclasses import dataclass
from typing import Literal

import torch

Phase = Literal["prefill_s", "draft_s", "verify_s"]
Mark = float | torch.cuda.Event


@dataclass
class EngineStats:
    """Seconds by phase, since the engine was created or `reset`."""

    prefill_s: float = 0.0
    """Prefill: the target's pass over prompts and the drafter's."""

    draft_s: float = 0.0
    """Drafter: `propose` and `extend`."""

    verify_s: float = 0.0
    """The target's pass over the trees, sampling (noise included) and the bookkeeping of plain decoding."""

    rounds: int = 0
    nodes: int = 0
    """Nodes of one row's trees, root included, summed over rounds."""

    def reset(self) -> None:
        """Set all counters to zero."""
        self.prefill_s = self.draft_s = self.verify_s = 0.0
        self.rounds = self.nodes = 0

    def add(self, phase: Phase, seconds: float) -> None:
        """Add to one phase."""
        setattr(self, phase, getattr(self, phase) + seconds)


class PhaseClock:
    """Marks the beginnings and ends of phases, and adds their durations to `stats`."""

    def __init__(self, stats: EngineStats, device: torch.device) -> None:
        self._stats, self._by_events = stats, device.type == "cuda"
        self._pending: list[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = []

    def mark(self) -> Mark:
        """This point of the work launched so far."""
        if not self._by_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def count(self, phase: Phase, begin: Mark, end: Mark) -> None:
        """Add the time between two marks to a phase, on a GPU once the device has passed them."""
        if isinstance(begin, float) and isinstance(end, float):
            self._stats.add(phase, end - begin)
        elif not isinstance(begin, float) and not isinstance(end, float):
            self._pending.append((phase, begin, end))

    def settle(self, wait: bool = False) -> None:
        """Add the phases that the device has finished; with `wait` all of them."""
        unfinished = []
        for phase, begin, end in self._pending:
            if wait:
                end.synchronize()
            if end.query():
                self._stats.add(phase, begin.elapsed_time(end) / 1000.0)
            else:
                unfinished.append((phase, begin, end))
        self._pending = unfinished
