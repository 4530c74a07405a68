"""The only module that imports Triton: dispatch and launches.

The device of the tensors chooses one of three modes; there is no fallback:

    CPU tensors                          the plain-torch form in each kernel file
    CUDA tensors                         the Triton kernel; without Triton an error rather than a silent slow path
    CPU tensors, TRITON_INTERPRET=1      the Triton kernel in Triton's interpreter (numpy, block by block); for tests

Triton is imported only where it can run: with a CUDA device, under the interpreter, or for the tests that compile
for GPUs that are not present (EYRIE_COMPILE_KERNELS=1). Elsewhere `import eyrie_kernels.soft_target_loss` needs torch
alone.

The interpreter multiplies bfloat16 blocks as the integers that hold their bits (Triton 3.9, `create_dot`), so `dot`
converts them to float32 there first. On a GPU float32 blocks are multiplied as float32, not as TF32: callers that
prefer speed pass bfloat16.
"""

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

__all__ = ["INTERPRETING", "KernelsUnavailable", "dot", "jit", "launch", "next_power_of_two", "runs_kernels", "tl"]

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_WANTED = INTERPRETING or os.environ.get("EYRIE_COMPILE_KERNELS") == "1" or torch.cuda.is_available()

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
        if not INTERPRETING:
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


def launch(kernel: Any, grid: tuple[int, ...], *tensors_and_integers: Tensor | int, num_warps: int = 4,
           num_stages: int = 2, **constants: Any) -> None:
    """Run a kernel on a grid; constants are passed by name. An empty grid launches nothing.

    The tensors' GPU is made the current one for the launch: Triton launches on the current device, and a kernel there
    that is given addresses of another device is an illegal access.

    Fusing a multiplication and an addition into one rounding is disabled: the interpreter does not fuse them either.
    """
    if 0 in grid:
        return
    device = next(value.device for value in tensors_and_integers if isinstance(value, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*tensors_and_integers, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False,
                     **constants)
