"""Packing wastes nothing, repeats nothing, and is a function of the step's number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.errors import NoUsableData
from eyrie_workers.training.batches import Schedule, checkpoint_steps, cut_evenly, shard_batch, split_rows

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=80)


@given(lengths=LENGTHS, max_tokens=st.integers(1, 700))
def test_cuts_cover_the_sequence_in_order_within_the_limit(lengths: list[int], max_tokens: int) -> None:
    cuts = cut_evenly(lengths, max_tokens)
    assert [position for cut in cuts for position in cut] == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or sum(lengths[cut.start:cut.stop]) <= max_tokens


@given(lengths=LENGTHS, max_tokens=st.integers(300, 900))
def test_cuts_are_the_fewest_and_their_largest_the_smallest(lengths: list[int], max_tokens: int) -> None:
    def fits(capacity: int) -> int:
        batches, used = 1, 0
        for length in lengths:
            if used + length > capacity:
                batches, used = batches + 1, 0
            used += length
        return batches

    cuts = cut_evenly(lengths, max_tokens)
    assert len(cuts) == fits(max_tokens)
    largest = max(sum(lengths[cut.start:cut.stop]) for cut in cuts)
    assert largest == max(lengths) or fits(largest - 1) > len(cuts)


@given(lengths=LENGTHS, epochs=st.floats(0.05, 3.0), seed=st.integers(0, 99), max_tokens=st.integers(50, 500))
def test_every_epoch_visits_each_row_once_and_steps_do_not_depend_on_what_was_asked_before(
        lengths: list[int], epochs: float, seed: int, max_tokens: int) -> None:
    rows = list(range(0, len(lengths), 2))
    schedule = Schedule(rows, lengths, max_tokens, epochs, seed)
    plans = [schedule.at(step) for step in range(schedule.num_steps)]
    for epoch in range(int(epochs)):
        seen = [row for plan in plans if int(plan.epoch) == epoch for row in plan.rows]
        assert sorted(seen) == rows
    again = Schedule(rows, lengths, max_tokens, epochs, seed)
    assert [again.at(step) for step in reversed(range(schedule.num_steps))] == plans[::-1]


def test_epochs_differ_and_seeds_differ() -> None:
    lengths = [10] * 40
    one = Schedule(list(range(40)), lengths, 50, 2, seed=0)
    assert one.epoch(0) != one.epoch(1)
    assert one.epoch(0) != Schedule(list(range(40)), lengths, 50, 2, seed=1).epoch(0)


def test_max_steps_ends_the_run_early() -> None:
    assert Schedule(list(range(40)), [10] * 40, 50, 5, 0, max_steps=3).num_steps == 3


def test_no_row_to_train_on_is_refused() -> None:
    with pytest.raises(NoUsableData):
        Schedule([], [], 100, 1, 0)


@given(num_rows=st.integers(0, 2000), seed=st.integers(0, 5))
def test_held_out_rows_are_disjoint_from_training_rows_and_nothing_is_lost(num_rows: int, seed: int) -> None:
    train, held = split_rows(num_rows, seed)
    assert sorted(train + held) == list(range(num_rows))
    assert len(held) <= 64
    assert (len(held) >= 1) == (num_rows > 1)


@given(num_steps=st.integers(1, 500), num=st.integers(1, 30))
def test_checkpoints_are_distinct_and_the_last_is_at_the_end(num_steps: int, num: int) -> None:
    steps = checkpoint_steps(num_steps, num)
    assert steps == sorted(set(steps))
    assert steps[-1] == num_steps
    assert len(steps) == min(num, num_steps) or num_steps < 2 * num


def test_the_processes_of_a_step_of_16k_tokens_each_differ_by_less_than_three_percent() -> None:
    # Conversations of 100 to 4000 tokens, most of them short, as chat data are.
    lengths = np.exp(np.random.default_rng(3).uniform(np.log(100), np.log(4000), 4000)).astype(int).tolist()
    for num_processes in (2, 8):
        schedule = Schedule(range(len(lengths)), lengths, 16_384 * num_processes, 1.0, 0)
        for step in range(schedule.num_steps):
            rows = schedule.at(step).rows
            loads = [sum(lengths[rows[place]] for place in shard)
                     for shard in shard_batch(rows, lengths, num_processes)]
            assert max(loads) < 1.03 * sum(loads) / num_processes
