"""Hand-written gradients against autograd's of the plain formulas, in float64, at odd and round sizes."""

import pytest
import torch
from torch import Tensor

from eyrie_workers.targets.device import CPU
from eyrie_workers.training.numerics import (
    apply_rotary,
    linear,
    matmul,
    mlp,
    normed_linear,
    pad_rows,
    reference_mlp,
    reference_normed_linear,
    rms_norm,
    round_up_rows,
)

EPS = 1e-5


def noise(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.clone().requires_grad_() for tensor in tensors)


def agree(ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...], same_inputs: tuple[Tensor, ...],
          tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    weight = noise(*ours.shape, dtype=ours.dtype, seed=9)
    found, wanted = (torch.autograd.grad((out * weight).sum(), variables)
                     for out, variables in ((ours, inputs), (theirs, same_inputs)))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [1, 5, 32, 123])
@pytest.mark.parametrize("recompute", [False, True])
def test_mlp_and_its_gradients_equal_the_formula(rows: int, recompute: bool) -> None:
    values = noise(rows, 12), 1 + 0.1 * noise(12), noise(14, 12), noise(12, 7)
    ours, theirs = leaves(*values), leaves(*values)
    agree(mlp(*ours, EPS, recompute), reference_mlp(*theirs, EPS), ours, theirs)


@pytest.mark.parametrize("rows", [1, 5, 32, 123])
def test_normed_product_and_its_gradients_equal_the_formula(rows: int) -> None:
    values = noise(rows, 12), 1 + 0.1 * noise(12), noise(9, 12)
    ours, theirs = leaves(*values), leaves(*values)
    agree(normed_linear(*ours, EPS), reference_normed_linear(*theirs, EPS), ours, theirs)


def test_product_norm_and_turn_have_the_gradients_of_their_formulas() -> None:
    (x, norm), (y, other) = leaves(noise(5, 12), noise(12)), leaves(noise(5, 12), noise(12))
    agree(rms_norm(x, norm, EPS), torch.nn.functional.rms_norm(y, (12,), other, EPS), (x, norm), (y, other))
    (x, weight), (y, same) = leaves(noise(5, 12), noise(3, 12)), leaves(noise(5, 12), noise(3, 12))
    agree(linear(x, weight), y @ same.T, (x, weight), (y, same))
    angles = noise(5, 6, seed=3)
    cos_sin = torch.stack([angles.cos(), angles.sin()], 1)
    (x,), (y,) = leaves(noise(5, 2, 12)), leaves(noise(5, 2, 12))
    turned = torch.complex(*y.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    agree(apply_rotary(x, cos_sin), torch.cat([turned.real, turned.imag], -1), (x,), (y,))


@pytest.mark.parametrize("shape", [(5, 123, 7), (64, 32, 48), (1, 3, 1), (0, 4, 5)])
def test_products_in_float32_are_float32_whatever_the_layout(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    a, b = noise(rows, inner), noise(inner, columns, seed=1)
    gaps = torch.empty(inner, 2 * columns)
    gaps[:, columns:] = b
    for right in (b.float(), b.float().T.contiguous().T, gaps[:, columns:]):
        for left in (a.float(), a.float().T.contiguous().T):
            torch.testing.assert_close(matmul(left, right).double(), a @ b, atol=1e-4, rtol=1e-5)


def test_rows_are_rounded_to_few_sizes_and_padding_is_zero() -> None:
    assert [round_up_rows(n, CPU) for n in (1, 32, 33, 1023, 1024, 1025, 5000)] == [32, 32, 64, 1024, 1024, 1088, 5120]
    assert len({round_up_rows(n, CPU) for n in range(1, 20_000)}) < 110
    assert round_up_rows(33, torch.device("cuda")) == 33
    x = noise(5, 3)
    assert torch.equal(pad_rows(x, x.dtype), torch.cat([x, torch.zeros(27, 3, dtype=x.dtype)]))
    assert pad_rows(noise(64, 3), torch.float64).shape == (64, 3)
