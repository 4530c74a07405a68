"""A conversation replayed on policy: which messages an answer is followed by, until there is nothing left to answer.

With `turns: last` there is one question, the conversation up to its last assistant turn. With `turns: all` every
assistant turn is answered anew, in the context of the answers before it, and each is a row of its own: its prompt is
what a server would see at that turn, rendered by the chat template from messages. So a template that leaves earlier
reasoning out, or spells earlier calls otherwise than the target wrote them, does here what it does in serving; and what
is supervised is the answer's tokens by their offset, whatever the template does to the turns before.

What the user said is kept. What a tool said is spliced in where the new answer calls the tools that the data has
results for: each new call takes the result of the old call of that name, one with equal arguments first. An answer that
calls no tool where the old one did goes on at the next user turn. The conversation ends early, with a reason that is
counted, where the new answer calls what the data has no result for, was cut, or was refused.

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
    """TurnQueue a conversation has at most; `messages` are without its last assistant turn."""
    return 1 if turns == "last" else 1 + sum(message["role"] == "assistant" for message in messages)


def first_turn(messages: Sequence[Message], turns: str) -> list[Message]:
    """The first question."""
    if turns == "last":
        return list(messages)
    return list(messages[:_next_assistant(messages, 0)])


def turn_id(row_id: str, turn: int, turns: str) -> str:
    """The id of one turn's row; that of the conversation where only one turn is asked."""
    if turns == "last":
        return row_id
    return hashlib.sha256(f"{row_id}:{turn}".encode()).hexdigest()[:32]


def answer_message(text: str, reasoning: str, tool_calls: Sequence[Mapping[str, Any]], has_tools: bool) -> Message:
    """An answer as the message a client puts into the next request.

    Calls that the engine has not read out of the text are read out here, where tools were on offer.
    """
    message: Message = {"role": "assistant", "content": text}
    if tool_calls:
        message |= {"content": text or None, "tool_calls": [dict(call) for call in tool_calls]}
    elif has_tools:
        message = parse_answer(text)
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def next_turn(original: Sequence[Message], said: Sequence[Message], place: int,
              answer: Message) -> tuple[list[Message], int] | Ended | None:
    """What is asked after an answer, and the place in `original` of the assistant turn it stands for.

    original  the conversation as the data has it, without its last assistant turn
    said      the question that was answered
    place     of the assistant turn in `original` that `answer` replaces
    None where the conversation is over; Ended where it should go on and cannot.
    """
    if place >= len(original):
        return None
    inputs_end = _next_assistant(original, place + 1)
    inputs = original[place + 1:inputs_end]
    if answer.get("tool_calls"):
        results = _spliced(original[place].get("tool_calls") or (), inputs, answer["tool_calls"])
        if results is None:
            return Ended("the answer calls tools that the data has no results for")
        return [*said, answer, *results], inputs_end
    while inputs and inputs[0]["role"] == "tool":  # the answer called none: on to the next user turn
        inputs_end = _next_assistant(original, place + 1)
        place, inputs = inputs_end, original[inputs_end + 1:_next_assistant(original, inputs_end + 1)]
    if not inputs:
        return None
    return [*said, answer, *inputs], _next_assistant(original, place + 1)


def _next_assistant(messages: Sequence[Message], start: int) -> int:
    return next((place for place in range(start, len(messages)) if messages[place]["role"] == "assistant"),
                len(messages))


def _spliced(old_calls: Sequence[Message], results: Sequence[Message],
             new_calls: Sequence[Message]) -> list[Message] | None:
    """A result for each new call, under its id; None where one has none."""
    by_id = {result.get("tool_call_id"): result for result in results}
    left = [(call["function"], by_id[call["id"]]) for call in old_calls if call["id"] in by_id]
    spliced = []
    for call in new_calls:
        called = call["function"]
        alike = [pair for pair in left if pair[0]["name"] == called["name"]]
        if not alike:
            return None
        pair = next((pair for pair in alike if _arguments(pair[0]) == _arguments(called)), alike[0])
        left.remove(pair)
        spliced.append(pair[1] | {"tool_call_id": call["id"]})
    return spliced


def _arguments(function: Mapping[str, Any]) -> object:
    given = function.get("arguments")
    try:
        return json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        return given
