"""Digests of values whose class has got fields since: a job that runs while Eyrie is upgraded keeps its stages."""

import hashlib
import json
from typing import Any

import pytest

from eyrie_api.artifacts import digest_model, is_digest_of
from eyrie_api.v1alpha1.data import DataSource, DataSpec
from eyrie_api.v1alpha1.model import Frozen, later
from eyrie_api.v1alpha1.regeneration import RegenerateSpec
from eyrie_api.v1alpha1.stages import RegenerateStage
from eyrie_api.v1alpha1.targets import TargetSpec

STAGE = RegenerateStage(job_id="job", target=TargetSpec(model="m"), data=DataSpec(sources=(DataSource(path="a"),)),
                        regenerate=RegenerateSpec())


class Inner(Frozen):
    """As an earlier version has it."""

    size: int = 1


class Whole(Frozen):
    """As an earlier version has it."""

    inner: tuple[Inner, ...]


class GrownInner(Frozen):
    """As this version has it."""

    size: int = 1
    first: int | None = later(None, 1)
    second: tuple[str, ...] = later((), 2)


class Grown(Frozen):
    """As this version has it."""

    inner: tuple[GrownInner, ...]
    named: dict[str, int] = later({}, 2)


def digest_of(data: Any) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def test_a_field_that_was_added_changes_neither_json_nor_digest_until_it_is_used() -> None:
    before, after = Whole(inner=(Inner(), Inner(size=3))), Grown(inner=(GrownInner(), GrownInner(size=3)))
    assert after.model_dump_json() == before.model_dump_json()
    assert digest_model(after) == digest_model(before)
    assert Whole.model_validate_json(after.model_dump_json()) == before
    assert digest_model(Grown(inner=(GrownInner(first=0),))) != digest_model(Whole(inner=(Inner(),)))


@pytest.mark.parametrize(("extra", "inner"), [
    ({}, {}), ({}, {"first": None}), ({"named": {}}, {"first": None, "second": []})])
def test_a_digest_of_a_version_that_wrote_every_field_it_had_is_recognised(
        extra: dict[str, Any], inner: dict[str, Any]) -> None:
    digest = digest_of({"inner": [{"size": 3, **inner}], **extra})
    assert is_digest_of(digest, Grown(inner=(GrownInner(size=3),)))
    assert not is_digest_of(digest, Grown(inner=(GrownInner(size=4),)))
    assert not is_digest_of(digest, Grown(inner=(GrownInner(size=3, second=("x",)),)))


def test_a_stage_that_an_earlier_version_finished_is_that_of_its_spec_today() -> None:
    full = json.loads(STAGE.model_dump_json())
    assert not {"reuse", "answered", "mix", "name"} & {*full, *full["data"], *full["data"]["sources"][0]}
    assert is_digest_of(digest_of(full), STAGE)
    full["data"] |= {"answered": False, "mix": None}
    full["data"]["sources"][0]["name"] = None
    assert is_digest_of(digest_of(full), STAGE)
    full["reuse"] = []
    assert is_digest_of(digest_of(full), STAGE)
    assert not is_digest_of(digest_of(full | {"reuse": ["x"]}), STAGE)
