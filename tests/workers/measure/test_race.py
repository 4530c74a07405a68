"""Admission, elimination and the winner of a race, on synthetic speeds with known noise."""

import math
import random
from statistics import fmean
from typing import Any

import pytest

from eyrie_api.contract.engine import DraftServing, DraftTreeShape
from eyrie_api.contract.tuning import OFF, Setting, TuneSpec
from eyrie_workers.measure.benchmark.blocks import turns
from eyrie_workers.measure.intervals import MeasuredBlock
from eyrie_workers.measure.tuner.predict import PredictedSpeed
from eyrie_workers.measure.tuner.race import (
    TIE,
    Race,
    always_raced,
    within_budget,
)
from eyrie_workers.stages.tune import chosen

TEMPERATURES = (0.0, 1.0)


def chain(steps: int, method: str = "drafter") -> Setting:
    return Setting.model_validate({"method": method, "tree": DraftTreeShape(
        num_steps=steps, top_k=1, num_draft_tokens=steps + 1)})


def tree(steps: int) -> Setting:
    return Setting(tree=DraftTreeShape(num_steps=steps, top_k=2, num_draft_tokens=10))


def race_of(predicted: dict[Setting, float], most_trials: int = 99) -> Race:
    return Race({s: PredictedSpeed(s, 1, 100 * speed, speed, 2.0) for s, speed in predicted.items()}, most_trials)


def run(race: Race, true: dict[Setting, float], *, noise: float = 0.0, rungs: int = 8, seed: int = 0,
        affordable: int = 99) -> int:
    """Race on true speeds; returns the rungs it took."""
    chance = random.Random(seed)
    for rung in range(rungs):
        race.admit(affordable)
        for temperature in TEMPERATURES:
            hard = chance.gauss(0, 0.3)  # shared by all variants: prompts differ in length and ease
            for setting in list(race.active):
                seconds = math.exp(hard + chance.gauss(0, noise)) / true[setting]
                # Of two answers per block the prompts are new in every rung.
                rates = {(f"{rung}/{answer}", f"{rung}/{answer} (0)"): 100 / seconds for answer in range(2)}
                race.record(setting, (temperature, rung), MeasuredBlock(100, seconds, rates))
        race.drop()
        if race.decided:
            return rung + 1
    return rungs


def test_off_and_possible_winners_are_admitted_dissimilar_shapes_first() -> None:
    predicted = {OFF: 1.0, chain(1): 1.5, chain(4): 1.96, chain(5): 2.0, chain(6): 1.95, chain(9): 1.9, tree(5): 1.94}
    race = race_of(predicted)
    assert race.admit(4) == [OFF, chain(5), tree(5), chain(9)]
    assert set(race_of(predicted).admit(99)) == set(predicted) - {chain(1)}


def test_a_setting_that_is_computed_otherwise_is_not_similar() -> None:
    other = Setting(tree=DraftTreeShape(num_steps=5, num_draft_tokens=6, draft=DraftServing(kv_dtype="fp8_e4m3")))
    drawn = Setting(tree=DraftTreeShape(num_steps=5, num_draft_tokens=6, verification="rejection"))
    race = race_of({OFF: 1.0, chain(5): 2.0, chain(6): 1.99, other: 1.98, drawn: 1.97})
    assert race.admit(4) == [OFF, chain(5), other, drawn]


def test_the_gain_of_another_way_to_verify_or_draft_is_that_of_its_best_shape_over_the_same_shape() -> None:
    def otherwise(steps: int, **how: Any) -> Setting:
        plain = chain(steps).tree
        assert plain is not None
        return Setting(tree=plain.model_copy(update=how))

    drawn, half = ({"verification": "rejection"}, {"draft": DraftServing(quantization="fp8")})
    true = {chain(2): 1.2, chain(5): 1.3, otherwise(2, **drawn): 1.5, otherwise(5, **drawn): 1.4,
            otherwise(7, **half): 1.1, OFF: 1.0}
    race = race_of(true)
    race.active = list(true)
    for setting, speed in true.items():
        for rung in range(6):
            race.record(setting, (0.0, rung), MeasuredBlock(100, 100 / speed, {
                (f"{rung}/{answer}", f"{rung}/{answer} (0)"): speed for answer in range(2)}))
    assert race.gains() == [
        "2/1/3/rejection was 1.25 times as fast as 2/1/3 (1.25 to 1.25).",
        "7/1/8/fp8 was 0.85 times as fast as 5/1/6 (0.85 to 0.85)."]
    race.blocks = {setting: dict(list(blocks.items())[:1]) for setting, blocks in race.blocks.items()}
    assert race.gains()[0].endswith("(too few blocks for an interval).")


def test_required_settings_are_measured_even_if_they_cannot_win() -> None:
    race = race_of({OFF: 1.0, chain(5): 0.4, chain(3, "ngram"): 1.5})
    assert race.admit(3, [chain(5)]) == [OFF, chain(5), chain(3, "ngram")]


def test_no_more_are_tried_than_trials_allow() -> None:
    race = race_of({OFF: 1.0} | {chain(steps): 2.0 for steps in range(1, 15)}, most_trials=5)
    run(race, dict.fromkeys(race.predictions, 1.0) | {chain(3): 1.01}, noise=0.02)
    assert len(race.blocks) == 5


def test_the_clearly_slower_drop_out_and_the_race_ends() -> None:
    true = {OFF: 1.0, chain(3): 1.7, chain(5): 2.0, tree(5): 1.8}
    race = race_of({OFF: 1.0, chain(3): 1.9, chain(5): 1.95, tree(5): 2.0})  # the prediction prefers the tree
    rungs = run(race, true, noise=0.01)
    assert rungs < 8
    assert race.leader() == chain(5)
    assert race.active == [OFF, chain(5)]
    assert race.speedup(chain(5)) == pytest.approx(2.0, rel=0.03)
    assert "of 5/1/6" in race.reasons[tree(5)]


def test_equally_fast_settings_end_the_race() -> None:
    race = race_of({OFF: 1.0, chain(5): 2.0, tree(5): 2.0})
    assert run(race, {OFF: 1.0, chain(5): 2.0, tree(5): 2.0}, noise=0.002, rungs=50) < 20


def test_off_wins_when_speculation_does_not_pay_or_pays_too_little_to_notice() -> None:
    for speed in (0.8, 1.0 + TIE / 2):
        race = race_of({OFF: 1.0, chain(3): speed})
        run(race, {OFF: 1.0, chain(3): speed})
        assert race.leader() == OFF


def test_where_no_load_pays_and_a_race_was_too_noisy_to_show_it_the_proof_decides_at_that_load() -> None:
    clear, noisy, unmeasured = (race_of({OFF: 1.0, chain(3): 1.1}) for _ in range(3))
    run(clear, {OFF: 1.0, chain(3): 0.8})
    run(noisy, {OFF: 1.0, chain(3): 0.9}, noise=0.5, seed=4)
    run(unmeasured, {OFF: 1.0, chain(3): 0.7}, rungs=1)  # too short for an interval
    assert {race.leader() for race in (clear, noisy, unmeasured)} == {OFF}
    assert chosen({1: clear, 4: clear}) == {1: OFF, 4: OFF}
    assert chosen({1: clear, 4: noisy}) == {1: OFF, 4: chain(3)}
    assert chosen({1: noisy, 4: unmeasured}) == {1: chain(3), 4: OFF}, "the best estimate alone: each load must pay"
    slow = race_of({OFF: 1.0, chain(3): 0.8})
    run(slow, {OFF: 1.0, chain(3): 0.9}, rungs=1)
    assert chosen({1: slow}) == {1: OFF}, "predicted and measured to be slower"
    pays = race_of({OFF: 1.0, chain(3): 1.9})
    run(pays, {OFF: 1.0, chain(3): 1.8})
    assert chosen({1: pays, 4: noisy}) == {1: chain(3), 4: OFF}


def test_a_prediction_that_was_too_high_lets_the_next_ones_in() -> None:
    predicted = {OFF: 1.0, chain(5): 2.0, chain(3, "ngram"): 1.5}
    race = race_of(predicted)
    assert race.admit(99) == [OFF, chain(5)]
    assert run(race, {OFF: 1.0, chain(5): 1.2, chain(3, "ngram"): 1.5}, noise=0.01, rungs=10) <= 10
    assert chain(3, "ngram") in race.blocks
    assert race.leader() == chain(3, "ngram")


def test_a_short_race_is_settled_by_prediction_and_a_long_one_by_measurement() -> None:
    predicted = {OFF: 1.0, chain(5): 2.0, chain(2): 1.94}
    true = {OFF: 1.0, chain(5): 1.94, chain(2): 2.0}
    short, long = race_of(predicted), race_of(predicted)
    run(short, true, rungs=1)
    run(long, true, noise=0.004, rungs=12)
    assert short.leader() == chain(5)
    assert long.leader() == chain(2)


def test_a_setting_that_changed_an_answer_does_not_win_over_a_lossless_one() -> None:
    race = race_of({OFF: 1.0, chain(5): 2.0, tree(5): 1.9})
    run(race, {OFF: 1.0, chain(5): 2.0, tree(5): 1.9}, rungs=1)
    race.changed_output = {chain(5)}
    assert race.leader() == tree(5)
    assert race.best_drafted("drafter") == tree(5)


def test_noise_of_a_tenth_costs_less_than_half_a_percent_on_average() -> None:
    """With right predictions: what the race adds must not make it worse than they are."""
    true = {OFF: 1.0} | {chain(steps): 2.0 - 0.04 * abs(steps - 5) for steps in range(1, 10)}
    reached = []
    for seed in range(20):
        race = race_of(true, most_trials=5)
        run(race, true, noise=0.1, seed=seed)
        reached.append(true[race.leader()] / 2.0)
    assert fmean(reached) >= 0.995
    assert min(reached) >= 0.95


def test_trials_and_budget_leave_room_for_a_baseline_and_a_leader() -> None:
    assert TuneSpec(trials_share=0.25).trials(48) == 12
    assert TuneSpec(trials_share=0.25).trials(6) == 4
    assert TuneSpec(trials_share=0.25).trials(2) == 2
    assert within_budget([3.0, 1.0, 1.0, 1.0], 5.0) == 3
    assert within_budget([30.0, 10.0, 1.0], 5.0) == 2


def test_lookup_that_is_predicted_best_is_measured_however_small_the_budget() -> None:
    race = race_of({OFF: 1.0, chain(3, "ngram"): 2.0, chain(5): 1.5, chain(4): 1.4})
    required = always_raced([chain(3, "ngram"), chain(5), chain(4), OFF])
    assert race.admit(1 + len(required), required) == [OFF, chain(3, "ngram"), chain(5)]
    assert always_raced([OFF, chain(5), chain(3, "ngram")]) == [chain(5)]


def test_a_setting_that_cannot_be_measured_is_not_admitted_again() -> None:
    race = race_of({OFF: 1.0, chain(5): 2.0, chain(1): 1.95})
    race.admit(2)
    race.withdraw(chain(5), "could not start: out of memory")
    assert race.admit(2, [chain(5)]) == [chain(1)]
    assert race.reasons == {chain(5): "could not start: out of memory"}


def test_a_setting_that_cannot_be_measured_uses_no_trial_even_after_its_first_blocks() -> None:
    race = race_of({OFF: 1.0, chain(5): 2.0, tree(5): 1.95}, most_trials=2)
    run(race, dict.fromkeys(race.predictions, 1.0), rungs=1)
    race.withdraw(chain(5), "its server ended 4 times")
    assert race.admit(9) == [tree(5)]
    assert chain(5) not in race.blocks


def test_a_setting_that_is_slower_on_every_rung_of_few_prompts_stays_since_other_prompts_may_differ() -> None:
    for prompts, stays in ((2, True), (16, False)):
        race = race_of({OFF: 1.0, chain(5): 2.0, tree(5): 1.95})
        race.admit(9)
        for rung in range(8):
            for setting, speed in ((OFF, 1.0), (chain(5), 2.0 + rung / 100), (tree(5), 1.5)):
                rates = {(str(number % prompts), str(number)): 100 * speed for number in (2 * rung, 2 * rung + 1)}
                race.record(setting, (0.0, rung), MeasuredBlock(100, 1.0 / speed, rates))
        assert race.drop() == ([] if stays else [tree(5)])
        assert (race.interval(tree(5), chain(5)) is None) == stays


def test_settings_that_replace_each_other_answer_all_blocks_at_once_with_off_before_and_after_them() -> None:
    blocks = [(0.0, rung) for rung in range(4)]
    order = turns([OFF, chain(1), chain(5)], blocks, 0, all_ready=False)
    assert [setting for setting, _ in order] == [OFF] * 2 + [chain(1)] * 4 + [chain(5)] * 4 + [OFF] * 2
    assert sorted(block for setting, block in order if setting == OFF) == blocks
    together = turns([OFF, chain(1)], blocks, 0, all_ready=True)
    assert together[:4] == [(OFF, blocks[0]), (chain(1), blocks[0]), (chain(1), blocks[1]), (OFF, blocks[1])]
