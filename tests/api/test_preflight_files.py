"""Targets and data that a first stage could not use are refused before a job is accepted, with exactly this text."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyrie_api.errors import InvalidInput
from eyrie_api.planning.facts import target_facts
from eyrie_api.planning.preflight import check, plan
from eyrie_api.planning.target_files import expected_tensors
from eyrie_api.settings import Settings
from tests.api.samples import job_spec, target_directory, write_weights

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
Break = Callable[[Path], Any]


def edited(file: str, **changes: Any) -> Break:
    def apply(directory: Path) -> None:
        value = json.loads((directory / file).read_text()) | changes
        (directory / file).write_text(json.dumps({key: item for key, item in value.items() if item is not None}))
    return apply


def written(file: str, text: str) -> Break:
    return lambda directory: (directory / file).write_text(text)


def renamed(file: str, to: str) -> Break:
    return lambda directory: (directory / file).rename(directory / to)


def weights(dtype: str = "BF16", **changes: tuple[int, ...] | None) -> Break:
    """Weights of the config with some tensors of other shapes, or missing; `__` in a name stands for a dot."""
    def apply(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        shapes: dict[str, Any] = expected_tensors(config, target_facts(directory)) | {
            name.replace("__", "."): shape for name, shape in changes.items()}
        write_weights(directory / WEIGHTS, {name: shape for name, shape in shapes.items() if shape is not None}, dtype)
    return apply


def indexed(weight_map: Any) -> Break:
    return written(INDEX, json.dumps({"weight_map": weight_map}))


def shortened(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:100_000])


def endless_offsets(directory: Path) -> None:
    header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e400]}}'
    (directory / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)


def without_end(directory: Path) -> None:
    edited("config.json", eos_token_id=None)(directory)
    edited("tokenizer_config.json", eos_token=None)(directory)


TARGETS: dict[str, tuple[Break, str]] = {
    "no weights": (renamed(WEIGHTS, "notes.txt"),
                   "target directory {d} has no weights (model.safetensors or model.safetensors.index.json); copy the "
                   "weight files next to its config.json"),
    "pickled weights": (renamed(WEIGHTS, "pytorch_model.bin"),
                        "target directory {d} has neither model.safetensors nor its index, only pytorch_model.bin; "
                        "save the model with save_pretrained(..., safe_serialization=True)"),
    "git-LFS weights": (written(WEIGHTS, POINTER),
                        "{d}/model.safetensors is a git-LFS pointer, not the file itself; run `git lfs pull` where it "
                        "was cloned, or download it with `hf download`"),
    "git-LFS tokenizer": (written("tokenizer.json", POINTER),
                          "{d}/tokenizer.json is a git-LFS pointer, not the file itself; run `git lfs pull` where it "
                          "was cloned, or download it with `hf download`"),
    "another file": (written(WEIGHTS, "<html>404: not found</html>"),
                     "{d}/model.safetensors is truncated or not a safetensors file; download it again"),
    "truncated weights": (shortened,
                          "{d}/model.safetensors has 100000 bytes, its header says 383461: the file is truncated; "
                          "download it again"),
    "layers of no model": (edited("config.json", num_hidden_layers=2**63),
                           "{d}/config.json: num_hidden_layers is larger than 10,000, which no model has; give the "
                           "config of a decoder-only text model, as it was saved"),
    "offsets without an end": (endless_offsets, "{d}/model.safetensors has no safetensors header; download it again"),
    "index without a map": (written(INDEX, "{}"),
                            "{d}/model.safetensors.index.json has no weight_map of tensor names to files; save the "
                            "model again with save_pretrained, or download it again"),
    "shard of a name that no file has": (indexed({"a": "x" * 70_000}),
                                         "{d}/model.safetensors.index.json has no weight_map of tensor names to files; "
                                         "save the model again with save_pretrained, or download it again"),
    "missing shard": (indexed({"a": WEIGHTS, "b": "model-2.safetensors"}),
                      "1 of 2 weight files that {d}/model.safetensors.index.json lists are missing, the first is "
                      "model-2.safetensors; finish the download (`hf download` resumes it)"),
    "index of other files": (indexed({"a": WEIGHTS}),
                             "{d}/model.safetensors.index.json lists tensor 'a' in model.safetensors, which does not "
                             "hold it; save the model again with save_pretrained, or download it again"),
    "missing tensor": (weights(lm_head__weight=None),
                       "the weights in {d} have no tensor 'lm_head.weight', which config.json implies; save the model "
                       "again with save_pretrained, or download it again"),
    "wrong shape": (weights(lm_head__weight=(321, 64)),
                    "tensor 'lm_head.weight' in {d} has shape [321, 64], config.json implies [320, 64]; give the "
                    "config.json that was saved with these weights"),
    "quantised tensors": (weights(dtype="F8_E4M3"),
                          "tensor 'model.embed_tokens.weight' in {d} is stored as F8_E4M3, and config.json has no "
                          "quantization_config that says how; give the unquantised model, or the config.json that was "
                          "saved with these weights"),
    "quantised config": (edited("config.json", quantization_config={"quant_method": "bitsandbytes"}),
                         "quantization_config: quant_method 'bitsandbytes' is not computed by Eyrie or through "
                         "transformers, only fp8, compressed-tensors, gptq, awq, mxfp4; give the unquantised model, or "
                         "set engine to 'sglang', whose own states of bitsandbytes are captured"),
    "tensors of another model": (edited("config.json", num_hidden_layers=3),
                                 "11 tensors in {d} are no part of the model that config.json describes, the first is "
                                 "'model.layers.3.input_layernorm.weight': they would be ignored; correct config.json, "
                                 "or merge and save the model with save_pretrained"),
    "adapter": (written("adapter_config.json", "{}"),
                "target directory {d} holds an adapter (adapter_config.json), which is not applied: drafters would be "
                "trained for the model without it; merge it into the weights (peft: merge_and_unload, then "
                "save_pretrained) and give the merged model"),
    "code": (edited("config.json", auto_map={"AutoModelForCausalLM": "modeling.X"}),
             "target.model '{d}': config.json names Python code (auto_map), which is not executed; remove auto_map if "
             "the model computes what Qwen3ForCausalLM of transformers does"),
    "activation": (edited("config.json", hidden_act="gelu"),
                   "hidden_act 'gelu' is not supported; only silu is computed"),
    "rope": (edited("config.json", rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
             "rope type 'dynamic' is not supported; only default, linear, llama3, yarn are computed"),
    "layer types": (edited("config.json", layer_types=["full_attention"]),
                    "layer_types has 1 entries for 4 layers; correct config.json"),
    "tokenizer without vocabulary": (written("tokenizer.json", "{}"),
                                     "{d}/tokenizer.json has no vocabulary (model.vocab); save the tokenizer again"),
    "tokenizer that is not JSON": (written("tokenizer.json", "[1,"),
                                   "{d}/tokenizer.json is not JSON: Expecting value: line 1 column 4 (char 3); "
                                   "download the model again"),
    "tokenizer.model alone": (renamed("tokenizer.json", "tokenizer.model"),
                              "target directory {d} has no tokenizer.json, which is the only form of a tokenizer that "
                              "is read; copy it next to config.json; of a tokenizer.model, make it with transformers: "
                              "AutoTokenizer.from_pretrained(DIR, use_fast=True).save_pretrained(DIR)"),
    "template that loses the user": (
        written("chat_template.jinja", "{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}{% endif %}"
                                       "{% endfor %}"),
        "the chat template of {d} loses the text of user in every form of a conversation: it would not reach the "
        "prompt; restore the model's own template"),
    "template that refuses everything": (
        written("chat_template.jinja", "{{ raise_exception('not today') }}"),
        "the target's chat template refuses this conversation: not today; check roles, their order and the content of "
        "each message"),
    "template of a megabyte": (
        written("chat_template.jinja", "x" * (1 << 20) + "y"),
        "the chat template in {d}/chat_template.jinja has more than 1048576 characters; restore the model's own "
        "template"),
    "unknown special token": (edited("tokenizer_config.json", eos_token="<stop>"),
                              "target directory {d}: eos_token '<stop>' is not a token of tokenizer.json; save the "
                              "tokenizer again, or correct tokenizer_config.json"),
    "no end": (without_end,
               "target directory {d} names no end-of-sequence token, so no answer would end; set eos_token_id in "
               "generation_config.json to the token that ends an answer"),
    "end beyond the vocabulary": (edited("config.json", eos_token_id=[2, 320]),
                                  "target directory {d}: eos_token_id 320 is not in the model's vocabulary of 320; "
                                  "correct config.json and generation_config.json"),
    "template null": (written("tokenizer_config.json", '{"chat_template": null}'),
                      "target directory {d} has a tokenizer without a chat template; use the chat model rather than "
                      "the base model, or add chat_template.jinja"),
    "template empty": (written("chat_template.jinja", "\n"),
                       "the chat template in {d}/chat_template.jinja is empty; restore the model's own template"),
    "template that is not Jinja": (written("chat_template.jinja", "{% for m in messages %}{{ m }}"),
                                   "the chat template in {d}/chat_template.jinja is not valid Jinja (line 1): "
                                   "Unexpected end of template. Jinja was looking for the following tags: 'endfor' or "
                                   "'else'. The innermost block that needs to be closed is 'for'.; correct the "
                                   "template"),
}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                                  INDEX])
@pytest.mark.parametrize(("kind", "says"), [("deep", "is not JSON: "), ("huge", "is larger than 256 MiB; ")])
def test_a_deep_or_huge_file_of_a_target_is_refused(
        settings: Settings, tmp_path: Path, file: str, kind: str, says: str) -> None:
    target = target_directory(tmp_path / "target")
    with (target / file).open("wb") as broken:
        if kind == "deep":
            broken.write(b'{"a":' * 100_000)
        else:
            broken.truncate((1 << 28) + 1)  # sparse: takes no space on the disk
    with pytest.raises(InvalidInput) as caught:
        check(job_spec(target={"model": str(target)}), settings)
    assert str(caught.value).startswith(f"{target / file} {says}")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("file", "says"), [
    ("config.json", "no readable config.json"), ("tokenizer_config.json", "a tokenizer without a chat template"),
    (WEIGHTS, f"{WEIGHTS} is not a regular file")])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(
        settings: Settings, tmp_path: Path, file: str, says: str) -> None:
    target = target_directory(tmp_path / "target")
    (target / file).unlink()
    os.mkfifo(target / file)
    with pytest.raises(InvalidInput, match=says):
        check(job_spec(target={"model": str(target)}), settings)


def test_a_pipe_or_a_device_in_place_of_data_is_refused_and_not_waited_for(settings: Settings, tmp_path: Path) -> None:
    target = str(target_directory(tmp_path / "target"))
    os.mkfifo(tmp_path / "rows.jsonl")
    for path in (tmp_path / "rows.jsonl", tmp_path / "*.jsonl", "/dev/zero", "/dev/stdin"):
        with pytest.raises(InvalidInput, match="file on the server"):
            check(job_spec(target={"model": target}, data={"sources": [{"path": str(path)}]}), settings)


def test_a_file_that_the_kernel_makes_up_is_refused_and_not_waited_for(settings: Settings, tmp_path: Path) -> None:
    # Reading /proc/kmsg waits for the next message of the kernel.
    (tmp_path / "rows.jsonl").symlink_to("/proc/kmsg")
    with pytest.raises(InvalidInput, match=r"data\.sources\[0\]\.path: .* (not a regular file|not permitted)"):
        plan(job_spec(data={"sources": [{"path": str(tmp_path)}]}), settings)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_broken_target_is_refused(settings: Settings, tmp_path: Path, kind: str) -> None:
    target = target_directory(tmp_path / "target")
    broken, text = TARGETS[kind]
    broken(target)
    for submit in (check, plan):
        with pytest.raises(InvalidInput) as caught:
            submit(job_spec(target={"model": str(target)}), settings)
        assert str(caught.value) == text.replace("{d}", str(target))


def test_a_template_that_does_not_end_is_stopped_and_refused(settings: Settings, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyrie_api.chat_template._PROBE_SECONDS", 1)
    target = target_directory(tmp_path / "target")
    written("chat_template.jinja", "{% for a in range(99999) %}" * 9 + "x" + "{% endfor %}" * 9)(target)
    with pytest.raises(InvalidInput, match="does not render a conversation of four short turns within 1 seconds"):
        check(job_spec(target={"model": str(target)}), settings)


PARTS = ("{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
         "{% endfor %}<end>{% endfor %}")
WARNINGS: dict[str, tuple[Break, str]] = {
    "a token beyond the embedding": (
        edited("tokenizer.json", added_tokens=[{"id": 2, "content": "<end>"}, {"id": 320, "content": "<image>"}]),
        "tokens of tokenizer.json without an embedding: 1 (the first is '<image>' with id 320 of 320); rows and "
        "requests whose text has one are refused"),
    "a turn that ends with no end token": (
        edited("tokenizer.json", added_tokens=[{"id": 2, "content": "<end>"},
                                               {"id": 7, "content": "<turn>", "special": True}]),
        "the chat template ends an answer with '<turn>', which is no end token of the model: answers would run to "
        "their limit; add its id 7 to eos_token_id in generation_config.json"),
    "a template without a place for tools": (
        written("chat_template.jinja", "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}"
                                       "{% endfor %}"),
        "the chat template has no place for tool: conversations with them are refused"),
}


@pytest.mark.parametrize("kind", WARNINGS)
def test_what_a_target_does_with_some_conversations_is_a_warning_of_the_plan(settings: Settings, tmp_path: Path,
                                                                             kind: str) -> None:
    target = target_directory(tmp_path / "target")
    change, warning = WARNINGS[kind]
    change(target)
    if kind.startswith("a turn"):
        written("chat_template.jinja", "{% for m in messages %}{{ m.content }}<turn>{% endfor %}")(target)
    assert warning in plan(job_spec(target={"model": str(target)}), settings).warnings


def test_a_template_that_reads_parts_or_arguments_as_text_is_accepted(settings: Settings, tmp_path: Path) -> None:
    target = target_directory(tmp_path / "target")
    joined = ("{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
              "{{ c.function.name + c.function.arguments }}{% endfor %}<end>{% endfor %}")
    for template in (PARTS, joined):
        (target / "chat_template.jinja").write_text(template)
        warnings = plan(job_spec(target={"model": str(target)}), settings).warnings
        assert not [warning for warning in warnings if "tool calls" in warning and template == joined]


ROWS = '{"query": "Say hi", "reply": "hi"}\n'
NO_CONVERSATION = "none of its first {n} rows can be used; the first: {fault}; give one JSON object per line " \
         "with `messages` (OpenAI), `conversations` (ShareGPT), `instruction` (Alpaca), `question` (GSM8K) or " \
         "`prompt` (TRL)"
NO_LAYOUT = "neither `messages` nor `conversations` nor `instruction` nor `question` nor `prompt` in the row, " \
         "which has query, reply"
DATA: dict[str, tuple[str, bytes, str]] = {
    "CSV": ("chats.csv", b"prompt,answer\nhi,hello\n", NO_CONVERSATION.format(
        n=2, fault="bad JSON at column 1: Expecting value")),
    "gzip without a conversation": ("chats.jsonl.gz", gzip.compress(ROWS.encode()), NO_CONVERSATION.format(
        n=1, fault=NO_LAYOUT)),
    "gzip of another name": ("chats.jsonl", gzip.compress(b"{}"), "a gzip file of another name; rename it to end in "
                                                                  ".gz"),
    "no gzip": ("chats.jsonl.gz", ROWS.encode(), "no gzip file, as its name says; write it again, or name it .jsonl if "
                                                 "it is JSON lines"),
    "truncated gzip": ("chats.jsonl.gz", gzip.compress(ROWS.encode())[:-9],
                       "Compressed file ended before the end-of-stream marker was reached; write it again"),
    "damaged gzip": ("chats.jsonl.gz", gzip.compress(ROWS.encode())[:10] + b"\xff" * 40,
                     "Error -3 while decompressing data: invalid block type; write it again"),
    "no zstd": ("chats.jsonl.zst", ROWS.encode(), "no zstd file, as its name says; write it again, or name it .jsonl "
                                                  "if it is JSON lines"),
    "zip": ("chats.jsonl", b"PK\x03\x04 and more", "a zip archive, which is not read; unzip it"),
    "UTF-16": ("chats.jsonl", ROWS.encode("utf-16"), "UTF-16 text, which is not read; convert it: iconv -f UTF-16 -t "
                                                     "UTF-8"),
    "empty array": ("chats.json", b"[]", "holds no rows; give a file with one conversation per line"),
    "array": ("chats.jsonl", b'[{"messages": []}]\n',
              NO_CONVERSATION.format(n=1, fault="empty conversation")),
    "array of white space": ("chats.json.gz", gzip.compress(b"[" + b" " * (9 << 20)),
                             "more than 8388608 bytes of white space after element 0; write it again"),
    "broken array": ("chats.json", b'[{"messages": []} {}]', "no comma after element 1; write it again"),
    "git-LFS": ("chats.jsonl", POINTER.encode(), "a git-LFS pointer, not the file itself; run `git lfs pull` where it "
                                                 "was cloned, or download it with `hf download`"),
    "parquet of another name": ("chats.jsonl", b"PAR1 and more", "a parquet file of another name; rename it to end in "
                                                                 ".parquet"),
    "no parquet": ("chats.parquet", ROWS.encode(), "no parquet file, as its name says; write it again, or name it "
                                                   ".jsonl if it is JSON lines"),
    "truncated parquet": ("chats.parquet", b"PAR1" + bytes(100), "does not end as a parquet file does: it is "
                                                                 "truncated; copy or write it again"),
    "other fields": ("chats.jsonl", (ROWS * 70).encode(), NO_CONVERSATION.format(
        n=64, fault=NO_LAYOUT)),
    "empty conversations": ("chats.jsonl", b'{"messages": []}\n' * 3,
                            NO_CONVERSATION.format(n=3, fault="empty conversation")),
    "one long line": ("chats.jsonl", b"x" * ((8 << 20) + 1), NO_CONVERSATION.format(
        n=1, fault="oversized: more than 8388608 bytes")),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_without_conversations_is_refused(settings: Settings, tmp_path: Path, kind: str) -> None:
    name, content, text = DATA[kind]
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        plan(job_spec(data={"sources": [{"path": str(file)}]}), settings)
    said = str(caught.value)
    assert said.startswith(f"data.sources[0].path: data file {str(file)!r}")
    assert said.endswith(text)


ASSISTANT_ALONE = '{"messages": [{"role": "assistant", "content": "hello"}]}\n'
NO_ANSWER = ('{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]}\n'
             '{"conversations": [{"from": "human", "value": "hi"}]}\n{"instruction": "Say hi", "output": ""}\n')
ANSWERS = ('{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n',
           '{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}\n',
           '{"conversations": [{"from": "human", "value": "hi"}, {"from": "function_call", "value": '
           '"{\\"name\\": \\"look\\"}"}]}\n',
           '{"instruction": "Say hi", "output": "hi"}\n')


@pytest.mark.parametrize(("text", "answered", "says", "hint"), [
    (ASSISTANT_ALONE, False, "no user turn with text before the last answer",
     "give conversations with the user's turns"),
    (NO_ANSWER, True, "its last turn is not an answer, and data.answered is true", "omit data.answered")])
def test_data_of_which_no_row_can_be_used_is_refused(
        settings: Settings, tmp_path: Path, text: str, answered: bool, says: str, hint: str) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("".join(ANSWERS))
    bad.write_text(text)
    spec = job_spec(data={"sources": [{"path": str(good)}, {"path": str(bad)}], "answered": answered})
    for submit in (check, plan):
        with pytest.raises(InvalidInput) as caught:
            submit(spec, settings)
        assert caught.value.message.startswith(f"data.sources[1].path: data file {str(bad)!r}")
        assert caught.value.message.endswith(says)
        assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("row", ANSWERS)
def test_each_form_of_an_answer_is_seen_before_a_job_is_accepted(settings: Settings, tmp_path: Path, row: str) -> None:
    (tmp_path / "chats.jsonl").write_text(row)
    assert check(job_spec(data={"sources": [{"path": str(tmp_path / "chats.jsonl")}], "answered": True}), settings)


def test_rows_that_some_lines_of_a_file_spoil_are_left_to_the_stage(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("\n" * 100 + '{"torn\n' + ROWS + '{"conversations": [{"from": "human", "value": "hi"}]}\n')
    assert plan(job_spec(data={"sources": [{"path": str(file)}]}), settings)
    with pytest.raises(InvalidInput, match="none of its first 3 rows can be used"):
        plan(job_spec(data={"sources": [{"path": str(file), "format": "messages"}]}), settings)


def test_a_directory_of_70_billion_weights_in_shards_is_checked(
        settings: Settings, tmp_path: Path) -> None:
    target = target_directory(tmp_path / "target", architectures=["LlamaForCausalLM"], model_type="llama",
                              hidden_size=8192, num_hidden_layers=80, vocab_size=128_256, intermediate_size=28_672,
                              num_attention_heads=64, num_key_value_heads=8)
    (target / WEIGHTS).unlink()
    config = json.loads((target / "config.json").read_text())
    shapes = list(expected_tensors(config, target_facts(target)).items())
    listed = {}
    for shard in range(30):
        name = f"model-{shard}.safetensors"
        part = dict(shapes[shard::30])
        write_weights(target / name, part)
        listed |= dict.fromkeys(part, name)
    indexed(listed)(target)
    vocabulary = {f"token-{index}": index for index in range(128_256)}
    edited("tokenizer.json", model={"vocab": vocabulary, "merges": [["ab", "cd"]] * 280_000},
           added_tokens=[{"id": 128_001, "content": "<end>"}])(target)
    assert plan(job_spec(target={"model": str(target)}), settings)


def test_what_is_on_the_hub_is_named_in_the_plan_as_not_checked(
        settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = target_directory(tmp_path / "models--org--name" / "snapshots" / "main")
    spec = job_spec(target={"model": "org/name"}, data={"sources": [{"path": "org/chats"}]})
    rows = "the rows of org/chats are not on this machine: the first stage checks them"
    assert plan(spec, settings).notes[-1] == rows
    for name in (WEIGHTS, "tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).unlink()
    assert plan(spec, settings).notes[-2:] == (
        "the weights of org/name are not on this machine: the first stage checks the target's files", rows)
