"""The map in SGLang's terms and in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.contract.engine import DraftTreeShape
from eyrie_api.contract.model import Interval
from eyrie_api.contract.tuning import OFF, OperatingPoint, Setting, Trial
from eyrie_workers.measure.tuner.operating import adaptive, between, compile_map, predicted_point
from eyrie_workers.measure.tuner.predict import PredictedSpeed


def chain(steps: int) -> Setting:
    return Setting(tree=DraftTreeShape(num_steps=steps, top_k=1, num_draft_tokens=steps + 1))


TREE = Setting(tree=DraftTreeShape(num_steps=3, top_k=2, num_draft_tokens=6))
LOOKUP = Setting(method="ngram", tree=DraftTreeShape(num_steps=3, top_k=1, num_draft_tokens=4))


def point(concurrency: int, setting: Setting, measured: bool = True) -> OperatingPoint:
    return OperatingPoint(concurrency=concurrency, setting=setting, speedup=1.0 if setting == OFF else 1.8,
                          speedup_interval=None if setting == OFF else Interval(low=1.7, high=1.9), tokens_per_s=200.0,
                          measured=measured)


def test_chains_and_off_become_batch_size_slots() -> None:
    points = [point(1, chain(5)), point(2, chain(5)), point(4, chain(2)), point(16, OFF)]
    assert adaptive(points) == {"1": {"candidate_steps": [5]}, "4": {"candidate_steps": [2]},
                                "16": {"candidate_steps": [0]}}


def test_the_first_slot_begins_at_one_row() -> None:
    assert adaptive([point(4, chain(3)), point(8, OFF)]) == {"1": {"candidate_steps": [3]},
                                                            "8": {"candidate_steps": [0]}}


@pytest.mark.parametrize("settings", [[TREE, OFF], [chain(3), LOOKUP], [chain(3), chain(3)], [OFF, OFF]])
def test_what_sglang_cannot_follow_or_need_not_stays_static(settings: list[Setting]) -> None:
    assert adaptive([point(2**i, setting) for i, setting in enumerate(settings)]) is None


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8))
def test_every_load_is_routed_to_the_depth_of_its_point(depths: list[int]) -> None:
    points = [point(2**i, chain(depth) if depth else OFF) for i, depth in enumerate(depths)]
    slots = adaptive(points)
    if slots is None:
        assert len(set(depths)) == 1
        return
    keys = sorted(map(int, slots))
    assert keys[0] == 1
    chart = compile_map(points, [], 1.0)
    for load in range(1, 2 ** len(depths) + 3):
        slot = slots[str(max(key for key in keys if key <= load))]
        assert isinstance(slot, dict)
        setting = chart.at(load).setting
        assert slot["candidate_steps"] == [setting.tree.num_steps if setting.tree else 0]


def trial(setting: Setting, concurrency: int, predicted: float, measured: float | None) -> Trial:
    return Trial(setting=setting, concurrency=concurrency, predicted_tokens_per_s=100 * predicted,
                 predicted_speedup=predicted, predicted_tau=2.0, speedup=measured, blocks=4 if measured else 0)


def test_the_finding_says_what_is_best_where_it_stops_paying_and_what_that_rests_on() -> None:
    trials = [trial(OFF, 1, 1.0, 1.0), trial(chain(5), 1, 1.9, 1.8), trial(LOOKUP, 1, 1.2, None),
              trial(OFF, 8, 1.0, 1.0), trial(chain(5), 8, 0.9, 0.85), trial(LOOKUP, 8, 1.01, 0.99)]
    chart = compile_map([point(8, OFF), point(1, chain(5)), point(4, chain(5), False)], trials, 12.0)
    assert [one.concurrency for one in chart.points] == [1, 4, 8]
    assert (chart.crossover, chart.trials_measured, chart.trials_possible) == (8, 5, 6)
    for said in ("at concurrency 1 chain 5/1/6 (1.80x, 1.70-1.90), 200 tokens/s", "at concurrency 8 no speculation",
                 "stops paying between concurrency 4 and 8 (measured)",
                 "N-gram lookup reaches 1.20x at 1 (predicted, not worth a trial), 0.99x at 8 (measured)",
                 "off by", "5 of 6 pairs"):
        assert said in chart.finding, chart.finding


def test_a_load_above_the_crossover_at_which_it_pays_again_is_named() -> None:
    chart = compile_map([point(1, LOOKUP), point(2, OFF, False), point(4, LOOKUP)], [], 1.0)
    assert "stops paying between concurrency 1 and 2 (predicted), and pays again at 4." in chart.finding


def test_a_map_without_a_crossover_says_how_far_it_looked() -> None:
    chart = compile_map([point(1, TREE), point(4, TREE)], [], 1.0)
    assert chart.crossover is None
    assert "every load examined, up to 4" in chart.finding
    assert "keep it off" in compile_map([point(1, OFF), point(4, OFF)], [], 1.0).finding


def test_a_load_that_the_race_left_open_is_named() -> None:
    chart = compile_map([point(1, chain(3)).model_copy(update={"speedup": 0.9}), point(4, OFF)], [], 1.0)
    assert "at concurrency 1 was too noisy to decide" in chart.finding


def test_between_measured_loads_only_what_was_measured_somewhere_is_predicted() -> None:
    assert between([1, 4]) == [2]
    assert between([2, 24, 4]) == [8, 16]
    assert between([3]) == []
    predictions = {s: PredictedSpeed(s, 2, 100 * speed, speed, 2.0) for s, speed in
                   ((OFF, 1.0), (chain(5), 1.5), (TREE, 1.9))}
    assert predicted_point(predictions, [OFF, chain(5)]).setting == chain(5)
    slow = {s: PredictedSpeed(s, 2, 90.0, 1.0 if s == OFF else 0.9, 2.0) for s in (OFF, TREE)}
    assert predicted_point(slow, [OFF, TREE]).setting == OFF
