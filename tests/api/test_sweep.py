"""The grid of a sweep: names, order, and what is refused."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.errors import InvalidInput
from eyrie_api.sweep import expand
from tests.api.samples import job_spec

LABEL = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")


def sweep(*axes: tuple[str, list[Any]], **more: Any) -> Any:
    return job_spec(sweep={"axes": [{"field": field, "values": values} for field, values in axes], **more})


def test_no_axis_means_the_job_itself_as_the_only_candidate() -> None:
    spec = job_spec()
    (only,) = expand(spec)
    assert (only.name, only.spec) == ("base", spec)


def test_the_grid_varies_the_last_axis_fastest_and_puts_the_values_in() -> None:
    found = expand(sweep(("train.learning_rate", [0.001, 0.0003]), ("drafter.intermediate_size", [64, 128])))
    assert [one.name for one in found] == [
        "c1-lr-0p001-ffn-64", "c2-lr-0p001-ffn-128", "c3-lr-0p0003-ffn-64", "c4-lr-0p0003-ffn-128"]
    assert [(one.train.learning_rate, one.drafter.intermediate_size) for one in found] == [
        (0.001, 64), (0.001, 128), (0.0003, 64), (0.0003, 128)]


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
def test_an_axis_that_cannot_be_trained_is_refused_by_name_with_the_mend(axes: list[Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        expand(sweep(*axes))
    assert caught.value.mend


def test_a_grid_over_the_limit_is_refused_before_it_is_built() -> None:
    axes = [("train.seed", list(range(64))), ("train.learning_rate", [number / 1000 for number in range(1, 65)])]
    with pytest.raises(InvalidInput, match="4096 candidates, more than"):
        expand(sweep(*axes))
