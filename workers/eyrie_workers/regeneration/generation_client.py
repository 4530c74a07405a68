"""What is asked of a target and what comes back, whatever engine stands between.

An engine takes prompts lazily, keeps as many in flight as it likes, and yields outcomes in the order they finish; each
row's seed depends on the row alone, so neither order nor concurrency changes an answer. A prompt the engine declines
for good comes back as a `Refusal` with the reason; trouble that may pass is retried inside and raised as Transient when
it does not pass: the stage then ends, and run again it goes on.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from eyrie_api.v1alpha1.sampling import SamplingSpec


@dataclass(frozen=True)
class Prompt:
    """One conversation that waits for its last assistant turn."""

    row_id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt_ids: list[int]
    seed: int
    place: int = 0
    """Its number in the selection, which does not change when others have been answered."""


@dataclass(frozen=True)
class Answer:
    """The target's answer."""

    row_id: str
    prompt_ids: list[int]
    """As the target saw them: an endpoint that renders templates itself may differ from ours."""

    answer_ids: list[int]
    finish_reason: Literal["stop", "length"]
    text: str
    ids_exact: bool
    ids_differ: bool = False
    """Known not to be the ids the target produced: another number of them, or another text."""

    reasoning: str = ""
    """What the endpoint gave apart from the text."""

    tool_calls: tuple[dict[str, Any], ...] = ()
    """As the endpoint read them out of the answer."""


RefusalKind = Literal["declined", "filtered", "failed", "empty"]


@dataclass(frozen=True)
class Refusal:
    """A prompt the engine will not answer, however often it is asked."""

    row_id: str
    reason: str
    kind: RefusalKind = "failed"


@dataclass(frozen=True)
class Asking:
    """How every prompt of a job is asked."""

    sampling: SamplingSpec
    max_new_tokens: int


class AnswerEngine(Protocol):
    """Anything that answers prompts."""

    def answers(self, prompts: Iterator[Prompt], pause: Callable[[], None]) -> Iterator[Answer | Refusal]:
        """Outcomes in the order they finish, each prompt exactly once.

        pause   called often; it raises when the program was asked to stop, and the engine drops what is in flight.
        """


def row_seed(seed: int, row_id: str) -> int:
    """The seed of one row, 0 <= value < 2**31, which every OpenAI-compatible server takes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{row_id}".encode()).digest()[:4], "big") & 0x7FFFFFFF
