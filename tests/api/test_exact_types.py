"""The contract takes values of the types that its JSON schema states, from JSON and from Python."""

import importlib
import json
import pkgutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import eyrie_api.contract
from eyrie_api import yaml_text
from eyrie_api.contract.job import JobSpec
from eyrie_api.contract.model import Frozen
from tests.api.samples import job_body


def _contract() -> list[type[Frozen]]:
    for module in pkgutil.iter_modules(eyrie_api.contract.__path__):
        importlib.import_module(f"eyrie_api.contract.{module.name}")

    def below(model: type[Frozen]) -> Iterator[type[Frozen]]:
        for one in model.__subclasses__():
            yield one
            yield from below(one)

    return sorted((one for one in set(below(Frozen)) if one.__module__.startswith("eyrie_api.contract")),
                  key=lambda one: one.__name__)


_TRIED = {"integer": (True, "5"), "number": (True, "0.5"), "boolean": (0, "true")}


def _given(model: type[Frozen]) -> Iterator[tuple[str, Any]]:
    """Fields with a value of another type than their schema's, of fields of one type."""
    for name, schema in model.model_json_schema().get("properties", {}).items():
        for value in _TRIED.get(schema.get("type", ""), ()):
            yield name, value
        types = [one.get("type") for one in schema.get("anyOf", ())]
        if len(types) == 2 and types[1] == "null":
            yield from ((name, value) for value in _TRIED.get(types[0], ()))


@pytest.mark.parametrize("model", _contract(), ids=lambda one: one.__name__)
def test_no_number_is_made_of_a_boolean_or_a_text_and_no_boolean_of_a_number(model: type[Frozen]) -> None:
    for name, value in _given(model):
        for validate, document in ((model.model_validate, {name: value}),
                                   (model.model_validate_json, json.dumps({name: value}))):
            with pytest.raises(ValidationError) as refused:
                validate(document)  # type: ignore[operator]
            assert any(one["loc"][0] == name and one["type"].endswith(("_type", "literal_error"))
                       for one in refused.value.errors()), (name, value, refused.value.errors())


def test_a_whole_number_with_a_point_is_an_integer_and_numbers_of_numpy_are_numbers() -> None:
    body = job_body(tune={"num_steps": [3.0], "budget_s": 5})
    assert JobSpec.model_validate_json(json.dumps(body)).tune.num_steps == (3,)
    body["tune"] = {"num_steps": [np.int64(3)], "budget_s": np.float32(5)}
    assert JobSpec.model_validate(body).tune.budget_s == 5.0


def test_keys_of_a_json_object_may_be_numbers_by_their_type() -> None:
    class Counts(Frozen):
        by_length: dict[int, int]

    assert Counts.model_validate_json('{"by_length": {"3": 7}}').by_length == {3: 7}


@pytest.mark.parametrize(("text", "value"), [
    ("5e-4", 5e-4), ("1e+06", 1e6), ("-2E3", -2e3), ("1.5e3", 1.5e3), ("0.5", 0.5), ("7", 7), ("'5e-4'", "5e-4"),
    ("12e", "12e"), ("1e5x", "1e5x"), ("2024-01-01e", "2024-01-01e"), ("true", True)])
def test_yaml_has_the_numbers_of_json(text: str, value: object) -> None:
    found = yaml_text.load(f"field: {text}")["field"]
    assert (found, type(found)) == (value, type(value))
