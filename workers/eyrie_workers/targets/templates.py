"""Renders conversations to token ids with the target's own chat template, parses answers, and shows single tokens.

The template is a Jinja program shipped with the tokenizer. It runs as in transformers (sandboxed, trimmed blocks, the
same globals and `tojson`), without importing transformers: that import costs seconds at every start of a stage program
or an engine process. Only a tokenizer without `tokenizer.json` is loaded with `AutoTokenizer`.

Two intended differences. Text of a message that spells a special token (`<|im_end|>`) is encoded as text, so that no
client can end or begin a turn; SGLang's own server encodes it as the token. And a tool call's `arguments` given as a
JSON string (the OpenAI wire format) is parsed before it reaches the template. Templates print arguments with `tojson`,
and a string would come out quoted twice.

`parse_answer` parses the tool-call forms of common templates: Hermes and Qwen (`<tool_call>{...}</tool_call>`),
and a whole answer that is one JSON call or a list of calls (Llama 3.1 with `parameters`, and the plainest templates).

A single token need not hold whole characters (`token_text`): byte-level tokenizers (GPT-2 and most since) and the byte
fallback of sentencepiece split a character's UTF-8 bytes over tokens, and each of those decodes to U+FFFD. Its bytes
are read from its piece, the spelling in the vocabulary: a character per byte in byte-level tokenizers, `<0xE2>` in byte
fallback.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from eyrie_api.errors import InvalidInput, NoChatTemplate, UnsupportedTarget
from eyrie_workers.targets.config import read_config, read_json

REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""Sentencepiece's spelling of a space."""

# GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from 256 on, in their order.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + index): byte for index, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


@dataclass(frozen=True)
class TokenText:
    """One token, decoded alone."""

    text: str
    """With U+FFFD in place of bytes that are no whole character."""

    bytes: bytes | None
    """None where they are not known."""

    @property
    def is_whole(self) -> bool:
        return self.bytes is not None and self.bytes == self.text.encode()


def token_text(decoded: str, piece: str | None) -> TokenText:
    """A token's text and bytes.

    decoded  the token decoded alone, special tokens included
    piece    its spelling in the vocabulary; None for an id that has none
    """
    # Decoders of sentencepiece drop the space before the first token, which a token decoded alone is.
    if piece is not None and piece.startswith(_SPACE) and not decoded.startswith(" "):
        decoded = " " + decoded
    if REPLACEMENT not in decoded:
        return TokenText(decoded, decoded.encode())
    return TokenText(decoded, _bytes_of(piece) if piece is not None else None)


def _bytes_of(piece: str) -> bytes | None:
    fallback = _BYTE_PIECE.fullmatch(piece)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    if all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return None


Message = dict[str, Any]
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_OPEN, _CLOSE = "\ue000", "\ue001"
_PLACE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
"""Stands in the rendered text for a special token that a message spells."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _FastCodec:
    """`tokenizer.json`, read by the tokenizers library alone."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for any malformed file
            raise UnsupportedTarget(f"{file} cannot be read: {error}", "save the tokenizer again") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._plain: Tokenizer | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        if self._plain is None:
            # A copy: the flag belongs to the tokenizer, which other threads encode with.
            plain = type(self._tokenizer).from_str(self._tokenizer.to_str())
            plain.encode_special_tokens = True
            self._plain = plain
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        known_id: int | None = self._tokenizer.token_to_id(token)
        return known_id

    def piece(self, token_id: int) -> str | None:
        piece: str | None = self._tokenizer.id_to_token(token_id)
        return piece


class _TransformersCodec:
    """A tokenizer without `tokenizer.json` (sentencepiece and the like), through `AutoTokenizer`."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(directory))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise UnsupportedTarget(f"{directory} has no usable tokenizer: {error}",
                                    "save the tokenizer next to the model") from error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_plain(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        known_id: int | None = self._tokenizer.convert_tokens_to_ids(token)
        return known_id

    def piece(self, token_id: int) -> str | None:
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return piece


class ChatTokenizer:
    """The target's tokenizer and chat template."""

    def __init__(self, path: Path) -> None:
        """Read from model directory `path`. A missing template is reported by `render`, not here: completions work."""
        self.path = path
        file = path / "tokenizer_config.json"
        settings = read_json(file) if file.exists() else {}
        fast = path / "tokenizer.json"
        self._codec = _FastCodec(fast) if fast.is_file() else _TransformersCodec(path)
        self._special = _special_tokens(path, settings)
        self._templates = _read_templates(path, settings)
        self.eos_ids = self._end_ids()
        self._markers = _marker_pattern(fast)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of the conversation, ending where the assistant's answer begins.

        Text of a message that spells a special token is encoded as text: only the template marks turns.

        variables   for the template (`chat_template_kwargs` of the OpenAI extensions); they replace none of its own

        Raises NoChatTemplate when the tokenizer has none, InvalidInput when the template refuses the conversation.
        """
        spelled: list[str] = []
        if self._markers is not None:
            messages = [_place_markers(message, self._markers, spelled) for message in messages]
            tools = [_place_markers(tool, self._markers, spelled) for tool in tools or ()] or None
        text = self.render_text(messages, tools, add_generation_prompt, variables)
        if not spelled:
            return self._codec.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for place, part in enumerate(_PLACE.split(text)):  # text, number, text, ..., text
            if place % 2:
                ids += self._codec.encode_plain(spelled[int(part)])
            elif part:
                ids += self._codec.encode(part, add_special_tokens=False)
        return ids

    def render_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
                    add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None) -> str:
        """The text that `render` encodes. Raises as `render`."""
        if not self._templates:
            raise NoChatTemplate(f"the tokenizer in {self.path} has no chat template",
                                 "add chat_template.jinja to the model directory, or use a chat-tuned target")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        try:
            return template.render(**{
                **(variables or {}), "messages": [_with_parsed_arguments(message) for message in messages],
                "tools": list(tools) if tools else None, "documents": None,
                "add_generation_prompt": add_generation_prompt, **self._special})
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"the target's chat template refuses this conversation: {error}",
                               "check roles, their order and the content of each message") from error

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens that the tokenizer adds."""
        return self._codec.encode(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._codec.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> TokenText:
        """Text and bytes of one token alone, special tokens included."""
        return token_text(self.decode([token_id], skip_special_tokens=False), self._codec.piece(token_id))

    def _end_ids(self) -> tuple[int, ...]:
        ids = list(read_config(self.path).eos_token_ids) if (self.path / "config.json").exists() else []
        token = self._special.get("eos_token")
        own = self._codec.token_id(token) if token else None
        if own is not None and own not in ids:
            ids.append(own)
        return tuple(ids)


def parse_answer(text: str) -> Message:
    """The assistant message in a decoded answer, with `tool_calls` in OpenAI form if it has any. Text that only looks
    like a call stays text."""
    calls, rest = [], text
    for match in _CALL.finditer(text):
        call = _as_call(match.group(1))
        if call is not None:
            calls.append(call)
            rest = rest.replace(match.group(0), "", 1)
    if not calls:
        calls = _whole_text_calls(text)
        rest = "" if calls else text
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": rest.strip() or None, "tool_calls": [
        {"id": f"call_{index}", "type": "function", "function": call} for index, call in enumerate(calls)]}


def _whole_text_calls(text: str) -> list[Message]:
    try:
        value = json.loads(text.strip().removeprefix("<|python_tag|>"))
    except json.JSONDecodeError:
        return []
    items = value if isinstance(value, list) else [value]
    calls = [_as_call(json.dumps(item)) for item in items]
    return [] if None in calls else [call for call in calls if call is not None]


def _as_call(text: str) -> Message | None:
    """The function in `{"name", "arguments" | "parameters"}`, bare or under `function`; None if there is none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return {"name": value["name"], "arguments": arguments}
    return {"name": value["name"], "arguments": json.dumps(arguments)} if isinstance(arguments, dict) else None


def _marker_pattern(file: Path) -> re.Pattern[str] | None:
    """Matches the special tokens of a `tokenizer.json`, longest first; None without that file or without any."""
    added = (read_json(file).get("added_tokens") or []) if file.is_file() else []
    markers = sorted({str(token["content"]) for token in added if token.get("special")}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, [*markers, _OPEN]))) if markers else None


def _place_markers(value: Any, markers: re.Pattern[str], spelled: list[str]) -> Any:
    """The value with every special token in its strings replaced by a place, and appended to `spelled`."""
    if isinstance(value, str):
        def place(marker: re.Match[str]) -> str:
            spelled.append(marker[0])
            return f"{_OPEN}{len(spelled) - 1}{_CLOSE}"
        return markers.sub(place, value)
    if isinstance(value, Mapping):
        return {key: _place_markers(item, markers, spelled) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_place_markers(item, markers, spelled) for item in value]
    return value


def _with_parsed_arguments(message: Mapping[str, Any]) -> Message:
    message = dict(message)
    if not message.get("tool_calls"):
        return message
    message["tool_calls"] = copy.deepcopy(list(message["tool_calls"]))
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            try:
                parsed = json.loads(function["arguments"])
                json.dumps(parsed, ensure_ascii=False).encode()  # as templates print it: text that can be encoded
            except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, deep nesting, surrogates
                continue  # a malformed call of the model is kept as text
            function["arguments"] = parsed
    return message


def _special_tokens(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    file = path / "special_tokens_map.json"
    tokens: dict[str, str] = {}
    for source in (read_json(file) if file.exists() else {}, settings):
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                tokens[name] = value
    return tokens


def _read_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, jinja2.Template]:
    sources: dict[str, str] = {}
    declared = settings.get("chat_template")
    if isinstance(declared, str):
        sources["default"] = declared
    elif isinstance(declared, list):
        sources |= {str(entry["name"]): str(entry["template"]) for entry in declared}
    legacy = path / "chat_template.json"
    if legacy.exists():
        sources["default"] = str(read_json(legacy)["chat_template"])
    if (path / "chat_template.jinja").exists():
        sources["default"] = (path / "chat_template.jinja").read_text()
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = file.read_text()
    environment = _environment()
    try:
        return {name: environment.from_string(source) for name, source in sources.items()}
    except jinja2.TemplateSyntaxError as error:
        raise NoChatTemplate(f"the chat template in {path} is not valid Jinja (line {error.lineno}): {error.message}",
                             "correct the template") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for loss masks; for rendering it is its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
