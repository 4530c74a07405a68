"""A row of data as a conversation: the dialects that are read, and the rules for a row.

Every dialect becomes turns with OpenAI's names, whose normal form `eyrie_api.chat_messages` defines for rows and
requests alike: a template renders, a hash identifies and an endpoint receives the same value for any file format. Read
besides OpenAI's and ShareGPT's turns: those of Dolci (tools as `functions` of the system turn, calls as
`function_calls` in JSON or Python's syntax, results by `environment`), Alpaca's `instruction`, `input`, `output` (or
`response`), GSM8K's `question`, `answer`, and TRL's `prompt`, `completion`, texts or turns. An empty last answer is
left out. A row that breaks a rule is refused with a reason (`Malformed`); whether the target can answer a conversation,
its template decides. The stage that answers rows and the plan that counts them read them by these rules.

Pure: values in, values out.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyrie_api.chat_messages import Malformed, Message, calls_in_text, json_text, kind_of, normal_messages
from eyrie_api.data_files import BYTE_ORDER_MARK, CALL_TURNS, MAX_ROW_BYTES, ROLES

NO_USER = "no user turn with text before the last answer"
NO_ANSWER = "its last turn is not an answer, and data.answered is true"
EMPTY_LINE = "empty line"
_MAX_DEPTH = 64
_QUESTIONS = ("instruction", "question", "prompt")


@dataclass(frozen=True)
class Conversation:
    id: str  # stable hash of the prompt: the same prompt has the same id in every run, file and order
    source: str
    line: int
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    source_name: str = ""  # what `data.mix` calls the source
    category: str = ""
    prompt: tuple[Message, ...] = field(default=())
    """`messages` without the last assistant turn, if they end with one: the prompt that the target answers again."""

    @property
    def answer(self) -> Message | None:
        return self.messages[len(self.prompt)] if len(self.messages) > len(self.prompt) else None


@dataclass(frozen=True)
class Undecodable:
    """A row that could not be decoded."""

    reason: str


def decode_row(line: bytes) -> Any:
    """The JSON value of one line of a file, or why there is none."""
    if not line.strip():
        return Undecodable(EMPTY_LINE)
    if len(line) > MAX_ROW_BYTES:
        return Undecodable(f"oversized: more than {MAX_ROW_BYTES} bytes")
    try:
        # A byte order mark at the start of the file is not part of the first row.
        return json.loads(line.removeprefix(BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as error:
        return Undecodable(f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return Undecodable(f"bad JSON at column {error.colno}: {error.msg}")
    except ValueError as error:  # for example an integer of thousands of digits
        return Undecodable(f"bad JSON: {error}")
    except RecursionError:
        return Undecodable("bad JSON: nested too deep")


def conversation(value: object, source: str, line: int, layout: str | None) -> Conversation:
    """The conversation in one decoded row.

    layout   "messages" (OpenAI), "sharegpt" (`conversations`) or "alpaca" (`instruction`, `question` or `prompt`);
             None where the rows before have none of these

    Raises Malformed with the reason when the row breaks a rule.
    """
    if isinstance(value, Undecodable):
        raise Malformed(value.reason)
    if not isinstance(value, Mapping):
        raise Malformed(f"a row must be an object, this is {kind_of(value)}")
    if layout is None:
        fields = ", ".join(sorted(map(str, value))[:6]) or "no fields"
        raise Malformed("neither `messages` nor `conversations` nor `instruction` nor `question` nor `prompt` in the "
                        f"row, which has {fields}")
    turns = _answered(_instruction(value) if layout == "alpaca" else _turns(value, layout))
    tools = _tools(value.get("tools")) or _tools(turns[0].get("functions"))
    messages = normal_messages([_openai(turn, index) for index, turn in enumerate(turns)])
    if layout == "sharegpt" and isinstance(value.get("system"), str) and value["system"].strip() \
            and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": value["system"]})
    prompt = tuple(messages[:-1] if messages[-1]["role"] == "assistant" else messages)
    if not any(message["role"] == "user" and message["content"].strip() for message in prompt):
        raise Malformed(NO_USER)
    category = "" if value.get("category") is None else value["category"]
    if not isinstance(category, str):
        raise Malformed(f"category must be text, this is {kind_of(category)}")
    return Conversation(id=row_id(prompt, tools), source=source, line=line, messages=tuple(messages), tools=tools,
                        category=category, prompt=prompt)


def detect_layout(value: object) -> str | None:
    """Which layout a decoded row has; None when it has neither key."""
    if isinstance(value, Mapping):
        if "messages" in value:
            return "messages"
        if "conversations" in value or "conversation" in value:
            return "sharegpt"
        if any(name in value for name in _QUESTIONS):
            return "alpaca"
    return None


def row_id(prompt: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    """128 bits of a hash over the prompt and its tools: rows of equal id would get the same answer. Raises Malformed
    for text that has no UTF-8 form (JSON can contain half a surrogate pair; no tokenizer accepts it)."""
    value = [list(prompt), list(tools)]
    _check_depth(value)
    text = json_text(value, sort_keys=True, separators=(",", ":"))
    try:
        return hashlib.sha256(text.encode()).hexdigest()[:32]
    except UnicodeEncodeError:
        raise Malformed("text with an unpaired surrogate") from None


def _check_depth(value: object) -> None:
    """Raises Malformed beyond _MAX_DEPTH: later parsers recurse and fail at depths of their own."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [item for outer in level if isinstance(outer, Mapping | list)
                 for item in (outer.values() if isinstance(outer, Mapping) else outer)]
        if not level:
            return
    raise Malformed(f"nested deeper than {_MAX_DEPTH} levels")


def _turns(value: Mapping[str, Any], layout: str) -> list[Mapping[str, Any]]:
    keys = ("messages",) if layout == "messages" else ("conversations", "conversation")
    key = next((key for key in keys if key in value), None)
    if key is None:
        raise Malformed(f"no `{keys[0]}` in the row")
    turns = value[key]
    if not isinstance(turns, list):
        raise Malformed(f"`{key}` must be a list, this is {kind_of(turns)}")
    if not turns:
        raise Malformed("empty conversation")
    for index, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise Malformed(f"a turn must be an object, this is {kind_of(turn)}", index)
    return turns


def _instruction(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A row of Alpaca's, GSM8K's or TRL's fields as turns: the input stands below the instruction."""
    name = next((name for name in _QUESTIONS if name in value), _QUESTIONS[0])
    instruction, given = value.get(name), value.get("input")
    if name == "prompt" and isinstance(instruction, list):
        completion = value.get("completion")
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        return _turns({"messages": [*instruction, *(completion or ())]}, "messages")
    if not isinstance(instruction, str):
        raise Malformed(f"`{name}` must be text, this is {kind_of(instruction)}")
    text = f"{instruction}\n\n{given}" if isinstance(given, str) and given.strip() else instruction
    answers = [answer for key in ("output", "response", "answer", "completion")
               if isinstance(answer := value.get(key), str)]
    return [{"role": "user", "content": text}, *({"role": "assistant", "content": answer} for answer in answers[:1])]


def _answered(turns: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The turns without an empty last answer: the target answers there in any case."""
    last = turns[-1]
    is_answer = ROLES.get(str(last.get("role", last.get("from")))) == "assistant"
    empty = not any(last.get(key) for key in ("content", "value", "tool_calls", "function_call", "function_calls"))
    return turns[:-1] if is_answer and empty and len(turns) > 1 else turns


def _openai(turn: Mapping[str, Any], index: int) -> Message:
    """A turn of any dialect with OpenAI's names."""
    name = turn.get("role", turn.get("from"))
    message = {key: value for key, value in turn.items()
               if key not in ("from", "value", "functions", "function_calls", "environment")}
    message["content"] = turn["content"] if "content" in turn else turn.get("value")
    if name in CALL_TURNS:
        return {"role": "assistant", "tool_calls": calls_in_text(message["content"], index)}
    message["role"] = ROLES.get(name, name) if isinstance(name, str) else name
    if turn.get("function_calls") and not turn.get("tool_calls"):  # Dolci's
        message["tool_calls"] = calls_in_text(turn["function_calls"], index)
    return message


def _tools(tools: object) -> tuple[dict[str, Any], ...]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError:
            raise Malformed("tools is text, but not JSON") from None
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise Malformed(f"tools must be a list, this is {kind_of(tools)}")
    result = []
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Malformed("a tool names no function")
        result.append({"type": "function", "function": dict(function)})
    return tuple(result)
