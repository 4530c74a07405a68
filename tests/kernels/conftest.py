"""Two ways through every function of `eyrie_kernels`: plain torch on the CPU, and the kernel, where one can run.

`path` names the way and `device` is where its tensors lie. A kernel runs on a GPU, or, with TRITON_INTERPRET=1, in
Triton's interpreter on the CPU (`make test-kernels`). The interpreter takes CPU tensors too, so in one process CPU
tensors go one way only.
"""

import importlib.util

import pytest
import torch

from eyrie_kernels.compiler import INTERPRETING


def _missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: make test-kernels"
    if not (INTERPRETING or torch.cuda.is_available()):
        return "neither a GPU nor TRITON_INTERPRET=1: make test-kernels"
    return None


@pytest.fixture(params=["torch", "kernel"])
def path(request: pytest.FixtureRequest) -> str:
    """"torch" or "kernel"."""
    if request.param == "kernel" and (reason := _missing()) is not None:
        pytest.skip(reason)
    if request.param == "torch" and INTERPRETING:
        pytest.skip("the interpreter takes the CPU's tensors: the plain path is the fast tier's")
    torch.manual_seed(0)
    return str(request.param)


@pytest.fixture
def device(path: str) -> str:
    """Where tensors of this way lie."""
    return "cuda" if path == "kernel" and torch.cuda.is_available() and not INTERPRETING else "cpu"
