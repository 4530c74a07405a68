"""The quickstart targets' tokenizer: byte-level BPE with 2048 tokens (the larger one has 4096), and its chat template.

ChatML framing (`<|im_start|>role ... <|im_end|>`) because every engine knows it. Tool schemas go into the system
turn between `<tools>` tags; a call is one JSON object between `<tool_call>` tags, the Hermes form, for which
engines have parsers. Digits are split one by one, so that sums are computed by columns and not from rare number
tokens.

The template marks assistant turns with `{% generation %}`, so `return_assistant_tokens_mask` yields the loss mask.
It adds nothing that depends on later turns: rendering a prompt with `add_generation_prompt` gives a prefix of
rendering the whole conversation. Training data and capture both rely on that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

VOCAB_SIZE = 2048
MAX_LENGTH = 2048
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, START, END)
"""Ids 0, 1, 2."""
CALL_TOKENS = ("<tool_call>", "</tool_call>")
"""Ids 3, 4. One token each, but not special: a parser must still see them in decoded text."""

CHAT_TEMPLATE = """\
{%- if messages and messages[0]['role'] == 'system' -%}
  {%- set system = messages[0]['content'] -%}{%- set turns = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- if system or tools -%}
  {{- '<|im_start|>system\\n' + system -}}
  {%- if tools -%}
    {{- ('\\n\\n' if system else '') + '# Tools\\n<tools>\\n' -}}
    {%- for tool in tools -%}
      {{- (tool.function if tool.function is defined else tool) | tojson -}}{{- '\\n' -}}
    {%- endfor -%}
    {{- '</tools>' -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in turns -%}
  {{- '<|im_start|>' + message['role'] + '\\n' -}}
  {%- if message['role'] == 'assistant' -%}
    {%- generation -%}
    {{- message['content'] or '' -}}
    {%- for call in message['tool_calls'] or [] -%}
      {%- set function = call.function if call.function is defined else call -%}
      {{- ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n' -}}
      {{- '{"name": "' + function.name + '", "arguments": ' -}}
      {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}
    {%- endgeneration -%}
    {{- '\\n' -}}
  {%- else -%}
    {{- (message['content'] or '') + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def empty() -> Tokenizer:
    """Splits text as the trained tokenizer does, with no merges learnt yet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens over rendered text."""
    tokenizer = empty()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *CALL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in CALL_TOKENS])
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """`tokenizer.json` and a `tokenizer_config.json` that transformers 4 and 5 both read."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(directory: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(directory))
    return loaded
