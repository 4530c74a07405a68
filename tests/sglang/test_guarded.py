"""The server that pods of engines start: the real SGLang answers inference, and nothing else, to whoever reaches it.

Values that SGLang answers with 500 get 400 before it reads them."""

import os
from pathlib import Path

import httpx

from eyrie_workers.sglang.plugin_files import place_plugin
from eyrie_workers.sglang.process import start_sglang
from tests.sglang.servers import MODEL, READY_S, environment, flags, program

ADMINISTRATION = ("/server_info", "/get_server_info", "/flush_cache", "/pause_generation", "/abort_request",
                  "/update_weights_from_disk", "/release_memory_occupation", "/set_internal_state", "/start_profile",
                  "/configure_logging", "/openapi.json", "/docs", "/", "/v1/../flush_cache", "//flush_cache")


def test_a_client_of_a_guarded_server_gets_answers_and_cannot_administer_it(tmp_path: Path) -> None:
    place_plugin(tmp_path / "plugin")
    variables = environment()
    variables["PYTHONPATH"] += os.pathsep + str(tmp_path / "plugin")
    server = start_sglang(flags("--enable-metrics"), tmp_path, environment=variables, prefix=(*program(), "--guarded"))
    try:
        server.wait_ready(READY_S)
        with httpx.Client(base_url=server.url, timeout=READY_S) as client:
            answer = client.post("/v1/completions", json={"model": MODEL, "prompt": "one two", "max_tokens": 4})
            assert answer.json()["usage"]["completion_tokens"] == 4
            for path in ("/health", "/ready", "/metrics", "/v1/models", "/model_info"):
                assert client.get(path).status_code == 200, path
            for levels, status in ((1, 200), (600, 400)):  # 500 of SGLang itself
                call = {"type": "function", "id": "c", "function": {
                    "name": "f", "arguments": '{"a": ' + "[" * levels + "]" * levels + "}"}}
                turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
                answer = client.post("/v1/chat/completions", json={"model": MODEL, "messages": turns, "max_tokens": 4})
                assert answer.status_code == status, answer.text
            for path in ADMINISTRATION:
                for method in ("GET", "POST"):
                    assert client.request(method, httpx.URL(server.url).copy_with(raw_path=path.encode()),
                                          json={} if method == "POST" else None).status_code == 404, path
    finally:
        server.stop(timeout_s=0.0)
