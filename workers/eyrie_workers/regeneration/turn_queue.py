"""The turns of a job in the order they can be sent: a conversation's next turn once the turn before is answered.

The ledger is the only state: a conversation is replayed from its first turn through the answers in the ledger to the
first turn without one. A run that was killed anywhere therefore continues with the same turns.

A client takes requests from an iterator that may be exhausted and yield again: after `mark_done` there may be another.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from eyrie_api.errors import InvalidInput
from eyrie_api.v1alpha1.regeneration import RegenerateSpec
from eyrie_workers.conversations.rows import AnsweredRow, RowLedger
from eyrie_workers.regeneration.conversation_replay import (
    Ended,
    answer_message,
    first_turn,
    next_turn,
    turn_id,
)
from eyrie_workers.regeneration.generation_client import GenerationRequest, row_seed
from eyrie_workers.regeneration.selection import SelectedRow
from eyrie_workers.targets.templates import ChatTokenizer

REFUSED = "an answer was refused"
CUT = "an answer was cut at max_new_tokens"
TOO_LONG = "the next prompt is longer than max_prompt_tokens"
TEMPLATE = "the chat template refuses the answer"


@dataclass(frozen=True)
class PendingTurn:
    """One turn of one conversation, ready to be sent."""

    row: SelectedRow
    turn: int
    prompt: GenerationRequest


@dataclass(frozen=True)
class ReplayState:
    """How far a conversation is answered."""

    answered: list[str]
    """Ids of its answered rows, in order."""

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
        """The turn that an outcome belongs to."""
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
            found = self._ledger.row(row_id)
            after = next_turn(row.messages, messages, assistant_index, _message(found, bool(row.tools)))
            if after is None or isinstance(after, Ended):
                return ReplayState(answered, after)
            if found.finish_reason == "length":
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


def _message(row: AnsweredRow, has_tools: bool) -> dict[str, object]:
    return answer_message(row.text, row.reasoning, row.tool_calls, has_tools)
