"""From the engine's output to what a client receives: independent of how tokens are grouped into rounds."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_api.contract.engine import SamplingSpec
from eyrie_workers.engines.openai_api import ChatCompletionRequest, ResponseMetadata, StreamOptions, Tool
from eyrie_workers.engines.responses import DecodingRequest, ResponseBuilder
from eyrie_workers.speculation.engine import Request, StepOutput
from eyrie_workers.speculation.verify import TokenLogprobs
from eyrie_workers.targets.templates import token_text

EOS = 3  # no byte of the texts below
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def new_builder(*, stops: tuple[str, ...] = (), tools: bool = False, chat: bool = True) -> ResponseBuilder:
    request = Request(id="r", prompt_ids=[1, 2], max_new_tokens=999, sampling=SamplingSpec(), stop_ids=(EOS,))
    body = ChatCompletionRequest(
        messages=[{"role": "user", "content": "hello"}], stop=list(stops), stream=True,
        tools=[Tool(type="function", function={"name": "get_weather"})] if tools else None,
        stream_options=StreamOptions(include_usage=True, continuous_usage_stats=True),
        return_token_ids=True, return_spec_tokens_details=True)
    return ResponseBuilder(DecodingRequest(body, request), ResponseMetadata("chatcmpl-77", "m", 0, chat, "f"), decode,
                           lambda token: token_text(decode([token]), None))


def rounds(tokens: list[int], cuts: list[int]) -> list[StepOutput]:
    """The tokens in rounds of the given lengths (the last takes what is left). Token t has the log probability -t."""
    said, at = [], 0
    for cut in [*cuts, len(tokens)]:
        taken = tokens[at:at + cut]
        at += len(taken)
        if taken:
            reason = None if at < len(tokens) else ("stop" if tokens[-1] == EOS else "length")
            said.append(StepOutput("r", taken, [len(taken) - 1], reason, drafted=[4],  # type: ignore[arg-type]
                                   logprobs=[TokenLogprobs(-float(token), ((97, -1.0),)) for token in taken]))
    return said


def streamed(builder: ResponseBuilder, said: list[StepOutput]) -> list[dict[str, Any]]:
    chunks = [builder.first_chunk()]
    for progress in said:
        text = builder.append(progress)
        if text or builder.has_unsent:
            chunks.append(builder.chunk(text))
        if builder.finish is not None:
            break
    return chunks + builder.last_chunks()


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@given(st.text(alphabet="ab\u20ac", max_size=12), st.lists(st.integers(1, 5), max_size=6),
       st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=2))
def test_text_usage_and_reason_do_not_depend_on_rounds(text: str, cuts: list[int], stops: list[str]) -> None:
    tokens = [*text.encode(), EOS]
    seen = []
    for said in (rounds(tokens, cuts), rounds(tokens, [1] * len(tokens))):
        builder = new_builder(stops=tuple(stops))
        chunks = streamed(builder, said)
        assert text_of(chunks) == builder.response()["choices"][0]["message"]["content"]
        ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
        assert ids == builder.token_ids
        scores = [entry["logprob"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]
                  for entry in choice["logprobs"]["content"]]
        assert scores == [-float(token) for token in ids]
        assert builder.response()["choices"][0]["logprobs"]["content"] == [
            {"token": decode([token]), "logprob": -token, "bytes": [token] if token < 128 else None,
             "top_logprobs": [{"token": "a", "logprob": -1.0, "bytes": [97]}]} for token in ids]
        seen.append((text_of(chunks), builder.usage(), builder.finish))
    assert seen[0] == seen[1]


def test_the_end_token_counts_but_is_not_text() -> None:
    builder = new_builder()
    streamed(builder, rounds([*b"hi", EOS], [3]))
    whole = builder.response()
    assert whole["choices"][0]["message"]["content"] == "hi"
    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["sglext"]["spec_tokens_details"]["spec_accept_length"] == 3.0


@pytest.mark.parametrize("before", ["", "I look it up.\n"])
def test_a_tool_call_is_returned_as_a_call_and_not_as_text(before: str) -> None:
    builder = new_builder(tools=True)
    chunks = streamed(builder, rounds([*(before + CALL).encode(), EOS], [4] * 40))
    assert text_of(chunks).strip() == before.strip()
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert call["index"] == 0
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    whole = builder.response()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert (whole["message"]["content"] or "").strip() == before.strip()
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_text_that_resembles_a_call_is_returned_as_text_at_the_end() -> None:
    builder = new_builder(tools=True)
    chunks = streamed(builder, rounds([*b"if a < b: [1]", EOS], [2] * 20))
    assert text_of(chunks) == "if a < b: [1]"
    assert builder.response()["choices"][0]["finish_reason"] == "stop"


def test_without_tools_a_call_is_text_and_is_streamed_at_once() -> None:
    builder = new_builder()
    first = builder.append(StepOutput("r", list(CALL.encode()), [len(CALL) - 1]))
    assert first == CALL


def test_a_completion_tells_where_its_tokens_are_in_the_text() -> None:
    builder = new_builder(chat=False)
    text = "a\u20acb"
    chunks = streamed(builder, rounds([*text.encode(), EOS], [2, 1, 1]))
    found = builder.response()["choices"][0]["logprobs"]
    assert found["text_offset"] == [0, 1, 1, 1, 2, 3]
    assert found["tokens"] == ["a", "\ufffd", "\ufffd", "\ufffd", "b", "\x03"]
    assert found["token_logprobs"] == [-97.0, -226.0, -130.0, -172.0, -98.0, -3.0]
    assert found["top_logprobs"][0] == {"a": -1.0}
    assert found["top_logprobs"][4] == {"a": -1.0, "b": -98.0}
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [offset for part in parts for offset in part["text_offset"]] == found["text_offset"]


def test_without_log_probabilities_the_field_is_null() -> None:
    builder = new_builder()
    builder.append(StepOutput("r", [97], [], "length"))
    assert builder.response()["choices"][0]["logprobs"] is None
    assert all(choice["logprobs"] is None for chunk in builder.last_chunks() for choice in chunk["choices"])


def test_details_add_up_over_rounds() -> None:
    builder = new_builder(chat=False)
    for tokens, accepted in (([97], []), ([97, 98, 99], [2]), ([97], [0])):
        builder.append(StepOutput("r", tokens, accepted))
    builder.append(StepOutput("r", [], [], "length"))
    details = builder.response()["sglext"]["spec_tokens_details"]
    assert (details["spec_verify_ct"], details["spec_correct_drafts_histogram"]) == (2, [1, 0, 1])
    assert (details["spec_num_correct_drafts"], details["spec_accept_length"]) == (2, 2.0)
