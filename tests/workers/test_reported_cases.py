"""Inputs that public trackers of other tools report, on the shipped target with single files changed."""

import json
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eyrie_api.contract.data import DataSource
from eyrie_api.conversation import Conversation
from eyrie_api.errors import InvalidInput, UnsupportedTarget
from eyrie_api.planning.facts import read_config, target_facts
from eyrie_api.planning.target_files import check_tokenizer, check_weights
from eyrie_workers.data.readers import check_source, read_conversations
from eyrie_workers.targets.loading import load_target
from eyrie_workers.targets.state_source import load_transformers_target
from eyrie_workers.targets.templates import ChatTokenizer
from tests.tiny import tiny_target
from tests.workers.regeneration.test_rows_and_selection import run

SHIPPED = Path(__file__).parents[2] / "workers" / "eyrie_workers" / "quickstart" / "target"

PARTS = """{%- for m in messages -%}<|im_start|>{{ m['role'] }}
{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor -%}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
JOINED = """{%- for m in messages -%}<|im_start|>{{ m['role'] }}
{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c['function']['name'] + c['function']['arguments'] }}{% endfor %}
{%- else %}{{ m['content'] }}{% endif %}<|im_end|>
{% endfor -%}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
STRICT = """{%- for m in messages -%}{% if m['role'] not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('Unexpected message role.') }}{% endif %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor -%}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SILENT = STRICT.replace("{{- raise_exception('Unexpected message role.') }}{% endif %}", "{% else %}").replace(
    "<|im_end|>\n{% endfor", "<|im_end|>\n{% endif %}{% endfor")


def shipped(directory: Path, template: str | None = None, **files: dict[str, Any]) -> Path:
    """The shipped target's tokenizer and config; a file's name without its suffix gives fields that are changed."""
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        copyfile(SHIPPED / name, directory / name)
    for name, changes in files.items():
        path = directory / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def warnings(target: Path) -> tuple[str, ...]:
    return check_tokenizer(target, read_config(target), target_facts(target).vocab_size)


def test_a_token_beyond_the_vocabulary_is_a_note_and_text_with_it_is_refused(tmp_path: Path) -> None:
    added = json.loads((SHIPPED / "tokenizer.json").read_text())["added_tokens"]
    target = shipped(tmp_path / "t", tokenizer={"added_tokens": [*added, {
        "id": 2048, "content": "<image_place>", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": False}]})
    assert any("'<image_place>' with id 2048 of 2048" in warning for warning in warnings(target))
    tokenizer = ChatTokenizer(target)
    assert tokenizer.render([{"role": "user", "content": "Hello"}])
    with pytest.raises(InvalidInput, match="'<image_place>' with id 2048"):
        tokenizer.render([{"role": "user", "content": "Look: <image_place>"}])


def test_text_reaches_a_template_that_reads_content_as_parts(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(shipped(tmp_path / "t", PARTS))
    prompts = {tuple(tokenizer.render([{"role": "user", "content": text}])) for text in ("one", "two", "three")}
    assert len(prompts) == 3


def test_conversations_that_render_alike_are_counted(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "t")
    (target / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content[:6] }}{{ m.content[-9:] }}{% endfor %}")
    (tmp_path / "out").mkdir()
    rows = [{"messages": [{"role": "user", "content": f"What is {number} plus one?"}]} for number in range(40)]
    summary = run(tmp_path / "out", rows, ChatTokenizer(target))
    assert summary.equal_prompts == summary.rows_selected - 1 > 10


def test_arguments_reach_a_template_that_joins_them_as_text(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(shipped(tmp_path / "t", JOINED))
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    ids = tokenizer.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}])
    assert 'weather{"city": "Oslo"}' in tokenizer.decode(ids)


@pytest.mark.parametrize("load", [load_target, lambda path: load_transformers_target(path, "float32")],
                         ids=["reference", "transformers"])
def test_an_output_head_of_its_own_under_a_tied_config_is_refused(tmp_path: Path, load: Any) -> None:
    target = tiny_target(tmp_path / "t")
    config = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": True}
    (target / "config.json").write_text(json.dumps(config))
    for refuses in (lambda: check_weights(target, config, target_facts(target), known=True), lambda: load(target)):
        with pytest.raises(UnsupportedTarget, match=r"lm_head\.weight of other values") as refused:
            refuses()
        assert "set tie_word_embeddings to false" in refused.value.hint
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    check_weights(target, config, target_facts(target), known=True)
    assert load(target).output_head


def test_a_turn_that_ends_with_no_end_token_is_a_warning_that_names_the_field(tmp_path: Path) -> None:
    assert not warnings(shipped(tmp_path / "whole"))
    target = shipped(tmp_path / "t", config={"eos_token_id": 0}, generation_config={"eos_token_id": 0},
                     tokenizer_config={"eos_token": "<|endoftext|>"})
    (warning,) = warnings(target)
    assert "'<|im_end|>', which is no end token" in warning
    assert "eos_token_id in generation_config.json" in warning


@pytest.mark.parametrize("template", [STRICT, SILENT], ids=["strict", "silent"])
def test_the_developer_is_the_system_where_the_template_has_no_such_role(tmp_path: Path, template: str) -> None:
    tokenizer = ChatTokenizer(shipped(tmp_path / "t", template))
    developer, system = (tokenizer.render([{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}])
                         for role in ("developer", "system"))
    assert developer == system
    assert "Be brief." in tokenizer.decode(developer)


def test_names_that_begin_with_a_dot_are_no_data(tmp_path: Path) -> None:
    row = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n"
    (tmp_path / "chats.jsonl").write_text(row)
    (tmp_path / "._chats.jsonl").write_bytes(bytes.fromhex("0005160700020000") + b"\0" * 50)
    for path in (tmp_path, tmp_path / "*.jsonl"):
        (conversation,) = read_conversations(DataSource(path=str(path)))
        assert isinstance(conversation, Conversation)
    assert list(read_conversations(DataSource(path=str(tmp_path / ".*.jsonl"))))


def test_a_directory_of_save_to_disk_is_named_in_the_hint(tmp_path: Path) -> None:
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(InvalidInput, match="load_from_disk"):
        check_source(DataSource(path=str(tmp_path)))


def test_two_user_turns_in_a_row_are_one_prompt(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Are you there?"},
                {"role": "assistant", "content": "Yes."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (conversation,) = read_conversations(DataSource(path=str(tmp_path / "a.jsonl")))
    assert isinstance(conversation, Conversation)
    assert [message["role"] for message in conversation.prompt] == ["user", "user"]
    assert ChatTokenizer(SHIPPED).render(conversation.prompt)


def test_a_tokenizer_without_its_json_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    target = shipped(tmp_path / "t")
    (target / "tokenizer.json").rename(target / "tokenizer.model")
    with pytest.raises(UnsupportedTarget, match=r"no tokenizer\.json"):
        warnings(target)
    with pytest.raises(UnsupportedTarget, match=r"tokenizer\.json cannot be read"):
        ChatTokenizer(target)
