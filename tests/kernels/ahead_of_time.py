"""Kernels compiled for a GPU that is not present: what each uses of a multiprocessor, and whether it compiles at all.

Within `compiling_for(90)` launches compile for that architecture instead of running; the functions' return values are
undefined within it. The process must have been started with EYRIE_COMPILE_KERNELS=1 and without TRITON_INTERPRET.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from eyrie_kernels import packed_attention, soft_target_loss
from eyrie_kernels.compiler import INTERPRETING

COMPILING = os.environ.get("EYRIE_COMPILE_KERNELS") == "1" and not INTERPRETING
_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
          torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
          torch.bool: "i1"}


@dataclass(frozen=True)
class Compiled:
    """Resources of a multiprocessor that one kernel uses."""

    name: str
    shared_bytes: int
    num_warps: int
    registers: int
    """Per thread."""

    spilled_bytes: int
    """Local memory per thread: registers that did not fit."""


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Compiled]]:
    """Within the block, launches compile for CUDA capability `capability` (90: Hopper) and run nothing."""
    made: list[Compiled] = []

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | int, num_warps: int = 4, num_stages: int = 2,
               **constants: Any) -> None:
        if 0 not in grid:
            made.append(_compile(kernel, capability, arguments, num_warps, num_stages, constants))

    with pytest.MonkeyPatch.context() as patch:
        for module in (packed_attention, soft_target_loss):
            patch.setattr(module, "launch", launch)
            patch.setattr(module, "runs_kernels", lambda x: True)
        yield made


def _compile(kernel: Any, capability: int, arguments: tuple[Tensor | int, ...], num_warps: int, num_stages: int,
             constants: dict[str, Any]) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget

    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: "*" + _NAMES[value.dtype] if isinstance(value, Tensor) else "i32"
                 for name, value in zip(names, arguments, strict=True)}
    signature |= dict.fromkeys(constants, "constexpr")
    # A launch detects addresses and strides that are multiples of 16, and reads them 16 bytes at a time. Without this
    # information the compiler spills kilobytes where the launched kernel spills none.
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]]
               for name, value in zip(names, arguments, strict=True) if isinstance(value, Tensor) or value % 16 == 0}
    source = triton.compiler.ASTSource(kernel, {name: signature[name] for name in kernel.arg_names},
                                       {(kernel.arg_names.index(name),): value for name, value in constants.items()},
                                       aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                            options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False})
    # `cuobjdump`, which Triton ships, lists registers and bytes of local memory per thread.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        listing = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True,
                                 text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    assert used is not None, f"cuobjdump reported no registers: {listing!r}"
    return Compiled(kernel.fn.__name__, binary.metadata.shared, num_warps, int(used[1]), int(used[2]))
