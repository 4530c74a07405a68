"""Requests to a target and its answers, independent of the engine that serves them.

A client takes requests lazily, keeps several in flight, and yields outcomes in the order they finish. The seed of a row
depends on the row alone, so neither order nor concurrency changes an answer. A prompt that the engine refuses
permanently yields a `GenerationFailure` with the reason. Transient errors are retried by the client, then raised as
Transient: the stage ends, and its next run resumes.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from eyrie_api.v1alpha1.engine import SamplingSpec


@dataclass(frozen=True)
class GenerationRequest:
    """One conversation to be continued with an assistant turn."""

    row_id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt_ids: list[int]
    seed: int
    place: int = 0
    """Index in the selection, independent of which rows have been answered."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, with which `prompt_ids` were rendered."""

    max_new_tokens: int | None = None
    """In place of the job's limit (`GenerationParams`)."""

    given: dict[str, Any] | None = None
    """The assistant turn of the data at this place, where the job takes it as the answer (`data.answered`)."""


@dataclass(frozen=True)
class GeneratedAnswer:
    """The target's answer."""

    row_id: str
    prompt_ids: list[int]
    """As the endpoint reports them: its rendering of the template may differ from ours."""

    answer_ids: list[int]
    finish_reason: Literal["stop", "length"]
    text: str
    ids_exact: bool
    ids_differ: bool = False
    """Whether the ids certainly differ from the target's: another number of them, or another text."""

    reasoning: str = ""
    """Reasoning that the endpoint returned in a field of its own."""

    tool_calls: tuple[dict[str, Any], ...] = ()
    """Tool calls as the endpoint parsed them."""


FailureKind = Literal["declined", "filtered", "failed", "empty"]


@dataclass(frozen=True)
class GenerationFailure:
    """A prompt that cannot be answered; retrying does not help."""

    row_id: str
    reason: str
    kind: FailureKind = "failed"


GenerationOutcome = GeneratedAnswer | GenerationFailure


@dataclass(frozen=True)
class GenerationParams:
    """Generation parameters of all prompts of a job."""

    sampling: SamplingSpec
    max_new_tokens: int


class GenerationClient(Protocol):
    """Generates answers to prompts."""

    def answers(self, prompts: Iterator[GenerationRequest], pause: Callable[[], None]) -> Iterator[GenerationOutcome]:
        """Outcomes in the order they finish, each prompt exactly once.

        pause   called often; it raises when the program has to stop, and the client cancels requests in flight.
        """


def row_seed(seed: int, row_id: str) -> int:
    """The seed of one row, 0 <= value < 2**31, which every OpenAI-compatible server takes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{row_id}".encode()).digest()[:4], "big") & 0x7FFFFFFF
