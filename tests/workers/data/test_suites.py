"""Suites in every layout they come in, and what is said of broken ones."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from eyrie_api.contract.benchmark import SuiteSpec
from eyrie_api.errors import ArtifactMissing, EyrieError, InvalidInput, NoUsableData
from eyrie_workers.data.suites import Prompt, load_suite, select


def write(path: Path, rows: list[Any]) -> SuiteSpec:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return SuiteSpec(name="s", path=str(path))


@pytest.mark.parametrize(("row", "question"), [
    ({"prompt": "Say hello"}, "Say hello"),
    ({"question": "2+2?", "answer": "#### 4"}, "2+2?"),
    ({"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "..."}, "def f():\n"),
    ({"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."]}, "Write a post."),
    ({"prompt_id": 7, "category": "x", "prompt": ["First turn", "Second turn"]}, "First turn"),
    ({"messages": [{"role": "user", "content": "Hi"}]}, "Hi"),
    ({"instruction": "Translate.", "input": "Hei", "output": "Hello"}, "Translate.\n\nHei"),
    ({"instruction": "List three colours.", "input": "", "output": "Red"}, "List three colours."),
    ({"id": "simple_0", "question": [[{"role": "user", "content": "Weather?"}]], "function": []}, "Weather?"),
])
def test_each_known_layout_yields_its_first_question(tmp_path: Path, row: dict[str, Any], question: str) -> None:
    (prompt,) = load_suite(write(tmp_path / "rows.jsonl", [row]))
    assert prompt.messages == ({"role": "user", "content": question},)


def test_the_answer_to_be_measured_is_not_given_away(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "secret"}]}
    (prompt,) = load_suite(write(tmp_path / "rows.jsonl", [row]))
    assert "secret" not in str(prompt)


def test_tools_and_ids_travel_with_the_prompt(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    spec = write(tmp_path / "r.jsonl", [{"id": "a", "messages": [{"role": "user", "content": "x"}], "tools": [tool]}])
    assert load_suite(spec) == [Prompt("a", "s", ({"role": "user", "content": "x"},), (tool,))]


def test_turns_and_functions_of_bfcl_are_a_prompt_with_tools_and_further_turns(tmp_path: Path) -> None:
    function = {"name": "weather", "description": "Weather.", "parameters": {"type": "dict", "properties": {}}}
    row = {"id": "multi_turn_0", "question": [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Oslo?"}],
        [{"role": "user", "content": "And Bergen?"}]], "function": [function]}
    assert load_suite(write(tmp_path / "r.jsonl", [row])) == [Prompt(
        "multi_turn_0", "s", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Oslo?"}),
        ({"type": "function", "function": function},), ("And Bergen?",))]


def test_lines_arrays_compressed_and_parquet_files_hold_the_same_prompts_whatever_their_names(tmp_path: Path) -> None:
    rows = [{"question": f"{i}?"} for i in range(5)]
    plain = load_suite(write(tmp_path / "a.jsonl", rows))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "c.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    # As BFCL publishes its rows: JSON lines in a file of another name.
    (tmp_path / "BFCL_v4_parallel.json").write_bytes((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "e.jsonl").write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    (tmp_path / "f.jsonl.zst").write_bytes(pyarrow.compress((tmp_path / "a.jsonl").read_bytes(), "zstd", asbytes=True))
    for name in ("b.jsonl.gz", "c.json", "d.parquet", "BFCL_v4_parallel.json", "e.jsonl", "f.jsonl.zst"):
        assert load_suite(SuiteSpec(name="s", path=str(tmp_path / name))) == plain


def test_the_order_depends_on_content_and_seed_not_on_the_file(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}"} for i in range(40)]
    forward = load_suite(write(tmp_path / "a.jsonl", rows))
    backward = load_suite(write(tmp_path / "b.jsonl", rows[::-1]))
    assert forward == backward
    assert forward != load_suite(write(tmp_path / "a.jsonl", rows), seed=1)


def test_a_question_asked_twice_counts_once_and_ids_stay_distinct(tmp_path: Path) -> None:
    rows = [{"id": "x", "prompt": "a"}, {"id": "y", "prompt": "a"}, {"id": "x", "prompt": "b"}]
    prompts = load_suite(write(tmp_path / "r.jsonl", rows))
    assert len(prompts) == 2
    assert len({prompt.id for prompt in prompts}) == 2


def test_a_line_separator_inside_a_string_does_not_cut_the_row(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"prompt": "one\u2028two"}, ensure_ascii=False) + "\n")
    assert load_suite(SuiteSpec(name="s", path=str(path)))[0].messages[0]["content"] == "one\u2028two"


@pytest.mark.parametrize(("bad", "says"), [
    ("{not json", "is not JSON"),
    ("[1, 2]", "not an object"),
    ({"text": "?"}, "none of `messages`, `prompt`, `question`, `turns`"),
    ({"prompt": "  "}, "`prompt` is empty"),
    ({"turns": []}, "`turns` is empty"),
    ({"messages": "hello"}, "not a list of objects with a `role`"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing is asked"),
    ({"prompt": "x", "tools": "weather"}, "`tools` is not a list"),
])
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, bad: Any, says: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_suite(write(tmp_path / "rows.jsonl", [{"prompt": "fine"}, bad]))
    assert "rows.jsonl line 2" in caught.value.message
    assert says in caught.value.message
    assert caught.value.hint


def test_a_missing_file_an_empty_one_and_bytes_that_are_not_text_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "noise.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 50)[:-9])
    (tmp_path / "plain.jsonl.gz").write_bytes(b'{"prompt": "x"}\n')
    (tmp_path / "open.json").write_text('[{"prompt": "x"}')
    for name, kind in (("gone.jsonl", ArtifactMissing), ("empty.jsonl", NoUsableData), ("noise.jsonl", InvalidInput),
                       ("cut.jsonl.gz", InvalidInput), ("plain.jsonl.gz", InvalidInput), ("open.json", InvalidInput)):
        with pytest.raises(kind) as caught:
            load_suite(SuiteSpec(name="s", path=str(tmp_path / name)))
        assert isinstance(caught.value, EyrieError)
        assert caught.value.hint


def test_a_parquet_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR?")
    with pytest.raises(InvalidInput, match="not readable parquet"):
        load_suite(SuiteSpec(name="s", path=str(tmp_path / "x.parquet")))


def test_held_out_needs_the_file_of_regenerate(tmp_path: Path) -> None:
    spec = SuiteSpec(name="held", path="held-out")
    with pytest.raises(ArtifactMissing, match="held_out_file"):
        load_suite(spec)
    write(tmp_path / "held_out.jsonl", [{"messages": [{"role": "user", "content": "q"}]}])
    assert len(load_suite(spec, tmp_path / "held_out.jsonl")) == 1


@pytest.mark.parametrize("name", ["chat", "math", "code", "tools"])
def test_the_quickstart_suites_load_and_keep_their_order(name: str) -> None:
    prompts = load_suite(SuiteSpec(name=name, path=f"quickstart:{name}"))
    assert len(prompts) >= 16
    assert [p.id for p in prompts] == sorted(p.id for p in prompts)


def test_an_unknown_quickstart_suite_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="chat"):
        load_suite(SuiteSpec(name="s", path="quickstart:nothing"))


def test_a_hub_id_without_the_datasets_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    with pytest.raises(InvalidInput, match="pip install datasets"):
        load_suite(SuiteSpec(name="s", path="openai/gsm8k"))


def test_slices_of_a_suite_are_disjoint_until_it_ends() -> None:
    prompts = [Prompt(str(i), "s", ()) for i in range(5)]
    assert {p.id for p in select(prompts, 0, 2)} & {p.id for p in select(prompts, 2, 2)} == set()
    assert [p.id for p in select(prompts, 4, 3)] == ["4", "0", "1"]
    assert len(select(prompts, 0, 9)) == 5
