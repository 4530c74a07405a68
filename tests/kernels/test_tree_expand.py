"""Growing and cutting draft trees, against the formulas and against the engine's own rerank."""

import pytest
import torch

from eyrie_kernels import tree_expand as module
from eyrie_kernels.tree_expand import expand, reference_expand, rerank
from eyrie_workers.speculation import tree as engine


@pytest.mark.parametrize(("rows", "nodes", "vocab", "width"), [
    (2, 3, 123, 5), (1, 1, 64, 4), (1, 8, 40, 8), (2, 2, 3, 6), (1, 2, 1, 1)])
def test_float64_children_and_frontier_are_the_formulas(rows: int, nodes: int, vocab: int, width: int, device: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE", 32)  # several slices of a small vocabulary
    logits = torch.randn(rows, nodes, vocab, dtype=torch.float64, device=device) * 3
    scores = -torch.rand(rows, nodes, dtype=torch.float64, device=device)
    found, wanted = expand(logits, scores, width), reference_expand(logits, scores, width)
    assert torch.equal(found.tokens, wanted.tokens)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.frontier, wanted.frontier)


def test_bfloat16_logits_are_summed_as_float32(device: str) -> None:
    logits = (torch.randn(2, 3, 123, device=device) * 3).to(torch.bfloat16)
    scores = -torch.rand(2, 3, device=device)
    found, wanted = expand(logits, scores, 5), reference_expand(logits.double(), scores.double(), 5)
    # Equal logits are many in bfloat16: any of them is right, so values are compared.
    torch.testing.assert_close(logits.gather(2, found.tokens), logits.gather(2, wanted.tokens))
    torch.testing.assert_close(found.scores.double(), wanted.scores, rtol=1e-5, atol=1e-5)
    picked, best = (part.scores.flatten(1).gather(1, part.frontier) for part in (found, wanted))
    torch.testing.assert_close(picked.double(), best, rtol=1e-5, atol=1e-5)


def test_of_equal_logits_a_kernel_takes_the_first(path: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "torch":
        pytest.skip("topk promises no order among equals")
    monkeypatch.setattr(module, "_SLICE", 8)
    logits, scores = torch.zeros(1, 2, 20, device=device), torch.zeros(1, 2, device=device)
    found = expand(logits, scores, 3)
    assert found.tokens.tolist() == [[[0, 1, 2], [0, 1, 2]]]
    assert found.frontier.tolist() == [[0, 1, 2]]


def _grown(rows: int, width: int, depth: int, dtype: torch.dtype, equals: bool) -> engine._Candidates:
    """Candidates as the engine grows them: a child below its parent, or equal to it."""
    tokens, parents, scores = [], [], []
    for _ in range(rows):
        above, score = [-1], [0.0]
        row_parents: list[int] = []
        row_scores: list[float] = []
        for _ in range(depth):
            fresh = []
            for node, base in zip(above, score, strict=True):
                for _ in range(width):
                    fall = float(torch.randint(0, 2, ())) if equals else float(torch.rand(()))
                    row_parents.append(node)
                    row_scores.append(base - fall)
                    fresh.append(len(row_parents) - 1)
            best = sorted(fresh, key=lambda index: -row_scores[index])[:width]
            above, score = best, [row_scores[index] for index in best]
        tokens.append(torch.randint(1000, (len(row_parents),)))
        parents.append(torch.tensor(row_parents))
        scores.append(torch.tensor(row_scores, dtype=dtype))
    return engine._Candidates(torch.stack(tokens), torch.stack(parents), torch.stack(scores))


@pytest.mark.parametrize("equals", [False, True])
@pytest.mark.parametrize(("rows", "width", "depth", "num_draft_tokens"), [(2, 3, 4, 9), (1, 8, 3, 60), (1, 2, 2, 32),
                                                                          (3, 4, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_stays_is_the_engines_own_tree(rows: int, width: int, depth: int, num_draft_tokens: int,
                                            dtype: torch.dtype, equals: bool, device: str) -> None:
    grown = _grown(rows, width, depth, dtype, equals)
    wanted = engine.rerank(grown, num_draft_tokens)
    found = rerank(grown.tokens.to(device), grown.parents.to(device), grown.scores.to(device), num_draft_tokens)
    assert torch.equal(found.tokens.cpu(), wanted.tokens)
    assert torch.equal(found.parents.cpu(), wanted.parents)
    assert torch.equal(found.scores.cpu(), wanted.scores)
