"""A real server process over HTTP: what clients of the OpenAI API rely on, and invalid requests."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyrie_workers.engines.process import EngineCommand, EngineFailed, start_engine
from eyrie_workers.targets.templates import ChatTokenizer
from tests.waiting import wait_for
from tests.workers.engines.conftest import chat_body

CHAT = "/v1/chat/completions"


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    yield from (json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def asked(client: httpx.Client, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    answer = client.post(path, json=chat_body(**fields))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def metric(client: httpx.Client, name: str) -> float:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name + " ")]
    return float(lines[0].split()[-1]) if lines else 0.0


def test_models_and_health_are_reported(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    listed = http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert listed["data"][0]["max_model_len"] == 4096
    assert http.get("/v1/models/tiny").json()["id"] == "tiny"


def test_a_response_has_the_openai_fields_and_exact_usage(http: httpx.Client) -> None:
    answer = asked(http, return_token_ids=True)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 24
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


def test_a_stream_has_the_content_of_the_response_without_streaming(http: httpx.Client) -> None:
    whole = asked(http, return_token_ids=True)
    chunks = list(events(http, CHAT, chat_body(return_token_ids=True, stream_options={"include_usage": True})))
    *pieces, last = chunks
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    assert pieces[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == text_of(whole)
    ids = [token for piece in pieces for token in piece["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces][-1] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_is_not_streamed_unless_requested(http: httpx.Client) -> None:
    assert not any("usage" in chunk for chunk in events(http, CHAT, chat_body()))


def test_usage_so_far_is_in_every_chunk_where_it_is_requested(http: httpx.Client) -> None:
    body = chat_body(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counted = [chunk["usage"]["completion_tokens"] for chunk in events(http, CHAT, body)]
    assert counted == sorted(counted)
    assert counted[-1] == 24


def test_a_stop_token_ends_the_response_where_the_end_token_is_ignored_too(http: httpx.Client) -> None:
    ids = asked(http, return_token_ids=True)["choices"][0]["token_ids"]
    stop = ids[5]
    answer = asked(http, return_token_ids=True, stop_token_ids=[stop])["choices"][0]
    assert answer["token_ids"] == ids[:ids.index(stop) + 1]
    assert answer["finish_reason"] == "stop"


def test_another_request_is_answered_while_a_large_prompt_is_encoded(http: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(http.post, CHAT, json=chat_body(text="\u00e4 long " * 450_000))
        answered = 0
        while not large.done():
            answered += http.get("/health").status_code == 200
    assert large.result().json()["error"]["code"] == "context_length_exceeded"
    assert answered > 3


def test_rounds_past_an_ignored_end_are_no_part_of_the_acceptance_that_is_watched(
        http: httpx.Client, target: Path) -> None:
    before = metric(http, "eyrie_verify_rounds_total")
    ends = ChatTokenizer(target).eos_ids
    answer = asked(http, return_token_ids=True, max_tokens=600, seed=3, temperature=1.0)["choices"][0]["token_ids"]
    first = next((place for place, token in enumerate(answer) if token in ends), len(answer))
    assert first < len(answer), "with this seed the tiny target says its end token"
    assert metric(http, "eyrie_verify_rounds_total") - before <= first + 1


def test_equal_seeds_give_equal_responses_and_no_seed_gives_another(http: httpx.Client) -> None:
    first, again, other = (text_of(asked(http, temperature=1.0, seed=seed)) for seed in (7, 7, 8))
    assert first == again != other
    assert text_of(asked(http, temperature=1.0)) != text_of(asked(http, temperature=1.0))


def test_a_stop_string_across_tokens_ends_the_response_before_it(http: httpx.Client) -> None:
    whole = text_of(asked(http, max_tokens=48, temperature=1.0, seed=3))
    stop = whole[10:17]
    at = whole.index(stop)
    answer = asked(http, max_tokens=48, temperature=1.0, seed=3, stop=["never said by it", stop])
    assert text_of(answer) == whole[:at]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 48
    pieces = events(http, CHAT, chat_body(max_tokens=48, temperature=1.0, seed=3, stop=stop))
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces) == whole[:at]


def test_a_stop_string_ends_the_log_probabilities_with_the_token_that_completes_it(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logprobs": True}
    whole = asked(http, **fields, max_tokens=48)
    # Whole characters: what may be the beginning of one is held back until the next token.
    stop = max(text_of(whole).split("\ufffd"), key=len)
    assert len(stop) > 2
    answer = asked(http, **fields, max_tokens=48, stop=stop)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] < 48
    assert entries == whole["choices"][0]["logprobs"]["content"][:len(entries)]
    assert stop not in text_of(asked(http, **fields, max_tokens=len(entries) - 1))
    assert stop in text_of(asked(http, **fields, max_tokens=len(entries)))


def test_an_end_or_stop_token_has_an_entry_and_no_text(http: httpx.Client) -> None:
    ids = asked(http, return_token_ids=True)["choices"][0]["token_ids"]
    body = chat_body(stop_token_ids=[ids[5]], logprobs=True, return_token_ids=True)
    for chunks in (list(events(http, CHAT, body)), [asked(http, **body)]):
        choices = [chunk["choices"][0] for chunk in chunks]
        counted = [len(choice.get("token_ids", [])) for choice in choices]
        assert [len((choice["logprobs"] or {"content": []})["content"]) for choice in choices] == counted
        assert sum(counted) == ids.index(ids[5]) + 1


def test_completions_take_text_or_token_ids(http: httpx.Client) -> None:
    chat = asked(http, return_token_ids=True)
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    same = http.post("/v1/completions", json=body | {"prompt": chat["prompt_token_ids"]}).json()
    assert same["object"] == "text_completion"
    assert same["choices"][0]["text"] == text_of(chat)
    pieces = events(http, "/v1/completions", body | {"prompt": chat["prompt_token_ids"]})
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text_of(chat)
    assert http.post("/v1/completions", json=body | {"prompt": "once upon"}).json()["usage"]["completion_tokens"] == 24


def test_no_system_prompt_is_added(http: httpx.Client) -> None:
    answer = asked(http, return_token_ids=True)
    prompt = http.post("/v1/completions", json={
        "prompt": "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n", "max_tokens": 1,
        "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == prompt["prompt_token_ids"]


def test_concurrent_requests_get_the_same_responses_as_single_ones(http: httpx.Client) -> None:
    prompts = [f"question number {i}" for i in range(6)]
    alone = [text_of(asked(http, text=prompt)) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: text_of(asked(http, text=prompt)), prompts))
    assert together == alone


def test_without_a_drafter_every_round_yields_one_token(http: httpx.Client) -> None:
    details = asked(http, return_spec_tokens_details=True)["sglext"]["spec_tokens_details"]
    assert details["spec_accept_length"] == 1.0
    assert details["spec_num_correct_drafts"] == details["spec_num_proposed_drafts"] == 0
    assert details["spec_verify_ct"] >= 23  # the first token may come from the prefill


@pytest.mark.parametrize(("fields", "status", "code"), [
    ({"model": "gpt"}, 404, "model_not_found"), ({"n": 3}, 400, "invalid_value"),
    ({"max_tokens": 5000}, 400, "context_length_exceeded"), ({"temperatur": 1}, 400, "unknown_parameter"),
    ({"messages": [{"role": "user", "content": "long " * 5000}]}, 400, "context_length_exceeded"),
    ({"min_p": 0.5}, 400, "unsupported_parameter"), ({"messages": None}, 400, "invalid_value"),
    ({"top_logprobs": 2}, 400, "invalid_value"),
])
def test_an_invalid_request_gets_an_openai_error_with_a_hint(
        http: httpx.Client, fields: dict[str, Any], status: int, code: str) -> None:
    answer = http.post(CHAT, json=chat_body() | fields)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["hint"]
    assert error["hint"] in error["message"]


def test_invalid_json_large_bodies_and_unknown_paths_are_rejected(http: httpx.Client) -> None:
    json = {"content-type": "application/json"}
    assert http.post(CHAT, content=b"{nonsense", headers=json).status_code == 400
    assert http.post(CHAT, content=b"[1]", headers=json).json()["error"]["code"] == "invalid_json"
    assert http.post(CHAT, content=b"[" * 100_000, headers=json).status_code == 400
    large = http.post(CHAT, content=b'{"messages": "' + b"x" * (5 * 2**20) + b'"}', headers=json)
    assert large.status_code == 413
    assert http.get("/v1/nowhere").json()["error"]["hint"]
    assert http.get("/health/").status_code == 404, "a redirect would name the engine's own port"
    for name in ("%00", "%ed%a0%80", "a" * 4000):
        assert http.get(f"/v1/models/{name}").status_code in (400, 404)
    for arguments in ('{"n": ' + "1" * 5000 + "}", "[" * 20_000, '"\\\\ud800"'):  # the model's malformed calls
        call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": arguments.replace("\\\\", "\\")}}
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        assert http.post(CHAT, json=chat_body(messages=turns)).status_code in (200, 400)
    assert http.get("/health").status_code == 200
    for refused, status in (({"origin": "https://evil.example"}, 403), ({"sec-fetch-site": "cross-site"}, 403),
                            ({"host": "evil.example"}, 403), ({"content-type": "text/plain"}, 415)):
        assert http.post(CHAT, content=b"{}", headers={**json, **refused}).status_code == status


def test_a_client_that_disconnects_frees_its_slot(http: httpx.Client) -> None:
    cancelled = metric(http, 'eyrie_requests_total{finish_reason="cancelled"}')
    with http.stream("POST", CHAT, json=chat_body(max_tokens=4000, stream=True)) as answer:
        lines = answer.iter_lines()  # kept: a reader that is dropped closes the connection
        next(lines)  # the head of a stream may precede the engine's first step by a moment
        wait_for(lambda: metric(http, "eyrie_running_requests") == 1, "the request runs")
    with pytest.raises(httpx.ReadTimeout):  # without streaming, with a client timeout
        http.post(CHAT, json=chat_body(max_tokens=4000), timeout=0.5)
    wait_for(lambda: metric(http, 'eyrie_requests_total{finish_reason="cancelled"}') >= cancelled + 2,
             "both are cancelled")
    wait_for(lambda: metric(http, "eyrie_running_requests") == 0, "none runs")


def test_metrics_count_tokens_rounds_and_reasons(http: httpx.Client) -> None:
    names = ("eyrie_generated_tokens_total", "eyrie_verify_rounds_total",
             'eyrie_requests_total{finish_reason="length"}', "eyrie_time_to_first_token_seconds_count")
    before = [metric(http, name) for name in names]
    asked(http)
    tokens, rounds, ended, firsts = (metric(http, name) - old for name, old in zip(names, before, strict=True))
    assert (tokens, ended, firsts) == (24, 1, 1)
    assert 23 <= rounds <= 24
    assert metric(http, "eyrie_acceptance_length") == 1.0
    assert metric(http, "eyrie_drafted_rounds_total") == metric(http, "eyrie_drafted_round_tokens_total") == 0.0


def test_a_port_in_use_is_reported_at_once_with_exit_code_69(target: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        ended = subprocess.run([sys.executable, "-m", "eyrie_workers.engines.server", "--target", str(target),
                                "--port", str(port)], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 69
    assert f"port {port}" in ended.stderr
    assert "hint:" in ended.stderr


def test_a_missing_target_ends_the_process_with_a_hint(tmp_path: Path) -> None:
    started = start_engine(EngineCommand(target=tmp_path / "nothing", model="m"), tmp_path / "engine")
    with pytest.raises(EngineFailed, match="hint:"):
        started.wait_ready(120)
    assert started.stop() == 66


def test_an_engine_that_cannot_say_that_it_is_ready_ends(target: Path) -> None:
    argv = EngineCommand(target=target, model="tiny", threads=1).argv(Path("/proc/nothing/ready.json"))
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 70, ended.stderr
    assert "FileNotFoundError" in ended.stderr


def test_sigterm_lets_a_running_response_finish(target: Path, tmp_path: Path) -> None:
    started = start_engine(EngineCommand(target=target, model="tiny", threads=1), tmp_path)
    try:
        url = started.wait_ready(120)
        finished: list[int] = []

        def ask() -> None:
            with httpx.Client(base_url=url, timeout=120) as client:
                finished.append(sum(1 for _ in events(client, CHAT, chat_body(max_tokens=600))))

        asking = threading.Thread(target=ask)
        asking.start()
        with httpx.Client(base_url=url, timeout=120) as client:
            wait_for(lambda: metric(client, "eyrie_generated_tokens_total") >= 5, "five tokens")
        started.process.send_signal(signal.SIGTERM)
        asking.join(120)
        assert finished
        assert started.process.wait(60) == 0
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")
        assert not (tmp_path / "ready.json").exists()
    finally:
        started.stop()


def test_an_engine_that_cannot_write_its_log_serves_and_a_response_that_outlasts_its_drain_ends_with_an_openai_error(
        target: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with open("/dev/full", "wb") as full:
        server = subprocess.Popen(
            [sys.executable, "-m", "eyrie_workers.engines.server", "--target", str(target), "--model", "tiny",
             "--port", "0", "--threads", "1", "--drain-s", "0.1", "--ready-file", str(ready)], stdout=full, stderr=full)
    try:
        wait_for(ready.exists, "the server answers", process=server)
        with httpx.Client(base_url=json.loads(ready.read_text())["url"], timeout=120) as client, \
                ThreadPoolExecutor(2) as pool:
            assert client.post(CHAT, json=chat_body()).status_code == 200
            whole = pool.submit(client.post, CHAT, json=chat_body(max_tokens=4000))
            stream = pool.submit(client.post, CHAT, json=chat_body(max_tokens=4000, stream=True))
            wait_for(lambda: metric(client, "eyrie_running_requests") == 2, "both run")
            server.send_signal(signal.SIGTERM)
            assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "NotReady")
            *_, error, end = [line for line in stream.result().text.splitlines() if line]
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "NotReady"
            assert end == "data: [DONE]"
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
