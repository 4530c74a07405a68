"""Renders conversations to token ids with the target's own chat template, parses answers, and shows single tokens.

The template is read and rendered by `eyrie_api.chat_template`, in the form that its probe found. One intended
difference from other servers: text of a message, of its keys and of a tool's schema that spells a special token
(`<|im_end|>`) is encoded as text, so that no client can end or begin a turn; SGLang's own server encodes it as the
token.

`parse_answer` parses the tool-call forms of common templates: Hermes and Qwen (`<tool_call>{...}</tool_call>`),
and a whole answer that is one JSON call or a list of calls (Llama 3.1 with `parameters`, and the plainest templates).

A single token need not hold whole characters (`token_text`): byte-level tokenizers (GPT-2 and most since) and the byte
fallback of sentencepiece split a character's UTF-8 bytes over tokens, and each of those decodes to U+FFFD. Its bytes
are read from its piece, the spelling in the vocabulary: a character per byte in byte-level tokenizers, `<0xE2>` in byte
fallback.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eyrie_api.chat_messages import Malformed, Message, normal_messages
from eyrie_api.chat_template import ChatTemplate, Form, read_sources, require_text, special_tokens
from eyrie_api.errors import InvalidInput, NoChatTemplate, UnsupportedTarget, reading
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


_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_OPEN, _CLOSE, _ESCAPED = "\ue000", "\ue001", r"\ue000"
_PLACE = re.compile(r"(?:\ue000|\\ue000)([0-9]+)(?:\ue001|\\ue001)")
"""Stands in the rendered text for a special token that a message spells; also as a template's JSON writes it."""


class ChatTokenizer:
    def __init__(self, path: Path) -> None:
        """Read from model directory `path`. A missing template is reported by `render`, not here: completions work.
        Raises UnsupportedTarget without a readable `tokenizer.json`, NoChatTemplate for a template that is no Jinja."""
        self.path = path
        with reading(path):
            self._read(path)

    def _read(self, path: Path) -> None:
        optional = {name: read_json(path / name) if (path / name).is_file() else {} for name in (
            "tokenizer_config.json", "special_tokens_map.json", "chat_template.json")}
        settings = optional["tokenizer_config.json"]
        try:
            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # bare Exception for a malformed file, a panic of Rust for some
            raise UnsupportedTarget(f"{path / 'tokenizer.json'} cannot be read: {error}",
                                    "save the tokenizer again, with use_fast=True") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # A copy that encodes the text of special tokens as text: the flag belongs to a tokenizer, which other threads
        # encode with.
        self._plain = Tokenizer.from_str(self._tokenizer.to_str())
        self._plain.encode_special_tokens = True
        special = special_tokens(optional["special_tokens_map.json"], settings)
        sources = read_sources(path, settings, optional["chat_template.json"])
        self._template = ChatTemplate(sources, special) if sources else None
        self._vocab_size = read_config(path).vocab_size if (path / "config.json").exists() else None
        ends = read_config(path).eos_token_ids if (path / "config.json").exists() else ()
        own = self._tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
        self.eos_ids: tuple[int, ...] = (*ends, *(() if own is None or own in ends else (own,)))
        # Longest first: a token may begin with another. Text that looks like a place, or like its escape, is none.
        markers = sorted({token.content for token in self._tokenizer.get_added_tokens_decoder().values()
                          if token.special}, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, [*markers, _OPEN, _ESCAPED])))

    @property
    def form(self) -> Form:
        """What the template does with a conversation. Raises as `render`."""
        return self._chat.form

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of the conversation, ending where the assistant's answer begins.

        Text of a message that spells a special token is encoded as text: only the template marks turns.

        messages    put into normal form here (`eyrie_api.chat_messages`), so that all callers render by one rule
        variables   for the template (`chat_template_kwargs` of the OpenAI extensions); they replace none of its own

        Raises NoChatTemplate when the tokenizer has none, InvalidInput when the template refuses the conversation or
        loses the text of one of its roles, and for a token that the model has no embedding of.
        """
        return self._ids(*self._text(messages, tools, add_generation_prompt, variables))

    def continuation(self, messages: Sequence[Mapping[str, Any]], answer: Mapping[str, Any],
                     tools: Sequence[Mapping[str, Any]] | None = None,
                     variables: Mapping[str, Any] | None = None) -> list[int] | None:
        """Token ids that follow the prompt when the conversation goes on with `answer`, the end of the turn included;
        None where the template does not render the answer as a continuation of its prompt. Raises as `render`."""
        before, _ = self._text(messages, tools, True, variables)
        whole, spelled = self._text([*messages, answer], tools, False, variables)
        return self._ids(whole[len(before):], spelled) if whole.startswith(before) else None

    def _text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None,
              add_generation_prompt: bool, variables: Mapping[str, Any] | None) -> tuple[str, list[str]]:
        """The rendered text with places for the special tokens that its messages spell, and those tokens."""
        try:
            normal = normal_messages(messages)
        except Malformed as error:
            raise InvalidInput(str(error), "give messages in OpenAI's format") from error
        require_text(self.form, normal)
        spelled: list[str] = []
        # In the template's own form, where arguments that were JSON text are objects, without escapes. Messages come
        # last: a conversation that goes on has the same places before.
        values = {**(variables or {}), **self._chat.values(normal, tools, self.form)}
        return self._chat.render(_place_markers(values, self._markers, spelled), add_generation_prompt), spelled

    def _ids(self, text: str, spelled: Sequence[str]) -> list[int]:
        ids: list[int] = []
        for place, part in enumerate(_PLACE.split(text)):  # text, number, text, ..., text
            if place % 2:
                known = int(part) < len(spelled)  # else the template's own text
                ids += self._plain.encode(spelled[int(part)] if known else f"{_OPEN}{part}{_CLOSE}",
                                          add_special_tokens=False).ids
            elif part:
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
        return self._known(ids)

    @property
    def _chat(self) -> ChatTemplate:
        if self._template is None:
            raise NoChatTemplate(f"the tokenizer in {self.path} has no chat template",
                                 "add chat_template.jinja to the model directory, or use a chat-tuned target")
        return self._template

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens that the tokenizer adds. Raises InvalidInput for a token that the
        model has no embedding of."""
        return self._known(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def _known(self, ids: list[int]) -> list[int]:
        if self._vocab_size is not None and ids and max(ids) >= self._vocab_size:
            token = max(ids)
            raise InvalidInput(f"the text has token {self._tokenizer.id_to_token(token)!r} with id {token}, and the "
                               f"model's vocabulary has {self._vocab_size} entries", "leave that text out")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> TokenText:
        """Text and bytes of one token alone, special tokens included."""
        return token_text(self.decode([token_id], skip_special_tokens=False), self._tokenizer.id_to_token(token_id))


def parse_answer(text: str) -> Message:
    """The assistant message in a decoded answer, with `tool_calls` in OpenAI form if it has any. Text that only looks
    like a call stays text."""
    calls, rest = [], text
    for match in _CALL.finditer(text):
        call = _as_call(_json(match.group(1)))
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
    value = _json(text.strip().removeprefix("<|python_tag|>"))
    calls = [_as_call(item) for item in (value if isinstance(value, list) else [value])]
    return [] if None in calls else [call for call in calls if call is not None]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _as_call(value: Any) -> Message | None:
    """The function in `{"name", "arguments" | "parameters"}`, bare or under `function`; None if there is none."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return {"name": value["name"], "arguments": arguments}
    return {"name": value["name"], "arguments": json.dumps(arguments)} if isinstance(arguments, dict) else None


def _place_markers(value: Any, markers: re.Pattern[str], spelled: list[str]) -> Any:
    """The value with every special token in its strings and keys replaced by a place, and appended to `spelled`."""
    if isinstance(value, str):
        def place(marker: re.Match[str]) -> str:
            spelled.append(marker[0])
            return f"{_OPEN}{len(spelled) - 1}{_CLOSE}"
        return markers.sub(place, value)
    if isinstance(value, Mapping):
        return {_place_markers(key, markers, spelled): _place_markers(item, markers, spelled)
                for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_place_markers(item, markers, spelled) for item in value]
    return value
