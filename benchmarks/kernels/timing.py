"""Times a kernel on a device, and measures the floor of its time there.

The floor is the least work of the kernel over what this device was measured to do: bytes over the bandwidth of a large
copy, operations over the rate of a large matrix product. A share of 1 is therefore the best that the installed
libraries reach, not a number from a data sheet. Times are medians; on CUDA by events, after a warm-up that also
compiles.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import Literal

import torch


@dataclass(frozen=True)
class Machine:
    """The device under measurement."""

    device: str
    budget_s: float = 1.0
    """Seconds of one figure's repetitions, three at least."""

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU: benches then take the shapes of real models, else small ones."""
        return self.device == "cuda"

    @property
    def name(self) -> str:
        """Name of the device."""
        return torch.cuda.get_device_name() if self.cuda else f"CPU, {torch.get_num_threads()} threads"

    def bandwidth(self) -> float:
        """Bytes per second of a copy, read and written counted."""
        return _bandwidth(self)

    def flops(self, dtype: torch.dtype) -> float:
        """Operations per second of a square product."""
        return _flops(self, dtype)


@dataclass(frozen=True)
class Timing:
    """One figure."""

    name: str
    shape: str
    seconds: float
    floor_s: float
    floor_of: Literal["traffic", "flops"]

    def as_json(self) -> dict[str, str | float]:
        """The fields, and the share of the floor that was reached."""
        return asdict(self) | {"share_of_floor": round(self.floor_s / self.seconds, 4)}


def this_machine() -> Machine:
    """The GPU if there is one."""
    return Machine("cuda" if torch.cuda.is_available() else "cpu")


def seconds(work: Callable[[], object], machine: Machine) -> float:
    """Median seconds of one call: at least three, as many as fit the budget, at most 100."""
    work()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < machine.budget_s and len(times) < 100):
        times.append(_once(work, machine))
    return median(times)


def _once(work: Callable[[], object], machine: Machine) -> float:
    if not machine.cuda:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    work()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


@cache
def _bandwidth(machine: Machine) -> float:
    source = torch.ones(1 << (28 if machine.cuda else 24), device=machine.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), machine)


@cache
def _flops(machine: Machine, dtype: torch.dtype) -> float:
    size = 8192 if machine.cuda else 768
    a, b = (torch.randn(size, size, device=machine.device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, machine)


def main(bench: Callable[[Machine], list[Timing]]) -> None:
    """Run one kernel's benchmark and print it, a line of JSON per figure."""
    machine = this_machine()
    print(json.dumps({"device": machine.name, "torch": torch.__version__}))
    for timing in bench(machine):
        print(json.dumps(timing.as_json()))
