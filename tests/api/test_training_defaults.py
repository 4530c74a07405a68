"""Tokens of a step where the job names none."""

from dataclasses import replace

import pytest

from eyrie_api.contract.training import TrainSpec
from eyrie_api.errors import GpuTooSmall
from eyrie_api.planning.training_cost import streamed_bytes, usable_bytes
from eyrie_api.planning.training_defaults import TrainingOnGpus, gpu_bytes, tokens_per_step, with_tokens
from tests.api.test_training_cost import DRAFTER_8B, GIB


@pytest.mark.parametrize(("given", "num_gpus", "epoch_tokens", "at_a_time", "step"), [
    ({}, 0, 10**9, None, 2048),
    ({}, 0, 100, None, 2048),
    ({}, 1, 10**9, 16_384, 16_384),
    ({}, 8, 10**9, 16_384, 131_072),
    ({}, 8, 64 * 131_072 - 1, 16_384, 65_536),
    ({}, 1, 64 * 4096, 16_384, 4096),
    ({}, 1, 100, 16_384, 2048),
    ({"max_tokens_per_gpu": 1024}, 1, 100, 1024, 1024),
    ({"max_tokens_per_gpu": 4096}, 2, 10**9, 4096, 8192),
    ({"max_tokens_per_batch": 1024}, 0, 10**9, None, 1024),
    ({"max_tokens_per_batch": 65_536}, 2, 100, 16_384, 65_536),
])
def test_tokens_left_open_follow_the_hardware_and_the_data(given: dict[str, int], num_gpus: int, epoch_tokens: int,
                                                           at_a_time: int | None, step: int) -> None:
    train = with_tokens(TrainSpec.model_validate(given), num_gpus, epoch_tokens)
    assert (train.max_tokens_per_gpu, tokens_per_step(train)) == (at_a_time, step)
    assert with_tokens(train, num_gpus, epoch_tokens) == train, "what is settled stays"


def training(num_gpus: int = 1, **fields: object) -> TrainingOnGpus:
    return TrainingOnGpus(DRAFTER_8B, with_tokens(TrainSpec.model_validate(fields), num_gpus, 10**9), num_gpus,
                          supervised_share=0.5, row_tokens=2048.0)


def test_a_step_that_does_not_fit_is_refused_with_the_largest_that_does() -> None:
    device = 24 * GIB
    with pytest.raises(GpuTooSmall, match=r"60000 tokens needs .* GB on each GPU .*, and an A10 has") as refused:
        training(max_tokens_per_gpu=60_000).require(device, "an A10", usable_bytes(device))
    fitting = int(refused.value.hint.split()[-1])
    assert training(max_tokens_per_gpu=fitting).require(device, "an A10", usable_bytes(device)).total > 0
    assert training(max_tokens_per_gpu=fitting, max_tokens_per_batch=60_000).require(
        device, "an A10", usable_bytes(device)), "in micro-batches too"


def test_where_no_step_fits_the_drafter_or_the_gpus_must_change() -> None:
    with pytest.raises(GpuTooSmall) as refused:
        training().require(6 * GIB, "it", usable_bytes(6 * GIB))
    assert refused.value.hint.startswith("use GPUs with more memory")
    assert training(8).need(80 * GIB).total < training(1).need(80 * GIB).total


def test_the_target_that_streams_its_states_counts_on_each_gpu_and_the_hint_names_the_store() -> None:
    device = 24 * GIB
    alone = training(max_tokens_per_gpu=4096)
    assert alone.require(device, "an A10", usable_bytes(device))
    weights, pass_of = 14 * GIB, 4096 * 2 * (4 * 4096 + 3 * 4096 + 3 * 14_336)
    streamed = streamed_bytes(DRAFTER_8B, weights, 2, 4, 4096, GIB)
    assert streamed == weights + pass_of + GIB
    both = replace(alone, streamed_bytes=streamed)
    for gpus in (1, 8):
        assert (replace(both, num_gpus=gpus).need(device).components["streamed target"]) == streamed
    with pytest.raises(GpuTooSmall, match=r"\(streamed target 1\d\.\d GB\), and an A10 has") as refused:
        both.require(device, "an A10", usable_bytes(device))
    assert refused.value.hint.startswith("set capture.mode to 'store', or ")


@pytest.mark.parametrize(("gib", "tokens"), [(80, 16_384), (14, 4096), (6, 16_384)])
def test_tokens_left_open_are_halved_until_they_fit_and_the_step_keeps_its_tokens(gib: int, tokens: int) -> None:
    device = gib * GIB
    fitted = training(2).fitted(device, usable_bytes(device), 2048)
    assert (fitted.tokens, tokens_per_step(fitted.train)) == (tokens, 32_768)
    if gib > 6:  # where none fits it is left as it was, and refused with the number to change
        assert fitted.require(device, "it", usable_bytes(device))


def test_tokens_left_open_are_never_lowered_below_the_longest_row_which_would_be_cut() -> None:
    device = 14 * GIB
    assert training(2).fitted(device, usable_bytes(device), 4097).tokens == 16_384


@pytest.mark.parametrize(("label", "gigabytes"), [
    ("NVIDIA-H100-80GB-HBM3", 80), ("NVIDIA-A100-SXM4-40GB", 40), ("NVIDIA-H200", 141), ("NVIDIA-L4", None),
    (None, None)])
def test_a_node_label_says_how_much_memory_its_gpus_have(label: str | None, gigabytes: int | None) -> None:
    assert gpu_bytes(label) == (None if gigabytes is None else gigabytes * 10**9)
