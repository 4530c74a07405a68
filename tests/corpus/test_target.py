"""The shipped target: it loads, is small, follows its template, ends its answers, and matches its card."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.quickstart import suites, tokenizer
from benchmarks.quickstart.corpus.streams import CATEGORIES, conversations, digest, normalised, user_prompts
from benchmarks.quickstart.llama import Llama, Shape, hugging_face_config, hugging_face_weights
from eyrie_api.contract.targets import TargetSpec
from eyrie_workers.targets.loading import resolve

TARGET = resolve(TargetSpec(model="quickstart"))


@cache
def reader() -> Any:
    return AutoTokenizer.from_pretrained(str(TARGET))


@cache
def card() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((TARGET / "card.json").read_text())
    return loaded


@cache
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(str(TARGET), dtype=torch.float32).eval()


def answer(row: dict[str, Any], max_new_tokens: int = 320) -> str:
    inputs = reader().apply_chat_template(
        row["messages"], tools=row.get("tools"), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        out = target().generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    text: str = reader().decode(out[0, inputs["input_ids"].shape[1] :])
    return text


def test_the_target_is_a_small_llama_with_untied_embeddings() -> None:
    config = target().config
    assert type(target()).__name__ == "LlamaForCausalLM"
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (16, 256, tokenizer.VOCAB_SIZE)
    assert config.tie_word_embeddings is False
    assert sum(f.stat().st_size for f in TARGET.iterdir()) < 30e6


def test_the_card_records_a_finished_training() -> None:
    assert card()["finished"] is True
    assert card()["validation"]["scores"]["all"]["top1"] > 0.8
    assert (TARGET / "README.md").read_text().startswith("# Eyrie quickstart target")


def test_the_corpus_can_be_regenerated_and_holds_no_suite_prompt() -> None:
    corpus = card()["corpus"]
    assert digest(corpus["num_conversations"], corpus["seed"]) == corpus["digest"]
    rows = conversations(corpus["num_conversations"], corpus["seed"])
    text = "\n".join(normalised(m["content"] or "") for r in rows for m in r["messages"])
    prompts = [normalised(user_prompts(r["messages"])[-1]) for c in CATEGORIES for r in suites.read(c)]
    assert len(prompts) == len(CATEGORIES) * suites.NUM_PROMPTS
    assert [p for p in prompts if p in text] == []


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("category", CATEGORIES)
def test_greedy_answers_end_by_themselves(category: str, number: int) -> None:
    assert answer(suites.read(category)[number]).endswith(tokenizer.END)


def test_a_tool_question_is_answered_with_a_call_that_parses() -> None:
    row = next(r for r in suites.read("tools") if r.get("tools") and r["messages"][-1]["role"] == "user")
    text = answer(row).removesuffix(tokenizer.END)
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    offered = {t["function"]["name"]: t["function"]["parameters"]["required"] for t in row["tools"]}
    assert list(call["arguments"]) == offered[call["name"]]


def test_the_shipped_template_is_the_one_in_the_source() -> None:
    assert reader().chat_template == tokenizer.CHAT_TEMPLATE


def test_special_tokens_are_single_and_where_the_config_says() -> None:
    ids = reader().convert_tokens_to_ids([*tokenizer.SPECIAL_TOKENS, *tokenizer.CALL_TOKENS])
    assert ids == [0, 1, 2, 3, 4]
    assert (reader().pad_token_id, reader().eos_token_id, len(reader())) == (0, 2, tokenizer.VOCAB_SIZE)
    assert "<tool_call>" in reader().decode([3], skip_special_tokens=True)


def test_text_survives_the_tokenizer() -> None:
    text = 'def f(x):\n    """Gruesse: 12,5 \u20ac \u4f60"""\n\treturn {"a": [1, -2]}'
    assert reader().decode(reader()(text)["input_ids"]) == text


def test_the_template_shows_system_tools_calls_and_results() -> None:
    row = next(r for r in conversations(2000, 5) if r.get("tools") and r["messages"][0]["role"] == "system")
    text = reader().apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    system, question, call, result = row["messages"][:4]
    function = call["tool_calls"][0]["function"]
    assert text.startswith(f"<|im_start|>system\n{system['content']}\n\n# Tools\n<tools>\n{{")
    assert f"<|im_start|>user\n{question['content']}<|im_end|>\n" in text
    assert f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>' in text
    assert f"<|im_start|>tool\n{result['content']}<|im_end|>\n" in text


def test_arguments_render_alike_as_string_and_as_object() -> None:
    row = next(r for r in conversations(2000, 5) if r.get("tools"))
    parsed = json.loads(json.dumps(row["messages"]))
    for message in parsed:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    texts = [reader().apply_chat_template(m, tools=row["tools"], tokenize=False) for m in (row["messages"], parsed)]
    assert texts[0] == texts[1]


def test_a_prompt_is_a_prefix_of_every_continuation() -> None:
    """What capture and the engines rely on: later turns change nothing before them, in text and in tokens."""
    for row in conversations(300, 9):
        messages, tools = row["messages"], row.get("tools")
        whole = reader().apply_chat_template(messages, tools=tools, tokenize=False)
        ids = reader()(whole)["input_ids"]
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = {"tools": tools, "add_generation_prompt": True, "tokenize": False}
                part = reader().apply_chat_template(messages[:i], **asked)
                part_ids = reader()(part)["input_ids"]
                assert whole.startswith(part)
                assert ids[: len(part_ids)] == part_ids


def test_the_mask_marks_what_the_assistant_says_and_its_end_of_turn() -> None:
    for row in conversations(100, 9):
        out = reader().apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        marked = [t for t, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
        assistants = [m for m in row["messages"] if m["role"] == "assistant"]
        assert marked.count(2) == len(assistants)
        texts = reader().decode(marked).split(tokenizer.END)[:-1]
        assert [t for t, m in zip(texts, assistants, strict=True) if m["content"]] == [
            m["content"] for m in assistants if m["content"]
        ]


def test_the_training_model_and_transformers_agree() -> None:
    torch.manual_seed(0)
    shape = Shape(num_layers=3)
    own = Llama(shape)
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    config = {**hugging_face_config(shape, 2, 0), "dtype": "float32", "torch_dtype": "float32"}
    theirs = LlamaForCausalLM(LlamaConfig(**config))
    theirs.load_state_dict(hugging_face_weights(own))
    tokens = torch.randint(0, shape.vocab_size, (2, 37))
    with torch.no_grad():
        difference = own(tokens, torch.ones_like(tokens)) - theirs(tokens).logits
    # both float32; the orders of summation differ
    assert difference.abs().max() < 1e-4


def test_documents_in_one_row_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    own = Llama(Shape(num_layers=2))
    tokens = torch.randint(0, 2048, (1, 24))
    documents = torch.tensor([[1] * 10 + [2] * 14])
    with torch.no_grad():
        together = own(tokens, documents)[0, 10:]
        alone = own(tokens[:, 10:], documents[:, 10:])[0]
    # positions differ by a shift, which rotary attention does not see
    assert (together - alone).abs().max() < 1e-4
