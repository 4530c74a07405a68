"""What engines accept of clients: the paths they may reach, and the values in bodies that are refused. Pure.

One definition for the embedded engine and the gateway of one machine (`openai_api.read_object`), and for pods of SGLang
on a cluster (`sglang.plugin.guarded`, to which `sglang.plugin_files` copies this module). It imports the standard
library alone: SGLang's interpreter reads it without Eyrie's packages.

SGLang has paths that change weights, end other clients' requests or stop the server. SGLang 0.5.23 answers most of the
refused values with 400 itself, and with 500, which counts against a canary, to a tool call whose `arguments` hold JSON
of many levels: it parses and copies them recursively (480 levels were answered, 500 were not). Arguments that are no
JSON are not refused here: models write malformed calls, and each engine answers for itself.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

OTHERS = frozenset({"/generate", "/health", "/health_generate", "/ready", "/metrics", "/get_model_info", "/model_info",
                    "/tokenize", "/detokenize"})
"""Besides /v1/: the embedded engine has /health and /metrics, SGLang all of them."""


def is_inference(path: str) -> bool:
    """Whether clients may reach the decoded `path`."""
    return (path.startswith("/v1/") and ".." not in path.split("/")) or path in OTHERS


MAX_DEPTH = 64
"""Levels of lists and objects in a body, and in arguments; JSON schemas of tools have about ten."""


class RefusedBody(ValueError):
    """What is wrong, and what to send instead. `param` is the path of the field, None for the whole body."""

    def __init__(self, message: str, hint: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code
        self.param = param


def read_values(body: bytes) -> dict[str, Any]:
    """Parse a body. Raises RefusedBody unless it is one JSON object whose strings and numbers every later step can
    represent: text that UTF-8 can encode, integers of 64 bits, finite floats, `MAX_DEPTH` levels at most."""
    hint = "send one JSON object"
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:  # also: an integer of more than 4,300 digits
        raise RefusedBody(f"the body is not JSON: {error}", hint, "invalid_json") from error
    if not isinstance(value, dict):
        raise RefusedBody(f"the body is a JSON {type(value).__name__}", hint, "invalid_json")
    for field, item, depth in _walk(value):
        if (wrong := _wrong(field, item, depth)) is not None:
            rule, hint = wrong
            raise RefusedBody(f"{field or 'the body'}: {rule}", hint, "invalid_value", field)
    return value


def _walk(value: Any) -> Iterator[tuple[str, Any, int]]:
    """Path, value and level of `value` and of all in it."""
    # A list instead of recursion: depth is what is checked.
    pending: list[tuple[str, Any, int]] = [("", value, 0)]
    while pending:
        field, value, depth = pending.pop()
        yield field, value, depth
        if isinstance(value, dict):
            pending += [(f"{field}.{key[:40]}" if field else key[:40], item, depth + 1) for key, item in value.items()]
        elif isinstance(value, list):
            pending += [(f"{field}.{index}", item, depth + 1) for index, item in enumerate(value)]


def _wrong(field: str, value: Any, depth: int) -> tuple[str, str] | None:
    """The rule that a value breaks, and a hint."""
    if depth > MAX_DEPTH:
        return f"more than {MAX_DEPTH} levels deep", "nest less"
    if isinstance(value, str):
        if not _is_text(value):
            return "a lone surrogate (\\ud800 to \\udfff) is not text", "send surrogates in pairs, or U+FFFD"
        if field.rpartition(".")[2] == "arguments" and _is_deep_json(value):
            return f"the JSON in it is more than {MAX_DEPTH} levels deep", "nest less"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "an integer beyond 64 bits", "send a smaller number"
    elif isinstance(value, float) and not math.isfinite(value):
        return "not a finite number", "send a finite number"
    elif isinstance(value, dict) and not all(map(_is_text, value)):
        return "a key has a lone surrogate", "name it with text"
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_deep_json(text: str) -> bool:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    try:
        value = json.loads(text)
    except RecursionError:
        return True
    except ValueError:
        return False
    return any(depth > MAX_DEPTH for _, _, depth in _walk(value))
