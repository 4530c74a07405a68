"""Tokens of a step where the job names none."""

import pytest

from eyrie_api.decisions.training_cost import StepSetting
from eyrie_api.decisions.training_defaults import tokens_per_step, tokens_that_fit, with_tokens
from eyrie_api.v1alpha1.training import TrainSpec
from tests.api.test_training_cost import DRAFTER_8B, GIB


@pytest.mark.parametrize(("given", "num_gpus", "most", "at_a_time", "step"), [
    ({}, 0, None, None, 2048),
    ({}, 1, None, 16_384, 16_384),
    ({}, 8, None, 16_384, 131_072),
    ({}, 2, 9984, 9984, 19_968),
    ({"max_tokens_per_gpu": 4096}, 2, 9984, 4096, 8192),
    ({"max_tokens_per_batch": 1024}, 0, None, None, 1024),
    ({"max_tokens_per_batch": 65_536}, 2, None, 16_384, 65_536),
])
def test_tokens_left_open_follow_the_hardware(given: dict[str, int], num_gpus: int, most: int | None,
                                              at_a_time: int | None, step: int) -> None:
    train = with_tokens(TrainSpec.model_validate(given), num_gpus, most)
    assert (train.max_tokens_per_gpu, train.max_tokens_per_batch) == (at_a_time, step)
    assert with_tokens(train, num_gpus) == train, "what is settled stays"
    if most is None:
        assert tokens_per_step(TrainSpec.model_validate(given), num_gpus) == step


def test_the_tokens_that_fit_grow_with_the_memory_and_are_none_without_room_for_the_moments() -> None:
    fitting = [tokens_that_fit(DRAFTER_8B, TrainSpec(), StepSetting(), gib * GIB) for gib in (8, 24, 40, 80)]
    assert fitting[0] == 0
    assert fitting == sorted(set(fitting))
