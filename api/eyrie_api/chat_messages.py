"""The normal form of messages, and the one set of rules by which data rows, suites and requests become it. Pure.

A conversation is rendered from this form whoever wrote it, so that a drafter is trained, measured and proved on the
prompts that it serves. The form is OpenAI's chat format:

    role                system, developer, user, assistant or tool
    content             text; null is empty, text parts are joined
    tool_calls          of an assistant: id, type and a function whose arguments are JSON text
    reasoning_content   of an assistant; `reasoning` and `thinking` are other names of it
    name, tool_call_id  where they are given

Calls in an assistant's text between `<tool_call>` tags become `tool_calls`, a result between `<tool_response>` tags
loses them, and a call without an id gets one. A field that is null or empty counts as absent. `_ANNOTATIONS` tell about
a message and are not a part of it; any other field is refused, because a template might read it, or ought to.
Which roles may follow each other is for the template to decide.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_TAGGED_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TAGGED_RESULT = re.compile(r"\A\s*<tool_response>\s*(.*?)\s*</tool_response>\s*\Z", re.DOTALL)
_REASONING = ("reasoning_content", "reasoning", "thinking")
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", *_REASONING)
_ANNOTATIONS = frozenset({
    # OpenAI's answers, which clients send back whole
    "refusal", "annotations", "audio", "id", "reasoning_details",
    # published data sets: of the turn's origin, use and judgement
    "turn_identifier", "timestamp", "created", "model", "language", "toxic", "redacted", "hashed_ip", "country",
    "state", "header", "weight", "loss", "train", "loss_mask", "score", "rating", "source", "tokens", "turn", "index"})


class Malformed(ValueError):
    """Messages, or a row, that break a rule; the text is the reason in the quarantine."""

    def __init__(self, reason: str, index: int | None = None, field: str = "") -> None:
        """
        index   of the message, from 0
        field   of the message
        """
        super().__init__(reason if index is None else f"turn {index + 1}: {reason}")
        self.reason, self.index, self.field = reason, index, field


def normal_messages(messages: Sequence[object]) -> list[Message]:
    """The messages in normal form. Raises Malformed."""
    normal = [_message(message, index) for index, message in enumerate(messages)]
    _link_calls(normal)
    return normal


def json_text(value: object, **how: Any) -> str:
    """JSON text of a value. Raises Malformed for NaN and for what JSON cannot hold, such as parquet's dates."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **how)
    except (TypeError, ValueError, RecursionError) as error:
        raise Malformed(f"a value that JSON cannot hold: {error}") from None


def kind_of(value: object) -> str:
    """The kind of a value as errors name it."""
    return "null" if value is None else type(value).__name__


def _message(message: object, index: int) -> Message:
    if not isinstance(message, Mapping):
        raise Malformed(f"a message must be an object, this is {kind_of(message)}", index)
    given = {name: value for name, value in message.items() if value is not None and value not in ("", [], {})}
    unknown = [name for name in given if name not in _FIELDS and name not in _ANNOTATIONS]
    if unknown:
        raise Malformed(f"unknown field {unknown[0]!r}", index, str(unknown[0]))
    role = given.get("role")
    if role not in ROLES:
        raise Malformed(f"unknown role {role!r}", index, "role")
    for name in ("name", "tool_call_id", *_REASONING):
        if not isinstance(given.get(name, ""), str):
            raise Malformed(f"{name} must be text, this is {kind_of(given[name])}", index, name)
    normal: Message = {"role": role, "content": _text(given.get("content"), index)}
    normal |= {name: given[name] for name in ("name", "tool_call_id") if name in given}
    if role == "tool":
        normal["content"] = _TAGGED_RESULT.sub(r"\1", normal["content"])
    if role != "assistant":
        return normal
    calls = given.get("tool_calls", [given["function_call"]] if "function_call" in given else [])
    if not isinstance(calls, list):
        raise Malformed(f"tool_calls must be a list, this is {kind_of(calls)}", index, "tool_calls")
    normal_calls = [_call(call, index) for call in calls]
    if not calls and (tagged := _TAGGED_CALL.findall(normal["content"])):
        with suppress(Malformed):  # text that only looks like a call stays text
            normal_calls = [call for text in tagged for call in calls_in_text(text, index)]
            normal["content"] = _TAGGED_CALL.sub("", normal["content"]).strip()
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return normal | ({"tool_calls": normal_calls} if normal_calls else {}) | (
        {"reasoning_content": reasoning} if reasoning else {})


def _text(content: object, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Malformed(f"content must be text, this is {kind_of(content)}", index, "content")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise Malformed(f"content has a part of type {kind!r}; it must be text", index, "content")
        parts.append(text)
    return "".join(parts)


def _call(call: object, index: int) -> Message:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Malformed("a tool call names no function", index, "tool_calls")
    arguments = function.get("arguments", function.get("parameters"))
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str):
        if not isinstance(arguments, Mapping):
            raise Malformed(f"arguments of a tool call must be an object or JSON text, this is {kind_of(arguments)}",
                            index, "tool_calls")
        arguments = json_text(arguments)
    assert isinstance(call, Mapping)
    identifier = call.get("id")
    return {"id": identifier if isinstance(identifier, str) else "", "type": "function",
            "function": {"name": function["name"], "arguments": arguments}}


def calls_in_text(content: object, index: int) -> list[Message]:
    """Tool calls written as JSON or in Python's syntax. Raises Malformed."""
    try:
        value = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError):
        value = _python_calls(str(content))
        if value is None:
            raise Malformed("a function call whose text is neither JSON nor calls in Python's syntax", index,
                            "content") from None
    return [_call(call, index) for call in (value if isinstance(value, list) else [value])]


def _python_calls(text: str) -> list[dict[str, Any]] | None:
    """Calls like `weather(city="Oslo", days=2)`, one per line or in a list, whose arguments are literals with names;
    None for any other text. Parsed, never evaluated."""
    try:
        body = ast.parse(text.strip(), mode="exec").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls: list[dict[str, Any]] = []
    for statement in body:
        if not isinstance(statement, ast.Expr):
            return None
        for node in statement.value.elts if isinstance(statement.value, ast.List | ast.Tuple) else [statement.value]:
            if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
                return None
            try:
                arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords if word.arg}
            except (ValueError, TypeError, SyntaxError, RecursionError):
                return None
            calls.append({"name": ast.unparse(node.func), "arguments": arguments})
    return calls or None


def _link_calls(messages: list[Message]) -> None:
    """Give every call an id and every result the id of its call, by position, where the data has none.

    Nine letters and digits: Mistral's chat template accepts no other length.
    """
    pending: list[str] = []
    serial = 0
    for message in messages:
        if message["role"] == "assistant":
            pending = []
            for call in message.get("tool_calls", ()):
                call["id"] = call["id"] or f"call{serial:05d}"
                pending.append(call["id"])
                serial += 1
        elif message["role"] == "tool":
            first = pending.pop(0) if pending else None
            if first is not None:
                message.setdefault("tool_call_id", first)
