"""The client of a load test: endpoints, one request to one OpenAI-compatible server, and its result.

Servers differ in what they report beyond the text. SGLang supports `return_spec_tokens_details` and
`return_output_ids_in_sglext` and rejects `return_token_ids` in a stream; vLLM supports `return_token_ids` and ignores
unknown fields; Eyrie supports the first and the third and rejects unknown fields; others support only
`stream_options.include_usage`, or not even that. So the first request to an endpoint is a probe: it has all optional
fields, fields that the server rejects by name are dropped, and after a rejection without a name all are dropped. The
report mentions what is missing, because it determines how precisely tokens are counted and whether acceptance is known.

End-of-sequence tokens end a completion, as in production. Benchmarks often disable them to get completions of equal
length; the text after the end is not representative, and drafters are accepted differently on it.
"""

import hashlib
import json
import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from eyrie_api.contract.load import LoadSpec
from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_workers.data.suites import Prompt
from eyrie_workers.measure.load.completion_stream import FloatArray, TokenCounting, read_stream, read_stream_in_slices
from eyrie_workers.measure.load.http_client import ConnectionPool, HttpResponse, RequestFailed, parse_url

_PATH = "/chat/completions"
_EXCERPT_CHARACTERS = 300
# Optional request fields, by the name a server's error message uses.
_EXTRAS: dict[str, dict[str, Any]] = {
    "return_token_ids": {"return_token_ids": True},
    "return_output_ids_in_sglext": {"return_output_ids_in_sglext": True},
    "return_spec_tokens_details": {"return_spec_tokens_details": True},
    "continuous_usage_stats": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "stream_options": {"stream_options": {"include_usage": True}},
}


@dataclass(frozen=True)
class LoadEndpoint:
    name: str
    url: str
    """Up to and including /v1."""

    model: str
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token; never printed, stored or reported."""

    what: str = ""
    """For the report: the setting behind the name. The URL, without credentials, is added to it."""


class EndpointUnusable(EyrieError):
    """A server under load rejects or fails a plain request."""

    http_status = 502
    exit_code = 69  # EX_UNAVAILABLE


@dataclass(frozen=True)
class Dialect:
    """The request fields a server supports."""

    extras: frozenset[str] = frozenset(_EXTRAS)
    limit_field: str = "max_tokens"
    """`max_completion_tokens` for servers that reject the deprecated name."""

    def body(self, variant: LoadEndpoint, request: "LoadRequest", spec: LoadSpec) -> bytes:
        body: dict[str, Any] = {
            "model": variant.model, "messages": request.prompt.messages_with(spec.system_prompt), "stream": True,
            "temperature": spec.temperature, self.limit_field: spec.max_new_tokens,
        }
        if request.prompt.tools:
            body["tools"] = list(request.prompt.tools)
        if spec.temperature > 0.0:
            body["seed"] = request.seed(spec)
        # In reverse order, so that `continuous_usage_stats` replaces the plain `stream_options` if both are supported.
        for name in reversed(_EXTRAS):
            if name in self.extras:
                body |= _EXTRAS[name]
        return json.dumps(body).encode()


@dataclass(frozen=True)
class LoadRequest:
    prompt: Prompt
    repeat: int
    index: int
    """Counted within the repeat: the same in every variant."""

    due_s: float | None = None
    """Open loop: its arrival time in seconds from the start of its block."""

    def seed(self, spec: LoadSpec) -> int:
        """Equal for all variants, so that engines whose random numbers depend on seed and position agree."""
        key = f"{spec.seed}/{self.repeat}/{self.index}/{self.prompt.suite}/{self.prompt.id}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True, eq=False)
class RequestResult:
    """A request and its outcome. Times in seconds from sending, in an open loop from the due time."""

    category: str
    prompt_id: str
    repeat: int
    index: int
    failure: str | None = None
    """The reason of a failed request, whose other fields are empty."""

    detail: str = ""
    tokens: int = 0
    ttft_s: float | None = None
    gaps_s: Annotated[FloatArray, PlainValidator(np.array), PlainSerializer(np.ndarray.tolist)] = field(
        default_factory=lambda: np.zeros(0))
    end_to_end_s: float = 0.0
    histogram: tuple[int, ...] | None = None
    proposed: bool = False
    digest: bytes = b""
    ids_digest: bytes | None = None
    completion_id: str = ""
    first_at: float | None = None
    """On the clock of `time.perf_counter()`."""


@dataclass(frozen=True, eq=False)
class RawResponse:
    """A request's outcome before parsing. Times on the clock of `time.perf_counter()`."""

    request: LoadRequest
    outcome: HttpResponse | RequestFailed
    started_at: float
    """When it was sent, in an open loop when it was due."""

    ended_at: float


class LoadClient:
    def __init__(self, variant: LoadEndpoint, spec: LoadSpec) -> None:
        self.variant = variant
        self.origin = parse_url(variant.url)
        self.dialect = Dialect()
        self.notes: list[str] = []
        self._spec = spec
        self._headers = {"User-Agent": "eyrie-load", "Accept": "text/event-stream"}
        if variant.api_key is not None:
            self._headers["Authorization"] = f"Bearer {variant.api_key}"
        self.pool = ConnectionPool(self.origin, self._headers)

    async def move_to(self, url: str) -> None:
        """The same server has been started again at another address."""
        await self.pool.close()
        self.variant, self.origin = replace(self.variant, url=url), parse_url(url)
        self.pool = ConnectionPool(self.origin, self._headers)

    async def send(self, request: LoadRequest, due_at: float | None = None) -> RawResponse:
        """Send a request and wait for the last byte, without parsing. Failures are returned, not raised."""
        body = self.dialect.body(self.variant, request, self._spec)
        try:
            response = await self.pool.send("POST", _PATH, body, timeout_s=self._spec.timeout_s)
            self._check(response)
        except RequestFailed as failure:
            return RawResponse(request, failure, due_at or 0.0, time.perf_counter())
        return RawResponse(request, response, response.sent_at if due_at is None else due_at, response.ended_at)

    def read(self, raw: RawResponse) -> Generator[None, None, RequestResult]:
        """Parse a raw response in slices (`read_stream_in_slices`)."""
        request, outcome = raw.request, raw.outcome
        identity = (request.prompt.suite, request.prompt.id, request.repeat, request.index)
        try:
            if isinstance(outcome, RequestFailed):
                raise outcome
            completion = yield from read_stream_in_slices(outcome.chunks)
        except RequestFailed as failure:
            return RequestResult(*identity, failure=failure.reason, detail=self.redacted(str(failure)))
        return RequestResult(
            *identity, tokens=completion.tokens,
            ttft_s=None if completion.first_at is None else completion.first_at - raw.started_at,
            gaps_s=completion.gaps_s, end_to_end_s=raw.ended_at - raw.started_at, histogram=completion.histogram,
            proposed=completion.proposed, digest=completion.digest(), ids_digest=completion.ids_digest(),
            completion_id=completion.id, first_at=completion.first_at)

    async def probe(self, request: LoadRequest) -> None:
        """Determine the server's dialect. Raises EndpointUnusable when a plain request fails."""
        while True:
            body = self.dialect.body(self.variant, request, self._spec)
            try:
                response = await self.pool.send("POST", _PATH, body, timeout_s=self._spec.timeout_s)
            except RequestFailed as failure:
                raise self._unusable(str(failure), "start the server, and check its address") from None
            if response.status in (400, 422) and self._drop_extra(response):
                continue
            try:
                self._check(response)
                completion = read_stream(response.chunks)
            except RequestFailed as failure:
                raise self._unusable(str(failure), _hint(response.status)) from None
            limitations: dict[TokenCounting, str] = {
                "text": "reports no token counts along the stream: tokens were placed by the length of the text",
                "chunks": "reports no token counts at all: every chunk with text counts as one token, which is too few "
                          "when a chunk has several",
            }
            if completion.counting in limitations:
                self.notes.append(f"{self.variant.name}: the server {limitations[completion.counting]}")
            return

    def redacted(self, text: str) -> str:
        """The text without the key, which a server may quote in an error message."""
        return text.replace(self.variant.api_key, "***") if self.variant.api_key else text

    def _check(self, response: HttpResponse) -> None:
        if response.status != 200:
            raise RequestFailed(f"Http{response.status}", f"{self.origin.url} answered {response.status}: "
                                                        f"{_excerpt(response)}")
        kind = response.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise RequestFailed("NotAStream", f"the server did not stream, its content type is {kind or 'missing'}: "
                                               f"{_excerpt(response)}")

    def _drop_extra(self, response: HttpResponse) -> bool:
        """Drop an optional field after a rejection; False when there is none left."""
        message = response.body.decode(errors="replace")
        if self.dialect.limit_field == "max_tokens" and "max_completion_tokens" in message:
            self.dialect = Dialect(self.dialect.extras, "max_completion_tokens")
            return True
        if not self.dialect.extras:
            return False
        named = [name for name in _EXTRAS if name in self.dialect.extras and name in message]
        if named:  # a message about `stream_options.continuous_usage_stats` contains both names: the first is meant
            left = self.dialect.extras - {named[0]}
        else:  # first keep only what every OpenAI server should support, then nothing
            left = self.dialect.extras & {"stream_options"} if len(self.dialect.extras) > 1 else frozenset()
        self.dialect = Dialect(left, self.dialect.limit_field)
        return True

    def _unusable(self, message: str, hint: str) -> EndpointUnusable:
        return EndpointUnusable(f"variant {self.variant.name!r}: {self.redacted(message)}", hint)


def _hint(status: int) -> str:
    return {
        401: "give the key: --api-key-env NAME", 403: "check the permissions of the key",
        404: "check the address (it ends in /v1) and the model's name",
    }.get(status, "the URL must be that of an OpenAI-compatible server's /v1")


def _excerpt(response: HttpResponse) -> str:
    flat = " ".join(response.body.decode(errors="replace").split())
    return flat if len(flat) <= _EXCERPT_CHARACTERS else flat[:_EXCERPT_CHARACTERS] + " ..."


async def served_models(variant_url: str, api_key: str | None, timeout_s: float) -> list[str]:
    """Model names from `GET /models`. Raises EndpointUnusable or InvalidInput."""
    client = LoadClient(LoadEndpoint("models", variant_url, "", api_key), LoadSpec())
    started = time.perf_counter()
    try:
        response = await client.pool.send("GET", "/models", timeout_s=timeout_s)
        if response.status != 200:
            raise EndpointUnusable(
                f"{client.origin.url}/models answered {response.status}: {client.redacted(_excerpt(response))}",
                _hint(response.status),
            )
        return [str(card["id"]) for card in json.loads(response.body)["data"]]
    except RequestFailed as failure:
        waited = time.perf_counter() - started
        raise EndpointUnusable(f"{failure} (after {waited:.1f} s)", "start the server, and check its address") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidInput(f"{client.origin.url}/models is not a list of models", "name the model: --model NAME") \
            from None
    finally:
        await client.pool.close()
