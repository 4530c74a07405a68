"""Our own OpenAI-compatible server, asked over HTTP, gives the very rows that the engine in the process gives."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyrie_api.contract.data import DataSource, DataSpec
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.stages import RegenerateStage
from eyrie_api.contract.targets import TargetSpec
from eyrie_workers.data.rows import AnsweredRow, read_rows
from eyrie_workers.engines.process import EngineCommand, EngineProcess, start_engine
from eyrie_workers.stage_program import run_program
from eyrie_workers.stages.regenerate import regenerate
from tests.tiny import tiny_target

CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def server(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    engine = start_engine(EngineCommand(target=target, model="tiny", max_concurrency=3, threads=1),
                          tmp_path_factory.mktemp("engine"))
    try:
        engine.wait_ready(120)
        yield engine
    finally:
        engine.stop()


def chats(path: Path) -> Path:
    asked = [{"messages": [{"role": "user", "content": f"What is {i}?"}]} for i in range(6)]
    asked.append({"messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": '{"sky": "clear"}'},
        {"role": "assistant", "content": "Clear."}], "tools": TOOLS})
    asked.append({"messages": [{"role": "user", "content": "far " * 110}]})  # leaves room for few new tokens
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return path


def answered(out: Path, target: Path, data: Path, asked: RegenerateSpec) -> list[AnsweredRow]:
    out.mkdir()
    spec = RegenerateStage(job_id="job", target=TargetSpec(model=str(target)), regenerate=asked,
                           data=DataSpec(sources=(DataSource(path=str(data)),), held_out_fraction=0.0))
    (out / "spec.json").write_text(spec.model_dump_json())
    assert run_program(RegenerateStage, regenerate, ["--spec", str(out / "spec.json"),
                                                     "--out", str(out / "manifest.json")]) == 0
    return list(read_rows(out / "rows.jsonl"))


def test_rows_over_http_equal_rows_in_process(tmp_path: Path, target: Path, server: EngineProcess) -> None:
    data = chats(tmp_path / "chats.jsonl")
    here = answered(tmp_path / "here", target, data, RegenerateSpec(max_new_tokens=60, seed=4))
    there = answered(tmp_path / "there", target, data, RegenerateSpec(
        max_new_tokens=60, seed=4, engine="openai", base_url=f"{server.url}/v1", served_model="tiny"))
    assert len(here) == 8
    for one, other in zip(here, there, strict=True):
        assert other.ids_exact
        assert (one.id, one.prompt_ids, one.answer_ids, one.finish_reason, one.seed) \
            == (other.id, other.prompt_ids, other.answer_ids, other.finish_reason, other.seed)
