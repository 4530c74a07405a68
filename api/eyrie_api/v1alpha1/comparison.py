"""A prompt answered with and without the drafter: the request, and the events of the response's stream."""

from typing import Literal

from pydantic import Field

from eyrie_api.v1alpha1.model import Frozen

RunName = Literal["drafted", "undrafted"]


class CompareRequest(Frozen):
    """Answer a prompt twice, greedily: as the endpoint serves it, and without its drafter."""

    prompt: str = Field(min_length=1, max_length=20_000)
    """One user message."""

    max_tokens: int = Field(128, ge=1, le=1024)
    """Length of each answer at most, in tokens."""


class ComparedToken(Frozen):
    """One token of the answer."""

    token: str
    """Decoded alone: bytes that are no whole character are U+FFFD."""

    drafted: bool
    """Proposed by the drafter and accepted; otherwise the target's own."""


class DraftNode(Frozen):
    """One node of a round's draft tree. Node 0 is the last token before the round."""

    token: str
    parent: int
    """Index of the parent; the root is its own."""

    accepted: bool


class ComparedRound(Frozen):
    """What one target pass added to the answer; the first is the prefill and yields one token."""

    text: str
    num_tokens: int
    tokens: tuple[ComparedToken, ...] = ()
    """Empty where the engine does not report origins: it has the text of a chunk and its number of tokens."""

    nodes: tuple[DraftNode, ...] = ()
    """The draft tree; empty for the prefill, and where the engine does not report it."""


class ComparedProgress(Frozen):
    """Event `progress`: new rounds of a run, and its figures so far."""

    run: RunName
    revision: int | None
    """That answered; during a canary the two runs may be answered by different ones."""

    rounds: tuple[ComparedRound, ...]
    num_tokens: int
    num_rounds: int
    """Target passes so far, prefill not included; of an engine without traces, chunks."""

    tau: float | None
    """Mean tokens per round; None before the first round."""

    tokens_per_s: float | None
    """From the first token on; None before the second."""


class RunProblem(Frozen):
    """Event `unavailable`, of a run that cannot be made here, or `failed`, of one that ended with an error."""

    run: RunName
    message: str
    hint: str


class ComparisonEnd(Frozen):
    """Event `end`: the last one."""

    equal: bool | None
    """Whether both answers have the same tokens; None unless both are complete."""
