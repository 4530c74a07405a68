"""A conversation is rendered to the same tokens as a row of data and as a request, whatever its shape and template."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie_api.chat_messages import Malformed
from eyrie_api.conversation import conversation
from eyrie_api.errors import InvalidInput
from eyrie_workers.engines.openai_api import ChatCompletionRequest, InvalidRequest, parse
from eyrie_workers.targets.templates import ChatTokenizer
from tests.chat_templates import FAMILIES, SPECIAL, write_tokenizer

WORDS = st.lists(st.sampled_from([
    "rain", "Oslo", "42", "naive caf\u00e9", "\u6570", "\n", " ", "{", '"', "</think>", "<tool_call>", "\ue0000\ue001",
    r"\ue0000\ue001", r"\u003c|im_end|>", *SPECIAL]), min_size=1, max_size=5).map("".join)
TEXT = WORDS.filter(lambda text: text.strip() != "")
PARTS = st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
CONTENT = TEXT | PARTS
ARGUMENTS = st.dictionaries(TEXT, TEXT | st.integers(-9, 9) | st.booleans(), max_size=2)
NOTHING = st.fixed_dictionaries({}, optional={
    "refusal": st.none(), "annotations": st.just([]), "audio": st.none(), "weight": st.just(1), "name": st.just("ada")})


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """A turn of calls as clients and data sets write them: as objects or text, with ids or without, or in tags."""
    functions = [{"name": "lookup", "arguments": draw(ARGUMENTS)} for _ in range(draw(st.integers(1, 2)))]
    if draw(st.booleans()):
        functions = [function | {"arguments": json.dumps(function["arguments"])} for function in functions]
    form = draw(st.sampled_from(["tools", "bare", "tags", "function_call"]))
    if form == "tags":
        return {"content": "".join(f"<tool_call>{json.dumps(function)}</tool_call>" for function in functions)}
    if form == "function_call":
        return {"content": None, "function_call": functions[0]}
    identifiers = draw(st.sampled_from([{}, {"id": "abcdefghi"}]))
    return {"content": draw(st.sampled_from([None, ""])), "tool_calls": [
        function if form == "bare" else {"type": "function", "function": function, **identifiers}
        for function in functions]}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": draw(st.sampled_from(["system", "developer"])), "content": draw(CONTENT)})
    if draw(st.integers(0, 5)) == 0:  # the assistant first
        messages.append({"role": "assistant", "content": draw(CONTENT)})
    for _ in range(draw(st.integers(0, 3))):
        messages += [{"role": "user", "content": draw(CONTENT)} for _ in range(draw(st.sampled_from([1, 1, 1, 2])))]
        if draw(st.integers(0, 2)) == 0:
            turn = draw(calls())
            messages.append({"role": "assistant", **turn})
            messages += [{"role": "tool", "content": draw(TEXT | TEXT.map("<tool_response>{}</tool_response>".format))}
                         for _ in range(len(turn.get("tool_calls", [1])))]
        thought = draw(st.fixed_dictionaries({}, optional={
            draw(st.sampled_from(["reasoning_content", "reasoning", "thinking"])): TEXT | st.none()}))
        messages.append({"role": "assistant", "content": draw(CONTENT | st.none()), **thought})
    messages.append({"role": "user", "content": draw(CONTENT)})
    return [draw(NOTHING) | message for message in messages]


TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {
    "type": "object", "properties": {"<|im_end|>": {"type": "string"}}}}}]


def outcome(tokenizer: ChatTokenizer, as_row: bool, messages: list[dict[str, Any]],
            tools: list[dict[str, Any]] | None) -> list[int] | str:
    """Token ids, or why there are none."""
    try:
        if as_row:
            row = conversation({"messages": messages} | ({"tools": tools} if tools else {}), "s", 1, "messages")
            return tokenizer.render(row.prompt, list(row.tools) or None)
        body = parse(ChatCompletionRequest, {"messages": messages} | ({"tools": tools} if tools else {}))
        return tokenizer.render(body.messages, body.offered_tools)
    except (Malformed, InvalidInput) as error:
        return str(error)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    root = tmp_path_factory.mktemp("families")
    return {family: ChatTokenizer(write_tokenizer(root / family, family)) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_conversations", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_a_conversation_has_the_same_tokens_as_a_row_and_as_a_request(
        tokenizers: dict[str, ChatTokenizer], family: str, num_conversations: int) -> None:
    @settings(max_examples=num_conversations)
    @given(messages=conversations(), tools=st.sampled_from([None, TOOLS]))
    def any_conversation(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
        assert_the_same_tokens(tokenizers[family], messages, tools)

    any_conversation()


def assert_the_same_tokens(tokenizer: ChatTokenizer, messages: list[dict[str, Any]],
                           tools: list[dict[str, Any]] | None) -> None:
    row, request = (outcome(tokenizer, as_row, messages, tools) for as_row in (True, False))
    assert row == request
    if isinstance(row, str):
        assert "template" in row, "no shape is refused before the template has its say"
        return
    # Text marks no turn: as many control tokens as with every word of the conversation replaced.
    plain = json.loads(json.dumps(messages))
    for message in plain:
        message["content"] = neutral(message["content"])
        for name in ("reasoning_content", "reasoning", "thinking"):
            if message.get(name):
                message[name] = neutral(message[name])
    special = {tokenizer.encode(token)[0] for token in SPECIAL}
    without = outcome(tokenizer, True, plain, tools)
    assert [token for token in row if token in special] == [token for token in without if token in special]


def neutral(content: Any) -> Any:
    """Content of the same shape without the spelling of any special token."""
    if isinstance(content, list):
        return [part | {"text": neutral(part["text"])} for part in content]
    if isinstance(content, str):
        for token in (*SPECIAL, "\ue000", "\ue001"):
            content = content.replace(token, "word")
    return content


@pytest.mark.parametrize(("family", "form"), [
    ("command", {"content": "parts"}), ("deepseek_v3", {"arguments": "text"}), ("qwen3", {"arguments": "object"}),
    ("gpt_oss", {"reasoning": "thinking", "developer": True}), ("glm45", {"prints_reasoning": True}),
    ("gemma3", {"refused": ("tool",)}), ("phi4", {"lost": ("tool calls", "tool")}),
    ("llama3", {"turn_end": "<|eot_id|>"}), ("mistral", {"refused": (), "lost": ()}),
    ("qwen3", {"keeps_reasoning": False}),
])
def test_the_probe_finds_the_form_that_a_family_expects(tokenizers: dict[str, ChatTokenizer], family: str,
                                                        form: dict[str, Any]) -> None:
    assert tokenizers[family].form.model_dump() | form == tokenizers[family].form.model_dump()


SHAPES: dict[str, list[dict[str, Any]]] = {
    "developer": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "null content": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None},
                     {"role": "user", "content": "And?"}],
    "two user turns": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "And?"}],
    "assistant first": [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}],
    "a result without its call": [{"role": "user", "content": "Hi"}, {"role": "tool", "content": "3"},
                                  {"role": "user", "content": "And?"}],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_that_the_template_accepts_is_accepted_of_data_and_of_clients(
        tokenizers: dict[str, ChatTokenizer], shape: str) -> None:
    tokenizer = tokenizers["qwen3"]
    row, request = (outcome(tokenizer, as_row, SHAPES[shape], None) for as_row in (True, False))
    assert isinstance(row, list)
    assert row == request


def test_an_unknown_field_of_a_message_is_refused_of_data_and_of_clients_and_named() -> None:
    messages = [{"role": "user", "content": "Hi", "wieght": 1}]
    with pytest.raises(Malformed, match="turn 1: unknown field 'wieght'"):
        conversation({"messages": messages}, "s", 1, "messages")
    with pytest.raises(InvalidRequest) as refused:
        parse(ChatCompletionRequest, {"messages": messages})
    assert refused.value.param == "messages.0.wieght"


def test_text_that_a_template_loses_is_refused_with_its_role(tmp_path: Path) -> None:
    target = write_tokenizer(tmp_path / "t", "phi4")
    called = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]},
              {"role": "tool", "content": "3"}]
    with pytest.raises(InvalidInput, match="loses the text of 'tool calls'"):
        ChatTokenizer(target).render(called)
    assert ChatTokenizer(target).render(called[:1])


def test_an_answer_without_reasoning_closes_what_its_prompt_opens(tmp_path: Path) -> None:
    target = write_tokenizer(tmp_path / "t", "smollm")
    (target / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
        "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
    tokenizer = ChatTokenizer(target)
    answer = {"role": "assistant", "content": "Hello <|im_end|>"}
    ids = tokenizer.continuation([{"role": "user", "content": "Hi"}], answer)
    assert ids is not None
    assert tokenizer.decode(ids, skip_special_tokens=False) == "\n</think>\n\nHello <|im_end|><|im_end|>\n"
    ends = [token for token in ids if token in tokenizer.eos_ids]
    assert len(ends) == 1, "the answer's own text ends nothing"
