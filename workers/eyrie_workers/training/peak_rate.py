"""The arithmetic rate of the machine, measured with large matrix products: the denominator of MFU."""

import time

import torch

from eyrie_workers.training.matmul import matmul

_PROBE_SIZE, _PROBE_S = 1024, 0.1
_GPU_PROBE_SIZE = 8192  # a smaller product ends before a GPU reaches its rate


def peak_rate(dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[float, float]:
    """Floating-point operations of a large square product per wall second and per CPU second: the fastest of several
    products within 0.1 s."""
    size = _PROBE_SIZE if torch.device(device).type == "cpu" else _GPU_PROBE_SIZE
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    wall, cpu, started = float("inf"), float("inf"), time.perf_counter()
    while time.perf_counter() - started < _PROBE_S:
        before, spent = time.perf_counter(), time.process_time()
        matmul(a, b).sum().item()
        wall, cpu = min(wall, time.perf_counter() - before), min(cpu, time.process_time() - spent)
    operations = 2.0 * size**3
    return operations / wall, operations / max(cpu, 1e-9)
