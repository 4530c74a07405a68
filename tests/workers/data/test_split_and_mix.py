"""The split sees the text alone; the mix keeps its shares; what a benchmark asks is found again."""

import json
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.contract.reports import QuarantinedRow
from eyrie_api.errors import InvalidInput
from eyrie_workers.data.overlap import BenchmarkPrompts, is_held_out, user_turns
from eyrie_workers.data.suites import excluded_prompts
from eyrie_workers.regeneration.selection import mix

WORDS = st.text(string.ascii_letters + string.digits + " ,.?!", min_size=1, max_size=40)


def turns(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@given(text=WORDS, fraction=st.floats(0, 1), system=WORDS)
def test_case_punctuation_and_system_prompt_do_not_move_a_prompt_across_the_split(text: str, fraction: float,
                                                                                system: str) -> None:
    plain = is_held_out(turns(text), fraction)
    assert is_held_out([{"role": "system", "content": system}, *turns(text)], fraction) == plain
    if any(c.isalnum() for c in text):
        assert is_held_out(turns(f" {text.upper()} ?!"), fraction) == plain


@given(text=WORDS, low=st.floats(0, 1), high=st.floats(0, 1))
def test_a_larger_fraction_holds_out_everything_a_smaller_one_does(text: str, low: float, high: float) -> None:
    if is_held_out(turns(text), min(low, high)):
        assert is_held_out(turns(text), max(low, high))


def test_the_share_held_out_is_the_share_asked_for() -> None:
    held = sum(is_held_out(turns(f"question {i}"), 0.1) for i in range(4000))
    assert abs(held - 400) < 5 * (4000 * 0.1 * 0.9) ** 0.5  # five standard deviations of a fair draw
    assert not any(is_held_out(turns(f"question {i}"), 0.0) for i in range(100))
    assert all(is_held_out(turns(f"question {i}"), 1.0) for i in range(100))


def test_the_steps_of_one_tool_conversation_stay_on_one_side() -> None:
    for i in range(200):
        asked = turns(f"weather in town {i}?")
        later = [*asked, {"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": "{}"}]
        assert is_held_out(asked, 0.5) == is_held_out(later, 0.5)


def test_a_conversation_that_overlaps_a_benchmark_prompt_is_found() -> None:
    suites = BenchmarkPrompts.of([turns("What is 2 + 2?"), turns("Tell a story.", "Once...", "Now shorter.")])
    assert suites.overlap(turns("what is 2+2"))
    assert suites.overlap(turns("Hello", "Hi", "What is 2 + 2"))
    assert suites.overlap(turns("Tell a story", "No."))
    assert suites.overlap(turns("Now shorter"))
    assert suites.overlap(turns("a", "b", "Tell a story", "x", "now shorter", "y", "c"))
    assert not suites.overlap(turns("What is 2 + 3?"))
    assert not suites.overlap(turns("Tell a story", "No.", "Now longer."))


@given(st.lists(st.lists(WORDS, min_size=1, max_size=3), max_size=5))
def test_every_suite_prompt_overlaps_itself(prompts: list[list[str]]) -> None:
    messages = [[{"role": "user", "content": text} for text in texts] for texts in prompts]
    suites = BenchmarkPrompts.of(messages)
    assert all(suites.overlap(prompt) for prompt in messages)


def test_quickstart_conversations_never_overlap_the_quickstart_suites() -> None:
    from benchmarks.quickstart.corpus.streams import conversations

    names = ("chat", "math", "code", "tools")
    suites = BenchmarkPrompts.of(excluded_prompts([f"quickstart:{name}" for name in names], pytest.fail))
    assert suites.whole
    assert not any(suites.overlap(row["messages"]) for row in conversations(300, seed=11))


def test_suite_rows_of_every_layout_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": "a b"}, {"question": "c d", "answer": "x"}, {"turns": ["e f", "g h"]},
            {"messages": [{"role": "user", "content": "i j"}, {"role": "assistant", "content": None}]}]
    path = tmp_path / "suite.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    read = [user_turns(prompt) for prompt in excluded_prompts([str(path)], pytest.fail)]
    assert read == [("a b",), ("c d",), ("e f", "g h"), ("i j",)]


def test_a_suite_that_cannot_be_excluded_is_an_error_or_a_warning_and_never_silence(tmp_path: Path) -> None:
    for path, says in (("quickstart:nonsense", "no quickstart suite"),
                       (str(tmp_path / "missing.jsonl"), "does not exist")):
        with pytest.raises(InvalidInput, match=says):
            list(excluded_prompts([path], pytest.fail))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x"}\n{"text": "y"}\n')
    with pytest.raises(InvalidInput, match="line 2"):
        list(excluded_prompts([str(bad)], pytest.fail))
    warnings: list[str] = []
    assert list(excluded_prompts(["some-org/some-suite"], warnings.append)) == []
    assert "some-org/some-suite" in warnings[0]


def stream(name: str, num: int, bad_every: int = 0) -> Any:
    for i in range(num):
        if bad_every and i % bad_every == 0:
            yield QuarantinedRow(source=name, line=i + 1, reason="bad")
        else:
            yield f"{name}{i}"


def test_a_mix_keeps_the_shares_and_the_order_within_a_source() -> None:
    mixed = [row for row, _ in zip(mix([stream("a", 9000, 2), stream("b", 9000)], [3.0, 1.0], 5), range(4000),
                                   strict=False) if isinstance(row, str)]
    share = Counter(row[0] for row in mixed)["a"] / len(mixed)
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / len(mixed)) ** 0.5
    for name in "ab":
        numbers = [int(row[1:]) for row in mixed if row[0] == name]
        assert numbers == sorted(numbers)


@given(sizes=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=5), seed=st.integers())
def test_a_mix_drops_nothing_and_is_a_function_of_the_seed(sizes: list[tuple[int, int]], seed: int) -> None:
    def run() -> list[Any]:
        streams = [stream(f"s{i}-", num, bad) for i, (num, bad) in enumerate(sizes)]
        return list(mix(streams, [1.0 + i for i in range(len(sizes))], seed))

    rows = run()
    assert rows == run()
    assert len(rows) == sum(num for num, _ in sizes)
