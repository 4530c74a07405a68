"""The regenerate stage with `engine: sglang`: servers of its own, killed with it, and rows equal to the reference's."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eyrie_api.artifacts import read_manifest, write_model
from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.engine import SGLANG_PROGRAM, EngineSpec, SamplingSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.reports import RegenerateReport
from eyrie_api.contract.stages import RegenerateStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_workers.data.rows import AnsweredRow, read_rows
from eyrie_workers.engines.process import EngineFailed
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.regenerate import regenerate
from tests.sglang.servers import READY_S, alive, descendants, let_stages_start_it
from tests.waiting import wait_for

ROWS = 24


def stage_directory(out: Path, data: Path, engine: str) -> Path:
    write_model(out / "spec.json", RegenerateStage(
        job_id="j", target=TargetSpec(model="quickstart", dtype="float32"), engine=EngineSpec.model_validate(engine),
        data=DataSpec(sources=(DataSource(path=str(data), max_new_tokens=24),), held_out_fraction=0.0),
        regenerate=RegenerateSpec(sampling=SamplingSpec(temperature=0.0), concurrency=2)))
    return out


def start(out: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "eyrie_workers.stages.regenerate", "--spec", str(out / "spec.json"),
                             "--out", str(out / "manifest.json")], stdout=subprocess.DEVNULL)


def answered(out: Path) -> int:
    rows = out / "rows.jsonl"
    return rows.read_bytes().count(b"\n") if rows.exists() else 0


def content(rows: list[AnsweredRow]) -> list[tuple[object, ...]]:
    return [(row.id, row.prompt_ids, row.answer_ids, row.finish_reason) for row in rows]


def test_rows_of_own_sglang_servers_equal_the_references_although_stage_and_server_were_killed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_stages_start_it(monkeypatch)
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"What is {i} and {i + 1}?"}]}) + "\n"
                            for i in range(ROWS)))
    reference = stage_directory(tmp_path / "reference", data, "embedded")
    assert run_program(RegenerateStage, regenerate, [
        "--spec", str(reference / "spec.json"), "--out", str(reference / "manifest.json")]) == 0

    out = stage_directory(tmp_path / "sglang", data, "sglang")
    first = start(out)
    wait_for(lambda: answered(out) >= 2, "two answers", READY_S, process=first)
    servers = descendants(first.pid)
    assert len(servers) >= 3, "SGLang is three processes"
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    wait_for(lambda: not alive(servers), "no server outlives its stage", 15)
    kept = answered(out)
    assert 2 <= kept < ROWS

    second = start(out)
    wait_for(lambda: answered(out) > kept, "one more answer", READY_S, process=second)
    servers = descendants(second.pid)
    os.kill(min(servers), signal.SIGKILL)  # the HTTP process, which started the others
    assert second.wait(2 * READY_S) == 0
    assert not alive(servers)
    report = read_manifest(out / "manifest.json").report
    assert isinstance(report, RegenerateReport)
    assert (report.engine, report.rows_answered) == ("sglang", ROWS)
    rows = list(read_rows(out / "rows.jsonl"))
    assert content(rows) == content(list(read_rows(reference / "rows.jsonl")))
    assert all(row.ids_exact and row.sampling.max_new_tokens == 24 for row in rows)
    assert "ServersRestarted" in (out / "events.jsonl").read_text()


def test_a_server_that_dies_while_loading_ends_the_stage_with_its_last_lines(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = [sys.executable, "-c", "raise MemoryError('no memory left for the weights')"]
    monkeypatch.setenv(SGLANG_PROGRAM, shlex.join(dying))
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}]}) + "\n")
    out = stage_directory(tmp_path / "out", data, "sglang")
    assert run_program(RegenerateStage, regenerate, [
        "--spec", str(out / "spec.json"), "--out", str(out / "manifest.json")]) == EngineFailed.exit_code
    assert "no memory left for the weights" in (out / "failure.json").read_text()
