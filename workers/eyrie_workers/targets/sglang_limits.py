"""Limits that SGLang derives from a `config.json`, and the error for a combination it refuses.

A module below drafters and engines, because checks of a drafter directory and of launch lines need the same limits.
"""

from collections.abc import Mapping
from typing import Any

from eyrie_api.errors import InvalidInput


class Unlaunchable(InvalidInput):
    """A combination of target, drafter, setting and machine that SGLang refuses, or serves wrongly without an error."""

    reason = "Unlaunchable"


def context_length(config: Mapping[str, Any], name: str) -> int:
    """The longest text SGLang allows for a config: rope scaling counts, unless the config gives the original length.

    `get_context_length` of SGLang's hf_transformers: a `factor` multiplies max_position_embeddings, except with
    `original_max_position_embeddings` (the length given is then the scaled one) and for llama3.
    """
    longest = positive_integer(config, "max_position_embeddings", name)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or "original_max_position_embeddings" in scaling:
        return longest
    if (scaling.get("rope_type") or scaling.get("type")) == "llama3":
        return longest
    factor = scaling.get("factor")
    return int(longest * factor) if isinstance(factor, int | float) else longest


def positive_integer(config: Mapping[str, Any], field: str, name: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise Unlaunchable(f"{name!r}: config.json has {field} = {value!r}, not a positive integer",
                           "give a decoder-only text model's config")
    return value
