"""One rank of a process group: what a training exchanges, on this rank's device. Started by torchrun.

    torchrun --standalone --nproc-per-node 2 tests/gpu/collectives.py OUT

Writes `OUT/rank-<rank>` when everything is as it should be; a failed assertion ends the rank and so the group.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from eyrie_api.errors import Conflict
from eyrie_workers.targets.device import default_device
from eyrie_workers.training.distributed import DistContext, Optimizer

STEPS, SHAPES = 3, ((3, 5), (7,), (1,))


def raise_conflict() -> None:
    raise Conflict("rank 0 found a conflict", "change it")


def check(group: DistContext, device: torch.device) -> None:
    """Sums, broadcasts, errors, and the sharded optimizer against the whole one."""
    total = group.size * (group.size + 1) / 2
    assert group.all_sum(torch.tensor([group.rank + 1.0])).item() == total
    assert group.all_sum(torch.tensor([group.rank + 1.0], device=device)).item() == total
    assert group.on_main(lambda: f"computed by {group.rank}") == "computed by 0"
    with pytest.raises(Conflict, match="rank 0 found a conflict"):
        group.on_main(raise_conflict)
    sharded, whole = ([nn.Parameter(torch.full(shape, 0.5, device=device)) for shape in SHAPES] for _ in range(2))
    optimizers = Optimizer(sharded, group.size, lr=1e-2), Optimizer(whole, lr=1e-2)
    for step in range(STEPS):
        for mine, one in zip(sharded, whole, strict=True):
            mine.grad = torch.full_like(mine.data, step + group.rank)
            one.grad = torch.full_like(one.data, sum(step + rank for rank in range(group.size)))
        for optimizer in optimizers:
            optimizer.reduce()
            optimizer.clip(0.5)
            optimizer.step()
    for mine, one in zip(sharded, whole, strict=True):
        torch.testing.assert_close(mine, one, atol=1e-6, rtol=1e-5)  # sums in another order


def main() -> None:
    """Join, check, note, leave."""
    group, device = DistContext.from_environment(), default_device()
    check(group, device)
    (Path(sys.argv[1]) / f"rank-{group.rank}").write_text(str(device))
    group.close()


if __name__ == "__main__":
    main()
