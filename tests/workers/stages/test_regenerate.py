"""Regenerate answers every selected row once, loses nothing to any kind of end, and never asks what is held out."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyrie_api.artifacts import read_manifest, read_report, verify_files
from eyrie_api.contract.data import FEW_ROWS, DataSource, DataSpec
from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.reports import RegenerateReport
from eyrie_api.contract.stages import RegenerateStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_workers.data.rows import AnsweredRow, read_rows
from eyrie_workers.regeneration.answers import row_seed
from eyrie_workers.speculation.engine import Engine
from eyrie_workers.speculation.requests import Request
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.regenerate import regenerate
from eyrie_workers.targets.loading import load_target, resolve, target_digest
from eyrie_workers.targets.templates import ChatTokenizer
from tests.servers.processes import kept
from tests.servers.redis import Redis
from tests.tiny import chats_file, tiny_target
from tests.waiting import wait_for
from tests.workers.regeneration.openai_double import Troubles, openai_double

FILES = ("rows.jsonl", "rows.meta.json", "held_out.jsonl", "quarantine.jsonl")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "model")


def write_spec(out: Path, target: Path, *sources: Path, data: dict[str, Any] | None = None,
               exclude: tuple[str, ...] = (), **fields: Any) -> RegenerateStage:
    out.mkdir(parents=True, exist_ok=True)
    spec = RegenerateStage(
        job_id="job", target=TargetSpec(model=str(target)), exclude_prompts=exclude,
        data=DataSpec(sources=tuple(DataSource(path=str(path)) for path in sources), **data or {}),
        regenerate=RegenerateSpec(**{"max_new_tokens": 12, "concurrency": 4} | fields))
    (out / "spec.json").write_text(spec.model_dump_json())
    return spec


def run(out: Path) -> int:
    return run_program(RegenerateStage, regenerate,
                       ["--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")])


def report(out: Path) -> RegenerateReport:
    found = read_report(out, RegenerateReport)
    assert isinstance(found, RegenerateReport)
    return found


def rows(out: Path) -> list[AnsweredRow]:
    return list(read_rows(out / "rows.jsonl"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def failure(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "failure.json").read_text()))


def artifact(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in FILES}


def test_each_answer_is_what_the_target_says_to_the_prompt_alone(tmp_path: Path, target: Path) -> None:
    write_spec(tmp_path / "out", target, chats_file(tmp_path / "chats.jsonl", 14), data={"held_out_fraction": 0.2})
    assert run(tmp_path / "out") == 0
    verify_files(read_manifest(tmp_path / "out"), tmp_path / "out")
    tokenizer, engine = ChatTokenizer(target), Engine(load_target(target), max_concurrency=1)
    found = rows(tmp_path / "out")
    chats = lines(tmp_path / "chats.jsonl")
    assert found == sorted(found, key=lambda row: row.line)
    for row in found:
        assert list(row.prompt_ids) == tokenizer.render(chats[row.line - 1]["messages"][:-1])
        assert row.seed == row_seed(0, row.id)
        (alone,) = engine.generate([Request("x", row.prompt_ids, 12, SamplingSpec(temperature=0.7), row.seed,
                                            tuple(tokenizer.eos_ids))])
        assert list(row.answer_ids) == alone.token_ids
        assert row.finish_reason == alone.finish_reason
        assert (row.answer_ids[-1] in tokenizer.eos_ids) == (row.finish_reason == "stop")
        assert row.ids_exact
        assert (row.sampling.temperature, row.sampling.max_new_tokens) == (0.7, 12)


def test_the_report_counts_every_row(tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 30)
    path.write_text(path.read_text() + "broken\n" + path.read_text().splitlines()[0] + "\n")
    write_spec(tmp_path / "out", target, path, data={"held_out_fraction": 0.2})
    assert run(tmp_path / "out") == 0
    found, got = report(tmp_path / "out"), rows(tmp_path / "out")
    assert (found.rows_read, found.rows_quarantined, found.duplicates) == (32, 1, 1)
    assert found.rows_answered == len(got) == 30 - found.rows_held_out
    assert found.rows_held_out > 0
    assert found.answer_tokens == sum(len(row.answer_ids) for row in got)
    assert found.prompt_tokens == sum(len(row.prompt_ids) for row in got)
    assert sum(found.finish_reasons.values()) == len(got)
    assert found.sources == {str(path): len(got)}
    assert [(row.line, row.reason.split(":")[0]) for row in found.quarantined] == [(31, "bad JSON at column 1")]
    assert lines(tmp_path / "out" / "quarantine.jsonl") == [row.model_dump() for row in found.quarantined]
    # One row of 32 is below the share that an event reports.
    (reason,) = found.quarantine_reasons
    assert reason.reason.startswith("bad JSON at column N")
    assert (reason.kind, reason.rows) == ("malformed", 1)
    assert [(at.source, at.line) for at in reason.samples] == [(str(path), 31)]
    assert not [event for event in lines(tmp_path / "out" / "events.jsonl") if event.get("reason") == "RowsLost"]
    assert not list((tmp_path / "out").glob("selection*"))


def test_a_source_that_loses_many_rows_is_reported_before_the_first_request(tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 8)
    path.write_text(path.read_text() + "broken\n" * 4 + "{}\n")
    gate = threading.Event()
    with openai_double(Troubles(gate=gate)) as service:
        write_spec(tmp_path / "out", target, path, engine="openai", base_url=service.url, concurrency=1,
                   data={"held_out_fraction": 0.0})
        process = start(tmp_path / "out")
        try:
            wait_for(lambda: service.at_gate, "a request", process=process)
            # The first request is held, and nothing was answered.
            assert service.at_gate == 1
            (event,) = [one for one in lines(tmp_path / "out" / "events.jsonl") if one.get("reason") == "RowsLost"]
            assert "5 rows (38%) cannot be used, 8 are answered" in event["message"]
            gate.set()
            assert process.wait(300) == 0
        finally:
            process.kill()
            process.wait()
    (malformed, other) = report(tmp_path / "out").quarantine_reasons
    assert (malformed.rows, [at.line for at in malformed.samples], other.rows) == (4, [9, 10, 11], 1)


@pytest.mark.parametrize(("given", "warned"), [(3, True), (FEW_ROWS - 1, True), (FEW_ROWS, False)])
def test_few_rows_left_to_train_on_are_reported_with_what_became_of_the_others(
        given: int, warned: bool, tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", given)
    path.write_text(path.read_text() + "broken\n")
    with openai_double() as service:
        write_spec(tmp_path / "out", target, path, engine="openai", base_url=service.url,
                   data={"held_out_fraction": 0.0})
        assert run(tmp_path / "out") == 0
    found = [one for one in lines(tmp_path / "out" / "events.jsonl") if one.get("reason") == "FewRows"]
    assert [one["type"] for one in found] == ["Warning"] * warned
    if warned:
        assert found[0]["message"].startswith(f"{given} answered rows are left to train on, fewer than {FEW_ROWS} (of "
                                              f"{given + 1} read, 0 are held out and 1 cannot be used)")
        assert "data.max_conversations" in found[0]["message"]


def test_what_is_held_out_is_never_answered(tmp_path: Path, target: Path) -> None:
    write_spec(tmp_path / "out", target, chats_file(tmp_path / "chats.jsonl", 40), data={"held_out_fraction": 0.5})
    assert run(tmp_path / "out") == 0
    held = lines(tmp_path / "out" / "held_out.jsonl")
    answered = {row.id for row in rows(tmp_path / "out")}
    assert 0 < len(held) < 40
    assert not answered & {row["id"] for row in held}
    assert len(answered) + len(held) == 40
    assert all(row["messages"][-1]["role"] == "user" for row in held)


def test_benchmark_prompts_are_kept_out(tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 10)
    suite = tmp_path / "suite.jsonl"
    suite.write_text('{"prompt": "what is 3 plus 6"}\n')
    write_spec(tmp_path / "out", target, path, exclude=(str(suite), "org/suite"), data={"held_out_fraction": 0.0})
    assert run(tmp_path / "out") == 0
    assert [row.line for row in rows(tmp_path / "out")] == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert lines(tmp_path / "out" / "quarantine.jsonl")[0]["line"] == 4
    events = lines(tmp_path / "out" / "events.jsonl")
    assert any(e.get("reason") == "PromptsNotExcluded" and "org/suite" in e["message"] for e in events)


def test_answers_do_not_depend_on_concurrency(tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 12)
    for name, concurrency in (("one", 1), ("many", 7)):
        write_spec(tmp_path / name, target, path, concurrency=concurrency)
        assert run(tmp_path / name) == 0
    assert artifact(tmp_path / "one") == artifact(tmp_path / "many")


def test_another_seed_gives_other_answers_and_temperature_zero_the_same(tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 8)
    answers: dict[tuple[float, int], list[tuple[int, ...]]] = {}
    for temperature, seed in ((1.0, 0), (1.0, 1), (0.0, 0), (0.0, 1)):
        out = tmp_path / f"{temperature}-{seed}"
        write_spec(out, target, path, seed=seed, sampling=SamplingSpec(temperature=temperature))
        assert run(out) == 0
        answers[temperature, seed] = [row.answer_ids for row in rows(out)]
    assert answers[1.0, 0] != answers[1.0, 1]
    assert answers[0.0, 0] == answers[0.0, 1]


def test_tool_conversations_of_the_quickstart_corpus_are_answered(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    spec = RegenerateStage(
        job_id="job", target=TargetSpec(model="quickstart"), exclude_prompts=("quickstart:tools",),
        data=DataSpec(sources=(DataSource(path="quickstart"),), max_conversations=8, seed=3),
        regenerate=RegenerateSpec(max_new_tokens=24))
    (out / "spec.json").write_text(spec.model_dump_json())
    assert run(out) == 0
    assert {row.source for row in rows(out)} == {"quickstart"}
    assert report(out).rows_read == 8


@pytest.mark.parametrize(("text", "reason", "words"), [
    ("", "NoUsableData", "of 0 rows read none remains to be answered"),
    ('{"messages": []}\n\n', "NoUsableData", "empty conversation (1); empty line (1)"),
    ('{"text": "x"}\n', "NoUsableData", "neither `messages` nor `conversations`"),
])
def test_nothing_usable_is_an_error_that_says_why(tmp_path: Path, target: Path, text: str, reason: str,
                                                words: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(text)
    write_spec(tmp_path / "out", target, path)
    assert run(tmp_path / "out") == 65
    assert failure(tmp_path / "out")["reason"] == reason
    assert words in failure(tmp_path / "out")["message"]
    assert "data.max_prompt_tokens" in failure(tmp_path / "out")["hint"]
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_target_whose_logits_are_nan_ends_the_stage_with_a_diagnosis_of_the_target(tmp_path: Path) -> None:
    broken = tiny_target(tmp_path / "model")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    write_spec(tmp_path / "out", broken, chats_file(tmp_path / "chats.jsonl"))
    assert run(tmp_path / "out") == 65
    assert failure(tmp_path / "out")["reason"] == "UnsupportedTarget"
    assert "the target's logits after" in failure(tmp_path / "out")["message"]


def test_a_half_done_directory_takes_no_other_answers(tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 4)
    write_spec(tmp_path / "out", target, path)
    assert run(tmp_path / "out") == 0
    (tmp_path / "out" / "manifest.json").unlink()
    write_spec(tmp_path / "out", target, path, sampling=SamplingSpec(temperature=0.1))
    assert run(tmp_path / "out") != 0
    assert failure(tmp_path / "out")["reason"] == "Conflict"
    write_spec(tmp_path / "out", target, path, concurrency=2)  # how fast is no matter of what
    assert run(tmp_path / "out") == 0
    assert report(tmp_path / "out").rows_resumed == len(rows(tmp_path / "out"))


def start(out: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "eyrie_workers.stages.regenerate", "--spec", str(out / "spec.json"),
         "--out", str(out / "manifest.json")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"})


def end_after(process: subprocess.Popen[bytes], out: Path, num_rows: int, number: signal.Signals) -> int:
    """Send a signal as soon as so many rows are in the ledger."""
    ledger = out / "rows.jsonl"
    wait_for(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") >= num_rows, f"{num_rows} rows",
             every_s=0.002, process=process)
    process.send_signal(number)
    return process.wait(300)


@pytest.mark.slow
def test_a_program_terminated_and_killed_midway_ends_with_the_same_bytes_and_asks_nothing_twice(
        tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 80)
    for name in ("whole", "broken"):
        write_spec(tmp_path / name, target, path, max_new_tokens=40, concurrency=3)
    assert run(tmp_path / "whole") == 0
    broken = tmp_path / "broken"
    for num_rows, number, code in ((4, signal.SIGTERM, 143), (12, signal.SIGKILL, -9)):
        assert end_after(start(broken), broken, num_rows, number) == code
        assert not (broken / "manifest.json").exists()
    kept = (broken / "rows.jsonl").read_bytes().count(b"\n")
    assert 12 <= kept < len(rows(tmp_path / "whole"))
    with (broken / "rows.jsonl").open("ab") as file:
        file.write(b'{"id": "torn')  # a kill in the middle of a line, made certain
    assert start(broken).wait(300) == 0
    assert report(broken).rows_resumed == kept
    assert artifact(broken) == artifact(tmp_path / "whole")


@pytest.mark.slow
def test_an_outside_endpoint_is_asked_for_each_row_once_across_a_kill(tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 60)
    gate = threading.Event()
    with openai_double(Troubles(know_token_ids=True, gate=gate, before_gate=12)) as service:
        out = tmp_path / "out"
        write_spec(out, target, path, engine="openai", base_url=service.url, concurrency=2,
                   data={"held_out_fraction": 0.1})
        assert end_after(start(out), out, 5, signal.SIGKILL) == -9
        gate.set()
        kept = (out / "rows.jsonl").read_bytes().count(b"\n")
        assert start(out).wait(300) == 0
        twice = [asked for asked, times in service.attempts.items() if times > 1]
        assert len(twice) <= 2  # those in flight when the kill came
        assert report(out).rows_resumed == kept
        assert len(rows(out)) == 60 - report(out).rows_held_out
        asked = set(service.attempts)
    held = {row["messages"][-1]["content"] for row in lines(out / "held_out.jsonl")}
    assert held
    assert not asked & held


def test_the_batch_api_is_asked_through_the_whole_program(tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 6)
    with openai_double(Troubles(decline={"What is 2 plus 4?": 400})) as service:
        write_spec(tmp_path / "out", target, path, engine="openai-batch", base_url=service.url,
                   data={"held_out_fraction": 0.0})
        assert run(tmp_path / "out") == 0
    assert [row.line for row in rows(tmp_path / "out")] == [1, 2, 4, 5, 6]
    assert not any(row.ids_exact for row in rows(tmp_path / "out"))
    quarantined = lines(tmp_path / "out" / "quarantine.jsonl")
    assert [(row["line"], "400" in row["reason"]) for row in quarantined] == [(3, True)]


def test_every_turn_is_answered_in_the_context_of_the_new_answers(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "chats.jsonl"
    turns = [("user", "one"), ("assistant", "old"), ("user", "two"), ("assistant", "old"), ("user", "three")]
    whole = {"messages": [{"role": role, "content": text} for role, text in turns]}
    path.write_text(json.dumps(whole) + "\n" + json.dumps({"messages": whole["messages"][:1]}) + "\n")
    with openai_double(Troubles(know_token_ids=True, decline={"three": 400})) as service:
        write_spec(tmp_path / "out", target, path, engine="openai", endpoints=(service.url,), turns="all",
                   data={"held_out_fraction": 0.0})
        assert run(tmp_path / "out") == 0
        asked = [[message["content"] for message in body["messages"]] for body in service.bodies]
    found = rows(tmp_path / "out")
    assert [(row.line, row.turn) for row in found] == [(1, 0), (1, 1), (2, 0)]
    assert ["one", found[0].text, "two", found[1].text, "three"] in asked
    result = report(tmp_path / "out")
    assert result.conversations_ended == {"an answer was refused": 1}
    assert result.outcomes == {str(path): {"answered": 3, "truncated": 0, "declined": 1}}
    assert result.rows_retokenised == 0
    assert result.answer_lengths is not None
    assert result.answer_lengths.most == max(len(row.answer_ids) for row in found)


def test_answers_of_the_data_are_taken_as_they_are_and_nothing_is_generated(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chats = [(("user", "one"), ("assistant", "a given answer")), (("user", "two"),),
             (("user", "three"), ("assistant", "word " * 40)),
             (("user", "four"), ("assistant", "inner"), ("user", "five"), ("assistant", "outer"))]
    path.write_text("".join(json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]}) + "\n"
                            for chat in chats))
    write_spec(tmp_path / "last", target, path, data={"answered": True, "held_out_fraction": 0.0})
    assert run(tmp_path / "last") == 0
    tokenizer = ChatTokenizer(target)
    found = rows(tmp_path / "last")
    assert [(row.line, row.text, row.finish_reason) for row in found] == [
        (1, "a given answer", "stop"), (3, "word " * 40, "length"), (4, "outer", "stop")]
    assert found[0].prompt_ids == tuple(tokenizer.render([{"role": "user", "content": "one"}]))
    assert tokenizer.decode(found[0].answer_ids[:-1]) == "a given answer"
    assert found[0].answer_ids[-1] in tokenizer.eos_ids
    assert len(found[1].answer_ids) == 12
    result = report(tmp_path / "last")
    assert (result.engine, result.rows_retokenised) == ("none", 3)
    assert [(row["line"], row["reason"]) for row in lines(tmp_path / "last" / "quarantine.jsonl")] == [
        (2, "its last turn is not an answer, and data.answered is true")]

    write_spec(tmp_path / "all", target, path, turns="all", data={"answered": True, "held_out_fraction": 0.0})
    assert run(tmp_path / "all") == 0
    assert [(row.line, row.turn, row.text) for row in rows(tmp_path / "all")][2:] == [(4, 0, "inner"), (4, 1, "outer")]


def test_a_given_answer_that_calls_tools_has_the_ids_that_the_template_writes(tmp_path: Path) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    turns = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": "call-1", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps({"messages": turns, "tools": [tool]}) + "\n")
    quickstart = resolve(TargetSpec(model="quickstart"))
    write_spec(tmp_path / "out", quickstart, path, turns="all", max_new_tokens=100,
               data={"answered": True, "held_out_fraction": 0.0})
    assert run(tmp_path / "out") == 0
    calling, saying = rows(tmp_path / "out")
    tokenizer = ChatTokenizer(quickstart)
    assert tokenizer.decode(saying.answer_ids[:-1]) == "It is 2."
    assert '"add"' in tokenizer.decode(calling.answer_ids)
    assert saying.prompt_ids[:len(calling.prompt_ids) + len(calling.answer_ids)] == (
        calling.prompt_ids + calling.answer_ids)


def test_cut_answers_are_kept_apart_where_the_spec_says_so(tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 4)
    with openai_double(Troubles(finish_reason="length")) as service:
        write_spec(tmp_path / "out", target, path, engine="openai", base_url=service.url, truncated="quarantine")
        assert run(tmp_path / "out") != 0
        assert "were cut at 12 tokens" in failure(tmp_path / "out")["message"]
        write_spec(tmp_path / "kept", target, path, engine="openai", base_url=service.url)
        assert run(tmp_path / "kept") == 0
    assert {row.finish_reason for row in rows(tmp_path / "kept")} == {"length"}
    kinds = report(tmp_path / "kept").outcomes[str(path)]
    assert kinds["answered"] == kinds["truncated"] == len(rows(tmp_path / "kept"))


def test_an_endpoint_that_refuses_everything_ends_early_and_says_so(tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 60)
    with openai_double(Troubles(everything=400)) as service:
        write_spec(tmp_path / "out", target, path, engine="openai", base_url=service.url)
        assert run(tmp_path / "out") == 65
        # The status alone: a reply may quote what its server knows.
        assert "the endpoint answered 400" in failure(tmp_path / "out")["message"]
        assert len(service.bodies) < 40


def test_an_endpoint_that_is_away_ends_as_transient_and_a_later_run_goes_on(tmp_path: Path, target: Path) -> None:
    path = chats_file(tmp_path / "chats.jsonl", 6)
    with openai_double(Troubles(everything=503)) as service:
        write_spec(tmp_path / "out", target, path, engine="openai", base_url=service.url, max_retries=0)
        assert run(tmp_path / "out") == 75
        assert failure(tmp_path / "out")["transient"]
        service.troubles.everything = None
        assert run(tmp_path / "out") == 0
    assert not (tmp_path / "out" / "failure.json").exists()
    assert len(rows(tmp_path / "out")) == 6 - report(tmp_path / "out").rows_held_out


def test_rows_are_of_the_target_that_answered(tmp_path: Path, target: Path) -> None:
    write_spec(tmp_path / "out", target, chats_file(tmp_path / "chats.jsonl", 3), data={"held_out_fraction": 0.0})
    assert run(tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "rows.meta.json").read_text())["target_digest"] == target_digest(target)


def test_an_endpoint_asked_in_shards_gives_the_artifact_of_one_asked_from_here(
        tmp_path: Path, target: Path, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = chats_file(tmp_path / "chats.jsonl", 9)
    for name, value in {"BROKER_URL": redis.url, "ARTIFACTS_URL": str(tmp_path / "store")}.items():
        monkeypatch.setenv(f"EYRIE_{name}", value)
    worker = subprocess.Popen(kept([sys.executable, "-m", "eyrie_workers.shards", "--concurrency", "1"]),
                              start_new_session=True)
    try:
        with openai_double(Troubles(decline={"nothing": 400})) as service:
            for name, shard_rows in (("here", ""), ("shards", "2")):
                monkeypatch.setenv("EYRIE_SHARD_ROWS", shard_rows)
                write_spec(tmp_path / name, target, chats, engine="openai", base_url=service.url)
                assert run(tmp_path / name) == 0
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    assert artifact(tmp_path / "shards") == artifact(tmp_path / "here")
    assert list((tmp_path / "store").rglob("*.jsonl")) == []


def test_each_source_has_its_own_template_variables_and_token_limit(tmp_path: Path) -> None:
    thinking = tiny_target(tmp_path / "thinking")
    template = (thinking / "chat_template.jinja").read_text()
    (thinking / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt and enable_thinking %}think {% endif %}")
    chats = [chats_file(tmp_path / f"{name}.jsonl", 2) for name in ("short", "long")]
    chats[1].write_text(chats[1].read_text().replace("What", "Where"))  # equal prompts would be dropped
    spec = write_spec(tmp_path / "out", thinking, *chats, data={"held_out_fraction": 0.0})
    sources = (DataSource(path=str(chats[0])),
               DataSource(path=str(chats[1]), chat_template_kwargs={"enable_thinking": True}, max_new_tokens=30))
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"sources": sources})})
    (tmp_path / "out" / "spec.json").write_text(spec.model_dump_json())
    assert run(tmp_path / "out") == 0
    tokenizer = ChatTokenizer(thinking)
    found = rows(tmp_path / "out")
    limits = {}
    for row in found:
        limits[row.source] = row.sampling.max_new_tokens
        assert tokenizer.decode(row.prompt_ids).endswith("think ") == (row.source == str(chats[1]))
        assert len(row.answer_ids) <= limits[row.source]
    assert limits == {str(chats[0]): 12, str(chats[1]): 30}
    assert report(tmp_path / "out").engine == "embedded"
