"""Selection by average, not by peak; and ranking."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.contract.model import Interval
from eyrie_api.contract.reports import ConcurrencyReport
from eyrie_api.decisions.leaderboard import (
    MeasuredCheckpoint,
    Selection,
    choices_of,
    mean_speedup,
    no_drafter,
    rank,
    select,
    select_best,
    select_for_proof,
)
from eyrie_api.errors import InvalidInput
from tests.api.samples import benchmark_report

STEADY = benchmark_report("a-step-1", {"chat": (2.0, 1.8), "math": (2.2, 2.0)})
PEAKED = benchmark_report("b-step-2", {"chat": (1.2, 1.1), "math": (3.4, 1.9)})
LOSSY = benchmark_report("c-step-3", {"chat": (4.0, 4.0), "math": (4.0, 4.0)}, lossless=False)


def test_the_best_average_wins_over_the_best_peak() -> None:
    assert select_best([PEAKED, STEADY]) is STEADY


def test_a_drafter_that_changes_the_output_is_chosen_only_when_all_do() -> None:
    assert select_best([LOSSY, PEAKED]) is PEAKED
    assert select_best([LOSSY]) is LOSSY


def test_a_suite_counts_once_however_many_temperatures_it_was_measured_at() -> None:
    report = benchmark_report("x", {"chat": (1.0, 1.0, 1.0), "math": (3.0,)})
    assert mean_speedup(report) == 2.0


def test_equal_averages_are_distinguished_by_the_worst_suite() -> None:
    even = benchmark_report("z", {"chat": (2.0,), "math": (2.0,)})
    uneven = benchmark_report("a", {"chat": (1.0,), "math": (3.0,)})
    assert select_best([uneven, even]) is even


def test_nothing_measured_is_an_error_and_not_a_winner() -> None:
    with pytest.raises(InvalidInput, match="no benchmark report"):
        select_best([])
    with pytest.raises(InvalidInput, match="no cells"):
        select_best([STEADY.model_copy(update={"cells": ()})])


@given(st.permutations([STEADY, PEAKED, LOSSY]))
def test_the_ranking_does_not_depend_on_the_order_of_the_reports(reports: list[object]) -> None:
    entries = rank(MeasuredCheckpoint("j", "eagle3", "t", False, report) for report in reports)  # type: ignore[arg-type]
    assert [(entry.rank, entry.checkpoint) for entry in entries] == [(1, "a-step-1"), (2, "b-step-2"), (3, "c-step-3")]


def test_an_entry_has_the_speed_up_at_every_concurrency_and_is_ranked_one_at_a_time() -> None:
    at_once = tuple(ConcurrencyReport(
        concurrency=users, temperature=temperature, requests=16, tau=2.0, tokens_per_s=speedup * 50.0,
        baseline_tokens_per_s=50.0, speedup=speedup, speedup_interval=Interval(low=1.0, high=9.0), identical=16)
        for users, temperature, speedup in ((4, 0.0, 1.5), (4, 1.0, 1.3), (16, 0.0, 0.8), (16, 1.0, 0.6)))
    steady = STEADY.model_copy(update={"concurrent": at_once})
    baseline = no_drafter("rival-off", steady)
    first, second, third = rank([
        MeasuredCheckpoint("j", "off", "t", False, baseline), MeasuredCheckpoint("j", "eagle3", "t", False, PEAKED),
        MeasuredCheckpoint("j", "eagle3", "t", False, steady)])
    assert first.speedup_by_concurrency == pytest.approx({1: 2.0, 4: 1.4, 16: 0.7})
    assert second.speedup_by_concurrency == pytest.approx({1: 1.9})
    assert (third.checkpoint, third.tree, third.tau, third.tokens_per_s) == ("rival-off", None, 1.0, 100.0)
    assert third.speedup_by_concurrency == {1: 1.0, 4: 1.0, 16: 1.0}


def test_only_drafters_are_selected_for_the_proof() -> None:
    lookup = benchmark_report("rival-ngram", {"chat": (9.0,)}).model_copy(update={"rival": True, "family": "ngram"})
    head = benchmark_report("rival-x", {"chat": (5.0,)}).model_copy(update={"rival": True, "family": "eagle3"})
    assert select_for_proof([STEADY, lookup, head], rivals=True) is head
    assert select_for_proof([STEADY, lookup, head], rivals=False) is STEADY
    refused = STEADY.model_copy(update={"checkpoint": "theirs", "cells": (), "dropped": "it reads states of 48"})
    assert select_for_proof([refused, STEADY], rivals=False) is STEADY
    with pytest.raises(InvalidInput, match="theirs could not be measured: it reads states of 48"):
        select_for_proof([refused, lookup, head], rivals=False)


def test_an_entry_averages_greedy_and_sampled_cells_apart() -> None:
    (entry,) = rank([MeasuredCheckpoint("j", "eagle3", "t", True, STEADY)])
    assert entry.speedup_greedy == pytest.approx(2.1)
    assert entry.speedup_sampled == pytest.approx(1.9)
    assert entry.suites == pytest.approx({"chat": 1.9, "math": 2.1})
    greedy_only = benchmark_report("g", {"chat": (2.0,)})
    assert rank([MeasuredCheckpoint("j", "eagle3", "t", True, greedy_only)])[0].speedup_sampled is None


def test_the_interval_of_one_measurement_is_the_measured_one_and_of_a_mean_the_mean_of_the_ends() -> None:
    ends = {("chat", 0.0): (1.5, 2.5), ("chat", 1.0): (1.6, 2.0), ("math", 0.0): (2.1, 2.3), ("math", 1.0): (1.0, 3.0)}
    cells = tuple(cell.model_copy(update={"speedup_interval": Interval(low=low, high=high)}) for cell, (low, high) in
                  zip(STEADY.cells, ends.values(), strict=True))
    assert [(cell.suite, cell.temperature) for cell in cells] == list(ends)
    board = [MeasuredCheckpoint("j", "eagle3", "t", False, STEADY.model_copy(update={"cells": cells}))]
    (one,) = rank(select(board, Selection(suite="math", temperature=1.0)))
    assert one.speedup_interval == Interval(low=1.0, high=3.0)
    (mean,) = rank(board)
    assert mean.speedup_interval is not None
    assert mean.speedup_interval.low == pytest.approx(((1.5 + 1.6) / 2 + (2.1 + 1.0) / 2) / 2)
    assert mean.speedup_interval.high == pytest.approx(((2.5 + 2.0) / 2 + (2.3 + 3.0) / 2) / 2)


def test_a_selection_ranks_by_its_measurements_alone_and_leaves_out_what_has_none() -> None:
    math = benchmark_report("m-step-4", {"math": (3.0, 1.5)})
    board = [MeasuredCheckpoint("j", "eagle3", "t", False, one) for one in (STEADY, PEAKED, LOSSY, math)]

    def ranked(**wanted: object) -> list[tuple[str, float]]:
        return [(one.checkpoint, round(one.speedup, 3))
                for one in rank(select(board, Selection(**wanted)))]  # type: ignore[arg-type]

    assert ranked(suite="chat") == [("a-step-1", 1.9), ("b-step-2", 1.15), ("c-step-3", 4.0)]
    assert ranked(suite="math", temperature=0.0)[:3] == [("b-step-2", 3.4), ("m-step-4", 3.0), ("a-step-1", 2.2)]
    assert ranked(suite="code") == []
    assert ranked(engine="sglang") == []
    assert ranked(engine="embedded") == ranked()
    (only, *_) = rank(select(board, Selection(suite="math", temperature=1.0)))
    assert (only.suites, only.speedup_greedy, only.speedup_by_concurrency) == ({"math": 2.0}, None, {1: 2.0})


def test_choices_are_the_values_that_occur() -> None:
    found = choices_of([MeasuredCheckpoint("j", "mtp", "t", False, STEADY),
                        MeasuredCheckpoint("j", "eagle3", "t", True, PEAKED)])
    assert (found.families, found.suites) == (("eagle3", "mtp"), ("chat", "math"))
    assert (found.temperatures, found.engines) == ((0.0, 1.0), ("embedded",))
