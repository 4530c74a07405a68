"""Request fields and error bodies. Pure: no server."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyrie_workers.engines.openai_api import (
    ChatCompletionRequest,
    CompletionRequest,
    ContextTooLong,
    InvalidRequest,
    error_body,
    fit_context,
    parse,
    read_object,
    spec_tokens_details,
)

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def test_defaults_are_those_of_openai() -> None:
    sampling = parse(ChatCompletionRequest, HELLO).sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert parse(CompletionRequest, {"prompt": "x"}).token_limit == 16


def test_nulls_mean_absent() -> None:
    request = parse(ChatCompletionRequest, HELLO | {
        "temperature": None, "stop": None, "n": None, "stream": None, "tools": None, "max_tokens": None,
        "logit_bias": None, "logprobs": None, "ignore_eos": None})
    assert request.stops() == ()
    assert request.token_limit is None


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", -0.1), ("temperature", "hot"), ("top_p", 0), ("max_tokens", 0), ("n", 2), ("stop", [""]),
    ("stop", ["a", "b", "c", "d", "e"]), ("messages", []), ("messages", "hello"), ("temprature", 1.0),
    ("frequency_penalty", 0.5), ("response_format", {"type": "json_object"}), ("seed", "x"), ("logprobs", 1),
    ("logprobs", "true"), ("top_logprobs", 3),
    ("temperature", 2.5), ("temperature", "0.5"), ("max_tokens", "5"), ("max_tokens", True), ("top_k", 2.5),
    ("tool_choice", "required"), ("messages", [{"role": "robot", "content": "x"}]), ("stop", ["x" * 1000]),
])
def test_an_unsupported_field_is_rejected_by_name_with_a_hint(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(ChatCompletionRequest, HELLO | {field: value})
    assert (refused.value.param or "").split(".")[0] == field
    assert refused.value.hint
    assert error_body(refused.value)["error"]["type"] == "invalid_request_error"


def test_the_error_names_the_field_inside_a_message() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(ChatCompletionRequest, {"messages": [{"role": "robot", "content": "x"}]})
    assert refused.value.param == "messages.0.role"


@pytest.mark.parametrize(("value", "param", "said"), [
    ({"drafter": 1}, "eyrie.drafter", "eyrie.drafter = 1: "), ({"draft": True}, "eyrie.draft", "is not a field"),
    ("off", "eyrie", "eyrie = 'off': "), ({"rounds": True}, "eyrie", "send stream = true too"),
])
def test_our_own_fields_are_checked_like_the_others(value: object, param: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}], "eyrie": value})
    assert refused.value.param == param
    assert said in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize("text", [
    '{"messages": [{"role": "user", "content": "\\ud800"}]}', '{"prompt": "\\udfff"}', '{"tools": [{"a\\ud800": 1}]}',
    '{"seed": ' + "9" * 5000 + "}", '{"seed": 9223372036854775808}', '{"temperature": 1e999}', '{"top_p": NaN}',
    '{"a": ' + "[" * 900 + "]" * 900 + "}", "[" * 100_000, "[1]", "\xff",
])
def test_strings_and_numbers_that_cannot_be_represented_are_refused_where_the_body_is_read(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_object(text.encode("latin-1"))
    assert refused.value.hint
    json.dumps(error_body(refused.value), allow_nan=False, ensure_ascii=False).encode()


def test_arguments_of_a_tool_call_are_refused_beyond_64_levels_and_left_to_the_engine_where_they_are_no_json() -> None:
    def body(arguments: str) -> bytes:
        call = {"function": {"name": "f", "arguments": arguments}}
        return json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()

    for levels in (65, 600, 5000):
        with pytest.raises(InvalidRequest) as refused:
            read_object(body('{"a": ' + "[" * levels + "]" * levels + "}"))
        assert refused.value.param == "messages.0.tool_calls.0.function.arguments"
    for arguments in ('{"a": ' + "[" * 64 + "]" * 64 + "}", '{"a": ' + "1" * 78 + "}", '{"a": "' + "[" * 900 + '"}',
                      "[" * 100, "", "nonsense", '{"a": "\\ud800"}'):
        assert read_object(body(arguments)) == json.loads(body(arguments))


def test_a_body_of_text_and_64_bit_numbers_is_read_as_it_is() -> None:
    assert read_object(b'{"seed": -9223372036854775808, "prompt": "\\ud83d\\ude00"}') == {
        "seed": -(2**63), "prompt": "\U0001f600"}


@pytest.mark.parametrize(("field", "value"), [
    ("frequency_penalty", 0), ("logprobs", False), ("response_format", {"type": "text"}), ("user", "u"),
    ("metadata", {"a": "b"}), ("parallel_tool_calls", True), ("top_k", -1),
])
def test_a_field_without_effect_is_accepted(field: str, value: object) -> None:
    parse(ChatCompletionRequest, HELLO | {field: value})


def test_content_parts_are_joined_and_images_rejected() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    (message,) = parse(ChatCompletionRequest, {"messages": [{"role": "user", "content": parts}]}).messages
    assert message["content"] == "one two"
    with pytest.raises(InvalidRequest, match=r"messages\.0\.content: .*must be text"):
        parse(ChatCompletionRequest, {"messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]})


def test_tools_are_not_rendered_when_tool_choice_is_none() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert parse(ChatCompletionRequest, HELLO | {"tools": tools}).offered_tools == tools
    assert parse(ChatCompletionRequest, HELLO | {"tools": tools, "tool_choice": "none"}).offered_tools is None


def test_a_prompt_is_one_text_or_one_list_of_token_ids() -> None:
    assert parse(CompletionRequest, {"prompt": [1, 2, 3]}).prompt == [1, 2, 3]
    assert parse(CompletionRequest, {"prompt": ["one"]}).prompt == ["one"]
    for prompt, says in ((["one", "two"], "2 prompts in one request"), ("", "the prompt is empty"),
                         ([], "the prompt is empty"), (None, "must be text")):
        with pytest.raises(InvalidRequest, match=says):
            parse(CompletionRequest, {"prompt": prompt})


@given(st.integers(1, 600), st.one_of(st.none(), st.integers(1, 600)))
def test_prompt_and_response_never_exceed_the_context(num_prompt: int, asked: int | None) -> None:
    if num_prompt + (asked or 1) > 512:
        with pytest.raises(ContextTooLong) as refused:
            fit_context(num_prompt, asked, 512)
        assert refused.value.code == "context_length_exceeded"
    else:
        assert fit_context(num_prompt, asked, 512) == (asked or 512 - num_prompt)


def test_spec_details_agree_with_their_histogram() -> None:
    details = spec_tokens_details((1, 1, 0, 2), 12)
    assert details == {"spec_verify_ct": 4, "spec_num_proposed_drafts": 12, "spec_num_correct_drafts": 7,
                       "spec_accept_length": 2.75, "spec_correct_drafts_histogram": [1, 1, 0, 2]}
    assert spec_tokens_details((), 0)["spec_accept_length"] == 1.0
