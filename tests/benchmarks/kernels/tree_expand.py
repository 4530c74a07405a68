"""The `tree_expand` kernel against its floor: `python -m tests.benchmarks.kernels.tree_expand`."""

from functools import partial

import torch

from eyrie_kernels.tree_expand import expand
from tests.benchmarks.kernels.timing import Machine, Timing, main, seconds


def bench(machine: Machine) -> list[Timing]:
    """One depth of a tree of top-k 8, against the traffic of its logits."""
    timings = []
    for rows in (1, 32) if machine.cuda else (1, 4):
        vocab = 32_768 if machine.cuda else 4096
        logits = torch.randn(rows, 8, vocab, device=machine.device)
        logits = logits.to(torch.bfloat16) if machine.cuda else logits
        scores = torch.randn(rows, 8, device=machine.device)
        taken = seconds(partial(expand, logits, scores, 8), machine)
        timings.append(Timing("tree_expand.expand", f"B={rows} W=8 D={vocab} K=8", taken,
                              logits.nbytes / machine.bandwidth(), "traffic"))
    return timings


if __name__ == "__main__":
    main(bench)
