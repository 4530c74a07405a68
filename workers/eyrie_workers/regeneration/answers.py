"""Requests to a target and its answers, whatever engine serves them, and token ids of answers given as text.

A client takes requests lazily, keeps several in flight, and yields outcomes in the order they finish. The seed of a row
depends on the row alone, so neither order nor concurrency changes an answer. A prompt that the engine refuses
permanently yields a `GenerationFailure` with the reason. Transient errors are retried by the client, then raised as
Transient: the stage ends, and its next run resumes.

`AnswerRetokenizer` gives the ids of a text, for endpoints that return no ids and for answers that the data has already
(`AnswersOfData`). Inexact: a target may generate a text with other tokens than its tokenizer would choose, and a
drafter trained on the tokenizer's choice is wrong wherever they differ. Plain text is encoded as it is, followed by the
id that ends a turn. Tool calls and reasoning arrive parsed into fields; the chat template serializes them, as it would
in the next turn of the conversation. So it does with answers of the data, which others may have written: after a prompt
that opens the reasoning (`<think>`), an answer without reasoning begins by closing it. An answer that the template does
not render as a continuation of its prompt is declined.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from eyrie_api.errors import InvalidInput
from eyrie_workers.targets.templates import ChatTokenizer


@dataclass(frozen=True)
class GenerationRequest:
    """One conversation to be continued with an assistant turn."""

    row_id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt_ids: list[int]
    seed: int
    place: int = 0  # index in the selection, independent of which rows have been answered
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, with which `prompt_ids` were rendered."""

    max_new_tokens: int | None = None  # in place of the job's limit
    given: dict[str, Any] | None = None
    """The assistant turn of the data at this place, where the job takes it as the answer (`data.answered`)."""


@dataclass(frozen=True)
class GeneratedAnswer:
    row_id: str
    prompt_ids: list[int]  # as the endpoint reports them: its rendering of the template may differ from ours
    answer_ids: list[int]
    finish_reason: Literal["stop", "length"]
    text: str
    ids_exact: bool
    ids_differ: bool = False
    """Whether the ids certainly differ from the target's: another number of them, or another text."""

    reasoning: str = ""  # reasoning that the endpoint returned in a field of its own
    tool_calls: tuple[dict[str, Any], ...] = ()  # tool calls as the endpoint parsed them


_SLICE_S = 0.2

FailureKind = Literal["declined", "filtered", "failed", "empty"]


@dataclass(frozen=True)
class GenerationFailure:
    """A prompt that cannot be answered; retrying does not help."""

    row_id: str
    reason: str
    kind: FailureKind = "failed"


GenerationOutcome = GeneratedAnswer | GenerationFailure


class WaitingRequests:
    """Requests not yet sent: those put back, then the rest of an iterator, which may be exhausted and yield again."""

    def __init__(self, prompts: Iterator[GenerationRequest]) -> None:
        self.front: deque[GenerationRequest] = deque()
        self._rest = prompts

    def take_while(self, wanted: Callable[[GenerationRequest], bool]) -> list[GenerationRequest]:
        taken: list[GenerationRequest] = []
        while (prompt := self.front.popleft() if self.front else next(self._rest, None)) is not None:
            if not wanted(prompt):
                self.front.appendleft(prompt)
                break
            taken.append(prompt)
        return taken


class GenerationClient(Protocol):
    def answers(self, prompts: Iterator[GenerationRequest], pause: Callable[[], None]) -> Iterator[GenerationOutcome]:
        """Outcomes in the order they finish, each prompt exactly once.

        pause   called often; it raises when the program has to stop, and the client cancels requests in flight.
        """


def row_seed(seed: int, row_id: str) -> int:
    """The seed of one row, 0 <= value < 2**31, which every OpenAI-compatible server takes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{row_id}".encode()).digest()[:4], "big") & 0x7FFFFFFF


class AnswerRetokenizer:
    """Tokenizes an answer again with the target's own tokenizer and template, where there is only its text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._prefix = tokenizer.encode("")
        """Tokens that the tokenizer puts before every text (BOS); an answer within a conversation has none."""
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            written = tokenizer.render(turn, add_generation_prompt=False)
        except InvalidInput:
            written = []
        last = next((token for token in reversed(written) if token in tokenizer.eos_ids), None)
        self.eos_ids: tuple[int, ...] = tuple(tokenizer.eos_ids) if last is None else (
            last, *(token for token in tokenizer.eos_ids if token != last))
        """Ids that end an answer; first the one that the template writes after an assistant turn, if it writes one."""

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def answer_ids(self, prompt: GenerationRequest, message: Mapping[str, Any], *, ended: bool,
                   recorded: bool = False) -> list[int]:
        """Ids of an assistant message after this prompt, with the end-of-turn id when it `ended`.

        recorded   by somebody else, so that it need not go on where the prompt ends: after a prompt that opens the
                   reasoning, an answer without reasoning begins with the tag that ends it

        Raises ValueError when the message cannot be tokenized.
        """
        parsed = {name: message[name] for name in ("tool_calls", "reasoning_content", "reasoning") if message.get(name)}
        if recorded or parsed:
            answer = {"role": "assistant", "content": message.get("content"), **parsed}
            try:
                following = self._tokenizer.continuation(prompt.messages, answer, prompt.tools or None,
                                                         prompt.chat_template_kwargs)
            except InvalidInput as error:
                raise ValueError(error.message) from error
            if following is None:
                raise ValueError("the answer has no token ids, and the chat template does not render this answer as a "
                                 "continuation of its prompt" + (
                                     "" if recorded else ": use an endpoint that honours return_token_ids"))
            ids = following
        else:
            ids = self._tokenizer.encode(message.get("content") or "")
            if ids[:len(self._prefix)] == self._prefix:
                ids = ids[len(self._prefix):]
        end = next((place for place, token in enumerate(ids) if token in self.eos_ids), len(ids))
        return [*ids[:end], *self.eos_ids[:1]] if ended else ids[:end]


@dataclass(frozen=True)
class AnswersOfData:
    """`GenerationClient` over `GenerationRequest.given`."""

    tokenizer: AnswerRetokenizer
    max_new_tokens: int  # where an answer is cut, unless its request has a limit of its own
    context: int  # longest prompt and answer together, in tokens

    def answers(self, prompts: Iterator[GenerationRequest], pause: Callable[[], None]) -> Iterator[GenerationOutcome]:
        for prompt in prompts:
            pause()
            answer = prompt.given
            assert answer is not None, "the selection rejects rows without an answer"
            try:
                ids = self.tokenizer.answer_ids(prompt, answer, ended=True, recorded=True)
            except ValueError as error:
                yield GenerationFailure(prompt.row_id, str(error), "declined")
                continue
            limit = min(prompt.max_new_tokens or self.max_new_tokens, self.context - len(prompt.prompt_ids))
            yield GeneratedAnswer(
                row_id=prompt.row_id, prompt_ids=prompt.prompt_ids, answer_ids=ids[:limit],
                finish_reason="stop" if len(ids) <= limit else "length", text=answer.get("content") or "",
                ids_exact=False, reasoning=answer.get("reasoning_content") or "",
                tool_calls=tuple(answer.get("tool_calls") or ()))


def sleep_in_slices(seconds: float, pause: Callable[[], None]) -> None:
    """Sleep in slices, so that a stop request takes effect within one slice."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        pause()
        time.sleep(min(left, _SLICE_S))
    pause()
