"""The OpenAI API as data types: request fields, response objects, error bodies. Pure.

Chat completions and completions with n = 1. A field that would change the output and that this engine does not support
is rejected with a hint; a field that cannot change the output (`user`, `metadata`, ...) is accepted and ignored; an
unknown field is rejected, because ignoring a misspelt `temprature` would return a wrong result. The prompt is the chat
template over the client's messages; no system prompt is added.

Three extensions have the names that SGLang and vLLM use, so that one client can read all three servers:
`return_spec_tokens_details` (SGLang) returns `sglext.spec_tokens_details`, `return_token_ids` (vLLM) returns
`prompt_token_ids` and `choices[].token_ids`, and `ignore_eos` (both) generates up to `max_tokens`.

The field `eyrie` is ours (`Extension`): a request without the drafter, and the draft tree of every round in the chunks
of a stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from eyrie_api.chat_messages import Malformed, normal_messages
from eyrie_api.contract.engine import SamplingSpec
from eyrie_api.contract.rules import rule_of
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_workers.engines.request_rules import RefusedBody, read_values

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256

FinishReason = Literal["stop", "length", "tool_calls"]


class InvalidRequest(InvalidInput):
    """A request this server rejects. `param` is the field's name, `code` is OpenAI's error code."""

    http_status = 400
    reason = "BadRequest"

    def __init__(self, message: str, hint: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, hint)
        self.param = param
        self.code = code


class ContextTooLong(InvalidRequest):
    """Prompt and response together exceed the target's context length."""


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""

    http_status = 404


class BodyTooLarge(InvalidRequest):
    """The body is larger than any conversation that fits the context."""

    http_status = 413
    reason = "TooLarge"


class Overloaded(EyrieError):
    """The queue of waiting requests is full."""

    http_status = 429


class NotReady(EyrieError):
    """The target is still loading, or the server is shutting down."""

    http_status = 503


class _Closed(BaseModel):
    # Strict: "5" and true are not numbers.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
"""null is an absent field."""


class StreamOptions(_Closed):
    """What a stream contains besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Usage so far in every chunk, as in vLLM and SGLang."""

    include_obfuscation: bool = False


class Extension(_Closed):
    """Our own request fields, under the name `eyrie`."""

    drafter: bool = True
    """False decodes this request without the drafter. The answer is the same."""

    rounds: bool = False
    """Return each round's draft tree in `choices[].eyrie.rounds` of the stream's chunks."""


class Tool(_Closed):
    """One function the target may call."""

    type: Literal["function"]
    function: dict[str, Any]


# Fields that are not supported, with the values that have no effect. None never has an effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "repetition_penalty": (1, 1.0), "logit_bias": ({},),
    "min_p": (0, 0.0), "min_tokens": (0,), "best_of": (1,), "echo": (False,), "suffix": ("",),
    "response_format": ({"type": "text"},), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (), "prediction": (), "reasoning_effort": (), "web_search_options": (),
    "guided_json": (), "guided_regex": (),
}
# Fields that cannot change the output.
_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier",
                       "prompt_cache_key", "prompt_cache_retention", "verbosity"})


class _SharedFields(_Closed):
    """Fields of both chat completions and completions."""

    model: str | None = None
    n: int = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    ignore_eos: Flag = False
    return_token_ids: Flag = False
    return_spec_tokens_details: Flag = False
    eyrie: Extension | None = None

    @field_validator("eyrie")
    @classmethod
    def _rounds_need_a_stream(cls, value: Extension | None, fields: ValidationInfo) -> Extension | None:
        if value is not None and value.rounds and not fields.data.get("stream"):
            raise ValueError("rounds are returned with the chunks of a stream: send stream = true too")
        return value

    @field_validator("n", mode="before")
    @classmethod
    def _single_choice(cls, value: object) -> object:
        if value is None:
            return 1
        if value != 1 or isinstance(value, bool):
            raise ValueError("the embedded engine returns one choice per request: send n = 1, send the request several "
                             "times with different seeds, or serve with `engine: sglang`")
        return value

    @field_validator("stop")
    @classmethod
    def _bounded_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"{len(stops)} stop strings: at most {MAX_STOP_STRINGS}")
        if any(not stop or len(stop) > MAX_STOP_CHARACTERS for stop in stops):
            raise ValueError(f"stop strings have 1 to {MAX_STOP_CHARACTERS} characters")
        return value

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> SamplingSpec:
        """OpenAI's defaults: temperature 1, no truncation. top_k -1 means the whole vocabulary, as in vLLM."""
        return SamplingSpec(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
        )


class ChatCompletionRequest(_SharedFields):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    """In normal form (`eyrie_api.chat_messages`)."""

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as `enable_thinking`."""

    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    @field_validator("messages")
    @classmethod
    def _normal(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return normal_messages(value)

    @field_validator("top_logprobs")
    @classmethod
    def _alternatives_need_logprobs(cls, value: int | None, fields: ValidationInfo) -> int | None:
        if value and not fields.data.get("logprobs"):
            raise ValueError("alternatives are returned with the log probabilities of the answer's own tokens: send "
                             "logprobs = true too")
        return value

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives per token; None when no log probabilities are requested."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """Tool definitions for the template; None when there are none or the client forbids their use."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump() for tool in self.tools]

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens`, or the deprecated `max_tokens`."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_SharedFields):
    """`POST /v1/completions`: one prompt, as text or as token ids."""

    prompt: str | list[int] | list[str]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    """Alternatives per token, as in OpenAI's API: 0 returns the log probabilities of the answer's own tokens."""

    @field_validator("prompt")
    @classmethod
    def _single_prompt(cls, value: str | list[int] | list[str]) -> str | list[int] | list[str]:
        if isinstance(value, list) and value and isinstance(value[0], str) and len(value) > 1:
            raise ValueError(f"{len(value)} prompts in one request: send one prompt per request; concurrent requests "
                             "are batched")
        if not value:
            raise ValueError("the prompt is empty: send at least one token")
        return value

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives per token; None when no log probabilities are requested."""
        return self.logprobs

    @property
    def token_limit(self) -> int:
        """`max_tokens`; OpenAI's default for completions is 16."""
        return self.max_tokens or 16


RequestT = TypeVar("RequestT", bound=_SharedFields)


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a request body. Raises InvalidRequest for what `read_values` refuses."""
    try:
        return read_values(body)
    except RefusedBody as refused:
        raise InvalidRequest(str(refused), refused.hint, param=refused.param, code=refused.code) from refused


def parse(kind: type[RequestT], body: Mapping[str, Any]) -> RequestT:
    """Parse a request. Raises InvalidRequest naming the field."""
    known: dict[str, Any] = {}
    for name, value in body.items():
        if name in _IGNORED:
            continue
        if name in _UNSUPPORTED and name not in kind.model_fields:
            # Equal and of the same type: `False` is not the 0 of a penalty.
            if value is not None and not any(value == default and type(value) is type(default)
                                             for default in _UNSUPPORTED[name]):
                raise InvalidRequest(f"{name} = {value!r} is not supported by the embedded engine",
                                     f"leave {name} out, or serve with `engine: sglang`", param=name,
                                     code="unsupported_parameter")
            continue
        known[name] = value
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        broken = error.errors()[0].get("ctx", {}).get("error")
        if isinstance(broken, Malformed):
            param = ".".join(str(step) for step in ("messages", broken.index, broken.field) if step not in (None, ""))
            raise InvalidRequest(f"{param}: {broken.reason}", "send messages in OpenAI's format", param=param,
                                 code="invalid_value") from error
        raise _invalid_request(error) from error


def _invalid_request(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    # Pydantic appends the branch of a union to the path; the client wrote only the field, and of messages and tools the
    # index and the field in it.
    length = {"messages": 3, "tools": 3, "stream_options": 2, "eyrie": 2}.get(str(first["loc"][0]), 1)
    param = ".".join(str(step) for step in first["loc"][:length])
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{param} is not a field of this request", "check its spelling, or leave it out",
                              param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is required", f"send {param}", param=param, code="missing_required_parameter")
    shown = repr(first["input"])
    rule = rule_of(first)
    return InvalidRequest(f"{param} = {shown if len(shown) < 80 else shown[:77] + '...'}: {rule}",
                   f"send another value of {param}", param=param, code="invalid_value")


def fit_context(num_prompt_tokens: int, requested: int | None, context: int) -> int:
    """The limit of generated tokens. Raises ContextTooLong when prompt and response do not fit the context.

    Without a requested limit the response may use the rest of the context.
    """
    left = context - num_prompt_tokens
    if left < 1:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens} tokens and the target's context is {context}",
            f"shorten the prompt to at most {context - 1} tokens", param="messages", code="context_length_exceeded")
    if requested is not None and requested > left:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {requested}: together more than the target's "
            f"context of {context}",
            f"ask for max_tokens <= {left}, or shorten the prompt", param="max_tokens",
            code="context_length_exceeded")
    return left if requested is None else requested


def spec_tokens_details(histogram: Sequence[int], proposed: int) -> dict[str, Any]:
    """Statistics of speculation for one request, as SGLang puts them under `sglext.spec_tokens_details`.

    histogram  [k]: verify rounds that accepted k draft tokens
    proposed   draft tokens proposed, as SGLang counts them: the size of the tree without its root, for each round that
               drafted. Distinguishes a drafter whose tokens are never accepted from no drafter
    """
    rounds, accepted = sum(histogram), sum(k * count for k, count in enumerate(histogram))
    return {"spec_verify_ct": rounds, "spec_num_proposed_drafts": proposed, "spec_num_correct_drafts": accepted,
            "spec_accept_length": 1.0 + accepted / rounds if rounds else 1.0,
            "spec_correct_drafts_histogram": list(histogram)}


@dataclass(frozen=True)
class ResponseMetadata:
    """Fields that all objects of one response repeat."""

    id: str
    model: str
    created: int
    chat: bool
    fingerprint: str

    def wrap(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        """A response object, or a chunk of one, with these choices."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model,
                "system_fingerprint": self.fingerprint, "choices": choices}


def chunk_choice(metadata: ResponseMetadata, *, text: str | None = None, role: str | None = None,
                 tool_calls: Sequence[Mapping[str, Any]] = (), reason: FinishReason | None = None) -> dict[str, Any]:
    if not metadata.chat:
        return {"index": 0, "text": text or "", "finish_reason": reason, "logprobs": None}
    delta: dict[str, Any] = {}
    if role is not None:
        delta["role"] = role
    if text is not None:
        delta["content"] = text
    if tool_calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(tool_calls)]
    return {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}


def error_body(error: EyrieError) -> dict[str, Any]:
    """OpenAI's error object. The hint is a field of its own and part of the message, which is what clients show."""
    kind = "invalid_request_error" if error.http_status < 500 and error.http_status != 429 else "server_error"
    return {"error": {
        "message": str(error), "type": "rate_limit_error" if error.http_status == 429 else kind,
        "param": getattr(error, "param", None), "code": getattr(error, "code", None) or error.reason,
        "hint": error.hint,
    }}
