"""The corpus: a pure function of seed and index, valid in form, and disjoint from the benchmark suites."""

from __future__ import annotations

import ast
import gzip
import itertools
import json
import re
from importlib import resources
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quickstart import suites
from benchmarks.quickstart.corpus.streams import (
    CATEGORIES,
    FAMILIES,
    conversations,
    held_out,
    is_held_out,
    normalised,
    training_stream,
    user_prompts,
)
from benchmarks.quickstart.practice import practice_stream

OTHER_SEEDS = (7, 11, 12345)


def sample(num: int = 3000, seed: int = 7) -> list[dict[str, Any]]:
    return list(conversations(num, seed))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(min_value=0), num=st.integers(min_value=0, max_value=40))
def test_a_longer_draw_of_a_stream_begins_with_the_shorter_one(seed: int, num: int) -> None:
    assert list(conversations(num, seed)) == list(itertools.islice(conversations(num + 5, seed), num))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(min_value=0))
def test_no_stream_yields_a_held_out_prompt_and_every_held_out_one_does(seed: int) -> None:
    for row in conversations(60, seed):
        assert not any(map(is_held_out, user_prompts(row["messages"])))
    for conversation in itertools.islice(held_out(seed), 2):
        assert is_held_out(user_prompts(conversation.chat.messages)[-1])


@given(text=st.text(), spaces=st.integers(1, 3))
def test_the_split_ignores_spacing_and_punctuation(text: str, spaces: int) -> None:
    varied = f"  {text}!" + " " * spaces
    assert normalised(varied) == normalised(text)
    assert is_held_out(varied) == is_held_out(text)


def test_conversations_end_with_an_answer_and_alternate() -> None:
    follows = {"system": {"user"}, "user": {"assistant"}, "assistant": {"user", "tool"}, "tool": {"assistant"}}
    for row in sample():
        roles = [m["role"] for m in row["messages"]]
        assert roles[-1] == "assistant"
        assert roles[0] in ("system", "user")
        assert all(b in follows[a] for a, b in itertools.pairwise(roles))
        assert row["category"] in CATEGORIES


def test_tool_calls_match_an_offered_schema() -> None:
    calls = 0
    for row in sample():
        offered = {t["function"]["name"]: t["function"]["parameters"] for t in row.get("tools", [])}
        for call in (c["function"] for m in row["messages"] for c in m.get("tool_calls", [])):
            schema, arguments = offered[call["name"]], json.loads(call["arguments"])
            assert list(arguments) == schema["required"] == list(schema["properties"])
            calls += 1
    assert calls > 300


def test_python_answers_are_valid_python() -> None:
    answers = [m["content"] for r in sample() for m in r["messages"] if m["role"] == "assistant" and m["content"]]
    blocks = [b for a in answers for b in re.findall(r"```python\n(.*?)```", a, re.DOTALL)]
    assert len(blocks) > 300
    for block in blocks:
        ast.parse(block)


def test_sums_in_answers_are_right() -> None:
    pattern = re.compile(r"(?<![\d*/+-] )\b(\d+) ([*+-]) (\d+) = (\d+)\b")
    apply = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    checked = 0
    for row in (r for r in sample() if r["category"] == "math"):
        for message in (m for m in row["messages"] if m["role"] == "assistant"):
            for a, sign, b, c in pattern.findall(message["content"]):
                assert apply[sign](int(a), int(b)) == int(c), message["content"]
                checked += 1
    assert checked > 1000


def test_fewer_than_two_percent_of_prompts_repeat() -> None:
    rows = sample(5000)
    assert len({normalised(user_prompts(r["messages"])[0]) for r in rows}) > 0.98 * len(rows)


def test_practice_answers_copy_from_the_prompt_and_no_prompt_is_held_out() -> None:
    for conversation in itertools.islice(practice_stream(3), 300):
        question, answer = conversation.chat.messages
        assert all(word in question["content"] for line in answer["content"].splitlines() for word in line.split(": "))
        assert not is_held_out(question["content"])


def test_every_family_occurs() -> None:
    seen = {c.family for c in itertools.islice(training_stream(3), 3000)}
    assert seen == {maker.__name__ for makers in FAMILIES.values() for maker, _ in makers}


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_suite_is_what_its_generator_writes(category: str) -> None:
    assert suites.read(category) == list(suites.suite(category))


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_suite_asks_and_does_not_answer(category: str) -> None:
    rows = suites.read(category)
    assert len(rows) == suites.NUM_PROMPTS == len({r["id"] for r in rows})
    assert {r["messages"][-1]["role"] for r in rows} <= {"user", "tool"}
    assert all(is_held_out(user_prompts(r["messages"])[-1]) for r in rows)


def test_no_suite_prompt_occurs_in_conversations_of_other_seeds() -> None:
    prompts = suite_prompts()
    for seed in OTHER_SEEDS:
        text = training_text(5000 // len(OTHER_SEEDS), seed)
        assert [p for p in prompts if p in text] == []


def suite_prompts() -> list[str]:
    return [normalised(user_prompts(r["messages"])[-1]) for c in CATEGORIES for r in suites.read(c)]


def training_text(num: int, seed: int) -> str:
    """All text of a stream, normalised as prompts are, so that `in` finds a prompt inside any message."""
    return "\n".join(normalised(m["content"] or "") for r in conversations(num, seed) for m in r["messages"])


def test_the_shipped_conversations_are_the_first_8192_of_stream_0() -> None:
    shipped = resources.files("eyrie_workers.quickstart") / "conversations.jsonl.gz"
    with shipped.open("rb") as packed:
        rows = [json.loads(line) for line in gzip.decompress(packed.read()).splitlines()]
    assert len(rows) == 8192
    assert rows == list(conversations(8192, 0))
