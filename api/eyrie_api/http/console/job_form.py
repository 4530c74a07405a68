"""The page of a new job: a form of its document, whose fields are made from the document's JSON schema.

One field for each value of the contract: a section of the document is flattened to its values, a list of objects has
the fields of one item, which script repeats, and what has no fixed fields (a mapping, a list of anything) is one field
of JSON. A pointer (RFC 6901) names a field, here as in the errors of the API; `{i}` in it is the number of an item.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from eyrie_api.contract.job import JobSpec
from eyrie_api.http.console import pages
from eyrie_api.http.control import Control, RequestControl

router = APIRouter(tags=["console"], include_in_schema=False)

_FIRST_JOB = {"name": "first", "target": {"model": "quickstart"}, "data": {"sources": [{"path": "quickstart"}]},
              "serve": {"endpoint": "default"}}
"""The shipped target and data: it needs nothing else."""
USUAL = ("/name", "/target/model", "/data/sources", "/engine/kind", "/drafter/family", "/serve/enabled",
         "/serve/endpoint")
"""What most jobs set. The form begins with these; all others are in sections that are closed at first."""

ITEM = "{i}"
_UNITS = {"_s": "seconds", "_days": "days", "_bytes": "bytes"}
_LONG = 4096
"""Texts that may be longer than this get several lines."""
_ALONE = "x-default-beside-others"
_EMPTY: tuple[Any, ...] = (None, "", [], {})

Schema = Mapping[str, Any]
Kind = Literal["text", "lines", "number", "choice", "list", "json", "items"]


@dataclass(frozen=True)
class FormField:
    """One value of the document."""

    pointer: str
    """Where it is in the document."""
    kind: Kind
    """`lines` is a text of several lines, `list` a list of numbers or words, `items` a list of objects."""
    help: str
    """The field's docstring."""
    rule: str
    """Unit and bounds."""
    default: str
    """The default as it would be typed; empty for a field that must be given or is not set by default."""
    required: bool
    num_lines: int = 1
    """Height of the field."""
    options: tuple[str, ...] = ()
    """JSON of the values to choose from."""
    numeric: bool = False
    """Whether the items of a list are numbers."""
    fields: tuple["FormField", ...] = ()
    """Of one item of a list of objects."""

    @property
    def label(self) -> str:
        """The dotted name, as in help texts and messages."""
        return self.pointer[1:].replace("/", ".")

    @property
    def sample(self) -> str:
        """The default where it fits into one line."""
        return self.default if len(self.default) <= 60 else ""


@dataclass(frozen=True)
class FormSection:
    """One section of the document, without its usual fields."""

    name: str
    help: str
    fields: tuple[FormField, ...]


@dataclass(frozen=True)
class JobForm:
    usual: tuple[FormField, ...]
    sections: tuple[FormSection, ...]


@cache
def job_form() -> JobForm:
    """The form of the job document of this version."""
    schema = JobSpec.model_json_schema()
    definitions = schema["$defs"]
    sections = {name: tuple(_fields(f"/{name}", part, definitions, name in schema["required"]))
                for name, part in schema["properties"].items()}
    known = {field.pointer: field for fields in sections.values() for field in fields}
    return JobForm(usual=tuple(known[pointer] for pointer in USUAL), sections=tuple(
        FormSection(name, _resolved(schema["properties"][name], definitions)["description"], rest)
        for name, fields in sections.items()
        if (rest := tuple(field for field in fields if field.pointer not in USUAL))))


@router.get("/console/new", response_class=HTMLResponse)
def new_job(control: RequestControl, request: Request) -> Response:
    """A document to begin with, as a form and as JSON, and what the server says of it while it is written."""
    return _job_form(control, request, None, _FIRST_JOB)


@router.get("/console/jobs/{job_id}/again", response_class=HTMLResponse)
def again(job_id: str, control: RequestControl, request: Request) -> Response:
    """The same with the document of a job, as far as it differs from the defaults: jobs are stored with all of them."""
    spec = control.jobs.get(job_id).spec
    return _job_form(control, request, spec.name or job_id, spec.model_dump(mode="json", exclude_defaults=True))


def _job_form(control: Control, request: Request, source: str | None, document: Mapping[str, Any]) -> Response:
    principal = control.scope.principal
    # In which project is known with the request that starts the job: here, whether there is one.
    may_start = principal is None or principal.model_copy(update={"scopes": None}).readable("jobs:write") != frozenset()
    return pages.render_page("new_job.html", control, request, source=source, form=job_form(), may_start=may_start,
                             document=json.dumps(document, indent=2))


def _fields(pointer: str, unresolved: Schema, definitions: Schema, required: bool, in_item: bool = False
            ) -> Iterator[FormField]:
    """The fields of one value: of an object with properties those of each, else one."""
    schema = _resolved(unresolved, definitions)
    values = [_resolved(part, definitions) for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    value = values[0] if len(values) == 1 else {}
    if "properties" in value:
        whole = schema.get("default")
        for name, part in value["properties"].items():
            if isinstance(whole, dict) and name in whole and whole[name] != part.get("default"):
                # The object's own default has another value for the field than the field itself.
                part = {**part, "default": whole[name], _ALONE: part.get("default")}
            yield from _fields(f"{pointer}/{name}", part, definitions,
                               required and name in value.get("required", ()), in_item)
        return
    item = _resolved(value.get("items", {}), definitions)
    kind, default = _kind(value, item, in_item), schema.get("default")
    typed = ", ".join(map(str, default or ())) if kind == "list" else (
        str(default) if kind in ("text", "lines") else json.dumps(default))
    yield FormField(
        pointer, kind, schema["description"], "; ".join(_rules(pointer, schema, value, item)),
        "" if default in _EMPTY else typed, required, num_lines=3 if kind in ("lines", "json") else 1,
        options=tuple(map(json.dumps, value.get("enum", (True, False)))) if kind == "choice" else (),
        numeric=item.get("type") in ("integer", "number"),
        fields=tuple(_fields(f"{pointer}/{ITEM}", item, definitions, True, in_item=True)) if kind == "items" else ())


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    while "$ref" in schema:
        rest = {name: value for name, value in schema.items() if name != "$ref"}
        schema = {**definitions[schema["$ref"].rpartition("/")[2]], **rest}
    return schema


def _kind(value: Schema, item: Schema, in_item: bool) -> Kind:
    kind = value.get("type")
    if kind == "boolean" or "enum" in value:
        return "choice"
    if kind in ("integer", "number"):
        return "number"
    if kind == "string":
        return "lines" if value.get("maxLength", 0) > _LONG else "text"
    if kind == "array" and item.get("type") in ("string", "integer", "number"):
        return "list"
    if kind == "array" and "properties" in item and not in_item:
        return "items"
    return "json"


def _rules(pointer: str, schema: Schema, value: Schema, item: Schema) -> Iterator[str]:
    """Unit, kind and bounds, of the items where it is a list of scalars."""
    scalar = item if item.get("type") in ("string", "integer", "number") else value
    if value is not scalar:
        yield "separated by commas"
    if unit := next((unit for end, unit in _UNITS.items() if pointer.endswith(end)), None):
        yield unit
    elif scalar.get("type") == "integer":
        yield "whole number"
    elif scalar.get("type") == "number":
        yield "number"
    if value.get("type") == "object" or ("items" in value and value is scalar and "properties" not in item):
        yield "JSON"
    if value is not scalar and "enum" in scalar:
        yield "of " + ", ".join(scalar["enum"])
    low, high = scalar.get("minimum"), scalar.get("maximum")
    if low is not None and high is not None:
        yield f"{_number(low)} to {_number(high)}"
    elif low is not None:
        yield f"{_number(low)} or more"
    if "exclusiveMinimum" in scalar:
        yield f"above {_number(scalar['exclusiveMinimum'])}"
    if high is not None and low is None:
        yield f"at most {_number(high)}"
    if "exclusiveMaximum" in scalar:
        yield f"below {_number(scalar['exclusiveMaximum'])}"
    if _ALONE in schema:
        yield f"default {json.dumps(schema[_ALONE])} where the document has another {pointer.split('/')[-2]} value"
    if "maxItems" in value:
        yield f"{value.get('minItems', 0)} to {value['maxItems']} of them"
    if value.get("type") == "array" and "minItems" not in value and schema.get("default"):
        yield "[] for none"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"
