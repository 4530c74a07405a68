"""What every section of the GPU benchmark gets."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.kernels.timing import Machine
from tests.gpu.sizes import Sizes

Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """Sizes, device and place of a run."""

    sizes: Sizes
    device: torch.device
    work: Path
    """A directory for this run; `target` below it is the target."""

    budget_s: float
    """Seconds of one figure's repetitions."""

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Arithmetic of the target, as a job has it there by default."""
        return "bfloat16" if self.machine.cuda else "float32"

    @property
    def target(self) -> Path:
        """The target's directory."""
        return self.work / "target"

    @property
    def machine(self) -> Machine:
        """The device, for timing."""
        return Machine(self.device.type, self.budget_s)
