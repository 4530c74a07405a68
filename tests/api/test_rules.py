"""The rule that a wrong value breaks is in our words, whatever model of the contract finds it."""

import importlib
import json
import pkgutil
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from eyrie_api import contract
from eyrie_api.cli.spec import validate
from eyrie_api.contract.model import Frozen
from eyrie_api.contract.rules import first_problem, rule_of
from eyrie_api.errors import InvalidInput
from tests.api.samples import job_body

for module in pkgutil.iter_modules(contract.__path__):
    importlib.import_module(f"{contract.__name__}.{module.name}")


def models_of_the_contract(above: type[BaseModel] = Frozen) -> Iterator[type[BaseModel]]:
    for model in above.__subclasses__():
        if model.__module__.startswith(contract.__name__):
            yield model
        yield from models_of_the_contract(model)


MODELS = sorted(set(models_of_the_contract()), key=lambda model: (model.__module__, model.__qualname__))
SIMPLE: tuple[Any, ...] = (None, True, -1, 1.5, float("inf"), 10**400, "", "x" * 5000, "no date", {}, [], {"kind": "x"})
WRONG = (*SIMPLE, *([one] for one in SIMPLE), *({"name": one} for one in SIMPLE), [1] * 5000)
OURS = ("value_error", "assertion_error")
"""Types of errors whose message is written here, in a validator of a model."""


def errors_of(model: type[BaseModel], document: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for check in (lambda: model.model_validate(document), lambda: model.model_validate_json(json.dumps(document))):
        try:
            check()
        except ValidationError as error:
            # Of equal errors one: a list of 5000 wrong values has 5000.
            found += {(entry["type"], entry["msg"]): entry for entry in error.errors(include_url=False)}.values()
    return found


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__qualname__)
def test_no_message_of_pydantic_remains_for_a_wrong_value_of_any_field(model: type[BaseModel]) -> None:
    documents = [{}, {"no_such_field": 1}, *({field.alias or name: value} for name, field in model.model_fields.items()
                                             for value in WRONG)]
    for document in documents:
        for error in errors_of(model, document):
            assert error["type"] in OURS or rule_of(error) != error["msg"], f"{error['type']}: {error['msg']}"
            assert "Input should" not in rule_of(error)
            assert "{" not in rule_of(error).replace(str(error.get("ctx", {}).get("pattern", "")), "")


def test_the_contract_has_models() -> None:
    assert len(MODELS) > 100


class _Cat(BaseModel):
    kind: Literal["cat"]


class _Dog(BaseModel):
    kind: Literal["dog"]


@pytest.mark.parametrize(("kind", "value", "words"), [
    (tuple[int, ...], 1, "must be a list"), (list[str], {}, "must be a list"), (frozenset[str], 1, "must be a list"),
    (dict[str, int], [], "must be an object with named values"), (_Cat, 1, "must be an object with named values"),
    (_Cat, {}, "kind: is missing"), (int, "x", "must be a whole number"), (int, 1.5, "must be a whole number"),
    (float, "x", "must be a number"), (bool, 7, "must be true or false"), (str, 7, "must be text (in YAML, quote it)"),
    (Annotated[str, Field(min_length=1)], "", "must not be empty"),
    (Annotated[str, Field(max_length=1)], "ab", "must have at most 1 character"),
    (Annotated[list[int], Field(min_length=2)], [1], "must have at least 2 entries"),
    (Annotated[int, Field(ge=3)], 2, "must be greater than or equal to 3"),
    (Literal["a", "b"], "c", "must be 'a' or 'b'"),
    (Annotated[_Cat | _Dog, Field(discriminator="kind")], {"kind": "cow"},
     "kind is 'cow', and must be one of 'cat', 'dog'"),
    (Annotated[_Cat | _Dog, Field(discriminator="kind")], {}, "kind is missing, which says what kind of object it is")])
def test_a_rule_is_said_in_plain_words(kind: Any, value: Any, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(value)
    assert first_problem(refused.value) == words


def test_what_a_validator_of_ours_says_is_kept_as_it_is() -> None:
    with pytest.raises(InvalidInput, match=r"^engine: engine\.tp_size is 2 and engine\.kind is 'embedded'"):
        validate(job_body(engine={"kind": "embedded", "tp_size": 2}))


def test_a_job_file_with_several_mistakes_names_each_with_its_rule() -> None:
    with pytest.raises(InvalidInput) as refused:
        validate(job_body(benchmark={"suites": 3}, train={"epoks": 1}))
    assert refused.value.message == "train.epoks: there is no such field; benchmark.suites: must be a list (got 3)"
    assert refused.value.hint == "did you mean 'epochs'?"
