"""Request fields that mean the same in both engines: each check runs on the embedded engine and on SGLang, through the
gateway.

The servers' chat templates end with `{{ closing }}`, a variable of `chat_template_kwargs`.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from eyrie_api.artifacts import write_model
from eyrie_operator.embedded.processes import start_gateway, stop_gateway
from eyrie_operator.embedded.routing import ROUTE_FILE, RouteRecord

CLOSING = "{{- closing -}}"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "Explain electricity in three sentences."


@dataclass(frozen=True)
class Served:
    """A model behind a gateway."""

    client: httpx.Client
    model: str

    def post(self, path: str = CHAT, **fields: Any) -> httpx.Response:
        """A greedy request of 24 tokens at most, with these fields."""
        return self.client.post(path, json=self._body(path, fields))

    def asked(self, path: str = CHAT, **fields: Any) -> dict[str, Any]:
        """The response object of `post`."""
        answer = self.post(path, **fields)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def streamed(self, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
        """The chunks of `post` as a stream."""
        with self.client.stream("POST", path, json=self._body(path, fields) | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def _body(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        text = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {"prompt": PROMPT}
        return {"model": self.model, "max_tokens": 24, "temperature": 0, **text, **fields}


@contextmanager
def behind_gateway(url: str, model: str, directory: Path) -> Iterator[Served]:
    """The engine at `url` behind a gateway of its own."""
    record = start_gateway(directory, 0)
    try:
        write_model(directory / ROUTE_FILE, RouteRecord(revision=1, url=url, since=datetime.now(UTC)))
        with httpx.Client(base_url=f"http://127.0.0.1:{record.port}", timeout=120, trust_env=False) as client:
            yield Served(client, model)
    finally:
        stop_gateway(directory)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def ids_of(answer: dict[str, Any]) -> list[int]:
    """The token ids of a chat completion; SGLang has another name for them there."""
    choice = answer["choices"][0]
    return list(choice.get("token_ids") or choice["response_token_ids"])


def bytes_of_spelling(token: str) -> bytes:
    """The bytes of a token of a completion."""
    return bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()


def check_stop_token_ids(served: Served) -> None:
    ids = ids_of(served.asked(return_token_ids=True))
    stop = ids[len(ids) // 2]
    stopped = served.asked(return_token_ids=True, stop_token_ids=[stop])
    assert ids_of(stopped) == ids[:ids.index(stop) + 1]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == ids.index(stop) + 1


def check_chat_template_kwargs(served: Served) -> None:
    plain = served.asked(max_tokens=1)["usage"]["prompt_tokens"]
    assert served.asked(max_tokens=1, chat_template_kwargs={"closing": ""})["usage"]["prompt_tokens"] == plain
    closed = served.asked(max_tokens=1, chat_template_kwargs={"closing": "Of course: "})
    assert closed["usage"]["prompt_tokens"] > plain


def check_continuous_usage_stats(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = served.streamed(ignore_eos=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"][0]["delta"].get("content")]
    assert len(counts) > 1
    assert counts == sorted(counts)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 24
    assert not any("usage" in chunk for chunk in served.streamed())


def check_chat_logprobs(served: Served) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    answer = served.asked(**fields)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == 24
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) < 1.0001
        # Greedy: the token itself is the most probable one.
        assert {key: entry[key] for key in ("token", "logprob", "bytes")} == entry["top_logprobs"][0]
    # `replace`: random weights spell bytes that are no characters.
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == text_of(answer)
    chunks = served.streamed(**fields)
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed = [entry for one in found if one is not None for entry in one["content"]]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in entries]
    assert all(abs(one["logprob"] - other["logprob"]) < 1e-3 for one, other in zip(streamed, entries, strict=True))
    none = served.asked(**fields | {"top_logprobs": None})["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in none] == [[]] * 24
    assert served.asked()["choices"][0]["logprobs"] is None


def check_completion_logprobs(served: Served) -> None:
    answer = served.asked(COMPLETIONS, logprobs=2, ignore_eos=True)
    found = answer["choices"][0]["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(values) for values in found.values()} == {answer["usage"]["completion_tokens"]} == {24}
    text = b"".join(map(bytes_of_spelling, found["tokens"])).decode(errors="replace")
    assert text == answer["choices"][0]["text"]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == logprob == max(top.values())
    chunks = served.streamed(COMPLETIONS, logprobs=2, ignore_eos=True)
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
    assert [token for one in streamed if one is not None for token in one["tokens"]] == found["tokens"]


CHECKS: dict[str, Callable[[Served], None]] = {
    "stop_token_ids": check_stop_token_ids, "chat_template_kwargs": check_chat_template_kwargs,
    "continuous_usage_stats": check_continuous_usage_stats, "chat logprobs": check_chat_logprobs,
    "completion logprobs": check_completion_logprobs,
}
