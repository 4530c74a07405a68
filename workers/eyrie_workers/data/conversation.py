"""The normal form of a conversation, and the rules that a row must keep to become one.

The normal form is the OpenAI chat format: roles `system`, `user`, `assistant`, `tool`; tool calls with an id and their
arguments as a JSON string; tool results that name the call they answer. Every reader ends here, so that a template
renders, a hash identifies and an endpoint receives the same value for any file format.

Kept: system prompts, all turns, tool definitions, tool calls, tool results, earlier reasoning. Changed: `developer`
becomes `system`, text parts are joined, missing call ids are filled in by position, an empty last answer is left out.
Read besides OpenAI's and ShareGPT's turns: those of Dolci (tools as `functions` of the system turn, calls as
`function_calls` in JSON or Python's syntax, results by `environment`), Hermes's `<tool_call>` tags, and Alpaca's
`instruction`, `input`, `output`. Refused, with a reason
(`Malformed`): everything that a chat template or an endpoint would refuse or silently alter, because training on
conversations that cannot occur in serving has no use.

Pure: values in, values out.
"""

import ast
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyrie_api.data_files import CALL_TURNS, ROLES

Message = dict[str, Any]

_MAX_DEPTH = 64
_TAGGED_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TAGGED_RESULT = re.compile(r"\A\s*<tool_response>\s*(.*?)\s*</tool_response>\s*\Z", re.DOTALL)
_REASONING = ("reasoning_content", "reasoning", "thinking")


class Malformed(ValueError):
    """A row that cannot become a conversation; its text is the reason in the quarantine."""


@dataclass(frozen=True)
class Conversation:
    """One conversation and its source."""

    id: str  # stable hash of the prompt: the same prompt has the same id in every run, file and order
    source: str
    line: int
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    source_name: str = ""  # what `data.mix` calls the source
    category: str = ""
    prompt: tuple[Message, ...] = field(default=())
    """`messages` without the last assistant turn, if they end with one: the prompt that the target answers again."""


def conversation(value: object, source: str, line: int, layout: str) -> Conversation:
    """The conversation in one decoded row.

    layout   "messages" (OpenAI), "sharegpt" (`conversations`) or "alpaca" (`instruction`).

    Raises Malformed with the reason when the row breaks a rule.
    """
    if not isinstance(value, Mapping):
        raise Malformed(f"a row must be an object, this is {_kind(value)}")
    turns = _answered(_instruction(value) if layout == "alpaca" else _turns(value, layout))
    tools = _tools(value.get("tools")) or _tools(turns[0].get("functions"))
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    if layout == "sharegpt" and isinstance(value.get("system"), str) and value["system"].strip() \
            and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": value["system"]})
    _link_calls(messages)
    _check_order(messages)
    prompt = tuple(messages[:-1] if messages[-1]["role"] == "assistant" else messages)
    category = "" if value.get("category") is None else value["category"]
    if not isinstance(category, str):
        raise Malformed(f"category must be text, this is {_kind(category)}")
    return Conversation(id=row_id(prompt, tools), source=source, line=line, messages=tuple(messages), tools=tools,
                        category=category, prompt=prompt)


def detect_layout(value: object) -> str | None:
    """Which layout a decoded row has; None when it has neither key."""
    if isinstance(value, Mapping):
        if "messages" in value:
            return "messages"
        if "conversations" in value or "conversation" in value:
            return "sharegpt"
        if "instruction" in value:
            return "alpaca"
    return None


def row_id(prompt: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    """128 bits of a hash over the prompt and its tools: rows of equal id would get the same answer.

    Raises Malformed for text that has no UTF-8 form (JSON can contain half a surrogate pair; no tokenizer accepts it).
    """
    text = _json([list(prompt), list(tools)], sort_keys=True, separators=(",", ":"))
    try:
        return hashlib.sha256(text.encode()).hexdigest()[:32]
    except UnicodeEncodeError:
        raise Malformed("text with an unpaired surrogate") from None


def _json(value: object, **how: Any) -> str:
    """JSON text of a value. Raises Malformed for NaN, for parquet's dates and bytes, and for too deep nesting."""
    _check_depth(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **how)
    except (TypeError, ValueError) as error:
        raise Malformed(f"a value that JSON cannot hold: {error}") from None


def _check_depth(value: object) -> None:
    """Raises Malformed beyond _MAX_DEPTH: later parsers recurse and fail at depths of their own."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [item for outer in level if isinstance(outer, Mapping | list)
                 for item in (outer.values() if isinstance(outer, Mapping) else outer)]
        if not level:
            return
    raise Malformed(f"nested deeper than {_MAX_DEPTH} levels")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _turns(value: Mapping[str, Any], layout: str) -> list[Mapping[str, Any]]:
    keys = ("messages",) if layout == "messages" else ("conversations", "conversation")
    key = next((key for key in keys if key in value), None)
    if key is None:
        raise Malformed(f"no `{keys[0]}` in the row")
    turns = value[key]
    if not isinstance(turns, list):
        raise Malformed(f"`{key}` must be a list, this is {_kind(turns)}")
    if not turns:
        raise Malformed("empty conversation")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping):
            raise Malformed(f"turn {number} must be an object, this is {_kind(turn)}")
    return turns


def _instruction(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """An Alpaca row as turns: the input stands below the instruction."""
    instruction, given = value.get("instruction"), value.get("input")
    if not isinstance(instruction, str):
        raise Malformed(f"`instruction` must be text, this is {_kind(instruction)}")
    text = f"{instruction}\n\n{given}" if isinstance(given, str) and given.strip() else instruction
    answer = value.get("output")
    return [{"role": "user", "content": text},
            *([{"role": "assistant", "content": answer}] if isinstance(answer, str) else [])]


def _answered(turns: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The turns without an empty last answer: the target answers there in any case."""
    last = turns[-1]
    is_answer = ROLES.get(str(last.get("role", last.get("from")))) == "assistant"
    empty = not any(last.get(key) for key in ("content", "value", "tool_calls", "function_call", "function_calls"))
    return turns[:-1] if is_answer and empty and len(turns) > 1 else turns


def _message(turn: Mapping[str, Any], number: int) -> Message:
    name = turn.get("role", turn.get("from"))
    content = turn["content"] if "content" in turn else turn.get("value")
    if name in CALL_TURNS:
        return {"role": "assistant", "content": None, "tool_calls": _calls_in_text(content, number)}
    if not isinstance(name, str) or name not in ROLES:
        raise Malformed(f"turn {number} has unknown role {name!r}")
    message: Message = {"role": ROLES[name], "content": _text(content, number)}
    if message["role"] == "assistant":
        if calls := _calls(turn, number):
            message["tool_calls"] = calls
        elif message["content"] and (tagged := _TAGGED_CALL.findall(message["content"])):
            message["tool_calls"] = [call for text in tagged for call in _calls_in_text(text, number)]
            message["content"] = _TAGGED_CALL.sub("", message["content"]).strip() or None
        reasoning = next((turn[key] for key in _REASONING if isinstance(turn.get(key), str) and turn[key]), None)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
    elif message["role"] == "tool":
        if message["content"] is not None:
            message["content"] = _TAGGED_RESULT.sub(r"\1", message["content"])
        message |= {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    if message["content"] is None and message["role"] == "system" and turn.get("functions"):
        message["content"] = ""  # it lists tools alone
    if message["content"] is None and "tool_calls" not in message:
        raise Malformed(f"turn {number} ({message['role']}) has no content")
    if message["role"] == "user" and not message["content"].strip():
        raise Malformed(f"turn {number} (user) is empty")
    return message


def _text(content: object, number: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Malformed(f"content of turn {number} must be text, this is {_kind(content)}")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise Malformed(f"content of turn {number} has a part of type {kind!r}; only text is supported")
        parts.append(text)
    return "".join(parts)


def _calls(turn: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    calls = turn.get("tool_calls")
    if calls is None and turn.get("function_call") is not None:  # OpenAI's form before tools
        calls = [turn["function_call"]]
    if calls is None and turn.get("function_calls"):  # Dolci's
        return _calls_in_text(turn["function_calls"], number)
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise Malformed(f"tool_calls of turn {number} must be a list, this is {_kind(calls)}")
    return [_call(call, number) for call in calls]


def _call(call: object, number: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Malformed(f"a tool call of turn {number} names no function")
    arguments = function.get("arguments", function.get("parameters"))
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str):
        if not isinstance(arguments, Mapping):
            raise Malformed(f"arguments of a tool call of turn {number} must be an object or JSON text, "
                            f"this is {_kind(arguments)}")
        arguments = _json(arguments)
    assert isinstance(call, Mapping)
    given = call.get("id")
    return {"id": given if isinstance(given, str) else "", "type": "function",
            "function": {"name": function["name"], "arguments": arguments}}


def _calls_in_text(content: object, number: int) -> list[dict[str, Any]]:
    try:
        value = json.loads(content) if isinstance(content, str) else content
    except json.JSONDecodeError:
        value = _python_calls(str(content))
        if value is None:
            raise Malformed(f"turn {number} is a function call, but its text is neither JSON nor calls in Python's "
                            "syntax") from None
    return [_call(call, number) for call in (value if isinstance(value, list) else [value])]


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


def _tools(tools: object) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError:
            raise Malformed("tools is text, but not JSON") from None
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise Malformed(f"tools must be a list, this is {_kind(tools)}")
    result = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Malformed("a tool names no function")
        result.append({"type": "function", "function": dict(function)})
    return tuple(result)


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


_MAY_FOLLOW = {
    "start": ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user",),
    "call": ("tool",), "tool": ("tool", "assistant"),
}


def _check_order(messages: Sequence[Message]) -> None:
    if not any(message["role"] == "user" for message in messages):
        raise Malformed("no user turn")
    before = "start"
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role not in _MAY_FOLLOW[before]:
            raise Malformed(f"bad role order: turn {number} is {role} after {before}")
        before = "call" if message.get("tool_calls") else role
