"""Packed attention of an unrolled step against the dense formula, and against the trainer's own."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor

from eyrie_kernels import packed_attention as module
from eyrie_kernels.packed_attention import Blocks, key_ranges, packed_attention, reference_packed_attention
from eyrie_workers.training.attention import SharedKeys, attend
from eyrie_workers.training.unroll_plan import plan_unroll

Inputs = tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]], Tensor, Tensor]


def _inputs(lengths: tuple[int, ...], alive: tuple[int, ...], kv_heads: int, per_kv: int, head: int,
            dtype: torch.dtype, device: str) -> Inputs:
    """Random tensors of the step after len(alive) - 1 others; alive: roots at each step so far."""
    total = sum(lengths)
    rng = np.random.default_rng(0)
    root = torch.from_numpy(rng.permutation(total)[: alive[-1]].copy()).to(device)
    starts = torch.tensor([0, *accumulate(lengths)][:-1])
    start = torch.repeat_interleave(starts, torch.tensor(lengths)).to(device)[root]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(device, dtype).requires_grad_()

    own = [(draw(count, kv_heads, head), draw(count, kv_heads, head)) for count in alive[:-1]]
    return (draw(alive[-1], kv_heads, per_kv, head), draw(total, kv_heads, head), draw(total, kv_heads, head), own,
            root, start)


def _leaves(inputs: Inputs) -> list[Tensor]:
    q, k, v, own, _, _ = inputs
    return [q, k, v, *(part for pair in own for part in pair)]


def _compare(inputs: Inputs, window: int | None, rtol: float) -> None:
    q, k, v, own, root, start = inputs
    exact = [leaf.detach().double().requires_grad_() for leaf in _leaves(inputs)]
    exact_own = list(zip(exact[3::2], exact[4::2], strict=True))
    wanted = reference_packed_attention(exact[0], exact[1], exact[2], exact_own, root, start, window)
    found = packed_attention(q, k, v, own, key_ranges(root, start, len(own), window))
    upstream = torch.randn_like(wanted)
    wants = torch.autograd.grad(wanted, exact, upstream, allow_unused=True)
    founds = torch.autograd.grad(found, _leaves(inputs), upstream.to(found.dtype), allow_unused=True)
    for got, want in [(found, wanted), *zip(founds, wants, strict=True)]:
        if want is None or got is None:  # own keys behind the window
            assert got is None or not got.any()
            assert want is None or not want.any()
            continue
        assert (got.double() - want).norm() <= rtol * want.norm() + 1e-9


CASES = {
    "first step, one document": ((9,), (9,), 1, 1, 16, None),
    "odd sizes, grouped heads, three own keys": ((5, 1, 12, 7), (21, 20, 17, 13), 2, 3, 12, None),
    "round sizes": ((16, 16), (32, 32), 2, 2, 16, None),
    "a window that hides documents' beginnings": ((20, 9), (20, 20, 18), 1, 2, 8, 4),
    "a window that hides every shared key": ((11,), (8, 8, 8, 8), 1, 1, 4, 2),
    "one root": ((3, 4), (1, 1), 1, 2, 5, None),
}


@pytest.mark.parametrize("case", CASES)
def test_float64_is_the_dense_formula_forward_and_backward(case: str, device: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    *sizes, window = CASES[case]
    # Blocks that these sizes fill more than once.
    monkeypatch.setattr(module, "_BLOCKS", {8: dict.fromkeys(("forward", "query_grad", "key_grad"), Blocks(16, 16, 4))})
    _compare(_inputs(*sizes, torch.float64, device), window, 1e-9)  # type: ignore[arg-type, misc, call-arg]


@pytest.mark.parametrize("case", ["odd sizes, grouped heads, three own keys", "round sizes"])
def test_bfloat16_differs_from_float64_by_its_own_rounding_alone(case: str, device: str) -> None:
    *sizes, window = CASES[case]
    # Inputs are the same; weights and gradients pass a product as bfloat16, whose rounding is 2^-9 each.
    _compare(_inputs(*sizes, torch.bfloat16, device), window, 2**-6)  # type: ignore[arg-type, misc, call-arg]


@pytest.mark.parametrize("window", [None, 6])
def test_it_is_the_attention_that_the_trainer_trains_with(window: int | None, device: str) -> None:
    lengths, step, kv_heads, per_kv, head = (13, 7), 2, 2, 2, 8
    mask = torch.ones(20, dtype=torch.bool)
    mask[:3] = False
    plan = plan_unroll(mask, lengths, 3)
    alive = plan.alive
    k, v = torch.randn(2, 20, kv_heads, head, dtype=torch.float64)
    own = [(torch.randn(alive[1], kv_heads, head, dtype=torch.float64),
            torch.randn(alive[1], kv_heads, head, dtype=torch.float64)),
           (torch.randn(alive[2], kv_heads, head, dtype=torch.float64),
            torch.randn(alive[2], kv_heads, head, dtype=torch.float64))]
    q = torch.randn(alive[step], kv_heads, per_kv, head, dtype=torch.float64)
    wanted = attend(q, SharedKeys(plan, k, v, window), own)
    roots = plan.roots[: alive[step]]
    ranges = key_ranges(roots.to(device), (roots - plan.positions[roots]).to(device), step, window)
    found = packed_attention(q.to(device), k.to(device), v.to(device),
                             [(a.to(device), b.to(device)) for a, b in own], ranges)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-9, atol=1e-12)


def test_no_roots_is_no_attention_but_still_a_gradient(device: str) -> None:
    q, k = torch.zeros(0, 1, 1, 4, device=device, requires_grad=True), torch.zeros(3, 1, 4, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    packed_attention(q, k, k, [], key_ranges(none, none, 0)).sum().backward()
    assert q.grad is not None


def test_the_same_input_gives_the_same_bits(device: str) -> None:
    inputs = _inputs((5, 1, 12, 7), (21, 20), 2, 3, 12, torch.float32, device)
    q, k, v, own, root, start = inputs
    runs = []
    for _ in range(2):
        out = packed_attention(q, k, v, own, key_ranges(root, start, 1))
        runs.append([out, *torch.autograd.grad(out.square().sum(), _leaves(inputs))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
