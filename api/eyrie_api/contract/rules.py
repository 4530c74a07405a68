"""The rule that a value breaks, in the words of a job's author: one place for what pydantic finds wrong.

Pydantic's own messages name Python's types ("Input should be a valid tuple"), which no document has. Whoever shows an
error of validation names the field and the value itself, and takes the rule from here: `FIELD: RULE (got VALUE)`.
"""

from collections.abc import Mapping
from datetime import date
from typing import Any

from pydantic import ValidationError

_LIST = "must be a list"
_OBJECT = "must be an object with named values"
_TIME = "must be a date and time, such as 2026-01-31T12:00:00Z"
_URL = "must be a URL, such as https://host/path"

_RULES = {
    "missing": "is missing",
    "extra_forbidden": "there is no such field",
    "invalid_key": "names must be text",
    "none_required": "must be null",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be greater than or equal to {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be less than or equal to {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "string_type": "must be text",
    "string_unicode": "must be text in UTF-8",
    "string_not_ascii": "must be text of ASCII characters",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "bytes_type": "must be text",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type", "deque_type", "iterable_type"), _LIST),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type",
                     "named_tuple_type"), _OBJECT),
    **dict.fromkeys(("datetime_type", "datetime_parsing", "datetime_object_invalid", "datetime_from_date_parsing"),
                    _TIME),
    **dict.fromkeys(("date_type", "date_parsing", "date_from_datetime_parsing", "date_from_datetime_inexact"),
                    "must be a date, such as 2026-01-31"),
    "timezone_aware": "must be a time with a time zone, such as 2026-01-31T12:00:00Z",
    **dict.fromkeys(("time_delta_type", "time_delta_parsing"), "must be a duration"),
    **dict.fromkeys(("url_type", "url_parsing", "url_syntax_violation"), _URL),
    "url_scheme": "must be a URL that begins with {expected_schemes}",
    "path_type": "must be a path",
    "union_tag_invalid": "{discriminator} is '{tag}', and must be one of {expected_tags}",
    "union_tag_not_found": "{discriminator} is missing, which says what kind of object it is",
    "json_invalid": "is not JSON: {error}",
    "json_type": "must be JSON text",
    "recursion_loop": "contains itself",
    "recursion_depth_exceeded": "is nested too deeply",
}
_LENGTHS = {
    "string_too_short": ("at least", "min_length", "character"),
    "string_too_long": ("at most", "max_length", "character"),
    "bytes_too_short": ("at least", "min_length", "byte"), "bytes_too_long": ("at most", "max_length", "byte"),
    "url_too_long": ("at most", "max_length", "character"),
    "too_short": ("at least", "min_length", "entry"), "too_long": ("at most", "max_length", "entry"),
}


def rule_of(error: Mapping[str, Any]) -> str:
    """The rule in an entry of `ValidationError.errors()`; pydantic's own words for a type that is not known here."""
    kind, known = str(error["type"]), error.get("ctx", {})
    if kind in _LENGTHS:
        bound, key, what = _LENGTHS[kind]
        number = int(known[key])
        if bound == "at least" and number == 1:
            return "must not be empty"
        named = what if number == 1 else what.removesuffix("y") + ("ies" if what.endswith("y") else "s")
        return f"must have {bound} {number} {named}"
    if kind in ("string_type", "literal_error") and isinstance(error.get("input"), bool | int | float | date):
        # YAML reads no, 1.10 and 2026-01-31 as a truth value, a number and a date.
        return f"{_RULES[kind].format_map(known)} (in YAML, quote it)"
    if kind in _RULES:
        return _RULES[kind].format_map({name: str(value).strip("'") if name == "discriminator" else value
                                        for name, value in known.items()})
    return str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")


def first_problem(error: ValidationError) -> str:
    """`FIELD: RULE` of the first error."""
    first = error.errors(include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), rule_of(first))))
