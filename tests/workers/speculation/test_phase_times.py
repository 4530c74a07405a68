from typing import Any, ClassVar

import pytest
import torch

from eyrie_workers.speculation.engine import EngineStats, PhaseClock


class StreamEvent:
    """An event in the stream of a device that has passed all events recorded before `passed`."""

    recorded: ClassVar[list[Any]] = []
    passed = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.recorded.append(self)

    def query(self) -> bool:
        return self.recorded.index(self) < type(self).passed

    def synchronize(self) -> None:
        type(self).passed = max(type(self).passed, self.recorded.index(self) + 1)

    def elapsed_time(self, end: "StreamEvent") -> float:
        assert end.query()
        return 1000.0 * (self.recorded.index(end) - self.recorded.index(self))  # a second between two events


def test_on_a_gpu_a_phase_is_counted_once_the_device_has_passed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", StreamEvent)
    stats = EngineStats()
    clock = PhaseClock(stats, torch.device("cuda", 0))
    first, second, third, fourth = (clock.mark() for _ in range(4))
    clock.count("draft_s", first, second)
    clock.count("verify_s", second, third)
    clock.count("draft_s", third, fourth)
    clock.settle()
    assert (stats.draft_s, stats.verify_s) == (0.0, 0.0)
    StreamEvent.passed = 3
    clock.settle()
    clock.settle()
    assert (stats.draft_s, stats.verify_s) == (1.0, 1.0)
    clock.settle(wait=True)
    assert (stats.draft_s, stats.verify_s) == (2.0, 1.0)
