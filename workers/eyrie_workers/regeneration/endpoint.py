"""The OpenAI API as regeneration uses it: request bodies, responses, and the meaning of each failure. No network here.

Token ids are requested (`return_token_ids`, supported by vLLM and by Eyrie's own server, then SGLang's
`return_output_ids_in_sglext`) and used as returned. Servers that cannot return them answer in text, which is tokenized
again by the target's own tokenizer; the row records this, and records when the ids certainly differ from the target's:
when they decode to another text, or their number differs from the server's count. A server that rejects an unknown
field gets the request again without it.

Failures are of three kinds, by status: retryable ones (429, 5xx, timeouts, refused connections) are retried; a prompt
that is declined (400, 413, 422: too long, filtered) becomes a GenerationFailure; any other status (401, 403, 404 ...)
would fail every request and ends the stage.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyrie_api.contract.read_rules import ReadRules
from eyrie_api.contract.regeneration import RegenerateSpec
from eyrie_api.contract.targets import TargetSpec
from eyrie_api.errors import InvalidInput, Permanent
from eyrie_workers.regeneration.answers import (
    AnswerRetokenizer,
    GeneratedAnswer,
    GenerationFailure,
    GenerationOutcome,
    GenerationRequest,
)

_DECLINED = (400, 413, 422)
_RETRYABLE = (408, 409, 425, 429)


@dataclass(frozen=True)
class GenerationEndpoint:
    """The endpoints of a job, which serve the same model."""

    spec: RegenerateSpec
    model: str
    api_key: str | None = field(default=None, repr=False)
    native: bool = False
    """SGLang's own API instead of OpenAI's: `/generate` takes and returns token ids, so a prompt is rendered here and
    an answer is exact."""

    reads: ReadRules | None = None
    """Of the job: to which addresses the host names may lead."""

    context: int | None = None
    """The target's context length. Most servers reject a `max_tokens` that exceeds it together with the prompt."""

    @property
    def base_url(self) -> str:
        """The first address, for clients that use only one."""
        return self.spec.base_urls[0]

    @property
    def path(self) -> str:
        """Of a request, below a base URL."""
        return "/generate" if self.native else "/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def endpoint_of(spec: RegenerateSpec, target: TargetSpec, context: int | None = None,
                reads: ReadRules | None = None) -> GenerationEndpoint:
    """The endpoint of a spec. Raises InvalidInput when the environment variable of its key is not set."""
    key = None
    if spec.api_key_env is not None:
        key = os.environ.get(spec.api_key_env)
        if not key:
            raise InvalidInput(f"regenerate.api_key_env names {spec.api_key_env}, which is not set",
                               f"export {spec.api_key_env}=<key> where the stage runs, or remove the field")
    assert spec.base_urls  # required by the contract for these engines
    return GenerationEndpoint(spec, spec.served_model or target.model, key, context=context, reads=reads)


def request_body(endpoint: GenerationEndpoint, prompt: GenerationRequest, *, ids_field: str | None) -> dict[str, Any]:
    """Body of one request.

    ids_field   field that requests token ids in a chat completion; None for none
    """
    sampling = endpoint.spec.sampling
    max_tokens = prompt.max_new_tokens or endpoint.spec.max_new_tokens
    if endpoint.context is not None:
        max_tokens = max(1, min(max_tokens, endpoint.context - len(prompt.prompt_ids)))
    if endpoint.native:
        return {"input_ids": prompt.prompt_ids, "sampling_params": {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1,
            "max_new_tokens": max_tokens, "sampling_seed": prompt.seed}}
    body: dict[str, Any] = {
        "model": endpoint.model, "messages": prompt.messages, "max_tokens": max_tokens,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": prompt.seed,
    }
    if prompt.tools:
        body["tools"] = prompt.tools
    if prompt.chat_template_kwargs:  # an extension of vLLM and SGLang, as is top_k
        body["chat_template_kwargs"] = prompt.chat_template_kwargs
    if sampling.top_k:  # an extension of vLLM and SGLang: sent only when it is set
        body["top_k"] = sampling.top_k
    if ids_field is not None:
        body[ids_field] = True
    return body


def parse_completion(prompt: GenerationRequest, payload: object, tokenizer: AnswerRetokenizer) -> GenerationOutcome:
    """The answer in a chat completion; a GenerationFailure for a response that cannot be used."""
    try:
        assert isinstance(payload, Mapping)
        choice = payload["choices"][0]
        message, finish = choice["message"], choice["finish_reason"]
        assert isinstance(message, Mapping)
    except (AssertionError, KeyError, IndexError, TypeError):
        return GenerationFailure(prompt.row_id, "the endpoint's response is not a chat completion")
    if finish not in ("stop", "length", "tool_calls", "function_call"):
        return GenerationFailure(prompt.row_id, f"the endpoint ended the answer for the reason {finish!r}",
                       "filtered" if finish == "content_filter" else "failed")
    ended = finish != "length"
    lists = (payload.get("sglext") or {}).get("output_ids")
    ids = _int_list(choice.get("token_ids")) or _int_list(lists[0] if isinstance(lists, list) and lists else None)
    exact, differ = ids is not None, False
    if ids is None:
        try:
            ids = tokenizer.answer_ids(prompt, message, ended=ended)
        except ValueError as error:
            return GenerationFailure(prompt.row_id, str(error))
        differ = _differs(ids, message, payload, tokenizer)
    elif ended and (not ids or ids[-1] not in tokenizer.eos_ids):
        ids = [*ids, tokenizer.eos_ids[0]]  # some servers omit the end-of-sequence token
    if not ids or (ended and len(ids) == 1):
        return GenerationFailure(prompt.row_id, "the endpoint's answer is empty", "empty")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    prompt_ids = _int_list(payload.get("prompt_token_ids")) or prompt.prompt_ids
    return GeneratedAnswer(row_id=prompt.row_id, prompt_ids=prompt_ids,
                  answer_ids=ids, finish_reason="stop" if ended else "length", text=message.get("content") or "",
                  ids_exact=exact, ids_differ=differ, reasoning=reasoning if isinstance(reasoning, str) else "",
                  tool_calls=tuple(message.get("tool_calls") or ()))


def parse_generated(prompt: GenerationRequest, payload: object, tokenizer: AnswerRetokenizer) -> GenerationOutcome:
    """The answer in a response of SGLang's `/generate`; a GenerationFailure for one that cannot be used."""
    try:
        assert isinstance(payload, Mapping)
        finish = payload["meta_info"]["finish_reason"]["type"]
        ids = list(payload["output_ids"])
    except (AssertionError, KeyError, TypeError):
        return GenerationFailure(prompt.row_id, "the response has no output_ids and finish_reason")
    if finish not in ("stop", "length"):
        return GenerationFailure(prompt.row_id, f"the engine ended the answer for the reason {finish!r}")
    ended = finish == "stop"
    if ended and (not ids or ids[-1] not in tokenizer.eos_ids):
        ids.append(tokenizer.eos_ids[0])
    return GeneratedAnswer(row_id=prompt.row_id, prompt_ids=prompt.prompt_ids, answer_ids=ids, ids_exact=True,
                           finish_reason=finish, text=tokenizer.text(ids[:-1] if ended else ids))


def is_retryable(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in _RETRYABLE or status >= 500


def declined(prompt: GenerationRequest, status: int, url: str) -> GenerationFailure:
    """The GenerationFailure of a status that is not retried. Raises Permanent when every request would get it."""
    if status in _DECLINED:
        return GenerationFailure(prompt.row_id, f"the endpoint answered {status}", "declined")
    raise fatal(status, url)


def fatal(status: int, url: str) -> Permanent:
    """The error for a status that every request would get. It does not quote the reply: the URL is the submitter's
    choice, and the reply may be of a server that only this machine can reach."""
    hints = {401: "check regenerate.api_key_env", 403: "check the key's rights",
             404: "check regenerate.base_url (it ends in /v1) and regenerate.served_model"}
    other = "check regenerate.base_url: redirects are not followed" if 300 <= status < 400 else "check the endpoint"
    return Permanent(f"{url} answered {status}", hints.get(status, other))


def retry_delay_s(attempt: int, retry_after: str | None, first_delay_s: float, draw: float) -> float:
    """Seconds to wait before attempt `attempt` + 1, counted from 0: doubling, at most 60, of which half is random.

    retry_after   the server's Retry-After in seconds; used up to five minutes.
    draw          random, 0 <= draw < 1, so that clients refused together do not return together.
    """
    if retry_after is not None and retry_after.strip().isdigit():
        return min(float(retry_after), 300.0)
    return min(first_delay_s * 2**attempt, 60.0) * (0.5 + draw / 2)


def _differs(ids: Sequence[int], message: Mapping[str, Any], payload: Mapping[str, Any],
             tokenizer: AnswerRetokenizer) -> bool:
    """Whether re-tokenized ids certainly differ from those that the target generated."""
    counted = (payload.get("usage") or {}).get("completion_tokens")
    if isinstance(counted, int) and counted not in (len(ids), len(ids) - 1):  # some servers count the end-of-turn token
        return True
    plain = not message.get("tool_calls") and not message.get("reasoning_content") and not message.get("reasoning")
    return plain and tokenizer.text(ids) != (message.get("content") or "")


def _int_list(value: object) -> list[int] | None:
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    return None
