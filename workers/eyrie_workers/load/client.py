"""One question to one OpenAI-compatible server, and what came of it.

What a server can tell beyond the text differs: SGLang knows `return_spec_tokens_details`, `return_output_ids_in_sglext`
and refuses `return_token_ids` in a stream; vLLM knows `return_token_ids` and ignores what it does not know; Eyrie knows
the first and the third and refuses every field it does not know; others know only `stream_options.include_usage`, or
not even that. So the first question to a variant is a probe: everything is asked for, what the server refuses by name
is left out, and what it refuses without naming it is found by asking for nothing extra. The report says what could not
be had, because it decides how well tokens are counted and whether acceptance is known at all.

End-of-sequence tokens end an answer here as in use. Benchmarks often forbid them to make answers equally long; what a
model says after its end is text nobody reads, and drafters are accepted differently on it.
"""

import hashlib
import json
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eyrie_api.errors import EyrieError, InvalidInput
from eyrie_api.v1alpha1.load import LoadSpec
from eyrie_workers.load.completion_stream import (
    FloatArray,
    StreamedCompletion,
    TokenCounting,
    read_stream,
    read_stream_in_slices,
)
from eyrie_workers.load.endpoint_url import RequestFailed, parse_url
from eyrie_workers.load.endpoints import LoadEndpoint, LoadPrompt
from eyrie_workers.load.http_client import ConnectionPool, HttpResponse

_PATH = "/chat/completions"
_QUOTED = 300
# Asked for on top of a plain streamed completion, by the name a refusal would use.
_EXTRAS: dict[str, dict[str, Any]] = {
    "return_token_ids": {"return_token_ids": True},
    "return_output_ids_in_sglext": {"return_output_ids_in_sglext": True},
    "return_spec_tokens_details": {"return_spec_tokens_details": True},
    "continuous_usage_stats": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "stream_options": {"stream_options": {"include_usage": True}},
}


class EndpointUnusable(EyrieError):
    """A server under load does not answer even one plain question."""

    http_status = 502
    exit_code = 69  # EX_UNAVAILABLE
    reason = "EndpointUnusable"


@dataclass(frozen=True)
class Dialect:
    """How a server is asked."""

    extras: frozenset[str] = frozenset(_EXTRAS)
    limit_field: str = "max_tokens"
    """`max_completion_tokens` where the old name is refused."""

    def body(self, variant: LoadEndpoint, question: "LoadRequest", spec: LoadSpec) -> bytes:
        """The request's JSON."""
        body: dict[str, Any] = {
            "model": variant.model, "messages": question.messages(spec), "stream": True,
            "temperature": spec.temperature, self.limit_field: spec.max_new_tokens,
        }
        if question.prompt.tools:
            body["tools"] = list(question.prompt.tools)
        if spec.temperature > 0.0:
            body["seed"] = question.seed(spec)
        # The plain form first: where both are understood, the richer `stream_options` replaces it.
        for name in reversed(_EXTRAS):
            if name in self.extras:
                body |= _EXTRAS[name]
        return json.dumps(body).encode()


@dataclass(frozen=True)
class LoadRequest:
    """A prompt in its place of the schedule."""

    prompt: LoadPrompt
    repeat: int
    index: int
    """Counted within the repeat: the same in every variant."""

    due_s: float | None = None
    """Open loop: when it arrives, from the beginning of its block."""

    def messages(self, spec: LoadSpec) -> list[Any]:
        """What is sent, with the system message replaced when the spec says so."""
        if spec.system_prompt is None:
            return list(self.prompt.messages)
        kept = [message for message in self.prompt.messages if message.get("role") not in ("system", "developer")]
        return [{"role": "system", "content": spec.system_prompt}, *kept]

    def seed(self, spec: LoadSpec) -> int:
        """The same for all variants, so that engines with position-keyed noise say the same."""
        words = f"{spec.seed}/{self.repeat}/{self.index}/{self.prompt.category}/{self.prompt.id}"
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True, eq=False)
class RequestResult:
    """One question and what came of it. Times in seconds from the sending, or in an open loop from the due time."""

    category: str
    prompt_id: str
    repeat: int
    index: int
    failure: str | None = None
    """The reason when no whole answer came; everything below is then empty."""

    detail: str = ""
    tokens: int = 0
    ttft_s: float | None = None
    gaps_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    end_to_end_s: float = 0.0
    histogram: tuple[int, ...] | None = None
    proposed: bool = False
    digest: bytes = b""
    ids_digest: bytes | None = None
    answer_id: str = ""
    first_at: float | None = None
    """On the clock of `time.perf_counter()`."""


@dataclass(frozen=True, eq=False)
class RawResponse:
    """What came of a question, unread. Times on the clock of `time.perf_counter()`."""

    question: LoadRequest
    came: HttpResponse | RequestFailed
    began_at: float
    """When it was sent, or in an open loop due."""

    ended_at: float


class LoadClient:
    """One variant: its connections and its dialect."""

    def __init__(self, variant: LoadEndpoint, spec: LoadSpec) -> None:
        self.variant = variant
        self.origin = parse_url(variant.url)
        self.dialect = Dialect()
        self.notes: list[str] = []
        self._spec = spec
        headers = {"User-Agent": "eyrie-load", "Accept": "text/event-stream"}
        if variant.api_key is not None:
            headers["Authorization"] = f"Bearer {variant.api_key}"
        self.pool = ConnectionPool(self.origin, headers)

    async def send(self, question: LoadRequest, due_at: float | None = None) -> RawResponse:
        """Ask, and wait for the last byte; nothing is read yet. Never raises for what went wrong."""
        request = self.pool.render("POST", _PATH, self.dialect.body(self.variant, question, self._spec))
        try:
            reply = await self.pool.exchange(request, self._spec.timeout_s)
            self._check(reply)
        except RequestFailed as failure:
            return RawResponse(question, failure, due_at or 0.0, time.perf_counter())
        return RawResponse(question, reply, reply.sent_at if due_at is None else due_at, reply.ended_at)

    def read(self, raw: RawResponse) -> Generator[None, None, RequestResult]:
        """The sample in a raw answer, slice by slice (`events.read_stream_in_slices`)."""
        question, came = raw.question, raw.came
        who = (question.prompt.category, question.prompt.id, question.repeat, question.index)
        try:
            if isinstance(came, RequestFailed):
                raise came
            answer = yield from read_stream_in_slices(came.pieces)
        except RequestFailed as failure:
            return RequestResult(*who, failure=failure.reason, detail=self.redacted(str(failure)))
        return RequestResult(
            *who, tokens=answer.tokens, ttft_s=None if answer.first_at is None else answer.first_at - raw.began_at,
            gaps_s=answer.gaps_s, end_to_end_s=raw.ended_at - raw.began_at, histogram=answer.histogram,
            proposed=answer.proposed, digest=answer.digest(), ids_digest=answer.ids_digest(), answer_id=answer.id,
            first_at=answer.first_at)

    async def probe(self, question: LoadRequest) -> None:
        """Find the server's dialect. Raises EndpointUnusable when it does not answer a plain question."""
        while True:
            request = self.pool.render("POST", _PATH, self.dialect.body(self.variant, question, self._spec))
            try:
                reply = await self.pool.exchange(request, self._spec.timeout_s)
            except RequestFailed as failure:
                raise self._unusable(str(failure), "start the server, and check its address") from None
            if reply.status in (400, 422) and self._give_way(reply):
                continue
            try:
                self._check(reply)
                answer = read_stream(reply.pieces)
            except RequestFailed as failure:
                raise self._unusable(str(failure), _hint(reply.status)) from None
            self._note(answer)
            return

    def redacted(self, text: str) -> str:
        """Without the key, should a server have quoted it."""
        return text.replace(self.variant.api_key, "***") if self.variant.api_key else text

    def _check(self, reply: HttpResponse) -> None:
        if reply.status != 200:
            raise RequestFailed(f"Http{reply.status}", f"{self.origin.url} answered {reply.status}: "
                                                        f"{_quoted(reply)}")
        kind = reply.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise RequestFailed("NotAStream", f"asked for a stream, the server sent {kind or 'untyped bytes'}: "
                                               f"{_quoted(reply)}")

    def _give_way(self, reply: HttpResponse) -> bool:
        """Ask for less after a refusal; False when there is nothing left to leave out."""
        said = reply.body.decode(errors="replace")
        if self.dialect.limit_field == "max_tokens" and "max_completion_tokens" in said:
            self.dialect = Dialect(self.dialect.extras, "max_completion_tokens")
            return True
        if not self.dialect.extras:
            return False
        named = [name for name in _EXTRAS if name in self.dialect.extras and name in said]
        if named:  # a refusal of `stream_options.continuous_usage_stats` names both; the first, inner one is meant
            left = self.dialect.extras - {named[0]}
        else:  # next only what every OpenAI server should know, then nothing
            left = self.dialect.extras & {"stream_options"} if len(self.dialect.extras) > 1 else frozenset()
        self.dialect = Dialect(left, self.dialect.limit_field)
        return True

    def _note(self, answer: StreamedCompletion) -> None:
        """What the reader of the report should know of this server."""
        ways: dict[TokenCounting, str] = {
            "text": "tells no token counts along the stream: tokens were placed by the length of the text",
            "chunks": "tells no token counts at all: every chunk with text counts as one token, which is too few when "
                      "tokens come in bundles",
        }
        told = ways.get(answer.counting)
        if told is not None:
            self.notes.append(f"{self.variant.name}: the server {told}")

    def _unusable(self, message: str, hint: str) -> EndpointUnusable:
        return EndpointUnusable(f"variant {self.variant.name!r}: {self.redacted(message)}", hint)


def _hint(status: int) -> str:
    return {
        401: "give the key: --api-key-env NAME", 403: "check the key's rights",
        404: "check the address (it ends in /v1) and the model's name",
    }.get(status, "the address must be that of an OpenAI-compatible server's /v1")


def _quoted(reply: HttpResponse) -> str:
    flat = " ".join(reply.body.decode(errors="replace").split())
    return flat if len(flat) <= _QUOTED else flat[:_QUOTED] + " ..."


async def served_models(variant_url: str, api_key: str | None, timeout_s: float) -> list[str]:
    """Names of `GET /models`. Raises EndpointUnusable or InvalidInput."""
    asker = LoadClient(LoadEndpoint("models", variant_url, "", api_key), LoadSpec())
    started = time.perf_counter()
    try:
        reply = await asker.pool.exchange(asker.pool.render("GET", "/models"), timeout_s)
        if reply.status != 200:
            raise EndpointUnusable(
                f"{asker.origin.url}/models answered {reply.status}: {asker.redacted(_quoted(reply))}",
                _hint(reply.status),
            )
        return [str(card["id"]) for card in json.loads(reply.body)["data"]]
    except RequestFailed as failure:
        waited = time.perf_counter() - started
        raise EndpointUnusable(f"{failure} (after {waited:.1f} s)", "start the server, and check its address") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidInput(f"{asker.origin.url}/models is not a list of models", "name the model: --model NAME") \
            from None
    finally:
        asker.pool.close()
