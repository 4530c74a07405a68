"""Token ids of an answer from its text, for endpoints that return no ids and for answers of the data.

Inexact: a target may generate a text with other tokens than its tokenizer would choose, and a drafter trained on the
tokenizer's choice is wrong wherever they differ. Plain text is encoded as it is, followed by the id that ends a turn.
Tool calls and reasoning arrive parsed into fields; the chat template serialises them, as it would in the next turn of
the conversation. An answer that the template does not render as a continuation of its prompt is declined.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from eyrie_api.errors import InvalidInput
from eyrie_workers.regeneration.generation_client import GenerationRequest
from eyrie_workers.targets.templates import ChatTokenizer


class AnswerRetokenizer:
    """`AnswerTokenizer` over the target's own tokenizer and template."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._prefix = tokenizer.encode("")
        """Tokens that the tokenizer puts before every text (BOS); an answer within a conversation has none."""
        self._eos_ids = _turn_end_first(tokenizer)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, the one the template ends a turn with first."""
        return self._eos_ids

    def text(self, ids: Sequence[int]) -> str:
        """See `AnswerTokenizer`."""
        return self._tokenizer.decode(ids)

    def answer_ids(self, prompt: GenerationRequest, message: Mapping[str, Any], *, ended: bool) -> list[int]:
        """See `AnswerTokenizer`. Raises ValueError when the message cannot be tokenised."""
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if message.get("tool_calls") or reasoning:
            ids = self._encode(self._rendered(prompt, message, reasoning))
        else:
            ids = self._encode(message.get("content") or "")
        end = next((place for place, token in enumerate(ids) if token in self._eos_ids), len(ids))
        return [*ids[:end], *self._eos_ids[:1]] if ended else ids[:end]

    def _rendered(self, prompt: GenerationRequest, message: Mapping[str, Any], reasoning: object) -> str:
        answer = {"role": "assistant", "content": message.get("content")}
        answer |= {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
        answer |= {"reasoning_content": reasoning} if reasoning else {}
        try:
            before = self._tokenizer.render_text(prompt.messages, prompt.tools or None,
                                                 variables=prompt.chat_template_kwargs)
            whole = self._tokenizer.render_text([*prompt.messages, answer], prompt.tools or None,
                                                add_generation_prompt=False, variables=prompt.chat_template_kwargs)
        except InvalidInput as error:
            raise ValueError(error.message) from error
        if not whole.startswith(before):
            raise ValueError("the answer has no token ids, and the chat template does not render this answer as a "
                             "continuation of its prompt: use an endpoint that honours return_token_ids")
        return whole[len(before):]

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text)
        return ids[len(self._prefix):] if ids[: len(self._prefix)] == self._prefix else ids


def _turn_end_first(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The eos ids; first the one that the template writes after an assistant turn, if it writes one."""
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        written = tokenizer.render(turn, add_generation_prompt=False)
    except InvalidInput:
        written = []
    last = next((token for token in reversed(written) if token in tokenizer.eos_ids), None)
    return tuple(tokenizer.eos_ids) if last is None else (
        last, *(token for token in tokenizer.eos_ids if token != last))
