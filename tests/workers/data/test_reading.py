"""Every format ends in one normal form, and every row that cannot is quarantined with its line and its reason."""

import contextlib
import gzip
import io
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api import conversation as reading
from eyrie_api.contract.data import DataSource
from eyrie_api.contract.reports import QuarantinedRow
from eyrie_api.conversation import Conversation, Malformed, conversation
from eyrie_api.data_files import array_rows
from eyrie_api.errors import InvalidInput
from eyrie_workers.data import readers
from eyrie_workers.data.readers import file_rows, read_conversations

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TOOL_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"sky": "clear"}'},
        {"role": "assistant", "content": "Clear."}, {"role": "user", "content": "Thanks!"},
        {"role": "assistant", "content": "You are welcome."},
    ],
    "tools": TOOLS, "category": "tools",
}


_STREAMED_ROWS, _STREAMED_CHARACTERS = 2000, 8000


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_is_read_in_a_fraction_of_the_memory_of_its_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    chats = ({"messages": [user(f"{number} " + "x" * _STREAMED_CHARACTERS)]} for number in range(_STREAMED_ROWS))
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(chats)), path, row_group_size=64)
    else:
        lines = "\n".join(map(json.dumps, chats))
        data = (f"[{','.join(lines.splitlines())}]" if name == "a.json" else lines).encode()
        path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else
                         pyarrow.compress(data, "zstd", asbytes=True) if name.endswith(".zst") else data)
        del lines, data
    held, count, most = pyarrow.total_allocated_bytes(), 0, 0
    tracemalloc.start()
    try:
        for one in read_conversations(DataSource(path=str(path))):
            assert isinstance(one, Conversation)
            count, most = count + 1, max(most, pyarrow.total_allocated_bytes() - held)
        traced = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == _STREAMED_ROWS
    # Parquet is held by 256 rows, in Arrow's memory and as Python's values.
    assert max(traced, most) < _STREAMED_ROWS * _STREAMED_CHARACTERS / 2.5


def read(path: Path, **fields: Any) -> list[Conversation | QuarantinedRow]:
    return list(read_conversations(DataSource(path=str(path), **fields)))


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def usable(rows: list[Conversation | QuarantinedRow]) -> list[Conversation]:
    assert all(isinstance(row, Conversation) for row in rows), rows
    return [row for row in rows if isinstance(row, Conversation)]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_system_prompt_turns_tool_calls_and_results_are_preserved(tmp_path: Path) -> None:
    (chat,) = usable(read(write(tmp_path / "a.jsonl", TOOL_CHAT)))
    assert list(chat.messages) == TOOL_CHAT["messages"]
    assert list(chat.tools) == TOOLS
    assert (chat.category, chat.line, chat.source) == ("tools", 1, str(tmp_path / "a.jsonl"))
    assert list(chat.prompt) == TOOL_CHAT["messages"][:-1]


def test_a_conversation_that_ends_with_the_user_loses_no_turn(tmp_path: Path) -> None:
    (chat,) = usable(read(write(tmp_path / "a.jsonl", {"messages": [user("Hi there")]})))
    assert chat.prompt == chat.messages


def test_sharegpt_and_messages_of_the_same_chat_are_one_conversation(tmp_path: Path) -> None:
    share = {
        "system": "Be brief.", "tools": json.dumps([TOOLS[0]["function"]]), "category": "tools",
        "conversations": [
            {"from": "human", "value": "Weather in Oslo?"},
            {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})},
            {"from": "observation", "value": '{"sky": "clear"}'}, {"from": "gpt", "value": "Clear."},
            {"from": "human", "value": "Thanks!"}, {"from": "gpt", "value": "You are welcome."},
        ],
    }
    plain = json.loads(json.dumps(TOOL_CHAT).replace("abcdefghi", "call00000"))
    (one,), (other,) = (usable(read(write(tmp_path / f"{i}.jsonl", row))) for i, row in enumerate((share, plain)))
    assert one.messages == other.messages
    assert one.id == other.id


def test_the_id_is_of_the_prompt_and_not_of_the_discarded_answer(tmp_path: Path) -> None:
    chats = [{"messages": [user("Hi"), {"role": "assistant", "content": answer}]} for answer in ("A", "B")]
    other = {"messages": [{"role": "system", "content": "x"}, *chats[0]["messages"]]}
    one, two, three = usable(read(write(tmp_path / "a.jsonl", *chats, other)))
    assert one.id == two.id != three.id


def test_parquet_rows_equal_the_same_rows_in_jsonl(tmp_path: Path) -> None:
    rows = [TOOL_CHAT, {"messages": [user("Hi"), {"role": "assistant", "content": "Hello"}]}]
    table = pyarrow.Table.from_pylist([{**row, "tools": json.dumps(row.get("tools", []))} for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    ours, theirs = usable(read(tmp_path / "a.parquet")), usable(read(write(tmp_path / "a.jsonl", *rows)))
    assert [(c.id, c.line, c.messages, c.tools, c.category) for c in ours] \
        == [(c.id, c.line, c.messages, c.tools, c.category) for c in theirs]


def test_text_parts_are_joined_and_the_developer_stays_one(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    row = {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]}
    (chat,) = usable(read(write(tmp_path / "a.jsonl", row)))
    assert [(m["role"], m["content"]) for m in chat.messages] == [("developer", "x"), ("user", "one two")]


FUNCTIONS = json.dumps([TOOLS[0]["function"]])


@pytest.mark.parametrize("calls", ['weather(city="Oslo")', '[weather(city="Oslo")]',
                                   '[{"name": "weather", "arguments": {"city": "Oslo"}}]'])
def test_a_row_as_dolci_publishes_it_keeps_its_tools_calls_and_results(tmp_path: Path, calls: str) -> None:
    def turn(role: str, content: str | None, functions: str | None = None, function_calls: str | None = None) -> Any:
        return {"role": role, "content": content, "functions": functions, "function_calls": function_calls}

    row = {"id": "x", "source_dataset": "y", "messages": [
        turn("system", "Be brief.", functions=FUNCTIONS), turn("user", "Weather in Oslo?"),
        turn("assistant", None, function_calls=calls), turn("environment", '{"sky": "clear"}'),
        turn("assistant", "Clear."), turn("user", "Thanks!"), turn("assistant", None)]}
    (chat,) = usable(read(write(tmp_path / "a.jsonl", row)))
    assert list(chat.tools) == TOOLS
    expected = json.loads(json.dumps(TOOL_CHAT["messages"][:-1]).replace("abcdefghi", "call00000"))
    assert list(chat.prompt) == expected, "the empty last turn is where the target answers"


def test_calls_and_results_in_hermes_tags_become_calls_and_results(tmp_path: Path) -> None:
    row = {"tools": FUNCTIONS, "conversations": [
        {"from": "system", "value": "Be brief."}, {"from": "human", "value": "Weather in Oslo?"},
        {"from": "gpt", "value": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'},
        {"from": "tool", "value": '<tool_response>\n{"sky": "clear"}\n</tool_response>'},
        {"from": "gpt", "value": "Clear."}, {"from": "human", "value": "Thanks!"}]}
    (chat,) = usable(read(write(tmp_path / "a.jsonl", row)))
    expected = json.loads(json.dumps(TOOL_CHAT["messages"][:-1]).replace("abcdefghi", "call00000"))
    assert list(chat.prompt) == expected


def test_an_alpaca_row_is_a_question_with_its_input_below(tmp_path: Path) -> None:
    rows = [{"instruction": "Translate.", "input": "Guten Tag", "output": "Good day"},
            {"instruction": "Name a town.", "input": "", "output": "Oslo"}]
    one, two = usable(read(write(tmp_path / "a.jsonl", *rows)))
    assert [message["content"] for message in one.messages] == ["Translate.\n\nGuten Tag", "Good day"]
    assert [message["content"] for message in two.prompt] == ["Name a town."]


def test_rows_of_gsm8k_and_of_gpteacher_are_read_as_published(tmp_path: Path) -> None:
    rows = [{"question": "How many are 2 + 3?", "answer": "2 + 3 = 5\n#### 5"}, {"question": "And 3 + 3?"}]
    one, two = usable(read(write(tmp_path / "a.jsonl", *rows)))
    assert [message["content"] for message in one.messages] == ["How many are 2 + 3?", "2 + 3 = 5\n#### 5"]
    assert [message["role"] for message in two.messages] == ["user"]
    (three,) = usable(read(write(tmp_path / "b.jsonl", {"instruction": "Add.", "input": "2 3", "response": "5"})))
    assert [message["content"] for message in three.messages] == ["Add.\n\n2 3", "5"]
    (bad,) = read(write(tmp_path / "c.jsonl", {"question": [[{"role": "user", "content": "Hi"}]]}))
    assert isinstance(bad, QuarantinedRow)
    assert bad.reason == "`question` must be text, this is list"


@pytest.mark.parametrize(("prompt", "completion"), [
    ("Name a town.", "Oslo"), ([user("Name a town.")], [{"role": "assistant", "content": "Oslo"}]),
    ([user("Name a town.")], "Oslo")])
def test_rows_of_a_prompt_with_or_without_completion_are_read_as_texts_and_as_turns(
        tmp_path: Path, prompt: object, completion: object) -> None:
    rows = [{"prompt": prompt, "completion": completion}, {"prompt": prompt, "chosen": "Oslo", "rejected": "Rome"}]
    one, two = usable(read(write(tmp_path / "a.jsonl", *rows)))
    assert [message["content"] for message in one.messages] == ["Name a town.", "Oslo"]
    assert list(two.messages) == list(one.prompt) == list(two.prompt)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_whatever_its_field_is_called(tmp_path: Path, key: str) -> None:
    row = {"messages": [user("Hi"), {"role": "assistant", "content": "Hello", key: "They greet."}, user("And?")]}
    (chat,) = usable(read(write(tmp_path / "a.jsonl", row)))
    assert chat.messages[1]["reasoning_content"] == "They greet."


@pytest.mark.parametrize("text", ["weather('Oslo')", "weather(city=town)", "import os", "x = 1", "f(",
                                  "__import__('os').system('x')"])
def test_a_call_that_is_no_call_with_named_literals_is_refused_and_never_run(tmp_path: Path, text: str) -> None:
    row = {"messages": [user("x"), {"role": "assistant", "content": None, "function_calls": text},
                        {"role": "environment", "content": "y"}]}
    (bad,) = read(write(tmp_path / "a.jsonl", row))
    assert isinstance(bad, QuarantinedRow)
    assert "neither JSON nor calls in Python's syntax" in bad.reason


MALFORMED: list[tuple[Any, str]] = [
    ("", "empty line"),
    ("   ", "empty line"),
    ('{"messages": [', "bad JSON at column"),
    ("[" * 100_000, "bad JSON: nested too deep"),
    ([1, 2], "a row must be an object, this is list"),
    ("null", "a row must be an object, this is null"),
    ({"text": "hello"}, "no `messages` in the row"),
    ({"messages": "hello"}, "`messages` must be a list, this is str"),
    ({"messages": []}, "empty conversation"),
    ({"messages": ["hello"]}, "turn 1: a turn must be an object, this is str"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "turn 1: unknown role 'wizard'"),
    ({"messages": [{"content": "x"}]}, "turn 1: unknown role None"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "turn 1: unknown role"),
    ({"messages": [{"role": "user", "content": 7}]}, "turn 1: content must be text, this is int"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
    ({"messages": [user("x") | {"wieght": 0.5}]}, "turn 1: unknown field 'wieght'"),
    ({"messages": [{"role": "user", "content": None}]}, "no user turn with text"),
    ({"messages": [user("  ")]}, "no user turn with text"),
    ({"messages": [{"role": "system", "content": "x"}]}, "no user turn with text"),
    ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "text with an unpaired surrogate"),
    ({"messages": [user("x"), {"role": "assistant", "tool_calls": [{}]}]}, "turn 2: a tool call names no function"),
    ({"messages": [user("x"), {"role": "assistant", "tool_calls": "y"}]}, "turn 2: tool_calls must be a list"),
    ({"messages": [user("x"), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": 3}]}]},
     "turn 2: arguments of a tool call must be an object or JSON text, this is int"),
    ({"messages": [user("x")], "tools": "{"}, "tools is text, but not JSON"),
    ({"messages": [user("x")], "tools": {}}, "tools must be a list, this is dict"),
    ({"messages": [user("x")], "tools": [{}]}, "a tool names no function"),
    ('{"messages": [{"role": "user", "content": "x"}], "n": ' + "9" * 5000 + "}", "bad JSON: Exceeds the limit"),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f", "x": NaN}]}', "that JSON cannot hold"),
    ({"messages": [user("x")], "tools": [{"name": "f", "x": json.loads("[" * 90 + "]" * 90)}]},
     "nested deeper than 64 levels"),
    ({"messages": [user("x")], "category": 3}, "category must be text, this is int"),
]


@pytest.mark.parametrize(("row", "reason"), MALFORMED, ids=[reason for _, reason in MALFORMED])
def test_a_malformed_row_is_quarantined_with_its_line(tmp_path: Path, row: Any, reason: str) -> None:
    good = {"messages": [user("fine")]}
    first, second, third = read(write(tmp_path / "a.jsonl", good, row, good), format="messages")
    assert isinstance(first, Conversation)
    assert isinstance(third, Conversation)
    assert third.line == 3
    assert isinstance(second, QuarantinedRow)
    assert (second.line, second.source) == (2, str(tmp_path / "a.jsonl"))
    assert reason in second.reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8)
ROLE = st.sampled_from(["system", "user", "human", "assistant", "gpt", "tool", "function_call", "observation", "?"])
TURN = st.fixed_dictionaries({"role": ROLE | JSON, "content": st.text(max_size=5) | JSON}, optional={
    "tool_calls": st.lists(st.fixed_dictionaries({"name": st.text(max_size=3), "arguments": JSON}), max_size=2) | JSON,
    "tool_call_id": JSON, "name": JSON, "reasoning_content": JSON})
ROW = st.fixed_dictionaries({"messages": st.lists(TURN, max_size=5) | JSON}, optional={
    "tools": st.lists(st.fixed_dictionaries({"name": st.text(max_size=3)}), max_size=2) | JSON, "category": JSON})


@settings(max_examples=400)
@given(row=ROW | JSON)
def test_any_row_becomes_a_conversation_or_a_reason(row: Any) -> None:
    with contextlib.suppress(Malformed):
        conversation(row, "s", 1, "messages")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(TEXT, TEXT | st.integers() | st.booleans(), max_size=2)
ROUND = st.tuples(TEXT.filter(str.strip), st.lists(ARGUMENTS, max_size=2), TEXT)


def chat_of(rounds: list[tuple[str, list[dict[str, Any]], str]]) -> list[dict[str, Any]]:
    messages = []
    for asked, calls, said in rounds:
        messages.append(user(asked))
        if calls:
            messages.append({"role": "assistant", "tool_calls": [{"name": "f", "arguments": a} for a in calls]})
            messages += [{"role": "tool", "content": said} for _ in calls]
        messages.append({"role": "assistant", "content": said})
    return messages


@given(rounds=st.lists(ROUND, min_size=1, max_size=4))
def test_a_well_formed_chat_is_kept_whole_and_its_normal_form_is_stable(
        rounds: list[tuple[str, list[dict[str, Any]], str]]) -> None:
    given_messages = chat_of(rounds)
    chat = conversation({"messages": given_messages}, "s", 1, "messages")
    assert [m["role"] for m in chat.messages] == [m["role"] for m in given_messages]
    assert [m["content"] for m in chat.messages] == [m.get("content", "") for m in given_messages]
    assert [json.loads(c["function"]["arguments"]) for m in chat.messages for c in m.get("tool_calls", [])] \
        == [arguments for _, calls, _ in rounds for arguments in calls]
    ids = [c["id"] for m in chat.messages for c in m.get("tool_calls", [])]
    assert [m["tool_call_id"] for m in chat.messages if m["role"] == "tool"] == ids
    assert len(set(ids)) == len(ids)
    again = conversation({"messages": list(chat.messages), "tools": list(chat.tools)}, "s", 1, "messages")
    assert (again.id, again.messages, again.prompt) == (chat.id, chat.messages, chat.prompt)


def test_bytes_that_are_not_utf8_are_quarantined(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"messages": "\xff"}\n' + json.dumps({"messages": [user("fine")]}).encode())
    bad, good = read(path)
    assert isinstance(bad, QuarantinedRow)
    assert bad.reason == "not UTF-8 at byte 14"
    assert isinstance(good, Conversation)
    assert good.line == 2


def test_an_oversized_row_is_quarantined_and_does_not_shift_line_numbers(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (readers, reading):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 200)
    good = {"messages": [user("fine")]}
    rows = read(write(tmp_path / "a.jsonl", good, {"messages": [user("x" * 1000)]}, good))
    assert [row.line for row in rows] == [1, 2, 3]
    assert isinstance(rows[1], QuarantinedRow)
    assert rows[1].reason == "oversized: more than 200 bytes"
    assert isinstance(rows[2], Conversation)


def test_the_layout_is_decided_by_the_first_readable_row(tmp_path: Path) -> None:
    share = {"conversations": [{"from": "human", "value": "Hi"}]}
    rows = read(write(tmp_path / "a.jsonl", "", {"other": 1}, share, {"messages": [user("x")]}))
    assert [isinstance(row, Conversation) for row in rows] == [False, False, True, False]


def packed_files(tmp_path: Path, rows: list[dict[str, Any]]) -> dict[str, Path]:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    array = json.dumps(rows, indent=1).encode()
    content = {"a.jsonl.gz": gzip.compress(lines), "a.json": array, "a.json.gz": gzip.compress(array),
               "a.jsonl.zst": bytes(pyarrow.compress(lines, codec="zstd", asbytes=True))}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    return {name: tmp_path / name for name in content}


def test_packed_files_and_arrays_hold_the_rows_of_the_plain_file(tmp_path: Path) -> None:
    rows = [{"messages": [user(f"question {number} \u2028 \"[]{{\" {'x' * number * 977}")]} for number in range(200)]
    plain = usable(read(write(tmp_path / "plain.jsonl", *rows)))
    for name, path in packed_files(tmp_path, rows).items():
        found = usable(read(path))
        assert [(one.line, one.messages) for one in found] == [(one.line, one.messages) for one in plain], name


def test_a_directory_and_a_pattern_are_one_source_whose_faults_name_file_and_row(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", {"messages": [user("two")]}, {"messages": []})
    write(tmp_path / "a.jsonl", {"messages": [user("one")]})
    write(tmp_path / "notes.txt", "no data")
    (tmp_path / "below").mkdir()
    write(tmp_path / "below" / "c.jsonl", {"messages": [user("three")]})
    for path in (tmp_path, tmp_path / "*.jsonl", tmp_path / "[ab].*"):
        one, two, bad = read(path)
        assert isinstance(one, Conversation)
        assert isinstance(two, Conversation)
        assert isinstance(bad, QuarantinedRow)
        assert [chat.messages[0]["content"] for chat in (one, two)] == ["one", "two"]
        assert (bad.source, bad.line, bad.reason) == (str(path), 3, "empty conversation (b.jsonl row 2)")
    assert [chat.messages[0]["content"] for chat in usable(read(tmp_path / "a.jsonl"))] == ["one"]


@pytest.mark.parametrize(("text", "says"), [
    ("[1, 2", "ends early, after 2 elements"), ('["a", "b', "element 2 is not JSON"),
    ("[1 2]", "no comma after element 1"),
    ("[" * 5000, "element 1 is nested too deep"), ("[1,]", "element 2 is not JSON")])
def test_a_broken_array_is_refused_after_its_good_elements(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        list(array_rows(io.BytesIO(text.encode())))


@pytest.mark.parametrize(("lines", "says"), [
    (b'{"a": 1}\n' + b" " * (9 << 20), "more than 8388608 bytes of white space up to line 2"),
    (b'{"a": 1}\n' + (b" " * 1000 + b"\n") * (9 << 10), "more than 8388608 bytes of white space up to line "),
    (b"x" * (130 << 20), "line 1 has more than 134217728 bytes")], ids=["one line", "many lines", "no white space"])
def test_a_packed_file_that_swells_to_white_space_or_to_an_endless_line_is_refused_where_a_stage_reads_it(
        tmp_path: Path, lines: bytes, says: str) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines, 1))
    with pytest.raises(InvalidInput, match=f"data source {path} cannot be read: {says}.*; copy or write it again"):
        for _ in file_rows(path, "data source "):
            pass


@given(st.lists(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) |
                             st.dictionaries(st.text(), inner), max_leaves=8)), st.integers(1, 9))
def test_an_array_read_in_pieces_of_any_size_is_the_array(rows: list[Any], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyrie_api.data_files._PIECE", piece)
        assert list(array_rows(io.BytesIO(b" " + json.dumps(rows).encode()))) == rows


def test_max_rows_bounds_what_is_read(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.jsonl", *({"messages": [user(f"q{i}")]} for i in range(9))), max_rows=4)
    assert [row.line for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize(("path", "hint"), [
    ("nowhere.jsonl", "give a JSONL or parquet file"), ("/no/such", "give a JSONL or parquet file"),
    ("tests", "put .jsonl or .parquet files there"), ("tests/*.jsonl", "correct the pattern"),
])
def test_a_source_that_cannot_be_opened_is_refused_with_the_hint(path: str, hint: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(Path(path))
    assert hint in caught.value.hint


def test_a_hub_id_without_the_datasets_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    with pytest.raises(InvalidInput) as caught:
        read(Path("some-org/some-data"))
    assert "pip install datasets" in caught.value.hint


@pytest.fixture
def hub_data_set(tmp_path: Path) -> Path:
    """A data set's repository as the Hub has it: parquet files per configuration and split, named by the README."""
    for config in ("chats", "code"):
        for split in ("train", "test"):
            (tmp_path / config).mkdir(exist_ok=True)
            rows = [{"messages": [{**user(f"{config} {split} {number}"), "name": None}]} for number in range(3)]
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / config / f"{split}-00000.parquet")
    (tmp_path / "README.md").write_text("---\nconfigs:\n" + "".join(
        f"- config_name: {config}\n  data_files:\n"
        + "".join(f"  - {{split: {split}, path: {config}/{split}-*}}\n" for split in ("train", "test"))
        for config in ("chats", "code")) + "---\n")
    return tmp_path


# The Hub itself cannot be reached from the tests. The `datasets` package reads a directory of this form by the same
# call; but a directory has one revision, so that of `revision` this shows that the call takes it, not what it chooses.
@pytest.mark.parametrize(("fields", "first"), [
    ({"config": "chats"}, "chats train 0"), ({"config": "code", "split": "test"}, "code test 0"),
    ({"config": "chats", "revision": "v1.1"}, "chats train 0"),
])
def test_a_hub_data_set_is_read_by_config_split_and_revision(hub_data_set: Path, fields: dict[str, str],
                                                              first: str) -> None:
    rows = list(readers._hub_rows(DataSource(path=str(hub_data_set), **fields)))
    assert rows[0] == {"messages": [user(first)]}


@pytest.mark.parametrize(("fields", "named"), [
    ({}, "chats"), ({"config": "math"}, "math"), ({"config": "chats", "split": "dev"}, "dev"),
    ({"config": "chats", "split": "train[:1]"}, "train"),
])
def test_a_config_or_split_that_a_hub_data_set_has_not_is_refused(hub_data_set: Path, fields: dict[str, str],
                                                                  named: str) -> None:
    with pytest.raises(InvalidInput, match=named) as caught:
        list(readers._hub_rows(DataSource(path=str(hub_data_set), **fields)))
    assert "config" in caught.value.hint


def test_files_of_the_wrong_kind_are_refused_with_the_hint(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="Not a gzipped file"):
        read(write(tmp_path / "a.jsonl.gz", {}))
    with pytest.raises(InvalidInput, match="cannot be read"):
        read(write(tmp_path / "a.jsonl.zst", {}))
    with pytest.raises(InvalidInput, match="no comma after element 1"):
        read(write(tmp_path / "b.json", "[{} {}]"))
    with pytest.raises(InvalidInput, match="not readable parquet"):
        read(write(tmp_path / "a.parquet", "text"))


def test_the_quickstart_corpus_is_a_source() -> None:
    chats = usable(read(Path("quickstart"), max_rows=30))
    assert len({chat.id for chat in chats}) == 30
    assert [chat.line for chat in chats] == list(range(1, 31))
    assert {chat.category for chat in chats} == {"chat", "math", "code", "tools"}
    assert any(chat.tools for chat in chats)
