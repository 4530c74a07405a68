"""How much arithmetic a step needs, and how much this machine can do: the two halves of MFU. Counting is pure.

Needed is what the loss and its gradient cannot do without: each matrix product once forward and twice backward (once
for its input, once for its weight), attention's two products once and twice, the teacher's forward only. What an
implementation computes again, or computes for padding, is its own affair and counts against it.

    T packed tokens, R roots, S steps, A aux layers, H hidden, Q = q + k + v widths, I intermediate, D draft vocabulary,
    V vocabulary
"""

import time

import torch

from eyrie_workers.drafters.eagle3.model import Eagle3Config
from eyrie_workers.training.matmul import matmul
from eyrie_workers.training.unroll_plan import UnrollPlan

_PROBE_SIZE, _PROBE_S = 1024, 0.1
_GPU_PROBE_SIZE = 8192  # a smaller product is over before a GPU has begun


def step_flops(config: Eagle3Config, plan: UnrollPlan) -> int:
    """Floating-point operations of one optimiser step, forward and backward, the optimiser's own left out."""
    tokens, hidden, (q, k, v) = plan.positions.numel(), config.hidden_size, config.qkv_widths
    once = tokens * hidden * (2 * config.num_aux * hidden + 3 * (k + v))  # fc has no gradient to its input
    token_half = 3 * tokens * hidden * (q + k + v)
    per_root = 3 * (q * hidden + 3 * hidden * config.intermediate_size + hidden * config.draft_vocab_size)
    unrolled = (plan.num_predictions * (per_root + 3 * q * hidden)
                + 3 * (plan.num_predictions - plan.alive[0]) * hidden * (k + v))
    sight = sum(int(plan.positions[plan.roots[:alive]].sum()) + alive * (1 + step)
                for step, alive in enumerate(plan.alive))
    asked = plan.target_positions().numel()
    return 2 * (once + token_half + unrolled + 3 * 2 * sight * q + asked * hidden * config.vocab_size)


def peak_rate(dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[float, float]:
    """Floating-point operations of a large square product per wall second and per CPU second: the fastest of a few,
    measured now."""
    size = _PROBE_SIZE if torch.device(device).type == "cpu" else _GPU_PROBE_SIZE
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    wall, cpu, started = float("inf"), float("inf"), time.perf_counter()
    while time.perf_counter() - started < _PROBE_S:
        before, spent = time.perf_counter(), time.process_time()
        matmul(a, b).sum().item()
        wall, cpu = min(wall, time.perf_counter() - before), min(cpu, time.process_time() - spent)
    operations = 2.0 * size**3
    return operations / wall, operations / max(cpu, 1e-9)
