"""The OpenAI dialect as regeneration speaks it: requests, answers, and what each failure means. No network here.

Token ids are asked for (`return_token_ids`, understood by vLLM and by Eyrie's own server, then SGLang's
`return_output_ids_in_sglext`) and taken as they come. Servers that cannot return them answer in text, which is
tokenised again by the target's own tokenizer; the row says so, and says when the ids are certainly others than the
target's: text that does not come back from them, or another number of tokens than the server counted. A server that
refuses an unknown field is asked again without it.

Failures are three kinds, told by status: trouble that may pass (429, 5xx, timeouts, refused connections) is retried;
a prompt that is declined (400, 413, 422: too long, filtered) becomes a GenerationFailure; anything else
(401, 403, 404 ...) means that every request would fail, and ends the stage.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eyrie_api.errors import InvalidInput, Permanent
from eyrie_api.v1alpha1.regeneration import RegenerateSpec
from eyrie_api.v1alpha1.targets import TargetSpec
from eyrie_workers.regeneration.generation_client import (
    GeneratedAnswer,
    GenerationFailure,
    GenerationOutcome,
    GenerationParams,
    GenerationRequest,
)

_MAX_QUOTED = 300
_DECLINED = (400, 413, 422)
_MAY_PASS = (408, 409, 425, 429)


class AnswerTokenizer(Protocol):
    """Turns an answer given as text back into ids, where the endpoint returned no ids."""

    def answer_ids(self, prompt: GenerationRequest, message: Mapping[str, Any], *, ended: bool) -> list[int]:
        """Ids of an assistant message after this prompt, with the end-of-turn id when it `ended`.

        Raises ValueError when the message cannot be put into ids.
        """

    def text(self, ids: Sequence[int]) -> str:
        """Text of some ids, without special tokens."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, the one the template ends a turn with first."""


@dataclass(frozen=True)
class Endpoint:
    """Where to ask, and how."""

    base_urls: tuple[str, ...]
    """The same model behind each of them."""

    model: str
    params: GenerationParams
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    max_retries: int = 5
    deadline_s: float = 3600.0
    concurrency: int = 24
    context: int | None = None
    """The target's longest text. Most servers refuse a `max_tokens` beyond what the prompt leaves of it."""

    @property
    def base_url(self) -> str:
        """The first, for engines that ask one alone."""
        return self.base_urls[0]

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def endpoint_of(spec: RegenerateSpec, target: TargetSpec, context: int | None = None) -> Endpoint:
    """The endpoint a spec names. Raises InvalidInput when the variable that should hold the key is not set."""
    key = None
    if spec.api_key_env is not None:
        key = os.environ.get(spec.api_key_env)
        if not key:
            raise InvalidInput(f"regenerate.api_key_env names {spec.api_key_env}, which is not set",
                               f"export {spec.api_key_env}=<key> where the stage runs, or remove the field")
    assert spec.base_urls  # the contract demands it for these engines
    return Endpoint(base_urls=spec.base_urls, model=spec.served_model or target.model, api_key=key,
                    params=GenerationParams(spec.sampling, spec.max_new_tokens), timeout_s=spec.timeout_s,
                    max_retries=spec.max_retries, deadline_s=spec.deadline_s, concurrency=spec.concurrency,
                    context=context)


def request_body(endpoint: Endpoint, prompt: GenerationRequest, *, ids_field: str | None) -> dict[str, Any]:
    """Body of one chat completion request.

    ids_field   what asks this server for token ids; None does not ask
    """
    sampling = endpoint.params.sampling
    most = endpoint.params.max_new_tokens
    if endpoint.context is not None:
        most = max(1, min(most, endpoint.context - len(prompt.prompt_ids)))
    body: dict[str, Any] = {
        "model": endpoint.model, "messages": prompt.messages, "max_tokens": most,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": prompt.seed,
    }
    if prompt.tools:
        body["tools"] = prompt.tools
    if sampling.top_k:  # an extension of vLLM and SGLang; sent only when it asks for something
        body["top_k"] = sampling.top_k
    if ids_field is not None:
        body[ids_field] = True
    return body


def parse_completion(prompt: GenerationRequest, payload: object, tokenizer: AnswerTokenizer) -> GenerationOutcome:
    """What a chat completion says. A reply we cannot use is a GenerationFailure, never a guess."""
    try:
        assert isinstance(payload, Mapping)
        choice = payload["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        assert isinstance(message, Mapping)
    except (AssertionError, KeyError, IndexError, TypeError):
        return GenerationFailure(prompt.row_id, "the endpoint's reply is not a chat completion")
    if finish not in ("stop", "length", "tool_calls", "function_call"):
        return GenerationFailure(prompt.row_id, f"the endpoint ended the answer for the reason {finish!r}",
                       "filtered" if finish == "content_filter" else "failed")
    ended = finish != "length"
    ids = _int_list(choice.get("token_ids")) or _sglang_ids(payload)
    exact, differ = ids is not None, False
    if ids is None:
        try:
            ids = tokenizer.answer_ids(prompt, message, ended=ended)
        except ValueError as error:
            return GenerationFailure(prompt.row_id, str(error))
        differ = _differs(ids, message, payload, tokenizer)
    elif ended and (not ids or ids[-1] not in tokenizer.eos_ids):
        ids = [*ids, tokenizer.eos_ids[0]]  # some servers leave the end-of-sequence token out
    if not ids or (ended and len(ids) == 1):
        return GenerationFailure(prompt.row_id, "the endpoint's answer is empty", "empty")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    prompt_ids = _int_list(payload.get("prompt_token_ids")) or prompt.prompt_ids
    return GeneratedAnswer(row_id=prompt.row_id, prompt_ids=prompt_ids,
                  answer_ids=ids, finish_reason="stop" if ended else "length", text=message.get("content") or "",
                  ids_exact=exact, ids_differ=differ, reasoning=reasoning if isinstance(reasoning, str) else "",
                  tool_calls=tuple(message.get("tool_calls") or ()))


def refuses_ids_field(status: int, text: str, ids_field: str | None) -> bool:
    """Whether this refusal is about the field that asks for token ids, not about the prompt."""
    return ids_field is not None and status in (400, 422) and ids_field in text


def is_retryable(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in _MAY_PASS or status >= 500


def declined(prompt: GenerationRequest, status: int, text: str, url: str) -> GenerationFailure:
    """The GenerationFailure a final status means. Raises Permanent when it would meet every request alike."""
    if status in _DECLINED:
        return GenerationFailure(prompt.row_id, f"the endpoint answered {status}: {_quoted(text)}", "declined")
    raise fatal(status, text, url)


def fatal(status: int, text: str, url: str) -> Permanent:
    """The error for a status that would meet every request alike."""
    hints = {401: "check regenerate.api_key_env", 403: "check the key's rights",
             404: "check regenerate.base_url (it ends in /v1) and regenerate.served_model"}
    return Permanent(f"{url} answered {status}: {_quoted(text)}", hints.get(status, "check the endpoint"))


def retry_delay_s(attempt: int, retry_after: str | None, first_delay_s: float, draw: float) -> float:
    """Seconds to wait before attempt `attempt` + 1, counted from 0: doubling, at most a minute, half of it by chance.

    retry_after   the server's own wish, when it gave one in seconds: it is obeyed, up to five minutes.
    draw          0 <= draw < 1, by chance, so that clients refused together do not return together.
    """
    if retry_after is not None and retry_after.strip().isdigit():
        return min(float(retry_after), 300.0)
    return min(first_delay_s * 2**attempt, 60.0) * (0.5 + draw / 2)


def _sglang_ids(payload: Mapping[str, Any]) -> list[int] | None:
    lists = (payload.get("sglext") or {}).get("output_ids")
    return _int_list(lists[0]) if isinstance(lists, list) and lists else None


def _differs(ids: Sequence[int], message: Mapping[str, Any], payload: Mapping[str, Any],
             tokenizer: AnswerTokenizer) -> bool:
    """Whether re-tokenised ids cannot be the ones the target produced."""
    counted = (payload.get("usage") or {}).get("completion_tokens")
    if isinstance(counted, int) and counted not in (len(ids), len(ids) - 1):  # some count the end of the turn
        return True
    plain = not message.get("tool_calls") and not message.get("reasoning_content") and not message.get("reasoning")
    return plain and tokenizer.text(ids) != (message.get("content") or "")


def _int_list(value: object) -> list[int] | None:
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    return None


def _quoted(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _MAX_QUOTED else flat[:_MAX_QUOTED] + " ..."
