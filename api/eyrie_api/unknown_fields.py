"""What to do about a field of a job that does not exist: its new name, the field whose name is close, or to remove it.

Pure; the server and the command line both answer with it.
"""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from eyrie_api.contract.engine import SglangArguments
from eyrie_api.contract.job import JobSpec

RENAMED: dict[tuple[str, ...], str] = {
    ("capture", "feed"): "mode", ("promotion", "beat"): "must_beat", ("prove", "loads"): "concurrencies",
    ("sweep", "together"): "shared_passes", ("train", "normalisation"): "normalization"}
"""Section and name of a field before 0.2: its name today."""


def unknown_field_hint(path: Sequence[str | int]) -> str:
    """The hint about a field that a job does not have.

    path   of the field in the document, as pydantic's errors have it: places in lists are numbers
    """
    renamed = RENAMED.get(tuple(map(str, path[-2:])))
    if renamed:
        return f"it is called {renamed!r} since 0.2"
    sections: list[type[BaseModel]] = [JobSpec]
    for part in path[:-1]:
        if isinstance(part, str) and any(part in section.model_fields for section in sections):
            sections = [model for section in sections if part in section.model_fields
                        for model in _models_in(section.model_fields[part].annotation)]
    names = [name for section in sections for name in section.model_fields]
    if SglangArguments in sections:  # the name of another flag of SGLang is not misspelt
        return f"Eyrie sets the others itself, or they are not safe for a comparison; allowed are {', '.join(names)}"
    close = difflib.get_close_matches(str(path[-1]), names, n=1)
    return f"did you mean {close[0]!r}?" if close else "remove it"


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field's type names: itself, an optional one, those of a list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
