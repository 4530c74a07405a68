"""On-policy replay of a conversation: the messages that follow each new answer, until no turn is left.

With `turns: last` there is one prompt, the conversation up to its last assistant turn. With `turns: all` every
assistant turn is answered again, in the context of the new answers before it, and each is a row of its own: its prompt
is what a server would receive at that turn, rendered by the chat template from messages. A template that drops earlier
reasoning, or serialises earlier calls otherwise than the target wrote them, therefore acts as it does in serving;
supervision covers the answer's tokens by their offset, whatever the template does to earlier turns.

User messages are kept. Tool results are spliced in where the new answer calls tools for which the data has results:
each new call takes the result of the old call of that name, one with equal arguments first. After an answer that calls
no tool where the old one did, the replay continues at the next user turn. The conversation ends early, with a reason
that is counted, where the new answer calls a tool without a result, was truncated, or failed.

Pure: messages in, messages out.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyrie_workers.conversations.conversation import Message
from eyrie_workers.targets.templates import parse_answer


@dataclass(frozen=True)
class Ended:
    """The conversation ends before its last turn."""

    reason: str


def num_turns(messages: Sequence[Message], turns: str) -> int:
    """Upper bound of the turns of a conversation; `messages` are without its last assistant turn."""
    return 1 if turns == "last" else 1 + sum(message["role"] == "assistant" for message in messages)


def first_turn(messages: Sequence[Message], turns: str) -> list[Message]:
    """Messages of the first prompt."""
    if turns == "last":
        return list(messages)
    return list(messages[:_next_assistant(messages, 0)])


def turn_id(row_id: str, turn: int, turns: str) -> str:
    """The id of one turn's row; with `turns: last` the id of the conversation."""
    if turns == "last":
        return row_id
    return hashlib.sha256(f"{row_id}:{turn}".encode()).hexdigest()[:32]


def answer_message(text: str, reasoning: str, tool_calls: Sequence[Mapping[str, Any]], has_tools: bool) -> Message:
    """An answer as the message a client puts into the next request.

    Tool calls that the engine has not parsed are parsed here, if the conversation defines tools.
    """
    message: Message = {"role": "assistant", "content": text}
    if tool_calls:
        message |= {"content": text or None, "tool_calls": [dict(call) for call in tool_calls]}
    elif has_tools:
        message = parse_answer(text)
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def next_turn(original: Sequence[Message], prompt: Sequence[Message], index: int,
              answer: Message) -> tuple[list[Message], int] | Ended | None:
    """The prompt after an answer, and the index in `original` of the assistant turn that it precedes.

    original  the conversation in the data, without its last assistant turn
    prompt    the messages that were answered
    index     of the assistant turn in `original` that `answer` replaces
    returns   None at the end of the conversation; Ended where it cannot continue.
    """
    if index >= len(original):
        return None
    inputs_end = _next_assistant(original, index + 1)
    inputs = original[index + 1:inputs_end]
    if answer.get("tool_calls"):
        results = _spliced(original[index].get("tool_calls") or (), inputs, answer["tool_calls"])
        if results is None:
            return Ended("the answer calls tools that the data has no results for")
        return [*prompt, answer, *results], inputs_end
    # The answer called no tool: skip the old results and the answers to them, up to the next user turn.
    while inputs and inputs[0]["role"] == "tool":
        inputs_end = _next_assistant(original, index + 1)
        index, inputs = inputs_end, original[inputs_end + 1:_next_assistant(original, inputs_end + 1)]
    if not inputs:
        return None
    return [*prompt, answer, *inputs], _next_assistant(original, index + 1)


def _next_assistant(messages: Sequence[Message], start: int) -> int:
    return next((place for place in range(start, len(messages)) if messages[place]["role"] == "assistant"),
                len(messages))


def _spliced(old_calls: Sequence[Message], results: Sequence[Message],
             new_calls: Sequence[Message]) -> list[Message] | None:
    """A result for each new call, under its id; None when a call has no result."""
    by_id = {result.get("tool_call_id"): result for result in results}
    left = [(call["function"], by_id[call["id"]]) for call in old_calls if call["id"] in by_id]
    spliced = []
    for call in new_calls:
        called = call["function"]
        same_name = [pair for pair in left if pair[0]["name"] == called["name"]]
        if not same_name:
            return None
        pair = next((pair for pair in same_name if _arguments(pair[0]) == _arguments(called)), same_name[0])
        left.remove(pair)
        spliced.append(pair[1] | {"tool_call_id": call["id"]})
    return spliced


def _arguments(function: Mapping[str, Any]) -> object:
    given = function.get("arguments")
    try:
        return json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        return given
