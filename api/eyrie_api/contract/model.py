"""The one base of every contract model: frozen, closed, documented field by field."""

from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, StringConstraints
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

API_VERSION = "eyrie.dev/v1alpha1"


def _refusing(kind: Any, *types: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, types) and not (kind == "bool_type" and isinstance(value, bool)):
            raise PydanticKnownError(kind)
        return value
    return check


# Native strictness would also refuse 5.0 for an integer, which JSON schema allows, and numpy's types.
_REFUSED = {"bool": _refusing("bool_type", int, float, str), "int": _refusing("int_type", bool, str),
            "float": _refusing("float_type", bool, str), "datetime": _refusing("datetime_type", int, float)}


def _exact(schema: Any, model: type[BaseModel]) -> Any:
    """The schema of a model with fields of exact types; those of nested models are exact already."""
    if isinstance(schema, list):
        return [_exact(part, model) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")  # of a schema; a mapping of fields may have one of this name
    if kind == "model" and schema["cls"] is not model:
        return schema
    if isinstance(kind, str) and kind in _REFUSED:
        return core_schema.no_info_before_validator_function(_REFUSED[kind], schema)
    # Keys of a JSON object are texts.
    return {name: part if name == "keys_schema" else _exact(part, model) for name, part in schema.items()}


class Frozen(BaseModel):
    """A value: immutable, unknown fields refused, attribute docstrings become schema descriptions. Types are those of
    its JSON schema: a number is not made from a boolean or a text, nor a boolean from a number or a text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        # A model that another one holds brings its own schema, which was changed when it was made.
        exact: CoreSchema = schema if cls.__pydantic_complete__ else _exact(schema, cls)
        return exact


ItemT = TypeVar("ItemT")


class Items(Frozen, Generic[ItemT]):
    """All of one kind: an object, to which fields may be added, in place of a bare array."""

    items: tuple[ItemT, ...]

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        """In the OpenAPI document."""
        return f"{params[0].__name__}List"


class FromVariables(Frozen):
    """A value whose fields are read from environment variables, which are texts: numbers and booleans are made from
    them."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(source)


DEPENDS = "x-eyrie-depends"


def depends(default: Any, **bounds: Any) -> Any:
    """`Field(default, **bounds)` of a field for which a job that omits it may get another value when it is accepted,
    by its data, target and hardware. So Kubernetes must not fill it in (`eyrie_operator.manifests.crd`)."""
    return Field(default, json_schema_extra={DEPENDS: True}, **bounds)


Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""A DNS label: it becomes part of file names, URLs and Kubernetes object names."""

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class Interval(Frozen):
    """A 95 % bootstrap interval over prompts."""

    low: float
    high: float
