"""One conversation of the quickstart corpus, as a value, in the OpenAI `messages` shape.

The families build `Chat`s; `streams` adds a system prompt, a category and an index in the stream. Tool calls
carry their arguments as a JSON string, as the OpenAI API does; the target's chat template prints a string
unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """The turns of one conversation, without a system prompt, and the tools on offer."""

    messages: list[Message]
    tools: Sequence[Mapping[str, Any]] = ()


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def tool_call(name: str, arguments: Mapping[str, Any]) -> Message:
    """An assistant turn that consists of one call and no text."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


def tool_result(name: str, result: Mapping[str, Any]) -> Message:
    return {"role": "tool", "name": name, "content": json.dumps(result)}
