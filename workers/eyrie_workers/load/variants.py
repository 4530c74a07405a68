"""What is asked, and who is asked: a server under load is a variant, a conversation to be answered is a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyrie_workers.conversations.benchmark_suites import Prompt


@dataclass(frozen=True)
class LoadVariant:
    """One server under load."""

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

    @classmethod
    def of(cls, prompt: Prompt) -> "LoadPrompt":
        """A suite's prompt; its suite is the category."""
        return cls(prompt.id, prompt.suite, prompt.messages, prompt.tools)
