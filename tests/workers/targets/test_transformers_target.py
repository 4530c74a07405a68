"""Hidden states through transformers: which layer is recorded, what the logits are, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch

from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import UnsupportedTarget
from eyrie_workers.drafters.initialisation import read_target_embeddings
from eyrie_workers.targets.config import read_config
from eyrie_workers.targets.operators import OutputHead
from eyrie_workers.targets.state_source import (
    TransformersTarget,
    is_spread,
    load_transformers_target,
    open_source,
    similar_lengths,
)
from tests.tiny import tiny_target

LAYERS = (0, 2, 4)
TEXTS = [torch.arange(3, 3 + length) for length in (40, 9, 37, 1)]


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose logits are scaled."""
    return tiny_target(tmp_path_factory.mktemp("granite"), "granite", logits_scaling=8.0)


def test_both_sources_compute_the_same_states_of_packed_texts(tmp_path: Path) -> None:
    spec = TargetSpec(model=str(tiny_target(tmp_path / "target", "qwen3")))
    ours, theirs = (open_source(name, spec).packed_states(TEXTS, LAYERS) for name in ("reference", "transformers"))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_a_texts_states_do_not_depend_on_the_texts_computed_with_it(granite: Path) -> None:
    target = load_transformers_target(granite, "float32")
    together, _ = target.packed_states(TEXTS, LAYERS)
    alone = torch.cat([target.packed_states([text], LAYERS)[0] for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_the_checkpoints_scaled_matrix_gives_the_models_logits(granite: Path) -> None:
    target = load_transformers_target(granite, "float32")
    target.verify(TEXTS[0])
    ends = read_target_embeddings(granite, target.config.tie_word_embeddings)
    _, last = target.packed_states(TEXTS[:1], LAYERS)
    torch.testing.assert_close(ends.output_head.logits(last), target.output_head.logits(last))


@pytest.mark.parametrize("changes", [{"logit_scale": 1.0}, {"logit_soft_cap": 2.0}])
def test_logits_that_the_matrix_does_not_explain_are_refused(granite: Path, changes: dict[str, float]) -> None:
    right = load_transformers_target(granite, "float32")
    wrong = TransformersTarget(right._model, dataclasses.replace(read_config(granite), **changes), "float32")
    with pytest.raises(UnsupportedTarget, match="not its output matrix"):
        wrong.verify(TEXTS[0])


def test_a_model_with_a_bias_on_its_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTarget, match="bias"):
        load_transformers_target(tiny_target(tmp_path / "phi", "phi"), "float32")


def test_soft_capped_logits_are_bounded() -> None:
    head = OutputHead.of(torch.eye(3), scale=2.0, soft_cap=4.0)
    torch.testing.assert_close(head.logits(torch.tensor([[0.0, 0.01, 100.0]])), torch.tensor([[0.0, 0.02, 4.0]]),
                               atol=1e-5, rtol=1e-5)


def test_texts_are_batched_with_little_padding_and_each_once() -> None:
    lengths = [5, 100, 80, 7, 60, 74, 6]
    batches = similar_lengths(lengths)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(lengths[index] >= 0.75 * lengths[batch[0]] for batch in batches for index in batch)
    assert batches[0] == [1, 2]


@pytest.mark.parametrize(("needed", "own", "free", "spread"), [
    (60, 80, [80, 80], False), (140, 80, [80, 80], True), (200, 80, [80, 80], False), (60, None, [], False)])
def test_a_target_is_spread_over_the_gpus_of_a_machine_where_one_does_not_hold_it_and_all_do(
        needed: int, own: int | None, free: list[int], spread: bool) -> None:
    assert is_spread(needed, own, free) is spread
