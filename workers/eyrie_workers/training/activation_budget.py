"""How many roots are unrolled at a time: the activations that may be kept, by device.

A training step keeps activations of every unrolled root for the backward pass. Parts of a batch may run one after the
other, each with its backward pass, so that the activations of one part alone exist (`drafters.eagle3.objective`). Every
part reads all weights and writes all their gradients again, so a GPU wants as few parts as its memory allows: at 8B
sizes and 8192 tokens one. A CPU computes small parts as fast as large ones, and its limit keeps a part near its cache.

The budget of a GPU is a quarter of its memory: what else a step needs (weights, gradients, moments, target
distributions) takes less than the other three. It does not depend on what is free at the moment, because the number of
parts decides the order of sums: a run resumed on the same kind of GPU has the same parts. Only where less than twice
the budget is free, half of what is free is taken.

The decision is `gpu_budget` and `roots_per_part` (`eyrie_api.decisions.training_cost`, which the plan of a job reads),
functions of numbers; `activation_budget` alone asks the device.
"""

import torch

from eyrie_api.decisions.training_cost import ACTIVATION_SHARE

CPU_BUDGET = 64 << 20
"""Bytes. Measured: see docs/results/training.md."""

_FREE_SHARE = 2


def gpu_budget(free_bytes: int, total_bytes: int) -> int:
    """Bytes of activations that may be kept at a time on a GPU."""
    return min(total_bytes // ACTIVATION_SHARE, free_bytes // _FREE_SHARE)


def activation_budget(device: torch.device) -> int:
    """Bytes of activations that may be kept at a time on a device, asked of a GPU when it holds the drafter already."""
    if device.type == "cpu":
        return CPU_BUDGET
    free, total = torch.cuda.mem_get_info(device)
    # What torch's allocator holds and does not use is free for this process.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return gpu_budget(free + unused, total)
