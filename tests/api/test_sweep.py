"""The candidates of a sweep: names, order, draws, and what is refused."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from eyrie_api.errors import InvalidInput
from eyrie_api.planning.sweep import axes_words, expand
from tests.api.samples import job_spec

LABEL = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")


def sweep(*axes: tuple[str, list[Any]], **more: Any) -> Any:
    return job_spec(sweep={"axes": [{"field": field, "values": values} for field, values in axes], **more})


def test_no_axis_means_the_job_itself_as_the_only_candidate() -> None:
    spec = job_spec()
    (only,) = expand(spec)
    assert (only.name, only.in_job(spec)) == ("base", spec)


def test_the_grid_varies_the_last_axis_fastest_and_puts_the_values_in() -> None:
    found = expand(sweep(("train.learning_rate", [0.001, 0.0003]), ("drafter.intermediate_size", [64, 128])))
    assert [one.name for one in found] == [
        "c1-lr-0p001-ffn-64", "c2-lr-0p001-ffn-128", "c3-lr-0p0003-ffn-64", "c4-lr-0p0003-ffn-128"]
    assert [(one.train.learning_rate, one.drafter.intermediate_size) for one in found] == [
        (0.001, 64), (0.001, 128), (0.0003, 64), (0.0003, 128)]


def test_the_values_of_a_candidate_are_known_by_its_name_however_little_of_them_the_name_holds() -> None:
    mixes = [{"think": 2, "instruct": 1, "support": 1}, {"think": 1, "instruct": 1, "support": 2}]
    spec = job_spec(
        data={"sources": [{"path": f"{name}.jsonl", "name": name} for name in mixes[0]]},
        sweep={"families": ["eagle3", "eagle1"], "axes": [{"field": "data.mix", "values": mixes}, {
            "field": "drafter.intermediate_size", "values": [64, 128]}]})
    found = expand(spec)
    assert [one.axes for one in found] == [
        {"data.mix": one.mix, "drafter.intermediate_size": one.drafter.intermediate_size} for one in found]
    assert axes_words(found[1].axes) == "mix think 2, instruct 1, support 1; intermediate_size 128"


def test_the_values_of_draws_are_those_of_their_candidates() -> None:
    rates = {"field": "train.learning_rate", "low": 1e-4, "high": 1e-2, "log": True}
    spec = job_spec(sweep={"random": 3, "axes": [rates]})
    assert [one.axes for one in expand(spec)] \
        == [{"train.learning_rate": one.train.learning_rate} for one in expand(spec)]
    assert [one.axes for one in expand(job_spec())] == [{}]


@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=16, unique=True),
       st.lists(st.sampled_from(["cosine", "wsd", "constant"]), min_size=1, max_size=1))
def test_names_are_unique_dns_labels_with_room_for_a_checkpoint_suffix(rates: list[float], kinds: list[str]) -> None:
    names = [one.name for one in expand(sweep(("train.learning_rate", rates), ("train.schedule", kinds)))]
    assert len(set(names)) == len(rates)
    assert all(LABEL.match(f"{name}-step-100000") for name in names)


@pytest.mark.parametrize(("axes", "says"), [
    ([("train.learning_rat", [1])], "does not exist"),
    ([("train.learning_rate", [0.1]), ("train.learning_rate", [0.2])], "more than once"),
    ([("train.learning_rate", [0.1, 0.1])], "twice"),
    ([("train.learning_rate", ["fast"])], "train.learning_rate"),
    ([("train.learning_rate", [7])], "less than or equal to 1"),
    ([("train.ttt_length", [1])], "far beyond"),
])
def test_an_axis_that_cannot_be_trained_is_refused_by_name_with_the_hint(axes: list[Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        expand(sweep(*axes))
    assert caught.value.hint


def test_a_grid_over_the_limit_is_refused_before_it_is_built() -> None:
    rates = [number / 1000 for number in range(1, 65)]
    axes: list[tuple[str, list[Any]]] = [("train.seed", list(range(64))), ("train.learning_rate", rates)]
    with pytest.raises(InvalidInput, match="4096 candidates, more than"):
        expand(sweep(*axes))


RANGES: list[dict[str, Any]] = [
    {"field": "train.learning_rate", "low": 1e-4, "high": 1e-2, "log": True},
    {"field": "drafter.intermediate_size", "low": 64, "high": 66},
    {"field": "train.loss", "values": ["kl", "tv", "lk_hybrid"]}]


def draws(num: int, axes: list[dict[str, Any]] | None = None, **more: Any) -> Any:
    return job_spec(sweep={"axes": RANGES if axes is None else axes, "random": num} | more)


@given(st.integers(0, 2**31 - 1))
def test_draws_lie_in_their_ranges_differ_and_are_named_uniquely(seed: int) -> None:
    found = expand(draws(16, seed=seed))
    assert len({one.name for one in found}) == 16
    assert all(LABEL.match(f"{one.name}-step-100000") for one in found)
    points = {(one.train.learning_rate, one.drafter.intermediate_size, one.train.loss) for one in found}
    assert len(points) == 16
    for rate, width, loss in points:
        assert rate is not None
        assert 1e-4 <= rate <= 1e-2
        assert width in (64, 65, 66)
        assert loss in ("kl", "tv", "lk_hybrid")


def test_the_same_seed_draws_the_same_and_more_draws_keep_the_ones_before() -> None:
    few, many = expand(draws(4)), expand(draws(12))
    assert expand(draws(4)) == few
    assert [one.train for one in many[:4]] == [one.train for one in few]
    assert [one.train for one in expand(draws(4, seed=1))] != [one.train for one in few]
    # Another axis changes nothing of those that were there.
    more = expand(draws(4, [*RANGES, {"field": "train.beta2", "low": 0.9, "high": 0.99}]))
    assert [one.train.learning_rate for one in more] == [one.train.learning_rate for one in few]


def test_a_logarithmic_range_is_drawn_as_often_in_each_decade() -> None:
    axis = {"field": "train.learning_rate", "low": 1e-4, "high": 1e-2, "log": True}
    rates = [one.train.learning_rate or 0.0 for one in expand(draws(256, [axis], max_candidates=256))]
    assert 96 <= sum(rate < 1e-3 for rate in rates) <= 160  # fixed seed; 128 +- 4 standard deviations


def test_every_family_is_trained_at_the_same_draws() -> None:
    found = expand(draws(3, families=["eagle3", "medusa"]))
    assert [one.drafter.family for one in found] == ["eagle3"] * 3 + ["medusa"] * 3
    assert [one.train for one in found[:3]] == [one.train for one in found[3:]]
    assert found[3].name.startswith("medusa-c1-lr-")


@pytest.mark.parametrize(("axes", "num", "says"), [
    ([{"field": "train.loss", "values": ["kl", "tv"]}], 3, "2 different points"),
    ([{"field": "train.loss", "low": 1, "high": 2}], 2, "takes no numbers"),
    ([{"field": "train.ttt_length", "low": 5.5, "high": 7}], 2, "whole numbers"),
    ([{"field": "train.beta1", "low": 0.5, "high": 1.5}], 16, "less than 1"),
    (RANGES, 17, "more than sweep.max_candidates"),
])
def test_draws_that_cannot_be_made_are_refused_with_the_hint(axes: list[Any], num: int, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        expand(draws(num, axes))
    assert caught.value.hint


@pytest.mark.parametrize(("sweep", "says"), [
    ({"axes": RANGES}, "is a range, which has no grid points"),
    ({"random": 4}, "no axis to sample from"),
    ({"axes": [{"field": "train.seed"}]}, "needs values, or low and high"),
    ({"axes": [{"field": "train.seed", "values": [1], "low": 1, "high": 2}]}, "not both"),
    ({"axes": [{"field": "train.seed", "low": 2, "high": 2}], "random": 1}, "are not a range"),
    ({"axes": [{"field": "train.seed", "low": 2}], "random": 1}, "are not a range"),
    ({"axes": [{"field": "train.seed", "low": 0, "high": 2, "log": True}], "random": 1}, "no logarithm"),
    ({"axes": [{"field": "train.seed", "values": [1], "log": True}]}, "omit log"),
    ({"rungs": [0.5, 0.25]}, "must ascend"),
    ({"rungs": [1.0]}, "less than 1"),
])
def test_a_sweep_that_contradicts_itself_is_refused_where_it_is_written(sweep: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        job_spec(sweep=sweep)


def test_layers_are_an_axis_of_their_own() -> None:
    found = expand(sweep(("drafter.aux_layers", [[1, 2, 3], [2, 4]])))
    assert [(one.name, one.drafter.aux_layers) for one in found] == [
        ("c1-aux-1-2-3", (1, 2, 3)), ("c2-aux-2-4", (2, 4))]


@pytest.mark.parametrize(("sections", "says"), [
    ({"drafter": {"family": "medusa"}}, "drafter.family names 'medusa'"),
    ({"sweep": {"families": ["eagle3", "hydra"]}}, "sweep.families names 'hydra'"),
    ({"benchmark": {"tree": {"num_steps": 3, "top_k": 2, "num_draft_tokens": 8, "static": True}}},
     "benchmark.tree.static"),
])
def test_what_sglang_cannot_serve_is_refused_at_the_boundary_with_the_hint(
        sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says) as caught:
        job_spec(engine="sglang", **sections)
    assert "embedded" in str(caught.value)
    assert job_spec(**sections)


def test_one_program_for_all_candidates_and_a_trainjob_for_each_contradict_one_another() -> None:
    with pytest.raises(ValidationError, match=r"sweep\.shared_passes is 'always'.*trainjob"):
        job_spec(sweep={"shared_passes": "always"}, placement={"train_launcher": "trainjob"})


def test_a_variant_of_one_family_is_refused_where_others_are_trained() -> None:
    with pytest.raises(ValidationError, match=r"drafter.fc_norm is a variant of eagle3, and 'medusa' is to be trained"):
        job_spec(drafter={"fc_norm": True}, sweep={"families": ["eagle3", "medusa"]})
    assert job_spec(drafter={"fc_norm": True}, sweep={"families": ["eagle3"]}).drafter.fc_norm
