"""Repeated text in answers, and tau without it."""

from hypothesis import given
from hypothesis import strategies as st

from eyrie_workers.measure.benchmark.repetition import LENGTH, repeated, repeated_share, tau_of_new_text
from eyrie_workers.measure.benchmark.variants import Sample


def sample(tokens: list[int], accepted: tuple[int, ...] = ()) -> Sample:
    return Sample(token_ids=tuple(tokens), seconds=1.0, cpu_seconds=1.0, ttft_s=0.1, rounds=len(accepted),
                  accepted_histogram=(), accepted=accepted)


def test_a_phrase_said_twice_is_repeated_from_its_eighth_token_on() -> None:
    phrase = [*range(100, 120)]
    assert repeated([*phrase, 1, *phrase]) == [False] * (20 + 1 + LENGTH - 1) + [True] * (20 - LENGTH + 1)
    assert not any(repeated([*phrase[:7], 1, *phrase[:7], 2]))  # too short


def test_a_loop_is_repeated_from_the_second_time_its_eight_tokens_are_complete() -> None:
    assert repeated([7] * 12) == [False] * 8 + [True] * 4


@given(st.lists(st.integers(0, 2), max_size=60))
def test_marks_are_those_of_the_definition(tokens: list[int]) -> None:
    grams = [tuple(tokens[max(0, end - LENGTH):end]) for end in range(1, len(tokens) + 1)]
    assert repeated(tokens) == [len(gram) == LENGTH and gram in grams[:place] for place, gram in enumerate(grams)]


def test_tau_of_new_text_leaves_out_each_round_with_a_repeated_token() -> None:
    # The prefill's token, four rounds of one token, one of seven, of which the last four are repeated, one of three.
    answer = sample([*[7] * 12, 1, 2, 3], (0, 0, 0, 0, 6, 2))
    assert tau_of_new_text([answer]) == (4 * 1 + 3) / 5
    assert tau_of_new_text([answer, sample([1, 2, 3], (1,))]) == (4 * 1 + 3 + 2) / 6
    assert repeated_share([answer, sample([1, 2, 3, 4, 5])]) == 4 / 20


def test_without_rounds_or_with_repeated_ones_alone_there_is_no_such_tau() -> None:
    assert tau_of_new_text([sample([1, 2, 3])]) is None
    assert tau_of_new_text([sample([7] * 12, (10,))]) is None
    assert repeated_share([]) == 0.0
