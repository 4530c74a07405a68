"""Every kernel against its floor, in one file: `python -m eyrie_kernels.bench --out .eyrie/bench/gpu.json`.

On a GPU the shapes are those of real models; on a CPU they are small and time the plain path. The device, the versions
and the measured bandwidth and product rate stand beside the figures. `eyrie_kernels.timing` says what a floor is.

A bench, not a test: nothing here decides anything.
"""

import argparse
import json
from pathlib import Path

import torch

from eyrie_kernels import codecs, packed_attention, soft_target_loss, tree_attention, tree_expand
from eyrie_kernels.timing import this_machine


def main() -> None:
    """Time everything, print a line each, write one document."""
    parser = argparse.ArgumentParser(prog="python -m eyrie_kernels.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    out: Path | None = parser.parse_args().out
    torch.manual_seed(0)
    machine, figures = this_machine(), []
    for kernel in (soft_target_loss, packed_attention, tree_attention, tree_expand, codecs):
        for timing in kernel.bench(machine):
            figures.append(timing.as_json())
            print(json.dumps(figures[-1]), flush=True)
    dtype = torch.bfloat16 if machine.cuda else torch.float32
    document = {"device": machine.name, "torch": torch.__version__, "cuda": torch.version.cuda,
                "copy_bytes_per_s": machine.bandwidth(), "product_flops_per_s": machine.flops(dtype),
                "kernels": figures}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
