"""The CPU form of the loss against the reference of its kernel: losses, gradients, choices, and what it allocates."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eyrie_kernels.soft_target_loss import Loss, reference_losses
from eyrie_kernels.soft_target_loss import soft_target_loss as kernel_soft_target_loss
from eyrie_workers.training import numerics as module
from eyrie_workers.training.numerics import soft_target_loss
from eyrie_workers.training.objective import TargetTable
from tests.workers.training.test_fused import agree, leaves, noise

LOSSES: list[Loss] = ["kl", "tv", "lk", "lk_hybrid"]


def random_table(positions: int, draft_vocab: int) -> TargetTable:
    mass = torch.rand(positions, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return TargetTable(noise(positions, draft_vocab, seed=1).mul(2).softmax(-1), mass, torch.ones(positions).bool(),
                   torch.zeros(positions, dtype=torch.int64))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("predictions", [3, 700])
def test_the_fused_loss_equals_its_formula_and_so_do_its_gradients(kind: Loss, predictions: int) -> None:
    # 700 predictions over 3001 draft ids are two chunks, neither a round number.
    draft_vocab = 3001 if predictions == 700 else 5
    x, weight = noise(predictions, 6), noise(draft_vocab, 6, seed=4) * 0.5
    table, row = random_table(11, draft_vocab), torch.arange(predictions) % 11
    share = torch.rand(predictions, generator=torch.Generator().manual_seed(5))
    share[::3] = 0
    ours, theirs = leaves(x, weight), leaves(x, weight)
    loss, losses, _ = soft_target_loss(*ours, table, row, share, kind)
    plain = reference_losses(theirs[0] @ theirs[1].T, table.probabilities[row], table.mass_R[row], kind)
    agree(loss, (plain * share).sum(), ours, theirs)
    torch.testing.assert_close(losses[share > 0], plain.detach()[share > 0])
    assert float(losses[share == 0].abs().max()) == 0.0


def test_losses_of_acceptance_are_zero_where_drafter_and_target_agree_and_kl_is_not_below_entropy() -> None:
    logits = noise(4, 9)
    table = logits.softmax(-1)
    for kind in ("tv", "lk"):
        assert float(reference_losses(logits, table, torch.ones(4), kind).abs().max()) < 1e-12  # type: ignore[arg-type]
    entropy = -(table * table.log()).sum(-1)
    torch.testing.assert_close(reference_losses(logits, table, torch.ones(4), "kl"), entropy)


def test_first_choices_are_found_for_every_row_also_those_that_do_not_count() -> None:
    x, weight = noise(40, 6), noise(5, 6, seed=4)
    _, _, choice = soft_target_loss(x, weight, random_table(3, 5), torch.zeros(40, dtype=torch.int64), torch.zeros(40),
                                    choose=True)
    assert torch.equal(choice, (x @ weight.T).argmax(-1))


@pytest.mark.parametrize("kind", LOSSES)
def test_float32_agrees_with_the_reference_in_losses_gradients_and_choices(kind: Loss) -> None:
    generator = torch.Generator().manual_seed(3)
    probabilities = torch.rand(6, 24, generator=generator).softmax(-1)
    table = TargetTable(probabilities, torch.rand(6, generator=generator), torch.ones(6, dtype=torch.bool),
                        probabilities.argmax(-1))
    row = torch.randint(6, (40,), generator=generator)
    share = torch.rand(40, generator=generator) * (torch.arange(40) % 3 > 0)

    def by_reference(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return kernel_soft_target_loss(x, weight, probabilities, table.mass_R, row, share, kind, True)

    def on_the_cpu(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return soft_target_loss(x, weight, table, row, share, kind, True)

    found = []
    for form in (on_the_cpu, by_reference):
        x = torch.randn(40, 8, generator=torch.Generator().manual_seed(4)).requires_grad_()
        weight = torch.randn(24, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()
        loss, losses, choice = form(x, weight)
        loss.backward()
        found.append([loss.detach(), losses * (share > 0), choice.float(), x.grad, weight.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)  # float32, summed in another order


def test_no_array_of_predictions_by_vocabulary_is_made() -> None:
    rows, vocab = 4096, 4096
    x, weight = torch.randn(rows, 2, requires_grad=True), torch.randn(vocab, 2, requires_grad=True)
    table = TargetTable(torch.full((1, vocab), 1 / vocab), torch.ones(1), torch.ones(1, dtype=torch.bool),
                        torch.zeros(1, dtype=torch.int64))
    row, share = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    largest = max(allocated_sizes(lambda: soft_target_loss(x, weight, table, row, share)[0].backward()))
    assert largest <= module._CHUNK_ELEMENTS < rows * vocab


def allocated_sizes(work: Callable[[], object]) -> list[int]:
    seen: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            seen.extend(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            return out

    with Watch():
        work()
    return seen
