"""The shipped target behind the server: real tool calls, and `eyrie chat` talking to it."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from eyrie_api.cli.commands import app
from eyrie_workers.engines.process import EngineCommand, EngineProcess, start_engine

SUITES = Path(__file__).resolve().parents[3] / "workers/eyrie_workers/quickstart/suites"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    started = start_engine(EngineCommand(target="quickstart", model="quickstart", threads=1),
                           tmp_path_factory.mktemp("quickstart"))
    try:
        started.wait_ready(120)
        yield started
    finally:
        started.stop()


def test_an_offered_tool_is_called_with_arguments_that_parse(quickstart: EngineProcess) -> None:
    rows = [json.loads(line) for line in (SUITES / "tools.jsonl").read_text().splitlines()]
    asking = [row for row in rows if row.get("tools") and row["messages"][-1]["role"] == "user"][:4]
    called = 0
    for row in asking:
        answer = httpx.post(f"{quickstart.url}/v1/chat/completions", timeout=120, json={
            "messages": row["messages"], "tools": row["tools"], "temperature": 0, "max_tokens": 96}).json()
        (choice,) = answer["choices"]
        for call in choice["message"].get("tool_calls", []):
            called += 1
            assert choice["finish_reason"] == "tool_calls"
            assert call["function"]["name"] in {tool["function"]["name"] for tool in row["tools"]}
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert called > 0  # a target trained on tool calls makes one when asked for what a tool does


def test_chat_asks_once_and_shows_speed(quickstart: EngineProcess) -> None:
    given = ["chat", "Explain electricity in three sentences.", "--url", f"{quickstart.url}/v1", "--model",
             "quickstart", "--temperature", "0", "--max-tokens", "32"]
    words = CliRunner().invoke(app, given)
    assert words.exit_code == 0, words.stderr
    assert words.stdout.strip()
    assert "tok/s" in words.stderr
    result = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)
    assert result["content"].strip() == words.stdout.strip()
    assert result["usage"]["completion_tokens"] == 32
    assert result["acceptance_length"] == 1.0


def test_chat_takes_its_message_from_a_pipe(quickstart: EngineProcess) -> None:
    given = ["chat", "--url", f"{quickstart.url}/v1", "--model", "quickstart", "--temperature", "0", "--max-tokens",
             "8", "--json"]
    piped = CliRunner().invoke(app, given, input="a question from a pipe\n")
    assert piped.exit_code == 0, piped.stderr
    assert json.loads(piped.stdout)["finish_reason"] in ("stop", "length")


def test_chat_tells_what_the_endpoint_refuses(quickstart: EngineProcess) -> None:
    refused = CliRunner().invoke(app, ["chat", "hi", "--url", f"{quickstart.url}/v1", "--model", "other"])
    assert refused.exit_code == 65
    assert "quickstart" in refused.stderr
    assert "hint:" in refused.stderr
