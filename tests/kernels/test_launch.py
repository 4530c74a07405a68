"""Launches of kernels: on the GPU of their tensors, whichever GPU is the current one.

The kernel, `torch.cuda.device` and the GPUs are external systems that are absent here; the test observes the calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from eyrie_kernels.compiler import launch

SECOND = torch.device("cuda", 1)


class OnSecond(Tensor):
    """A tensor that says it is on the second GPU."""

    device = SECOND  # type: ignore[assignment]


class Kernel:
    """Records the current device at each launch."""

    def __init__(self) -> None:
        self.current: torch.device | None = None
        self.launches: list[tuple[tuple[int, ...], torch.device | None]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> "Kernel":
        self.grid = grid
        return self

    def __call__(self, *_: object, **__: object) -> None:
        self.launches.append((self.grid, self.current))


def test_a_kernel_is_launched_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        kernel.current = device
        yield
        kernel.current = None

    monkeypatch.setattr(torch.cuda, "device", current)
    launch(kernel, (4,), 7, torch.zeros(2).as_subclass(OnSecond), BLOCK=16)
    launch(kernel, (2,), torch.zeros(2))
    launch(kernel, (0,), torch.zeros(2).as_subclass(OnSecond))
    assert kernel.launches == [((4,), SECOND), ((2,), None)]
