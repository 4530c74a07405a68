"""What a load test sends requests to, and what it sends: endpoints and prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyrie_workers.conversations.suites import Prompt


@dataclass(frozen=True)
class LoadEndpoint:
    """A server under load, and the name of the variant it serves."""

    name: str
    url: str
    """Up to and including /v1."""

    model: str
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token; never printed, stored or reported."""

    what: str = ""
    """For the report: the setting behind the name. The URL, without credentials, is added to it."""


@dataclass(frozen=True)
class LoadPrompt:
    """One conversation to be answered."""

    id: str
    category: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()

    def messages_with(self, system_prompt: str | None) -> list[Mapping[str, Any]]:
        """The messages; with `system_prompt` in place of their own system message, if one is given."""
        if system_prompt is None:
            return list(self.messages)
        kept = [message for message in self.messages if message.get("role") not in ("system", "developer")]
        return [{"role": "system", "content": system_prompt}, *kept]

    @classmethod
    def of(cls, prompt: Prompt) -> "LoadPrompt":
        """A suite's prompt; its suite is the category."""
        return cls(prompt.id, prompt.suite, prompt.messages, prompt.tools)
