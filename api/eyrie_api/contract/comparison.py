"""A prompt answered with and without the drafter: the request, and the events of the response's stream.

`RecordedAnswers` is a file of the prove stage. It stands in for the undrafted run where no engine can make one.
"""

from typing import Literal

from pydantic import Field

from eyrie_api.contract.model import Frozen

RunName = Literal["drafted", "undrafted"]
MAX_PROMPT = 20_000
"""Characters of a prompt."""

MAX_ANSWER = 1024
"""Tokens of an answer."""

ANSWERS_FILE = "undrafted_answers.json"
"""Of the prove stage: `RecordedAnswers`."""


class CompareRequest(Frozen):
    """Answer a prompt twice, greedily: as the endpoint serves it, and without its drafter."""

    prompt: str = Field(min_length=1, max_length=MAX_PROMPT)
    """One user message."""

    max_tokens: int = Field(128, ge=1, le=MAX_ANSWER)
    """Length of each answer at most, in tokens."""


class RecordedAnswer(Frozen):
    """The greedy answer of the serving engine without a drafter to a prompt that is one user message."""

    prompt: str
    text: str
    num_tokens: int
    is_cut: bool
    """Whether the limit of tokens ended it."""


class RecordedAnswers(Frozen):
    """Answers that a proof recorded."""

    answers: tuple[RecordedAnswer, ...]


class RecordedPrompts(Frozen):
    """The prompts to which a comparison has a recorded answer without the drafter."""

    job_id: str | None
    """Whose proof recorded them; None where there are none."""

    prompts: tuple[str, ...] = ()


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


class RecordedRun(Frozen):
    """Event `recorded`: in place of a run that no engine can make, the answer that the proof recorded."""

    run: RunName
    job_id: str
    text: str
    num_tokens: int
    is_cut: bool
    """Whether the proof's limit of tokens ended it."""

    tokens_per_s: float | None
    """From the first token on: the mean of the proof's load test without a drafter and with one user, not of this
    answer. None where it has no such level."""


class RunProblem(Frozen):
    """Event `unavailable`, of a run that cannot be made here, or `failed`, of one that ended with an error."""

    run: RunName
    message: str
    hint: str


class ComparisonEnd(Frozen):
    """Event `end`: the last one."""

    equal: bool | None
    """Whether both answers have the same tokens or, of an engine that does not report them, the same text, up to the
    shorter one where that was cut off; None unless both are complete."""
