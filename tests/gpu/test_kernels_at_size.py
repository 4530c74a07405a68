"""Kernels at the sizes of real models, in bfloat16 and float32, against the references in float64 on a sample of rows.

The references materialise what the kernels do not (32 heads x 16k x 16k scores): they are computed for a few queries or
predictions, and every other one has weight 0 in what is differentiated. The kernels compute all of them.
"""

from dataclasses import replace

import pytest
import torch

from eyrie_kernels.packed_attention import key_ranges, packed_attention, reference_packed_attention
from eyrie_kernels.soft_target_loss import reference_soft_target_loss, soft_target_loss
from tests.gpu.sizes import NO_GPU, REAL, TINY, Sizes

SAMPLE, OWN_KEYS = 24, 6
# bfloat16 rounds to 2^-9, float32 to 2^-24 (through sums of thousands of products); relative to a tensor's norm.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float32: 2**-14}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=("bfloat16", "float32"))

# Heads of 256, as Gemma 3 and Qwen3-Next have: the kernel takes other blocks.
WIDE = replace(REAL, name="wide heads", heads=16, kv_heads=8, head=256)


@pytest.fixture(scope="module", params=[TINY, REAL, WIDE], ids=lambda sizes: sizes.name)
def sizes(request: pytest.FixtureRequest) -> Sizes:
    """A row of the table of sizes, or heads that it has not."""
    if request.param is not TINY and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    assert isinstance(request.param, Sizes)
    return request.param


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((found.double() - wanted.double()).norm() <= TOLERANCE[dtype] * wanted.double().norm() + 1e-9)


@dtypes
def test_packed_attention_is_its_reference_forward_and_backward(
        sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    tokens, lengths = sizes.kernel_tokens, sizes.lengths(sizes.kernel_tokens)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    start = torch.repeat_interleave(starts, torch.tensor(lengths)).to(device)
    root = torch.arange(tokens, device=device)
    shapes = ((sizes.kv_heads, sizes.heads // sizes.kv_heads, sizes.head), (sizes.kv_heads, sizes.head),
              (sizes.kv_heads, sizes.head))
    q, k, v = (torch.randn(tokens, *shape, device=device).to(dtype).requires_grad_() for shape in shapes)
    own = [(torch.randn_like(k), torch.randn_like(v)) for _ in range(OWN_KEYS)]
    sample = torch.linspace(0, tokens - 1, SAMPLE, device=device).long()
    upstream = torch.zeros(q.shape, device=device, dtype=dtype)
    upstream[sample] = torch.randn(SAMPLE, *q.shape[1:], device=device).to(dtype)

    found = packed_attention(q, k, v, own, key_ranges(root, start, OWN_KEYS))
    grads = torch.autograd.grad(found, (q, k, v), upstream)
    exact = [part.detach().double().requires_grad_() for part in (q[sample], k, v)]
    exact_own = [(one[sample].double(), other[sample].double()) for one, other in own]
    wanted = reference_packed_attention(exact[0], exact[1], exact[2], exact_own, root[sample], start[sample])
    wanted_grads = torch.autograd.grad(wanted, exact, upstream[sample].double())
    assert close(found[sample], wanted, dtype)
    for got, want in zip((grads[0][sample], *grads[1:]), wanted_grads, strict=True):
        assert close(got, want, dtype)


@dtypes
def test_the_soft_target_loss_is_its_reference_forward_and_backward(
        sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    rows, width = sizes.kernel_tokens, sizes.draft_vocab
    x = torch.randn(rows, sizes.hidden, device=device).to(dtype).requires_grad_()
    weight = torch.randn(width, sizes.hidden, device=device).mul_(sizes.hidden**-0.5).to(dtype).requires_grad_()
    table = torch.randn(rows // 4, width, device=device).mul_(2).softmax(-1)
    mass, index = torch.rand(rows // 4, device=device), torch.arange(rows, device=device) // 4
    sample = torch.linspace(0, rows - 1, SAMPLE, device=device).long()
    weights = torch.zeros(rows, device=device)
    weights[sample] = torch.rand(SAMPLE, device=device) + 0.5

    found = soft_target_loss(x, weight, table, mass, index, weights)
    grads = torch.autograd.grad(found.total, (x, weight))
    exact = [part.detach().double().requires_grad_() for part in (x[sample], weight)]
    wanted = reference_soft_target_loss(exact[0], exact[1], table[index[sample]].double(), mass[index[sample]].double(),
                                        torch.arange(SAMPLE, device=device), weights[sample].double())
    wanted_grads = torch.autograd.grad(wanted.total, exact)
    assert close(found.losses_T[sample], wanted.losses_T, dtype)
    assert close(grads[0][sample], wanted_grads[0], dtype)
    assert close(grads[1], wanted_grads[1], dtype)
