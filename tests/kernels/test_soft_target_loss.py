"""The fused loss against its formulas: every loss, every teacher, vocabularies that are no power of two."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from eyrie_kernels import soft_target_loss as module
from eyrie_kernels.soft_target_loss import (
    Kind,
    TableTeacher,
    Teacher,
    TopKTeacher,
    probabilities,
    reference_soft_target_loss,
    soft_target_loss,
)

KINDS: tuple[Kind, ...] = ("ce", "kl", "tv", "lk", "lk_hybrid")
FORMS = ("probabilities", "logits", "topk")


def _teacher(form: str, rows: int, vocab: int, device: str, mass: bool = True) -> Teacher:
    logits = torch.randn(rows, vocab, dtype=torch.float64, device=device) * 2
    masses = torch.rand(rows, dtype=torch.float64, device=device) * 0.5 + 0.5 if mass else None
    if form == "topk":
        kept = min(5, vocab)
        top, ids = logits.topk(kept)
        tail = 1 - logits.softmax(-1).gather(1, ids).sum(-1)
        return TopKTeacher(ids.to(torch.int32), top - top[:, :1], tail.clamp(min=0.0), masses)
    if form == "logits":
        return TableTeacher(logits, "logits", masses)
    return TableTeacher(logits.softmax(-1), "probabilities", masses)


def _inputs(rows: int, hidden: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    x = torch.randn(rows, hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, device=device) / hidden**0.5 * 2).to(dtype).requires_grad_()
    index = torch.randint(3, (rows,), device=device)
    weights = torch.rand(rows, device=device)
    weights[0] = 0.0
    return x, weight, index, weights


@pytest.mark.parametrize(("kind", "form"), list(itertools.product(KINDS, FORMS)))
def test_every_loss_and_its_gradients_are_the_formulas_in_float64(kind: Kind, form: str, device: str) -> None:
    x, weight, index, weights = _inputs(6, 8, 37, torch.float64, device)
    teacher = _teacher(form, 3, 37, device)
    wanted = reference_soft_target_loss(x, weight, teacher, index, weights, kind)
    grads = torch.autograd.grad(wanted.total * 3.0, (x, weight))
    found = soft_target_loss(x, weight, teacher, index, weights, kind, choose=True)
    tolerance = {"rtol": 1e-10, "atol": 1e-12}  # float64's rounding, a few hundred sums on
    torch.testing.assert_close(found.total, wanted.total, **tolerance)
    torch.testing.assert_close(found.losses_T, wanted.losses_T, **tolerance)
    assert torch.equal(found.choice_T, wanted.choice_T)
    for got, want in zip(torch.autograd.grad(found.total * 3.0, (x, weight)), grads, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize(("rows", "hidden", "vocab"), [(5, 16, 123), (16, 32, 128), (1, 3, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_differs_from_float64_by_its_own_rounding_alone(rows: int, hidden: int, vocab: int, form: str,
                                                                 device: str) -> None:
    x, weight, index, weights = _inputs(rows, hidden, vocab, torch.bfloat16, device)
    teacher = _teacher(form, 3, vocab, device)
    exact_x, exact_weight = (part.detach().double().requires_grad_() for part in (x, weight))
    wanted = reference_soft_target_loss(exact_x, exact_weight, teacher, index, weights)
    found = soft_target_loss(x, weight, teacher, index, weights)
    # A logit of size 8 is rounded by at most 2^-6 on the CPU, where its product is bfloat16.
    torch.testing.assert_close(found.losses_T.double(), wanted.losses_T, rtol=0.0, atol=2**-5)
    for got, want in zip(torch.autograd.grad(found.total, (x, weight)),
                         torch.autograd.grad(wanted.total, (exact_x, exact_weight)), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() <= 2**-6 * want.norm() + 1e-6


def test_many_chunks_are_the_same_as_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, index, weights = _inputs(67, 4, 7, torch.float64, device)
    teacher = _teacher("probabilities", 3, 7, device)
    wanted = reference_soft_target_loss(x, weight, teacher, index, weights)
    grads = torch.autograd.grad(wanted.total, (x, weight))
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", {"cpu": 1, "cuda": 1})  # the least chunk, 64 rows
    found = soft_target_loss(x, weight, teacher, index, weights)
    torch.testing.assert_close(found.losses_T, wanted.losses_T)
    for got, want in zip(torch.autograd.grad(found.total, (x, weight)), grads, strict=True):
        torch.testing.assert_close(got, want)


def test_no_array_of_predictions_by_vocabulary_is_made() -> None:
    rows, vocab = 4096, 4096
    x, weight = torch.randn(rows, 2, requires_grad=True), torch.randn(vocab, 2, requires_grad=True)
    teacher = TableTeacher(torch.full((1, vocab), 1 / vocab))
    index = torch.zeros(rows, dtype=torch.int64)
    if module.runs_kernels(x):
        pytest.skip("the sizes of allocations are watched on the plain path")
    largest = max(_sizes(lambda: soft_target_loss(x, weight, teacher, index).total.backward()))
    assert largest <= module._CHUNK_ELEMENTS["cpu"] < rows * vocab


def _sizes(work: object) -> Iterator[int]:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    seen: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            seen.extend(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            return out

    with Watch():
        work()  # type: ignore[operator]
    return iter(seen)


def test_a_row_of_extreme_logits_stays_finite(device: str) -> None:
    x = torch.tensor([[300.0], [-300.0]], device=device, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], device=device, requires_grad=True)
    teacher = TableTeacher(torch.tensor([[0.0, 1.0, 0.0]], device=device))
    for kind in KINDS:
        found = soft_target_loss(x, weight, teacher, torch.zeros(2, dtype=torch.int64, device=device), None, kind)
        grads = torch.autograd.grad(found.total, (x, weight))
        assert found.losses_T.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)


def test_a_top_k_teacher_that_keeps_everything_is_the_table(device: str) -> None:
    logits = torch.randn(2, 4, device=device)
    top, ids = logits.topk(4)
    whole = TopKTeacher(ids, top - 5.0, torch.zeros(2, device=device))
    index = torch.arange(2, device=device)
    torch.testing.assert_close(probabilities(whole, index, 4, torch.float32), logits.softmax(-1))
    x, weight = torch.randn(2, 3, device=device), torch.randn(4, 3, device=device)
    torch.testing.assert_close(soft_target_loss(x, weight, whole, index).losses_T,
                               soft_target_loss(x, weight, TableTeacher(logits, "logits"), index).losses_T)


def test_no_predictions_cost_nothing(device: str) -> None:
    x, weight = (torch.zeros(size, 3, device=device, requires_grad=True) for size in (0, 4))
    found = soft_target_loss(x, weight, TableTeacher(torch.ones(1, 4, device=device) / 4),
                             torch.zeros(0, dtype=torch.int64, device=device))
    found.total.backward()
    assert found.total == 0
    assert weight.grad is not None
    assert not weight.grad.any()
