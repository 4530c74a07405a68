"""The `tree_attention` kernel against its floor: `python -m tests.benchmarks.kernels.tree_attention`."""

from functools import partial

import torch

from eyrie_kernels.tree_attention import tree_attention
from tests.benchmarks.kernels.timing import Machine, Timing, main, seconds


def bench(machine: Machine) -> list[Timing]:
    """A tree of 16 nodes over long contexts, against the cache's traffic."""
    timings = []
    nodes, groups, heads, size, dtype = (16, 8, 32, 128, torch.bfloat16) if machine.cuda else (
        16, 2, 4, 64, torch.float32)
    for rows, settled in ((1, 8192), (16, 8192), (1, 131_072)) if machine.cuda else ((1, 1024), (4, 512)):
        q = torch.randn(rows, nodes, heads, size, dtype=dtype, device=machine.device)
        k, v = torch.randn(2, rows, settled + nodes, groups, size, dtype=dtype, device=machine.device)
        starts = torch.full((rows,), settled, device=machine.device)
        seen = torch.ones(nodes, nodes, dtype=torch.bool, device=machine.device).tril().repeat(rows, 1, 1)
        taken = seconds(partial(tree_attention, q, k, v, starts, seen, settled), machine)
        timings.append(Timing("tree_attention", f"B={rows} N={nodes} L={settled} Q={heads} G={groups} E={size}", taken,
                              (k.nbytes + v.nbytes) / machine.bandwidth(), "traffic"))
    return timings


if __name__ == "__main__":
    main(bench)
