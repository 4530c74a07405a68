"""The questions of a job in the order they can be asked: a conversation's next turn once the one before is answered.

What has been answered stands in the ledger and nowhere else: a conversation is walked from its first_turn through the
answers that are there to the first one that is not. So a run that was killed anywhere goes on with the same questions.

An engine takes questions from an iterator that may run dry and flow again: after `heard` there may be another one.
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
    num_turns,
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
    """One turn of one conversation, ready to be asked."""

    row: SelectedRow
    turn: int
    prompt: GenerationRequest


@dataclass(frozen=True)
class ReplayState:
    """How far a conversation has come."""

    answered: list[str]
    """Ids of its answered rows, in order."""

    then: PendingTurn | Ended | None
    """What comes next; None where all is answered."""


class TurnQueue(Iterator[GenerationRequest]):
    """`Prompt`s for an engine."""

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
            self._line_up(self.walk(row, place))
        question = self._ready.popleft()
        self._in_flight[question.prompt.row_id] = question
        return question.prompt

    def asked(self, row_id: str) -> PendingTurn:
        """The question that an outcome is about."""
        return self._in_flight[row_id]

    def heard(self, row_id: str) -> None:
        """Its outcome is in the ledger, or was refused: the conversation's next turn may be asked."""
        question = self._in_flight.pop(row_id)
        if self._spec.turns == "all" and row_id in self._ledger:
            self._line_up(self.walk(question.row, question.prompt.place % self._num_rows))

    def walk(self, row: SelectedRow, place: int = 0) -> ReplayState:
        """Go through a conversation as far as it is answered."""
        turns, answered = self._spec.turns, list[str]()
        messages = first_turn(row.messages, turns)
        stands_for = len(messages)
        while (row_id := turn_id(row.id, len(answered), turns)) in self._ledger:
            answered.append(row_id)
            if stands_for >= len(row.messages):
                return ReplayState(answered, None)
            found = self._ledger.row(row_id)
            after = next_turn(row.messages, messages, stands_for, _message(found, bool(row.tools)))
            if after is None or isinstance(after, Ended):
                return ReplayState(answered, after)
            if found.finish_reason == "length":
                return ReplayState(answered, Ended(CUT))
            messages, stands_for = after
        turn = len(answered)
        prompt_ids = row.prompt_ids
        if turn > 0:
            try:
                prompt_ids = self._tokenizer.render(messages, row.tools or None)
            except InvalidInput:
                return ReplayState(answered, Ended(TEMPLATE))
            if len(prompt_ids) > self._max_prompt_tokens:
                return ReplayState(answered, Ended(TOO_LONG))
        prompt = GenerationRequest(row_id=row_id, messages=messages, tools=row.tools, prompt_ids=prompt_ids,
                        seed=row_seed(self._spec.seed, row_id), place=turn * self._num_rows + place)
        return ReplayState(answered, PendingTurn(row, turn, prompt))

    def num_unasked(self, question: PendingTurn) -> int:
        """Turns that will not be asked when this question is the last of its conversation."""
        return num_turns(question.row.messages, self._spec.turns) - question.turn - 1

    def _line_up(self, walk: ReplayState) -> None:
        if isinstance(walk.then, PendingTurn):
            self._ready.append(walk.then)


def _message(row: AnsweredRow, has_tools: bool) -> dict[str, object]:
    return answer_message(row.text, row.reasoning, row.tool_calls, has_tools)
