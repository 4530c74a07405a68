"""Sharded AdamW: the parameters of plain AdamW, on any number of processes, also after a change of their number."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from eyrie_workers.training.distributed import Optimizer

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SHAPES = ((3, 5), (7,), (1,))  # 23 numbers: no multiple of 2 or 3
MAX_NORM = 0.5


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int, process: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + process)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def alone(steps: int, processes: int) -> list[Tensor]:
    """What one process makes of the sum of all processes' gradients."""
    held = parameters()
    optimizer = torch.optim.AdamW(held, fused=True, **SETTINGS)
    for step in range(steps):
        for number, parameter in enumerate(held):
            parameter.grad = torch.stack([gradients(step, process)[number] for process in range(processes)]).sum(0)
        torch.nn.utils.clip_grad_norm_(held, MAX_NORM)
        optimizer.step()
    return [parameter.detach() for parameter in held]


def take_part(rank: int, size: int, meeting: str, steps: range, before: Path | None, after: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    held = parameters()
    optimizer = Optimizer(held, size, **SETTINGS)
    if before is not None:
        saved = torch.load(before)
        for parameter, value in zip(held, saved["parameters"], strict=True):
            parameter.data.copy_(value)
        optimizer.restore(saved["moments"])
    for step in steps:
        optimizer.zero_grad()
        # Three processes' gradients, whoever has them: the sum over all is the same for any number of processes.
        mine = [gradients(step, process) for process in range(3) if process % size == rank]
        for number, parameter in enumerate(held):
            parameter.grad = torch.stack([one[number] for one in mine]).sum(0) if mine else None
        optimizer.reduce()
        optimizer.clip(MAX_NORM)
        optimizer.step()
    moments = optimizer.moments()
    if rank == 0:
        torch.save({"parameters": [parameter.detach() for parameter in held], "moments": moments}, after)
    dist.destroy_process_group()


def together(size: int, directory: Path, steps: range, before: Path | None = None) -> Path:
    after = directory / f"after-{steps.stop}.pt"
    result = [str(size), str(directory / f"meet-{steps.stop}"), str(steps.start), str(steps.stop), str(before or ""),
            str(after)]
    processes = [subprocess.Popen([sys.executable, __file__, str(rank), *result]) for rank in range(size)]
    assert [process.wait(300) for process in processes] == [0] * size
    return after


@pytest.mark.slow
def test_sharded_adamw_equals_adamw_also_when_the_number_of_processes_changes(tmp_path: Path) -> None:
    half = together(3, tmp_path, range(3))
    end = tmp_path / "after-6.pt"
    take_part(0, 1, str(tmp_path / "meet-6"), range(3, 6), half, end)
    for got, wanted in zip(torch.load(end)["parameters"], alone(6, 3), strict=True):
        # sums over processes in another order
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


if __name__ == "__main__":  # one of the processes of `together`
    number, among, meet, first, last, earlier, later = sys.argv[1:]
    take_part(int(number), int(among), meet, range(int(first), int(last)), Path(earlier) if earlier else None,
              Path(later))
