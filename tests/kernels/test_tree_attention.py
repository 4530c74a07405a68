"""Verification's attention over settled text and draft trees, against the dense formula and the engine's own mask."""

import pytest
import torch
from torch import Tensor

from eyrie_kernels import tree_attention as module
from eyrie_kernels.tree_attention import reference_tree_attention, tree_attention
from eyrie_workers.speculation.tree import ancestors

CASES = {
    "a chain over nothing": ([0], [[0, 0, 1, 2]], 1, 1, 8, None),
    "odd sizes, rows of their own lengths": ([37, 5, 0], [[0, 0, 0, 1, 1, 2, 5]] * 3, 2, 3, 12, None),
    "round sizes": ([32, 16], [[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 2, 3, 4, 5, 6]], 2, 2, 16, None),
    "a window inside the settled text": ([40, 20], [[0, 0, 1, 2, 0]] * 2, 1, 2, 16, 8),
    "a window shorter than the tree": ([9], [[0, 0, 1, 2, 3, 4, 2]], 1, 2, 4, 3),
    "one node, as plain decoding": ([70], [[0]], 2, 2, 8, None),
}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int | None]


def _inputs(case: str, dtype: torch.dtype, device: str) -> Inputs:
    starts, parents, groups, repeats, head, window = CASES[case]
    rows, nodes, places = len(starts), len(parents[0]), max(starts) + len(parents[0]) + 3  # places nobody may read
    cache = torch.randn(rows, places, 2 * groups, head).to(device, dtype)
    cache[:, max(starts) + nodes:] = torch.nan
    q = torch.randn(rows, nodes, groups * repeats, head).to(device, dtype)
    seen = ancestors(torch.tensor(parents), nodes).to(device)
    return (q, cache[:, :, :groups], cache[:, :, groups:], torch.tensor(starts, device=device), seen, max(starts),
            window)


def _check(inputs: Inputs, rtol: float) -> None:
    q, k, v, starts, seen, max_start, window = inputs
    used = max_start + q.shape[1]
    wanted = reference_tree_attention(q.double(), k[:, :used].double(), v[:, :used].double(), starts, seen, window)
    found = tree_attention(q, k, v, starts, seen, max_start, window)
    assert found.dtype == q.dtype
    assert (found.double() - wanted).norm() <= rtol * wanted.norm()


@pytest.mark.parametrize("case", CASES)
def test_float64_is_the_dense_formula(case: str, device: str) -> None:
    _check(_inputs(case, torch.float64, device), 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_differs_from_float64_by_its_own_rounding_alone(case: str, device: str) -> None:
    _check(_inputs(case, torch.bfloat16, device), 2**-6)


def test_how_the_keys_are_split_does_not_show(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for programs in (1, 6, 264):
        monkeypatch.setattr(module, "_PROGRAMS", programs)
        torch.manual_seed(0)
        _check(_inputs("odd sizes, rows of their own lengths", torch.float64, device), 1e-12)


def test_a_node_sees_no_cousin_and_no_child(device: str) -> None:
    q, k, v, starts, seen, max_start, _ = _inputs("odd sizes, rows of their own lengths", torch.float32, device)
    before = tree_attention(q, k, v, starts, seen, max_start)
    for row, start in enumerate(starts.tolist()):
        k[row, start + 3], v[row, start + 3] = 9.0, 9.0  # node 3: a child of 1, nobody's parent
    after = tree_attention(q, k, v, starts, seen, max_start)
    changed = (before != after).flatten(2).any(-1)
    assert changed.tolist() == [[False, False, False, True, False, False, False]] * 3
