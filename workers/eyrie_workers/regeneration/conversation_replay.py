"""On-policy replay of conversations: the messages that follow each new answer, and the turns of a job in order.

With `turns: last` there is one prompt, the conversation up to its last assistant turn. With `turns: all` every
assistant turn is answered again, in the context of the new answers before it, and each is a row of its own: its prompt
is what a server would receive at that turn, rendered by the chat template from messages. A template that drops earlier
reasoning, or serializes earlier calls otherwise than the target wrote them, therefore acts as it does in serving;
supervision covers the answer's tokens by their offset, whatever the template does to earlier turns.

User messages are kept. Tool results are spliced in where the new answer calls tools for which the data has results:
each new call takes the result of the old call of that name, one with equal arguments first. After an answer that calls
no tool where the old one did, the replay continues at the next user turn. The conversation ends early, with a reason
that is counted, where the new answer calls a tool without a result, was truncated, or failed.

`TurnQueue` yields a conversation's next turn once the turn before is answered. The ledger is the only state: a
conversation is replayed from its first turn through the answers in the ledger to the first turn without one. A run that
was killed anywhere therefore continues with the same turns. A client takes requests from an iterator that may be
exhausted and yield again: after `mark_done` there may be another.
"""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyrie_api.chat_messages import Message
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.errors import InvalidInput
from eyrie_workers.data.rows import RowLedger, SelectedRow
from eyrie_workers.regeneration.answers import GenerationRequest, row_seed
from eyrie_workers.targets.templates import ChatTokenizer, parse_answer


@dataclass(frozen=True)
class Ended:
    """The conversation ends before its last turn."""

    reason: str


def num_turns(messages: Sequence[Message], turns: str) -> int:
    """Upper bound of the turns of a conversation; `messages` are without its last assistant turn."""
    return 1 if turns == "last" else 1 + sum(message["role"] == "assistant" for message in messages)


def first_turn(messages: Sequence[Message], turns: str) -> list[Message]:
    if turns == "last":
        return list(messages)
    # Turns of the assistant before anybody has asked are a part of the first prompt.
    asked = next((place for place, message in enumerate(messages) if message["role"] in ("user", "tool")), 0)
    return list(messages[:_next_assistant(messages, asked)])


def turn_id(row_id: str, turn: int, turns: str) -> str:
    """The id of one turn's row; with `turns: last` the id of the conversation."""
    return row_id if turns == "last" else hashlib.sha256(f"{row_id}:{turn}".encode()).hexdigest()[:32]


def answer_message(text: str, reasoning: str, tool_calls: Sequence[Mapping[str, Any]], has_tools: bool) -> Message:
    """An answer as the message a client puts into the next request.

    Tool calls that the engine has not parsed are parsed here, if the conversation defines tools.
    """
    message: Message = {"role": "assistant", "content": text}
    if tool_calls:
        message |= {"tool_calls": [dict(call) for call in tool_calls]}
    elif has_tools:
        message = parse_answer(text) | {"content": parse_answer(text)["content"] or ""}
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
        return None if inputs_end >= len(original) else Ended("the data has two answers in a row")
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


REFUSED = "an answer was refused"
CUT = "an answer was cut at max_new_tokens"
TOO_LONG = "the next prompt is longer than max_prompt_tokens"
TEMPLATE = "the chat template refuses the answer"


@dataclass(frozen=True)
class PendingTurn:
    row: SelectedRow
    turn: int
    prompt: GenerationRequest


@dataclass(frozen=True)
class ReplayState:
    """How far a conversation is answered."""

    answered: list[str]  # ids of its answered rows, in order
    next: PendingTurn | Ended | None
    """The next turn, or the reason for the end; None when all turns are answered."""


class TurnQueue(Iterator[GenerationRequest]):
    """Generation requests for a client."""

    def __init__(self, rows: Iterable[SelectedRow], num_rows: int, spec: RegenerateSpec, ledger: RowLedger,
                 tokenizer: ChatTokenizer, max_prompt_tokens: int) -> None:
        self._spec, self._ledger, self._tokenizer = spec, ledger, tokenizer
        self._num_rows, self._max_prompt_tokens = num_rows, max_prompt_tokens
        self._rows = enumerate(rows)
        self._ready: deque[PendingTurn] = deque()
        self._in_flight: dict[str, PendingTurn] = {}

    def __next__(self) -> GenerationRequest:
        while not self._ready:
            place, row = next(self._rows)
            self._enqueue(self.replay(row, place))
        pending = self._ready.popleft()
        self._in_flight[pending.prompt.row_id] = pending
        return pending.prompt

    def in_flight(self, row_id: str) -> PendingTurn:
        return self._in_flight[row_id]

    def mark_done(self, row_id: str) -> None:
        """Its answer is in the ledger, or it failed: the conversation's next turn may be sent."""
        pending = self._in_flight.pop(row_id)
        if self._spec.turns == "all" and row_id in self._ledger:
            # A prompt's place is turn * num_rows + the conversation's place.
            self._enqueue(self.replay(pending.row, pending.prompt.place % self._num_rows))

    def replay(self, row: SelectedRow, place: int = 0) -> ReplayState:
        """Replay a conversation as far as it is answered."""
        turns, answered = self._spec.turns, list[str]()
        messages = first_turn(row.messages, turns)
        assistant_index = len(messages)
        while (row_id := turn_id(row.id, len(answered), turns)) in self._ledger:
            answered.append(row_id)
            if assistant_index >= len(row.messages):
                return ReplayState(answered, None)
            answer = self._ledger.row(row_id)
            after = next_turn(row.messages, messages, assistant_index, answer_message(
                answer.text, answer.reasoning, answer.tool_calls, bool(row.tools)))
            if after is None or isinstance(after, Ended):
                return ReplayState(answered, after)
            if answer.finish_reason == "length":
                return ReplayState(answered, Ended(CUT))
            messages, assistant_index = after
        turn = len(answered)
        prompt_ids = row.prompt_ids
        if turn > 0:
            try:
                prompt_ids = self._tokenizer.render(messages, row.tools or None, variables=row.chat_template_kwargs)
            except InvalidInput:
                return ReplayState(answered, Ended(TEMPLATE))
            if len(prompt_ids) > self._max_prompt_tokens:
                return ReplayState(answered, Ended(TOO_LONG))
        given = row.messages[assistant_index] if assistant_index < len(row.messages) else row.answer
        prompt = GenerationRequest(row_id=row_id, messages=messages, tools=row.tools, prompt_ids=prompt_ids,
                                   seed=row_seed(self._spec.seed, row_id), place=turn * self._num_rows + place,
                                   chat_template_kwargs=row.chat_template_kwargs, max_new_tokens=row.max_new_tokens,
                                   given=None if row.answer is None else given)
        return ReplayState(answered, PendingTurn(row, turn, prompt))

    def _enqueue(self, state: ReplayState) -> None:
        if isinstance(state.next, PendingTurn):
            self._ready.append(state.next)
