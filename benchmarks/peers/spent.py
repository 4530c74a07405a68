"""Cost of a training loop: wall and processor seconds over its steps, and memory. The same for all peers.

Imported by drivers that run in different environments, so only the standard library is used. Memory is VmHWM, the high
water mark of this address space: `ru_maxrss` starts from the parent's, which a fork inherits.
"""

import json
import time
from pathlib import Path


def peak_rss_mb() -> float:
    """Peak resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM in /proc/self/status: this needs Linux")


class Spent:
    """Accumulates the cost of steps; the first `skip` steps, which touch memory and plan products for the first time,
    are excluded from the times."""

    def __init__(self, skip: int = 2) -> None:
        self._skip, self._seen = skip, 0
        self._imports_mb = peak_rss_mb()
        self._wall = self._cpu = 0.0
        self._at = (0.0, 0.0)
        self._tokens = self._computed = self._timed = self._all_tokens = 0
        self._steps: list[tuple[float, float]] = []
        self.losses: list[float] = []

    def begin(self) -> None:
        """Call before a step requests its batch."""
        self._at = time.perf_counter(), time.process_time()

    def end(self, real_tokens: int, computed_tokens: int, loss: float) -> None:
        """Call after the optimizer step, with the batch's tokens without and with padding."""
        wall, cpu = time.perf_counter() - self._at[0], time.process_time() - self._at[1]
        self._seen += 1
        self._all_tokens += real_tokens
        self.losses.append(loss)
        if self._seen > self._skip:
            self._timed += 1
            self._wall, self._cpu = self._wall + wall, self._cpu + cpu
            self._tokens, self._computed = self._tokens + real_tokens, self._computed + computed_tokens
            self._steps.append((wall, cpu))

    def write(self, path: Path, **more: object) -> None:
        """Write the figures as JSON."""
        middle = len(self._steps) // 2
        figures = {
            "steps": self._seen, "steps_timed": self._timed, "real_tokens": self._all_tokens,
            "real_tokens_per_s": self._tokens / self._wall, "cpu_s_per_real_token": self._cpu / self._tokens,
            "computed_per_real_token": self._computed / self._tokens,
            "step_s": sorted(wall for wall, _ in self._steps)[middle],
            "step_cpu_s": sorted(cpu for _, cpu in self._steps)[middle],
            "loop_s": self._wall, "peak_rss_mb": peak_rss_mb(), "imports_rss_mb": self._imports_mb,
            "peak_rss_above_imports_mb": peak_rss_mb() - self._imports_mb,
            "loss_first": self.losses[0], "loss_last": self.losses[-1], **more}
        path.write_text(json.dumps(figures, indent=1) + "\n")
