"""The form of a new job: a field for every value of the contract, with what the contract says of it."""

from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from markupsafe import Markup
from pydantic import BaseModel, ValidationError

from eyrie_api.contract.job import JobSpec
from eyrie_api.http.console.job_form import FormField, job_form
from eyrie_api.http.console.pages import with_code
from tests.api.samples import job_body


def _shown() -> Iterator[FormField]:
    form = job_form()
    for field in (*form.usual, *(one for section in form.sections for one in section.fields)):
        yield field
        yield from field.fields


FIELDS = {field.pointer: field for field in _shown()}


def contract_values(model: type[BaseModel], at: str = "") -> Iterator[str]:
    """Pointers of all values of a contract, from its Python types: of lists of models too, but a list in an item of
    another is one value."""
    for name, field in model.model_fields.items():
        pointer, kind = f"{at}/{name}", _without_none(field.annotation)
        if _is_model(kind):
            yield from contract_values(kind, pointer)
            continue
        yield pointer
        if get_origin(kind) is tuple and _is_model(get_args(kind)[0]) and "{i}" not in pointer:
            yield from contract_values(get_args(kind)[0], f"{pointer}/{{i}}")


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, UnionType):
        return kind
    kinds = [one for one in get_args(kind) if one is not type(None)]
    return kinds[0] if len(kinds) == 1 else kind


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def test_every_value_of_the_contract_has_one_field() -> None:
    shown = [field.pointer for field in _shown()]
    assert sorted(shown) == sorted(contract_values(JobSpec))


def test_every_field_has_a_help_text_and_each_choice_its_values() -> None:
    for field in FIELDS.values():
        assert field.help, field.pointer
        assert bool(field.options) == (field.kind == "choice"), field.pointer
    assert FIELDS["/engine/kind"].options == ('"embedded"', '"sglang"')
    assert FIELDS["/train/grad_checkpoint"].options == ("true", "false")


def test_what_must_be_given_is_among_the_usual_fields() -> None:
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate({"target": {}, "data": {"sources": [{}]}})
    missing = {"/" + "/".join("{i}" if isinstance(part, int) else str(part) for part in one["loc"])
               for one in refused.value.errors()}
    assert missing <= {one.pointer for one in FIELDS.values() if one.required}
    usual = [one for field in job_form().usual for one in (field, *field.fields)]
    assert missing <= {one.pointer for one in usual}


@pytest.mark.parametrize(("pointer", "default", "rule"), [
    ("/train/ttt_length", "7", "whole number; 1 to 16"),
    ("/train/step_decay", "0.8", "number; above 0; at most 1"),
    ("/tune/budget_s", "600.0", "seconds; above 0; at most 1,000,000"),
    ("/capture/max_bytes", "", "bytes; 65,536 to 1,152,921,504,606,846,976"),
    ("/tune/top_k", "1, 2, 4", "separated by commas; whole number; 1 to 64"),
    ("/sweep/families", "", "separated by commas; of eagle3, eagle1, mtp, medusa, hydra, standalone, dflash, dspark, "
                            "auto; 0 to 16 of them"),
    ("/sweep/rungs", "0.25, 0.5", "separated by commas; number; above 0; below 1; 0 to 8 of them; [] for none"),
    ("/labels", "", "JSON"),
    ("/name", "", "")])
def test_a_field_shows_its_default_its_unit_and_its_bounds(pointer: str, default: str, rule: str) -> None:
    assert (FIELDS[pointer].default, FIELDS[pointer].rule) == (default, rule)


def test_a_shown_default_is_the_value_of_a_document_without_the_field() -> None:
    spec = JobSpec.model_validate(job_body())
    for pointer, field in FIELDS.items():
        optional = "{i}" in pointer or pointer.startswith("/prove/hardware/")  # parts that a document need not have
        if field.kind in ("number", "text", "choice") and field.default and not optional:
            value: Any = spec
            for key in pointer.split("/")[1:]:  # of the model: JSON leaves out fields that were added later
                value = value[int(key)] if isinstance(value, tuple) else getattr(value, key)
            assert field.default.strip('"') == str(value).replace("True", "true").replace("False", "false"), pointer


def test_the_default_beside_other_values_is_said_where_it_differs() -> None:
    temperature = FIELDS["/regenerate/sampling/temperature"]
    assert "default 1.0 where the document has another sampling value" in temperature.rule


def test_backticks_are_code_and_text_stays_text() -> None:
    assert with_code("`a<b>` & c") == Markup("<code>a&lt;b&gt;</code> &amp; c")
