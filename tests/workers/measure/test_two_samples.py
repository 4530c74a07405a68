"""The two-sample test on answers drawn from known distributions: its level, and what it finds."""

import numpy as np
import pytest

from eyrie_workers.measure.two_samples import LEVEL, p_value, power, shared_tokens

PROMPTS, ANSWERS, TOKENS = 6, 16, 8


def drawn(seed: int, temperature: float = 1.0) -> list[list[list[int]]]:
    """Answers of a target whose next token depends on the one before: 6 tokens, more or less certain of each."""
    logits = np.random.default_rng(7).normal(size=(PROMPTS, 6, 6)) * 1.5
    random = np.random.default_rng(seed)
    answers = []
    for logits_VV in logits:
        chances = np.exp(logits_VV / temperature)
        chances /= chances.sum(1, keepdims=True)
        of_prompt = []
        for _ in range(ANSWERS):
            text = [0]
            for _ in range(TOKENS):
                text.append(int(random.choice(6, p=chances[text[-1]])))
            of_prompt.append(text[1:])
        answers.append(of_prompt)
    return answers


def test_leading_tokens_are_counted_and_ended_answers_share_the_rest() -> None:
    assert shared_tokens([[1, 2, 3], [1, 2, 4], [9, 2, 3], [1], [1]]).tolist() == [
        [3, 2, 0, 1, 1], [2, 3, 0, 1, 1], [0, 0, 3, 0, 0], [1, 1, 0, 3, 3], [1, 1, 0, 3, 3]]


def test_answers_of_one_distribution_are_rarely_told_apart() -> None:
    p_values = [p_value(drawn(2 * seed), drawn(2 * seed + 1)) for seed in range(20)]
    assert min(p_values) > LEVEL
    assert 0.25 < np.mean(p_values) < 0.75  # uniform


@pytest.mark.parametrize("temperature", [0.01, 0.4])
def test_greedy_answers_and_those_of_a_lower_temperature_are_found(temperature: float) -> None:
    assert p_value(drawn(0), drawn(1, temperature)) <= LEVEL


def test_two_servers_that_give_one_answer_for_ever_are_equal() -> None:
    same = [[[1, 2, 3]] * 4] * 2
    assert p_value(same, same) == 1.0


def test_the_power_is_that_of_the_stated_alternative_and_is_nothing_for_a_target_that_is_certain() -> None:
    answers, greedy = drawn(0), [of_prompt[0] for of_prompt in drawn(1, 0.01)]
    assert power(answers, greedy) > 0.95
    assert power([[one] * ANSWERS for one in greedy], greedy) == 0.0
