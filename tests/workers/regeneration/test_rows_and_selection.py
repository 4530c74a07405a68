"""The ledger loses and repeats nothing; the selection says what became of every row before anything is answered."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.reports import QuarantinedRow
from eyrie_api.errors import ArtifactCorrupt, NoChatTemplate
from eyrie_workers.data.overlap import BenchmarkPrompts
from eyrie_workers.data.rows import AnsweredRow, RowLedger, RowSampling, read_rows
from eyrie_workers.regeneration import selection
from eyrie_workers.regeneration.answers import row_seed
from eyrie_workers.regeneration.selection import losses
from eyrie_workers.targets.templates import ChatTokenizer
from tests.tiny import tiny_target


def row(number: int) -> AnsweredRow:
    return AnsweredRow(id=f"{number:032x}", source="a.jsonl", line=number + 1, category="", prompt_ids=(1, 2),
                       answer_ids=(3,) * (number + 1), finish_reason="stop", text=f"answer {number} \u2028 \u00e9",
                       sampling=RowSampling(temperature=0.7, top_p=1.0, top_k=0, max_new_tokens=8),
                       seed=row_seed(0, str(number)), ids_exact=True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_ledger_cut_anywhere_keeps_every_whole_row_and_goes_on(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "rows.jsonl"
    path.unlink(missing_ok=True)
    ledger = RowLedger(path)
    for number in range(4):
        ledger.append(row(number))
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    again = RowLedger(path)
    assert len(again) == whole[:cut].count(b"\n")
    for number in range(4):
        assert (row(number).id in again) == (number < len(again))
    for number in range(len(again), 4):
        again.append(row(number))
    assert path.read_bytes() == whole


@given(order=st.permutations(range(5)), wanted=st.sets(st.integers(0, 6)))
def test_the_finished_file_does_not_depend_on_the_order_of_arrival(tmp_path_factory: pytest.TempPathFactory,
                                                                  order: list[int], wanted: set[int]) -> None:
    path = tmp_path_factory.mktemp("ledger") / "rows.jsonl"
    ledger = RowLedger(path)
    for number in order:
        ledger.append(row(number))
    kept = list(ledger.put_in_order(row(number).id for number in sorted(wanted)))
    assert kept == [row(number) for number in sorted(wanted) if number < 5]
    assert list(read_rows(path)) == kept


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    line = row(0).model_dump_json()
    path.write_text(f"{line}\n{{broken\n{line}\n")
    with pytest.raises(ArtifactCorrupt, match="line 2"):
        RowLedger(path)
    with pytest.raises(ArtifactCorrupt, match="line 2"):
        list(read_rows(path))


@given(seed=st.integers(0, 2**31 - 1), row_id=st.text(max_size=40))
def test_row_seeds_fit_every_server_and_depend_on_the_row(seed: int, row_id: str) -> None:
    assert 0 <= row_seed(seed, row_id) < 2**31
    assert row_seed(seed, row_id) == row_seed(seed, row_id)
    assert row_seed(seed, row_id) != row_seed(seed, row_id + "x")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(tiny_target(tmp_path_factory.mktemp("target")))


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def run(directory: Path, rows: list[Any], tokenizer: ChatTokenizer, *, benchmark: list[str] | None = None,
        **data: Any) -> selection.SelectionSummary:
    source = directory / "chats.jsonl"
    if not source.exists():
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = DataSpec(sources=(DataSource(path=str(source)),), **{"held_out_fraction": 0.0} | data)
    prompts = BenchmarkPrompts.of([[{"role": "user", "content": text}] for text in benchmark or []])
    rules = selection.Rules(spec, prompts, spec.max_prompt_tokens)
    return selection.select(directory, rules, tokenizer, lambda: None, lambda _: None)


def test_every_row_read_is_accounted_for(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [chat("one", "x"), chat("one", "y"), {"messages": 3}, chat("long " * 400, "x"), chat("What is asked?", "x"),
            chat("two", "x", "three", "y")]
    summary = run(tmp_path, rows, tokenizer, benchmark=["what is asked"])
    assert summary == selection.SelectionSummary(rows_read=6, rows_selected=2, rows_quarantined=3, duplicates=1,
                                                 turns_selected=2)
    kept = list(selection.selected(tmp_path))
    assert [row.messages for row in kept] == [chat("one")["messages"], chat("two", "x", "three")["messages"]]
    assert kept[1].prompt_ids == tokenizer.render(kept[1].messages)
    reasons = {row.line: row.reason for row in selection.rejected(tmp_path)}
    assert [row.kind for row in selection.rejected(tmp_path)] == ["malformed", "too-long", "benchmark"]
    assert "`messages` must be a list" in reasons[3]
    assert "tokens, more than 1024" in reasons[4]
    assert reasons[5] == "its prompt occurs in a benchmark suite"


@settings(max_examples=20, deadline=None)
@given(fraction=st.floats(0.0, 1.0), num=st.integers(1, 30))
def test_held_out_and_selected_rows_never_meet(tmp_path_factory: pytest.TempPathFactory, tokenizer: ChatTokenizer,
                                               fraction: float, num: int) -> None:
    directory = tmp_path_factory.mktemp("selection")
    summary = run(directory, [chat(f"question {i}", "x") for i in range(num)], tokenizer, held_out_fraction=fraction)
    held = [json.loads(line) for line in (directory / "held_out.jsonl").read_text().splitlines()]
    kept = [row.id for row in selection.selected(directory)]
    assert (len(held), len(kept)) == (summary.rows_held_out, summary.rows_selected)
    assert len({*kept, *(row["id"] for row in held)}) == num


def test_a_whole_selection_is_kept_and_a_broken_off_one_is_made_again(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [chat(f"question {i}", "x") for i in range(8)]
    first = run(tmp_path, rows, tokenizer)
    before = (tmp_path / selection.SELECTED).read_bytes()
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat("another")) + "\n")
    assert run(tmp_path, [], tokenizer) == first
    (tmp_path / selection.SUMMARY).unlink()
    assert run(tmp_path, [], tokenizer).rows_read == 1
    assert (tmp_path / selection.SELECTED).read_bytes() != before


def test_a_request_to_stop_leaves_no_half_selection(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    class Stop(BaseException):
        pass

    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat(f"q {i}")) + "\n" for i in range(9)))
    spec = DataSpec(sources=(DataSource(path=str(path)),))
    calls = iter(range(5))

    def pause() -> None:
        if next(calls, None) is None:
            raise Stop

    rules = selection.Rules(spec, BenchmarkPrompts.of([]), 100)
    with pytest.raises(Stop):
        selection.select(tmp_path, rules, tokenizer, pause, lambda _: None)
    assert [p.name for p in tmp_path.iterdir()] == ["chats.jsonl"]


def test_max_conversations_counts_usable_rows(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [chat("one"), {"broken": 1}, chat("two"), chat("three"), chat("four")]
    summary = run(tmp_path, rows, tokenizer, max_conversations=3)
    assert (summary.rows_read, summary.rows_selected, summary.rows_quarantined) == (4, 3, 1)


def test_a_conversation_the_template_refuses_is_quarantined_and_a_missing_template_is_an_error(
        tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    template = target / "chat_template.jinja"
    template.write_text("{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"
                        "{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, chat("fine")]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    summary = run(tmp_path / "one", rows, ChatTokenizer(target))
    assert (summary.rows_selected, summary.rows_quarantined) == (1, 1)
    assert "no system prompts" in next(selection.rejected(tmp_path / "one")).reason
    template.unlink()
    with pytest.raises(NoChatTemplate):
        run(tmp_path / "two", rows, ChatTokenizer(target))


def test_a_source_that_loses_rows_is_reported_with_its_reasons_and_first_lines() -> None:
    def lost(source: str, line: int, reason: str, kind: Any = "malformed") -> QuarantinedRow:
        return QuarantinedRow(source=source, line=line, reason=reason, kind=kind)

    rows = [*(lost("a.jsonl", line, f"turn {line} has unknown role 'wizard'") for line in (3, 5, 8, 9)),
            lost("a.jsonl", 2, "empty line"), lost("b.jsonl", 1, "empty line"),
            *(lost("b.jsonl", line, "shared with a suite", "benchmark") for line in range(2, 50))]
    assert losses(rows, {"a.jsonl": 15, "b.jsonl": 19}) == [
        "a.jsonl: 5 rows (25%) cannot be used, 15 are answered: turn N has unknown role 'wizard' (4 rows, lines 3, 5, "
        "8); empty line (1 rows, lines 2)"]
