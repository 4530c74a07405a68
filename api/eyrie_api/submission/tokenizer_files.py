"""The tokenizer and the chat template of a target, as far as they can be checked without the tokenizers library.

`tokenizer.json` is read as JSON: its ids against the model's vocabulary, and the special tokens that other files name
against its tokens. Templates are parsed, not rendered: a template may refuse a conversation for good reasons.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from eyrie_api.errors import NoChatTemplate, UnsupportedTarget
from eyrie_api.submission.file_reading import read_object

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def check_tokenizer(directory: Path, config: Mapping[str, Any], vocab_size: int) -> None:
    """Raises NoChatTemplate or UnsupportedTarget, naming the file and the value."""
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise NoChatTemplate(f"target directory {directory} has no tokenizer ({', '.join(TOKENIZER_FILES)})",
                             "copy the model's tokenizer files next to its config.json")
    file = directory / "tokenizer_config.json"
    settings = read_object(file) if file.is_file() else {}
    _check_templates(directory, settings)
    generation = directory / "generation_config.json"
    ends = _end_ids(read_object(generation) if generation.is_file() else {}) + _end_ids(config)
    beyond = [token for token in ends if not 0 <= token < vocab_size]
    if beyond:
        raise UnsupportedTarget(f"target directory {directory}: eos_token_id {beyond[0]} is not in the model's "
                                f"vocabulary of {vocab_size}", "correct config.json and generation_config.json")
    fast = directory / "tokenizer.json"
    tokens = _token_ids(fast) if fast.is_file() else None
    if tokens is None:  # sentencepiece and the like, which the stage reads with transformers
        if settings.get("auto_map"):
            raise UnsupportedTarget(f"{file} names Python code (auto_map) and there is no tokenizer.json: code of a "
                                    "model is not executed", "save the tokenizer as tokenizer.json (use_fast=True)")
        return
    largest = max(tokens.values(), default=-1)
    if largest >= vocab_size:
        token = next(token for token, number in tokens.items() if number == largest)
        raise UnsupportedTarget(f"{fast} has token {token!r} with id {largest}, and the model's vocabulary has "
                                f"{vocab_size} entries",
                                "resize the model's embeddings (resize_token_embeddings), or remove the added tokens")
    named = _named_tokens(directory, settings)
    unknown = sorted(kind for kind, token in named.items() if token not in tokens)
    if unknown:
        raise UnsupportedTarget(f"target directory {directory}: {unknown[0]} {named[unknown[0]]!r} is not a token of "
                                "tokenizer.json", "save the tokenizer again, or correct tokenizer_config.json")
    if not ends and "eos_token" not in named:
        raise UnsupportedTarget(f"target directory {directory} names no end-of-sequence token, so no answer would end",
                                "set eos_token_id in generation_config.json to the token that ends an answer")


def _token_ids(path: Path) -> dict[str, int]:
    """Ids of the tokens, the added ones included."""
    document = read_object(path)
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        tokens = {str(token): number for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: pairs of token and score, in order
        tokens = {str(entry[0]): number for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    else:
        raise UnsupportedTarget(f"{path} has no vocabulary (model.vocab)", "save the tokenizer again")
    try:
        return tokens | {str(token["content"]): int(token["id"]) for token in document.get("added_tokens") or []}
    except (TypeError, KeyError, ValueError):
        raise UnsupportedTarget(f"{path}: added_tokens is not a list of tokens with content and id",
                                "save the tokenizer again") from None


def _end_ids(config: Mapping[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    return [token for token in (value if isinstance(value, list) else [value])
            if isinstance(token, int) and not isinstance(token, bool)]


def _named_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that prompts and answers depend on. Padding and the like never reach the model."""
    file = directory / "special_tokens_map.json"
    found: dict[str, str] = {}
    for source in (read_object(file) if file.is_file() else {}, settings):
        for kind in ("bos_token", "eos_token"):
            value = source.get(kind)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[kind] = value
    return found


def _check_templates(directory: Path, settings: Mapping[str, Any]) -> None:
    sources = _templates(directory, settings)
    if not sources:
        raise NoChatTemplate(f"target directory {directory} has a tokenizer without a chat template",
                             "use the chat model rather than the base model, or add chat_template.jinja")
    environment = jinja2.Environment(extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    for where, source in sources.items():
        if not source.strip():
            raise NoChatTemplate(f"the chat template in {where} is empty", "restore the model's own template")
        try:
            environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise NoChatTemplate(f"the chat template in {where} is not valid Jinja (line {error.lineno}): "
                                 f"{error.message}", "correct the template") from None


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The text of each template, by the file that holds it."""
    settings_file, legacy = directory / "tokenizer_config.json", directory / "chat_template.json"
    found: dict[str, str] = {}
    declared = [(settings_file, settings.get("chat_template"))]
    if legacy.is_file():
        declared.append((legacy, read_object(legacy).get("chat_template")))
    for file, value in declared:
        if isinstance(value, list):
            named = [entry.get("template") if isinstance(entry, dict) else None for entry in value]
            found |= {f"{file} (entry {index})": str(text) for index, text in enumerate(named) if text is not None}
        elif value is not None:
            found[str(file)] = str(value)
    files = [directory / "chat_template.jinja", *sorted(directory.glob("additional_chat_templates/*.jinja"))]
    for file in files:
        if file.is_file():
            try:
                found[str(file)] = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise NoChatTemplate(f"{file} cannot be read: {error}", "correct the template") from None
    return found


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which marks assistant text in templates of transformers."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
