"""The only module that imports Triton: dispatch, launches, and compilation without a GPU.

The device of the tensors chooses one of three modes; there is no fallback:

    CPU tensors                          the plain-torch form in each kernel file
    CUDA tensors                         the Triton kernel; without Triton an error rather than a silent slow path
    CPU tensors, TRITON_INTERPRET=1      the Triton kernel in Triton's interpreter (numpy, block by block); for tests

Triton is imported only where it can run: with a CUDA device, under the interpreter, or to compile ahead of time.
Elsewhere `import eyrie_kernels.soft_target_loss` needs torch alone.

**Ahead of time.** Triton compiles for a GPU that is not present. Within `compiling_for(90)` launches compile for that
architecture instead of running, and record what the kernel uses of a multiprocessor: shared memory, registers, spills.
The functions' return values are undefined within it. The process must have been started with EYRIE_COMPILE_KERNELS=1
and without TRITON_INTERPRET.

The interpreter multiplies bfloat16 blocks as the integers that hold their bits (Triton 3.9, `create_dot`), so `dot`
converts them to float32 there first. On a GPU float32 blocks are multiplied as float32, not as TF32: callers that
prefer speed pass bfloat16.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

__all__ = ["COMPILING", "INTERPRETING", "Compiled", "KernelsUnavailable", "compiling_for", "dot", "jit", "launch",
           "next_power_of_two", "runs_kernels", "tl"]

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
COMPILING = os.environ.get("EYRIE_COMPILE_KERNELS") == "1" and not INTERPRETING
_WANTED = INTERPRETING or COMPILING or torch.cuda.is_available()

triton: Any = None
tl: Any = SimpleNamespace(constexpr=None)  # kernel signatures refer to `tl.constexpr` when they are defined
if _WANTED:
    try:
        import triton  # type: ignore[no-redef]
        import triton.language as tl  # type: ignore[no-redef]
    except ImportError:  # `runs_kernels` raises where a kernel is needed
        triton = None


class KernelsUnavailable(RuntimeError):
    """A kernel is needed where none can run."""


def _unavailable(*_: Any, **__: Any) -> None:
    raise KernelsUnavailable("Triton is not installed: install it (`pip install triton`), or pass CPU tensors")


if TYPE_CHECKING:
    from typing import no_type_check as jit  # a kernel is Python in syntax only
else:

    def jit(function):
        """`triton.jit` where Triton is needed and installed."""
        return _unavailable if triton is None else triton.jit(function)


def runs_kernels(x: Tensor) -> bool:
    """Whether a kernel computes x. Raises KernelsUnavailable for CUDA tensors without Triton."""
    if x.device.type == "cpu":
        if not INTERPRETING and not _compiled:
            return False
    elif x.device.type != "cuda":
        raise KernelsUnavailable(f"no kernels for device {x.device.type!r}: move the tensors to CUDA or to the CPU")
    if triton is None:
        _unavailable()
    return True


@jit
def dot(a, b, INTERPRETED: tl.constexpr):
    """a @ b, accumulated in float32, or in float64 for float64."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if a.dtype == tl.float64:
        return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float64)
    else:
        return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32)


def next_power_of_two(value: int) -> int:
    """The least power of two >= `value`: sizes of Triton's blocks must be powers of two."""
    return 1 << max(0, value - 1).bit_length()


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


_compiled: list[tuple[int, list[Compiled]]] = []


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Compiled]]:
    """Within the block, launches compile for CUDA capability `capability` (90: Hopper) and run nothing."""
    if not COMPILING or triton is None:
        raise KernelsUnavailable("compiling ahead needs Triton, EYRIE_COMPILE_KERNELS=1 and no TRITON_INTERPRET")
    made: list[Compiled] = []
    _compiled.append((capability, made))
    try:
        yield made
    finally:
        _compiled.pop()


def launch(kernel: Any, grid: tuple[int, ...], *tensors_and_integers: Tensor | int, num_warps: int = 4,
           num_stages: int = 2, **constants: Any) -> None:
    """Run a kernel on a grid; constants are passed by name. An empty grid launches nothing.

    The tensors' GPU is made the current one for the launch: Triton launches on the current device, and a kernel there
    that is given addresses of another device is an illegal access.

    Fusing a multiplication and an addition into one rounding is disabled: the interpreter does not fuse them either.
    """
    if 0 in grid:
        return
    if _compiled:
        capability, made = _compiled[-1]
        made.append(_compile(kernel, capability, tensors_and_integers, num_warps, num_stages, constants))
        return
    device = next(value.device for value in tensors_and_integers if isinstance(value, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*tensors_and_integers, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False,
                     **constants)


_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
          torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
          torch.bool: "i1"}


def _compile(kernel: Any, capability: int, arguments: tuple[Tensor | int, ...], num_warps: int, num_stages: int,
             constants: dict[str, Any]) -> Compiled:
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
    if used is None:
        raise KernelsUnavailable(f"cuobjdump reported no registers: {listing!r}")
    return Compiled(kernel.fn.__name__, binary.metadata.shared, num_warps, int(used[1]), int(used[2]))
