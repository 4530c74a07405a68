"""Log probabilities in the response objects of the OpenAI API. Pure.

There is one entry for each token that `usage` counts. That includes tokens which are not part of the text: the end or
stop token, special tokens, which are not shown, and those of a stop string, before which the text is cut. Joined, the
tokens of the entries may therefore be longer than the text. What the values are: `speculation.logprobs`.

Chat completions give a token's text and its bytes, since a token may hold part of a character. Completions have no
field for bytes; a token that is not whole characters is spelled `bytes:\\xe2\\x82` there, as in OpenAI's API.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyrie_workers.targets.token_text import TokenText

_LEAST = -9999.0
"""OpenAI's value for a very improbable token. JSON has no infinity, which is what a logit of -inf yields."""


@dataclass(frozen=True)
class LogprobEntry:
    """One emitted token."""

    token: TokenText
    logprob: float
    top: tuple[tuple[TokenText, float], ...]
    """The most probable tokens of the position, best first."""

    text_offset: int
    """Characters of the answer before the token. A token within a character has the offset of the character."""


def chat_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion or a chunk."""
    return {"content": [{**_scored(entry.token, entry.logprob),
                         "top_logprobs": [_scored(token, logprob) for token, logprob in entry.top]}
                        for entry in entries], "refusal": None}


def completion_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
    """`choices[].logprobs` of a completion or a chunk. `top_logprobs` has the token itself besides the alternatives."""
    return {"tokens": [_spelled(entry.token) for entry in entries],
            "token_logprobs": [max(entry.logprob, _LEAST) for entry in entries],
            "top_logprobs": [_by_spelling(entry) for entry in entries],
            "text_offset": [entry.text_offset for entry in entries]}


def _scored(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(logprob, _LEAST),
            "bytes": None if token.bytes is None else list(token.bytes)}


def _by_spelling(entry: LogprobEntry) -> dict[str, float]:
    found: dict[str, float] = {}
    # Two ids may share a spelling: the more probable one comes first and stays.
    for token, logprob in (*entry.top, (entry.token, entry.logprob)):
        found.setdefault(_spelled(token), max(logprob, _LEAST))
    return found


def _spelled(token: TokenText) -> str:
    if token.is_whole or token.bytes is None:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
