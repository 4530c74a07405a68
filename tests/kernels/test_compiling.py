"""Every kernel compiles for the GPUs it is meant for, at the sizes of real models, and fits; no GPU is needed for it.

The second half of `make test-kernels`: a process with EYRIE_COMPILE_KERNELS=1, for the interpreter's cannot compile.
"""

import pytest
import torch

from eyrie_kernels.compiler import COMPILING, Compiled, compiling_for
from eyrie_kernels.packed_attention import key_ranges, packed_attention
from eyrie_kernels.soft_target_loss import soft_target_loss

pytestmark = pytest.mark.skipif(not COMPILING, reason="compiles only with EYRIE_COMPILE_KERNELS=1: make test-kernels")

# Shared memory that one block may take (CUDA programming guide, technical specifications per compute capability).
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


def _check(made: list[Compiled], names: set[str], capability: int) -> None:
    for compiled in made:
        print(capability, compiled)
    assert {compiled.name for compiled in made} == names
    for compiled in made:
        assert compiled.shared_bytes <= SHARED_BYTES[capability], compiled
        # A few registers put aside cost less than a smaller block: of all measured on an H200, the fastest kernel for
        # the queries' gradient spills 296 bytes. A block too large spills by the kilobyte.
        assert compiled.spilled_bytes <= 512, compiled


@pytest.mark.parametrize("head", [128, 256])
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_packed_attention_compiles_and_fits(capability: int, head: int) -> None:
    root = torch.arange(4)
    q, k, own = torch.randn(4, 2, 4, head), torch.randn(4, 2, head), torch.randn(2, 4, 2, head)
    with compiling_for(capability) as made:
        q, k, own = (part.bfloat16().requires_grad_() for part in (q, k, own))
        packed_attention(q, k, k, [(own[0], own[1])], key_ranges(root, torch.zeros(4), 1)).sum().backward()
    _check(made, {"_forward_kernel", "_query_grad_kernel", "_own_grad_kernel", "_key_grad_kernel"}, capability)


@pytest.mark.parametrize("capability", [90])
def test_the_loss_compiles(capability: int) -> None:
    x, weight = torch.randn(4, 16).bfloat16().requires_grad_(), torch.randn(32_768, 16).bfloat16().requires_grad_()
    table, mass, index = torch.rand(2, 32_768), torch.ones(2), torch.zeros(4, dtype=torch.int64)
    with compiling_for(capability) as made:
        for kind in ("kl", "tv", "lk", "lk_hybrid"):
            soft_target_loss(x, weight, table, mass, index, torch.ones(4), kind, choose=True)
    _check(made, {"_rows_kernel"}, capability)
