"""The fused loss against its formulas: every loss, vocabularies that are no power of two."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyrie_kernels import soft_target_loss as module
from eyrie_kernels.soft_target_loss import Loss, reference_soft_target_loss, soft_target_loss

KINDS: tuple[Loss, ...] = ("kl", "tv", "lk", "lk_hybrid")


def _table(rows: int, vocab: int, device: str) -> tuple[Tensor, Tensor]:
    """Target distributions and the masses of their draft vocabulary."""
    logits = torch.randn(rows, vocab, dtype=torch.float64, device=device) * 2
    return logits.softmax(-1), torch.rand(rows, dtype=torch.float64, device=device) * 0.5 + 0.5


def _inputs(rows: int, hidden: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    x = torch.randn(rows, hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, device=device) / hidden**0.5 * 2).to(dtype).requires_grad_()
    index = torch.randint(3, (rows,), device=device)
    weights = torch.rand(rows, device=device)
    weights[0] = 0.0
    return x, weight, index, weights


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_and_its_gradients_are_the_formulas_in_float64(kind: Loss, device: str) -> None:
    x, weight, index, weights = _inputs(6, 8, 37, torch.float64, device)
    table, mass = _table(3, 37, device)
    wanted = reference_soft_target_loss(x, weight, table, mass, index, weights, kind)
    grads = torch.autograd.grad(wanted.total * 3.0, (x, weight))
    found = soft_target_loss(x, weight, table, mass, index, weights, kind, choose=True)
    tolerance = {"rtol": 1e-10, "atol": 1e-12}  # float64's rounding, a few hundred sums on
    torch.testing.assert_close(found.total, wanted.total, **tolerance)
    torch.testing.assert_close(found.losses_T, wanted.losses_T, **tolerance)
    assert torch.equal(found.choice_T, wanted.choice_T)
    for got, want in zip(torch.autograd.grad(found.total * 3.0, (x, weight)), grads, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize(("rows", "hidden", "vocab"), [(5, 16, 123), (16, 32, 128), (1, 3, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_differs_from_float64_by_its_own_rounding_alone(rows: int, hidden: int, vocab: int, kind: Loss,
                                                                 device: str) -> None:
    x, weight, index, weights = _inputs(rows, hidden, vocab, torch.bfloat16, device)
    table, mass = _table(3, vocab, device)
    exact_x, exact_weight = (part.detach().double().requires_grad_() for part in (x, weight))
    wanted = reference_soft_target_loss(exact_x, exact_weight, table, mass, index, weights, kind)
    found = soft_target_loss(x, weight, table, mass, index, weights, kind)
    # A logit of size 8 is rounded by at most 2^-6 on the CPU, where its product is bfloat16.
    torch.testing.assert_close(found.losses_T.double(), wanted.losses_T, rtol=0.0, atol=2**-5)
    if kind != "kl":  # q crosses p under rounding: [q < p] of the other losses is then another number
        return
    for got, want in zip(torch.autograd.grad(found.total, (x, weight)),
                         torch.autograd.grad(wanted.total, (exact_x, exact_weight)), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() <= 2**-6 * want.norm() + 1e-6


def test_many_chunks_are_the_same_as_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, index, weights = _inputs(67, 4, 7, torch.float64, device)
    table, mass = _table(3, 7, device)
    wanted = reference_soft_target_loss(x, weight, table, mass, index, weights)
    grads = torch.autograd.grad(wanted.total, (x, weight))
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1)  # the least chunk, 64 rows
    found = soft_target_loss(x, weight, table, mass, index, weights)
    torch.testing.assert_close(found.losses_T, wanted.losses_T)
    for got, want in zip(torch.autograd.grad(found.total, (x, weight)), grads, strict=True):
        torch.testing.assert_close(got, want)


def test_a_row_of_extreme_logits_stays_finite(device: str) -> None:
    x = torch.tensor([[300.0], [-300.0]], device=device, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], device=device, requires_grad=True)
    table, mass = torch.tensor([[0.0, 1.0, 0.0]], device=device), torch.ones(1, device=device)
    index, weights = torch.zeros(2, dtype=torch.int64, device=device), torch.ones(2, device=device)
    for kind in KINDS:
        found = soft_target_loss(x, weight, table, mass, index, weights, kind)
        grads = torch.autograd.grad(found.total, (x, weight))
        assert found.losses_T.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)


def test_no_predictions_cost_nothing(device: str) -> None:
    x, weight = (torch.zeros(size, 3, device=device, requires_grad=True) for size in (0, 4))
    found = soft_target_loss(x, weight, torch.ones(1, 4, device=device) / 4, torch.ones(1, device=device),
                             torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device))
    found.total.backward()
    assert found.total == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_frozen_output_matrix_has_no_gradient_and_no_memory_for_one(device: str) -> None:
    x, weight, index, weights = _inputs(6, 8, 37, torch.float32, device)
    table, mass = (part.float() for part in _table(3, 37, device))
    both = torch.autograd.grad(soft_target_loss(x, weight, table, mass, index, weights).total, x)
    frozen, made = weight.detach(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            made.extend(tuple(part.shape) for part in tree_leaves(found) if isinstance(part, Tensor))
            return found

    with Watch():
        found = soft_target_loss(x, frozen, table, mass, index, weights)
        assert torch.equal(torch.autograd.grad(found.total, x)[0], both[0])
    assert (6, 37) in made
    assert (37, 8) not in made


def test_the_table_may_be_a_function_that_gives_the_rows_of_one_chunk(device: str,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, index, weights = _inputs(150, 4, 7, torch.float64, device)
    (table, mass), asked = _table(3, 7, device), []
    wanted = soft_target_loss(x, weight, table, mass, index, weights, "lk_hybrid")

    def rows(index_C: Tensor) -> Tensor:
        asked.append(index_C.numel())
        return table.index_select(0, index_C)

    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 1)  # the least chunk, 64 rows
    found = soft_target_loss(x, weight, rows, mass, index, weights, "lk_hybrid")
    assert asked == [64, 64, 22]
    torch.testing.assert_close(found.losses_T, wanted.losses_T)
    torch.testing.assert_close(*(torch.autograd.grad(part.total, x)[0] for part in (found, wanted)))
