"""The `codecs` kernel against its floor: `python -m tests.benchmarks.kernels.codecs`."""

from functools import partial
from typing import get_args

import torch

from eyrie_kernels.codecs import Codec, decode, encode
from tests.benchmarks.kernels.timing import Machine, Timing, main, seconds


def bench(machine: Machine) -> list[Timing]:
    """Each codec, both ways, against its traffic."""
    rows, hidden = (32_768, 4096) if machine.cuda else (2048, 512)
    values = torch.randn(rows, hidden, dtype=torch.bfloat16, device=machine.device)
    timings = []
    for codec in get_args(Codec):
        codes, scales = encode(codec, values)
        floor = (values.nbytes + codes.nbytes + scales.nbytes) / machine.bandwidth()
        for name, work in (("encode", partial(encode, codec, values)),
                           ("decode", partial(decode, codec, codes, scales, hidden))):
            timings.append(Timing(f"codecs.{name}.{codec}", f"N={rows} H={hidden} bfloat16", seconds(work, machine),
                                  floor, "traffic"))
    return timings


if __name__ == "__main__":
    main(bench)
