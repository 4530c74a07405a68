"""Bytes and operations of a training step; `tests.gpu.test_step_memory` compares the bytes with a step's."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import training_memory
from eyrie_api.contract.families import DecoderSizes, DrafterSizes
from eyrie_api.planning.training_cost import (
    StepSetting,
    StepWork,
    TrainedDrafter,
    eagle3_flops,
    expected_work,
    largest_tokens,
    needed_bytes,
    step_bytes,
    usable_bytes,
)

GIB = 2**30
DRAFTER_8B = training_memory.drafter_of("Llama-3.1-8B")


def work_of(tokens: int) -> StepWork:
    return expected_work(tokens, supervised_share=0.5, ttt_length=7, unrolled_fraction=0.33, row_tokens=2048)


def test_operations_are_counted_by_hand_for_one_token_and_one_root() -> None:
    sizes = DrafterSizes(target=DecoderSizes(2, 1, 5, 1, 1, 2), output_vocab_size=7, num_aux_layers=3,
                         max_draft_tokens=1, hidden_size=None, intermediate_size=None, num_layers=None)
    work = StepWork(tokens=1, alive=(1,), teacher_rows=1, visible_keys=1)
    fc, keys, token = 2 * (2 * 3 * 2), 3 * (2 * 2) * 2, 3 * 2 * 6  # forward and backward; fc's input has no gradient
    root = 3 * (2 * 2 + 3 * 2 * 5 + 2 * 7) + 3 * 2 * 2  # output projection, MLP, output matrix; queries
    attention, teacher = 3 * 2 * 2, 2 * 11
    found = eagle3_flops(TrainedDrafter("eagle3", sizes, 11), work)
    assert found == 2 * (fc + keys + token + root + attention + teacher)


@given(tokens=st.integers(256, 60_000), ranks=st.integers(1, 8), parts=st.integers(1, 4), wide=st.booleans())
def test_more_tokens_need_more_bytes_and_more_ranks_less(tokens: int, ranks: int, parts: int, wide: bool) -> None:
    setting = StepSetting(compute_bytes=4 if wide else 2, num_ranks=ranks, num_parts=parts)
    need = step_bytes(DRAFTER_8B, work_of(tokens), setting).total
    assert step_bytes(DRAFTER_8B, work_of(tokens + 512), setting).total > need
    assert step_bytes(DRAFTER_8B, work_of(tokens), replace(setting, num_ranks=ranks + 1)).total <= need
    assert step_bytes(DRAFTER_8B, work_of(tokens), replace(setting, accumulating=True)).total >= need
    assert step_bytes(DRAFTER_8B, work_of(tokens), replace(setting, recompute=True)).total <= need


@pytest.mark.parametrize("device", [40 * GIB, 80 * 10**9, 141 * 10**9])
def test_the_largest_batch_fits_and_a_larger_one_does_not(device: int) -> None:
    tokens = largest_tokens(DRAFTER_8B, work_of, StepSetting(), device)
    assert tokens > 8192
    assert needed_bytes(DRAFTER_8B, work_of(tokens), StepSetting(), device).total <= usable_bytes(device)
    assert needed_bytes(DRAFTER_8B, work_of(tokens + 256), StepSetting(), device).total > usable_bytes(device)


def test_no_batch_fits_a_gpu_that_cannot_hold_the_moments() -> None:
    assert largest_tokens(DRAFTER_8B, work_of, StepSetting(), 8 * GIB) == 0


def test_8192_tokens_for_an_8b_target_fit_25_gb() -> None:
    assert step_bytes(DRAFTER_8B, work_of(8192), StepSetting()).total < 25 * 10**9


def test_the_page_of_what_fits_is_what_its_command_prints() -> None:
    written = (Path(__file__).parents[2] / "docs" / "results" / "training_memory.md").read_text()
    assert written == training_memory.page(), "run: python -m benchmarks.training_memory > docs/results/..."
