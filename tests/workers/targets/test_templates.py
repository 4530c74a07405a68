import json
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.errors import InvalidInput, NoChatTemplate
from eyrie_workers.targets.templates import ChatTokenizer, parse_answer
from tests.tiny import tiny_target

# Written in the manner of Qwen's and Llama's templates: loop state, macros, whitespace control, strict roles, tools.
DEMANDING = """\
{%- macro call_text(call) %}{{ call.name }} {{ call.arguments | tojson }}{% endmacro -%}
{{- bos_token or '' }}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson(indent=2)) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
    {%- if message.content == 'critic' %}{{ raise_exception('no critics') }}{% endif %}
    {%- if message.role == 'skipped' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role }}
    {% if message.content is string %}
        {{- message.content | trim }}
    {% endif %}
    {%- generation %}
    {%- for call in message.tool_calls or [] %}
        {{- call_text(call.function) }}
    {%- endfor %}
    {%- endgeneration %}
    {{- eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' ~ ns.last ~ '\\n' }}{% endif %}
"""
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Wetter für 1 city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": "  What is twelve and thirty? "}],
    "system and several turns": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": "Hello there"}, {"role": "user", "content": "Größe? 数"}],
    "tool call and result": [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ålesund"}}}]},
        {"role": "tool", "content": "{\"celsius\": 3}", "tool_call_id": "1"}, {"role": "user", "content": "And?"}],
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("templates")
    plain, demanding = tiny_target(root / "plain"), tiny_target(root / "demanding")
    (demanding / "chat_template.jinja").write_text(DEMANDING)
    quickstart = Path(__file__).parents[3] / "workers" / "eyrie_workers" / "quickstart" / "target"
    return {"plain": plain, "demanding": demanding} | (
        {"quickstart": quickstart} if (quickstart / "tokenizer.json").exists() else {})


@pytest.mark.parametrize("spelled", [
    "<|im_end|>", "<|im_start|>system\n", "\ue0000\ue001", r"\ue0000\ue001", r"\ue0009\ue001",
    "<|im_end|><|im_end|> a"])
def test_text_that_spells_a_special_token_marks_no_turn(directories: dict[str, Path], spelled: str) -> None:
    tokenizer = ChatTokenizer(directories["plain"])
    turns = [{"role": "user", "content": f"Say {spelled}now"}, {"role": "assistant", "content": "x"}]
    plain = [{"role": "user", "content": "Say now"}, {"role": "assistant", "content": "x"}]
    found, without = tokenizer.render(turns), tokenizer.render(plain)
    special = {tokenizer.encode(text)[0] for text in ("<|im_start|>", "<|im_end|>")}
    assert [token for token in found if token in special] == [token for token in without if token in special]
    assert tokenizer.decode(found, skip_special_tokens=False) == tokenizer.decode(
        without, skip_special_tokens=False).replace("Say now", f"Say {spelled}now")


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", list(CONVERSATIONS))
def test_rendering_equals_hugging_face(directories: dict[str, Path], name: str, tools: Any) -> None:
    from transformers import AutoTokenizer

    for path in directories.values():
        theirs = AutoTokenizer.from_pretrained(path)
        messages = CONVERSATIONS[name]
        theirs_given = [message | {"content": message["content"] or ""} for message in messages]
        for prompt in (True, False):
            expected = theirs.apply_chat_template(theirs_given, tools=tools, add_generation_prompt=prompt,
                                                  tokenize=True)
            expected = expected["input_ids"] if not isinstance(expected, list) else expected
            assert ChatTokenizer(path).render(messages, tools, prompt) == list(expected)


def test_arguments_as_json_text_render_like_arguments_as_object(directories: dict[str, Path]) -> None:
    tokenizer = ChatTokenizer(directories["demanding"])
    as_object = CONVERSATIONS["tool call and result"]
    as_text = json.loads(json.dumps(as_object))
    as_text[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"city": "Ålesund"})
    before = json.dumps(as_text)
    assert tokenizer.render(as_text) == tokenizer.render(as_object)
    assert json.dumps(as_text) == before


def test_encoding_and_decoding_undo_each_other(directories: dict[str, Path]) -> None:
    tokenizer = ChatTokenizer(directories["plain"])
    text = "The answer is forty two, naïve café 数."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*tokenizer.encode("a"), *tokenizer.eos_ids]) == "a"


def test_a_template_may_refuse_and_a_missing_one_is_named(directories: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no critics"):
        ChatTokenizer(directories["demanding"]).render([{"role": "user", "content": "critic"}])
    path = tiny_target(tmp_path / "mute")
    (path / "chat_template.jinja").unlink()
    tokenizer = ChatTokenizer(path)
    assert tokenizer.encode("still works")
    with pytest.raises(NoChatTemplate, match="no chat template"):
        tokenizer.render([{"role": "user", "content": "hi"}])
    (path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(NoChatTemplate, match="not valid Jinja"):
        ChatTokenizer(path)


@pytest.mark.parametrize(("text", "names"), [
    ('<tool_call>\n{"name": "a", "arguments": {"x": {"y": 1}}}\n</tool_call>', ["a"]),
    ('Sure.\n<tool_call>{"name": "a", "arguments": {}}</tool_call>'
     '<tool_call>{"name": "b", "arguments": {}}</tool_call>', ["a", "b"]),
    ('{"name": "a", "parameters": {"x": 1}}', ["a"]),
    ('[{"id": "1", "function": {"name": "a", "arguments": {"x": 1}}}]', ["a"]),
])
def test_tool_calls_are_read_back(text: str, names: list[str]) -> None:
    message = parse_answer(text)
    assert [call["function"]["name"] for call in message["tool_calls"]] == names
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in message["tool_calls"])
    assert message["content"] == ("Sure." if text.startswith("Sure") else None)


@pytest.mark.parametrize("text", ["forty two", "{\"total\": 3}", "<tool_call>{broken</tool_call>", "[]", "7", ""])
def test_text_that_is_no_call_stays_text(text: str) -> None:
    assert parse_answer(text) == {"role": "assistant", "content": text}
