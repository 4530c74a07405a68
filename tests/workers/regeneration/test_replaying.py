"""Conversations replayed on policy: each turn in the context of the new answers, tool results inserted, and ends."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.conversation import conversation
from eyrie_workers.data.rows import AnsweredRow, RowLedger, RowSampling, SelectedRow
from eyrie_workers.regeneration.conversation_replay import (
    CUT,
    Ended,
    PendingTurn,
    TurnQueue,
    answer_message,
    first_turn,
    next_turn,
    num_turns,
    turn_id,
)
from eyrie_workers.targets.templates import ChatTokenizer
from tests.tiny import tiny_target


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    listed = [{"id": i, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
              for i, name, arguments in calls]
    return {"role": "assistant", "content": text} | ({"tool_calls": listed} if listed else {})


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


WEATHER = [user("Oslo or Rome?"),
           assistant(None, ("a", "weather", {"city": "Oslo"}), ("b", "weather", {"city": "Rome"})),
           result("a", "rain"), result("b", "sun"), assistant("Rome."), user("And the sea?")]


def test_the_opening_is_all_up_to_the_first_answer_or_up_to_the_last() -> None:
    assert first_turn(WEATHER, "all") == WEATHER[:1]
    assert first_turn(WEATHER, "last") == WEATHER
    assert (num_turns(WEATHER, "all"), num_turns(WEATHER, "last")) == (3, 1)
    assert next_turn(WEATHER, WEATHER, len(WEATHER), assistant("warm")) is None


def test_results_go_to_the_calls_with_equal_arguments_under_the_new_ids() -> None:
    answer = assistant(None, ("x", "weather", {"city": "Rome"}), ("y", "weather", {"city": "Oslo"}))
    after = next_turn(WEATHER, WEATHER[:1], 1, answer)
    assert after == ([WEATHER[0], answer, result("x", "sun"), result("y", "rain")], 4)


def test_fewer_calls_take_fewer_results_and_others_end_the_conversation() -> None:
    one = assistant(None, ("x", "weather", {"city": "Bergen"}))
    after = next_turn(WEATHER, WEATHER[:1], 1, one)
    assert isinstance(after, tuple)
    assert after[0][-1] == result("x", "rain")
    other = assistant(None, ("x", "tides", {}))
    assert isinstance(next_turn(WEATHER, WEATHER[:1], 1, other), Ended)
    three = assistant(None, *[(str(i), "weather", {"city": "Rome"}) for i in range(3)])
    assert isinstance(next_turn(WEATHER, WEATHER[:1], 1, three), Ended)
    said = [user("hello"), assistant("hi"), user("how?")]
    assert isinstance(next_turn(said, said[:1], 1, other), Ended)


def test_an_answer_without_the_old_calls_goes_on_at_the_next_user_turn() -> None:
    answer = assistant("I do not know.")
    assert next_turn(WEATHER, WEATHER[:1], 1, answer) == ([WEATHER[0], answer, WEATHER[-1]], 6)
    assert next_turn(WEATHER[:4], WEATHER[:1], 1, answer) is None


def test_calls_are_read_out_of_the_text_where_tools_were_on_offer_and_reasoning_is_put_back() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert answer_message(text, "", (), True)["tool_calls"][0]["function"]["name"] == "weather"
    assert answer_message(text, "", (), False) == {"role": "assistant", "content": text}
    assert answer_message("yes", "because", (), False)["reasoning_content"] == "because"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(tiny_target(tmp_path_factory.mktemp("target")))


def chats(tokenizer: ChatTokenizer, lengths: list[int]) -> list[SelectedRow]:
    rows = []
    for line, length in enumerate(lengths, start=1):
        messages = [m for i in range(length) for m in (user(f"{line}.{i}?"), assistant(f"old {line}.{i}"))]
        found = conversation({"messages": messages}, "a.jsonl", line, "messages")
        rows.append(SelectedRow(id=found.id, source="a.jsonl", line=line, category="", messages=list(found.prompt),
                                tools=[], prompt_ids=tokenizer.render(first_turn(found.prompt, "all"))))
    return rows


def answered(question: PendingTurn, tokenizer: ChatTokenizer, finish: str = "stop") -> AnsweredRow:
    prompt = question.prompt
    text = f"new answer to {prompt.messages[-1]['content']}"
    return AnsweredRow(id=prompt.row_id, source="a.jsonl", line=question.row.line, category="",
                       prompt_ids=tuple(prompt.prompt_ids), answer_ids=tuple(tokenizer.encode(text)),
                       finish_reason=finish, text=text, seed=prompt.seed, ids_exact=True,  # type: ignore[arg-type]
                       sampling=RowSampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=9), turn=question.turn)


def questions(rows: list[SelectedRow], ledger: RowLedger, tokenizer: ChatTokenizer) -> TurnQueue:
    return TurnQueue(iter(rows), len(rows), RegenerateSpec(turns="all"), ledger, tokenizer, 1000)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4), kills=st.lists(st.integers(0, 5), max_size=4),
       data=st.data())
def test_killed_anywhere_every_turn_is_answered_once_in_the_context_of_the_new_answers(
        tmp_path: Path, tokenizer: ChatTokenizer, lengths: list[int], kills: list[int], data: st.DataObject) -> None:
    path, rows, seen = tmp_path / "rows.jsonl", chats(tokenizer, lengths), list[str]()
    path.unlink(missing_ok=True)
    for left in itertools.chain(kills, [1000]):
        ledger = RowLedger(path)
        asked, waiting = questions(rows, ledger, tokenizer), list[str]()
        while left > 0:
            while len(waiting) < 3 and (prompt := next(asked, None)) is not None:
                waiting.append(prompt.row_id)
            if not waiting:
                break
            row_id = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            ledger.append(answered(asked.in_flight(row_id), tokenizer))
            seen.append(row_id)
            asked.mark_done(row_id)
            left -= 1
    assert sorted(seen) == sorted(turn_id(row.id, turn, "all") for row, length in zip(rows, lengths, strict=True)
                                  for turn in range(length))
    last = RowLedger(path)
    for row, length in zip(rows, lengths, strict=True):
        state = questions(rows, last, tokenizer).replay(row)
        assert (len(state.answered), state.next) == (length, None)
        text = tokenizer.decode(list(last.row(state.answered[-1]).prompt_ids))
        assert text.count("new answer to") == length - 1
        assert "old" not in text


def test_a_cut_answer_ends_its_conversation_and_is_reported(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    (row,) = chats(tokenizer, [3])
    ledger = RowLedger(tmp_path / "rows.jsonl")
    asked = questions([row], ledger, tokenizer)
    prompt = next(asked)
    ledger.append(answered(asked.in_flight(prompt.row_id), tokenizer, "length"))
    asked.mark_done(prompt.row_id)
    assert next(asked, None) is None
    assert asked.replay(row).next == Ended(CUT)
