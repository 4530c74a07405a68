"""What counts as a difference between what is wanted and what stands."""

from typing import Any

import pytest

from eyrie_operator.cluster.objects import difference, is_applied, with_digest

MANIFEST = {"kind": "Service", "metadata": {"name": "a", "annotations": {"note": "x"}}, "spec": {"ports": [1, 2]}}


@pytest.mark.parametrize(("wanted", "found"), [
    ({"a": 1}, {"a": 1, "added": "by the server"}),
    ({"cpu": "1000m"}, {"cpu": "1"}),
    ({"memory": "1Gi"}, {"memory": "1024Mi"}),
    ({"readOnly": False, "labels": {}, "note": ""}, {}),
    ([{"name": "a", "value": 1}], [{"name": "theirs"}, {"name": "a", "value": 1}]),
    ({"command": ["a", "b"]}, {"command": ["a", "b"]}),
])
def test_what_the_server_and_others_add_is_no_difference(wanted: Any, found: Any) -> None:
    assert difference(wanted, found) is None


@pytest.mark.parametrize(("wanted", "found", "where"), [
    ({"spec": {"replicas": 1}}, {"spec": {"replicas": 2}}, ".spec.replicas"),
    ({"spec": {"replicas": 1}}, {}, ".spec.replicas"),
    ({"cpu": "1000m"}, {"cpu": "2"}, ".cpu"),
    ({"command": ["a", "b"]}, {"command": ["a", "b", "c"]}, ".command"),
    ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "2"}]}, ".env[A].value"),
    ({"rules": [{"weight": 90}, {"weight": 10}]}, {"rules": [{"weight": 90}, {"weight": 20}]}, ".rules[1].weight"),
])
def test_a_field_of_ours_that_is_otherwise_is_one_and_its_place_is_named(wanted: Any, found: Any, where: str) -> None:
    assert difference(wanted, found) == where


def test_wanting_less_than_before_shows_in_the_digest_alone() -> None:
    standing = with_digest(MANIFEST)
    fewer = with_digest({**MANIFEST, "spec": {}})
    assert is_applied(with_digest(MANIFEST), standing)
    assert not is_applied(fewer, standing)
    assert difference(fewer["spec"], standing["spec"]) is None
    assert standing["metadata"]["annotations"]["note"] == "x"
