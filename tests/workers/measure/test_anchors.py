"""Costs of a round from anchor settings, timed from outside the engine."""

import pytest

from eyrie_api.contract.engine import DraftServing, DraftTreeShape
from eyrie_api.contract.tuning import OFF, Setting, TuneSpec
from eyrie_workers.measure.benchmark.blocks import BlockRun
from eyrie_workers.measure.tuner.anchors import (
    RoundCosts,
    anchor_of,
    anchors,
    draft_times,
    fit,
    replay_of_anchor,
    round_seconds,
    step_times,
)
from eyrie_workers.measure.tuner.operating import possible_settings
from eyrie_workers.measure.tuner.predict import Costs

SETTINGS = possible_settings(TuneSpec(num_steps=(1, 3, 6), top_k=(1, 2, 4), num_draft_tokens=(4, 8, 16)))
TRUE = RoundCosts(undrafted_s=0.020, per_node_s=0.001, fixed_s=0.003, per_step_s=0.002, per_branch_s=0.0004,
                  lookup_s=0.0005)


def test_the_anchors_are_off_both_ends_of_the_chains_the_largest_tree_and_the_deepest_lookup() -> None:
    assert [one.label() for one in anchors(SETTINGS)] == ["off", "1/1/2", "6/1/7", "6/4/16", "ngram 6/1/7"]
    assert [one.label() for one in anchors(SETTINGS[:2])] == ["off", "1/1/2"]


def test_the_anchors_draft_whole_blocks_in_one_way() -> None:
    for names, drafts in ((["off", "1/1/2", "6/1/7", "6/2/8"], ({"step_rates": ()}, {}, {"kv_dtype": "fp8_e4m3"})),
                          (["off", "1/1/2/triton", "6/1/7/triton", "6/2/8/triton"],
                           ({"attention_backend": "triton", "step_rates": ()},))):
        given = possible_settings(TuneSpec(
            num_steps=(1, 3, 6), top_k=(1, 2), num_draft_tokens=(8,), verifications=("target", "rejection"),
            drafts=tuple(DraftServing.model_validate(draft) for draft in drafts), ngram=False))
        assert [one.label() for one in anchors(given)] == names


def _predicted(found: RoundCosts, setting: Setting) -> float:
    costs = Costs(step_times(found, SETTINGS, 2, 0.0, 10), draft_times(found, SETTINGS, 2, 0.0, 10), {"off": 0.0})
    assert setting.tree is not None
    return (costs.verify_s(2, 0.0, setting.tree.num_draft_tokens, setting.tree.top_k > 1)
            + costs.draft_s(2, 0.0, setting))


def test_costs_are_recovered_from_exact_times_of_all_settings() -> None:
    found = fit(TRUE.undrafted_s, [(one, TRUE.round_s(one)) for one in SETTINGS if one != OFF])
    for name in ("per_node_s", "fixed_s", "per_step_s", "per_branch_s", "lookup_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    for setting in SETTINGS[1:]:
        assert _predicted(found, setting) == pytest.approx(TRUE.round_s(setting), rel=1e-6)


def test_from_the_anchors_chains_are_predicted_exactly_and_no_tree_is_off_by_much() -> None:
    found = fit(TRUE.undrafted_s, [(one, TRUE.round_s(one)) for one in anchors(SETTINGS) if one != OFF])
    for setting in anchors(SETTINGS)[1:]:
        assert _predicted(found, setting) == pytest.approx(TRUE.round_s(setting), rel=1e-6)
    for setting in SETTINGS[1:]:
        exact = setting.method == "drafter" and setting.tree is not None and setting.tree.top_k == 1
        assert _predicted(found, setting) == pytest.approx(TRUE.round_s(setting), rel=1e-6 if exact else 0.15)


def test_a_tree_as_deep_and_as_large_as_a_chain_costs_more_where_the_wide_pass_was_timed_slower() -> None:
    chain, tree, smaller = (Setting(tree=DraftTreeShape(num_steps=steps, top_k=top_k, num_draft_tokens=8))
                            for steps, top_k in ((7, 1), (7, 4), (3, 4)))
    found = fit(0.020, [(chain, 0.030), (tree, 0.042)])
    assert found.round_s(chain) == pytest.approx(0.030)
    assert found.round_s(tree) == pytest.approx(0.042)
    assert 0.022 < found.round_s(smaller) < 0.035


def test_noise_gives_no_negative_cost() -> None:
    # The deeper chain was timed faster than the shallower one, and both faster than no drafting.
    chain, deeper = (Setting(tree=DraftTreeShape(num_steps=n, top_k=1, num_draft_tokens=n + 1)) for n in (1, 6))
    found = fit(0.020, [(chain, 0.0199), (deeper, 0.0190)])
    assert found == RoundCosts(0.020, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_a_rounds_time_leaves_out_the_prefills_and_counts_the_rows_of_a_round_once() -> None:
    run = BlockRun(concurrency=4, temperature=0.0, rung=0, variant="2/1/3", seconds=2.0, tokens=90,
                   accepted_histogram=(10, 20, 10), answers={f"p{n}": (1, 2) for n in range(8)}, whole=())
    assert round_seconds(run, 0.05) == pytest.approx((2.0 - 8 * 0.05) * 4 / 40)
    with pytest.raises(ValueError, match="no round"):
        round_seconds(run.model_copy(update={"accepted_histogram": (0,)}), 0.05)


def test_without_a_reference_implementation_shallower_settings_accept_what_the_deepest_anchor_accepted() -> None:
    deep, shallow = (Setting(tree=DraftTreeShape(num_steps=n, top_k=1, num_draft_tokens=n + 1)) for n in (3, 1))
    run = BlockRun(concurrency=1, temperature=0.0, rung=0, variant=deep.label(), seconds=1.0, tokens=222,
                   accepted_histogram=(40, 30, 20, 10), answers={"p": (1,), "q": (1,)}, whole=("p", "q"))
    assert anchor_of(shallow, {OFF: run, deep: run}) is run
    assert anchor_of(Setting(method="ngram", tree=deep.tree), {OFF: run, deep: run}) is None
    # 100 rounds of tau 2 and one token per prefill: the anchor itself is reproduced.
    assert replay_of_anchor(deep, run, 2, 202).histogram == (40, 30, 20, 10)
    replayed = replay_of_anchor(shallow, run, 2, 202)
    assert replayed.tau == pytest.approx(1.6)  # 60 of 100 rounds accepted at least one
    assert replayed.passes == {2: 125}
