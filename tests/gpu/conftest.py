"""The pretended GPU of this folder's tests, and sizes: a test that takes `sizes` runs at the tiny ones anywhere, and
at real ones where there is a GPU.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad

from eyrie_kernels import packed_attention, soft_target_loss
from eyrie_workers.training import numerics
from tests.gpu.pretended import PretendedGpu, pretended_flash
from tests.gpu.sizes import NO_GPU, REAL, TINY, Sizes, this_device


@pytest.fixture(scope="module", params=[TINY, REAL], ids=lambda sizes: sizes.name)
def sizes(request: pytest.FixtureRequest) -> Sizes:
    """A row of the table of sizes."""
    if request.param is REAL and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    assert isinstance(request.param, Sizes)
    return request.param


@pytest.fixture
def device() -> torch.device:
    """Where the test computes."""
    return this_device()


@pytest.fixture(scope="module")
def target_of_size(sizes: Sizes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of these sizes."""
    return sizes.target(tmp_path_factory.mktemp("target") / sizes.name)


class HereGenerator(torch.Generator):
    """A generator for any device, whose numbers are the processor's."""

    def __new__(cls, device: object = None) -> "HereGenerator":
        return super().__new__(cls)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """The mode; kernels, which are not pretended, take their plain-torch form."""
    for module in (packed_attention, soft_target_loss):
        monkeypatch.setattr(module, "runs_kernels", lambda _: False)
    monkeypatch.setattr(numerics, "_GPU_PROBE_SIZE", 64)  # a size for a real GPU takes a core minutes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 << 30, 80 << 30))
    # Clipping moves its factor to the device that the gradients report: torch's C++ code sees the real one.
    group = clip_grad._group_tensors_by_device_and_dtype
    monkeypatch.setattr(clip_grad, "_group_tensors_by_device_and_dtype", lambda lists: {
        (found[0][0].device, dtype): (found, index) for (_, dtype), (found, index) in group(lists).items()})
    monkeypatch.setattr(torch, "Generator", HereGenerator)
    mode, run = PretendedGpu(), threading.Thread.run

    def run_there(thread: threading.Thread) -> None:  # torch's modes are each thread's own
        with mode:
            run(thread)

    for name, stand_in in mode.stand_ins().items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", pretended_flash)
    monkeypatch.setattr(torch.Tensor, "record_stream", mode.record_stream)
    monkeypatch.setattr(threading.Thread, "run", run_there)
    with mode:
        yield mode
    assert mode.met > 0, "nothing was computed there"
