"""How many steps a limit of seconds leaves (`train.max_seconds`), and the learning rate on the way there."""

import pytest

from eyrie_api.contract.training import TrainSpec
from eyrie_workers.training.loop import expected_steps, learning_rate_at
from eyrie_workers.training.state import Counters

SPEC = TrainSpec(learning_rate=1.0, warmup_ratio=0.1)


def counted(step: int, step_s: float, first_s: float) -> Counters:
    return Counters(step=step, spent_s=first_s + (step - 1) * step_s if step else 0.0, first_s=first_s if step else 0.0)


def test_without_a_limit_and_with_one_that_is_not_reached_the_steps_are_those_of_the_schedule() -> None:
    for step in range(50):
        assert expected_steps(counted(step, 2.0, 9.0), 50, None) == 50
        assert expected_steps(counted(step, 2.0, 9.0), 50, 1e6) == 50


@pytest.mark.parametrize("first_s", [0.5, 20.0])
def test_the_rate_warms_up_and_has_decayed_when_the_seconds_end_however_long_the_first_step_took(
        first_s: float) -> None:
    step, rates = 0, []
    while step < (num_steps := expected_steps(counted(step, 0.5, first_s), 10_000, 70.0)):
        rates.append(learning_rate_at(step, num_steps, SPEC))
        step += 1
    assert step == round((70.0 - first_s) / 0.5) + 1
    warm = [rate for rate in rates if rate < 1.0][:8]
    assert warm == sorted(warm)
    assert rates[step // 2] == 1.0
    assert rates[-1] < 0.1


def test_a_limit_shorter_than_the_first_step_leaves_that_one() -> None:
    assert expected_steps(counted(0, 1.0, 9.0), 50, 2.0) == 50
    assert expected_steps(counted(1, 1.0, 9.0), 50, 2.0) == 1
