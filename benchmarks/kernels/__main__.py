"""Every kernel against its floor, in one report: `python -m benchmarks.kernels --out .eyrie/bench/gpu.json`.

On a GPU the shapes are those of real models; on a CPU they are small and time the plain-torch form. The report names
the device, the versions and the measured bandwidth and matrix-product rate. `benchmarks.kernels.timing` defines
the floor. This is a benchmark, not a test: it asserts nothing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import packed_attention, soft_target_loss
from benchmarks.kernels.timing import Machine, this_machine

KERNELS = (soft_target_loss, packed_attention)


def report(machine: Machine) -> dict[str, Any]:
    """Time every kernel, and what this machine was measured to do."""
    torch.manual_seed(0)
    figures = []
    for kernel in KERNELS:
        for timing in kernel.bench(machine):
            figures.append(timing.as_json())
            print(json.dumps(figures[-1]), flush=True)
    dtype = torch.bfloat16 if machine.cuda else torch.float32
    return {"device": machine.name, "torch": torch.__version__, "cuda": torch.version.cuda,
            "copy_bytes_per_s": machine.bandwidth(), "product_flops_per_s": machine.flops(dtype), "kernels": figures}


def main() -> None:
    """Time every kernel, print a line of JSON for each, write one report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    out: Path | None = parser.parse_args().out
    document = report(this_machine())
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
